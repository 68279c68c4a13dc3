"""The commands `jobs`: the jobs of a gateway, and the signatures of their callbacks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gateway.commands.errors import ClientError, UsageError
from gateway.commands.flags import JsonOption, add_target, format_examples
from gateway.commands.target import Target
from gateway.messages import escape_unprintable, escape_unprintable_json

job_cli = typer.Typer(
    no_args_is_help=True, help="See, await and cancel the jobs that infer --async submits."
)

WAIT_TIMEOUT_S: Final = 86400.0
STDIN: Final = Path("-")
JOB_COLUMNS: Final = ("JOB", "STATE", "MODEL", "PROGRESS", "CREATED", "REASON")
JobId = Annotated[str, typer.Argument(metavar="JOB", help="ID of the job.")]


@job_cli.command("list")
@add_target
def print_jobs(
    target: Target,
    state: Annotated[str, typer.Option(help="Only jobs in this state, such as running.")] = "",
    model: Annotated[str, typer.Option(help="Only jobs of this model.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Number of jobs.")] = 100,
    json: JsonOption = False,
) -> None:
    """List the jobs of the key, the newest first; an admin sees those of all keys."""
    from urllib.parse import urlencode

    from gateway.client.jobs import JOBS_PATH
    from gateway.commands import tables

    query = {"state": state, "model": model, "limit": limit}
    wanted = urlencode({name: value for name, value in query.items() if value})
    with target.connect() as client:
        jobs = client.request("GET", f"{JOBS_PATH}?{wanted}")["jobs"]
    tables.print_entries(jobs, JOB_COLUMNS, format_job_row, json=json)


@job_cli.command("get")
@add_target
def show_job(target: Target, job: JobId, json: JsonOption = False) -> None:
    """Show a job: its state, its place in the queue and its progress."""
    from gateway.client.jobs import build_job_path

    with target.connect() as client:
        print_job(client.request("GET", build_job_path(job)), json=json)


@job_cli.command("wait")
@add_target
def await_job(
    target: Target,
    job: JobId,
    timeout: Annotated[float, typer.Option(min=0, help="Time limit, in seconds.")] = WAIT_TIMEOUT_S,
    json: JsonOption = False,
) -> None:
    """Wait until a job has ended. The exit status is 1 if it was not done."""
    with target.connect() as client:
        ended = client.wait_job(job, timeout)
    print_job(ended.document, json=json)
    if ended.state != "done":
        raise SystemExit(1)


@job_cli.command("cancel")
@add_target
def cancel_or_delete_job(target: Target, job: JobId, json: JsonOption = False) -> None:
    """Cancel a job; delete one that has ended, with its result."""
    with target.connect() as client:
        print_job(client.cancel_job(job).document, json=json)


@job_cli.command("result", epilog=format_examples("triton-gateway jobs result JOB > result.json"))
@add_target
def print_result(target: Target, job: JobId) -> None:
    """Print the result of a job: the response of its request, byte for byte unless to a terminal."""
    from gateway.client.jobs import build_job_path

    is_terminal = sys.stdout.isatty()
    with target.connect() as client:
        for data in client.download(f"{build_job_path(job)}/result"):
            sys.stdout.buffer.write(escape_bytes(data) if is_terminal else data)


@job_cli.command("secret")
@add_target
def print_secret(target: Target) -> None:
    """Print the secret that signs callbacks of keys without one of their own. Requires the role admin."""
    from gateway.client.jobs import JOBS_PATH

    with target.connect() as client:
        for secret in client.request("GET", f"{JOBS_PATH}/secret")["secrets"]:
            typer.echo(escape_unprintable(secret))


@job_cli.command(
    "verify",
    epilog=format_examples(
        "triton-gateway jobs verify body.json -H 'webhook-id: …' -H 'webhook-timestamp: …' "
        "-H 'webhook-signature: v1,…'"
    ),
)
def verify_body(
    body: Annotated[
        Path, typer.Argument(metavar="BODY", help="File with the received body; - is stdin.")
    ],
    header: Annotated[
        list[str], typer.Option("--header", "-H", help="Header of the callback, as NAME: VALUE.")
    ],
    secret: Annotated[
        str,
        typer.Option(
            envvar="GATEWAY_CALLBACK_SECRET", help="Secret of the callbacks.", show_default=False
        ),
    ],
    tolerance: Annotated[
        float, typer.Option(min=0, help="Maximum age of the signature, in seconds.")
    ] = 300.0,
) -> None:
    """Check the signature of a received callback. The exit status is 1 if it is not right."""
    from gateway.webhooks import InvalidSignature, verify_callback

    headers = dict(map(split_header, header))
    secrets = secret.replace(",", " ").split()
    try:
        content = sys.stdin.buffer.read() if body == STDIN else body.read_bytes()
        verify_callback(content, headers, secrets, tolerance_s=tolerance)
    except OSError as exc:
        raise UsageError(f"{body} cannot be read: {exc.strerror}") from None
    except InvalidSignature as exc:
        raise ClientError(str(exc)) from None
    except ValueError as exc:
        raise UsageError(f"--secret is invalid: {exc}") from None
    typer.echo("the signature is right")


def escape_bytes(data: bytes) -> bytes:
    return escape_unprintable_json(data.decode(errors="replace")).encode()


def split_header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon:
        raise UsageError(f"expected NAME: VALUE, not {line!r}")
    return name.strip(), value.strip()


def print_job(job: Mapping[str, Any], *, json: bool) -> None:
    from gateway.commands import tables

    if json:
        tables.print_json(job)
    else:
        tables.print_table(JOB_COLUMNS, [format_job_row(job)])


def format_job_row(job: Mapping[str, Any]) -> tuple[str, ...]:
    progress = job["progress"]
    counts = f"{progress['done']} of {progress['total']}"
    if progress["failed"]:
        counts += f", {progress['failed']} failed"
    reason = job.get("error", {}).get("message", "")
    if "position" in job:
        reason = f"{job['position']} jobs before it"
    return job["id"], job["state"], job["model"], counts, job["created"], reason
