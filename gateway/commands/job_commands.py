"""The commands `jobs`: the jobs of a gateway, and the signatures of their callbacks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from gateway.commands.errors import ClientError, UsageError
from gateway.commands.flags import JsonOption, add_target, format_examples
from gateway.commands.help import create_cli
from gateway.commands.plain import JobId, add_plain_commands
from gateway.commands.resources import JOBS
from gateway.commands.target import Target
from gateway.messages import escape_unprintable, escape_unprintable_json

job_cli = create_cli(help="See, await and cancel the jobs that infer --async submits.")

WAIT_TIMEOUT_S: Final = 86400.0
STDIN: Final = Path("-")
add_plain_commands("jobs", job_cli)


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
    JOBS.print(ended.document, json=json)
    if ended.state != "done":
        raise SystemExit(1)


@job_cli.command("result", epilog=format_examples("triton-gateway jobs result JOB > result.json"))
@add_target
def print_result(target: Target, job: JobId) -> None:
    """Print the result of a job: the response of its request, or the lines of a batch."""
    from gateway.client.jobs import build_job_path

    with target.connect() as client:
        for data in client.download(f"{build_job_path(job)}/result"):
            if sys.stdout.isatty():
                sys.stdout.write(escape_unprintable_json(data.decode(errors="replace")))
            else:
                sys.stdout.buffer.write(data)


@job_cli.command("secret")
@add_target
def print_secret(target: Target) -> None:
    """Print the secret that signs callbacks of keys without their own. Requires the role admin."""
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

    fields = (line.partition(":") for line in header)
    headers = {name.strip(): value.strip() for name, _, value in fields}
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
