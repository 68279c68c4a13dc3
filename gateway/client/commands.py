"""The commands for who uses a gateway. Each imports what it needs when it is called, to answer soon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.client.errors import ClientError, Misused, refusal
from gateway.client.target import Target
from gateway.words import printable

if TYPE_CHECKING:
    from gateway.client.api import Api

cli = typer.Typer()

Url = Annotated[
    str, typer.Option(envvar="TRITON_GATEWAY_URL", help="Where the gateway is.", show_envvar=True)
]
Key = Annotated[
    str,
    typer.Option(
        envvar="TRITON_GATEWAY_KEY", help="The key to it, if it wants one.", show_default=False
    ),
]
Ca = Annotated[
    Path | None,
    typer.Option(envvar="TRITON_GATEWAY_CA", help="Whose certificates are trusted, as a PEM file."),
]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="The model's name.")]
Models = Annotated[list[str], typer.Argument(metavar="MODELS", help="The models' names.")]
Version = Annotated[str, typer.Option("--version", help="Of the model; else the newest.")]
Json = Annotated[bool, typer.Option("--json", help="As JSON, for scripts.")]
Texts = Annotated[
    list[str] | None, typer.Option("--text", help="A text to infer; may be repeated.")
]
TimeoutS = Annotated[
    float, typer.Option("--timeout", min=0.001, help="Seconds that a request may take.")
]

LOCAL = "http://localhost:8080"


@cli.command()
def infer(
    model: Model,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILES",
            help="Files, folders and patterns; - is standard input, a text per line.",
        ),
    ] = None,
    text: Texts = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of a file is a text.")] = False,
    version: Version = "",
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests at a time.")] = 16,
    batch: Annotated[int, typer.Option(min=1, max=1024, help="Inputs in one request.")] = 1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file for the results.")
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", help="jsonl or csv; else by the output's name."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the output file where it stopped.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin the output file anew.")
    ] = False,
    retries: Annotated[
        int, typer.Option(min=0, help="How often a request that is put off is sent again.")
    ] = 10,
    timeout: TimeoutS = 60.0,
    url: Url = LOCAL,
    key: Key = "",
    ca: Ca = None,
) -> None:
    """Infer many files or texts: a record for each, in their order."""
    from gateway.client.infer import Order, infer
    from gateway.client.inputs import Inputs, found
    from gateway.client.records import Format

    if resume and (output is None or overwrite):
        raise Misused("--resume goes on with a file: it needs --output FILE, and no --overwrite")
    if not (files or text):
        raise Misused("nothing to infer: name files, a folder, - or --text")
    names = [form.value for form in Format]
    if format_ not in (None, *names):
        raise Misused(f"--format is {' or '.join(names)}, and not {format_!r}")
    suffix = output.suffix[1:] if output is not None else ""
    form = Format(format_ or (suffix if suffix in names else Format.jsonl))
    inputs = Inputs(text or (), found(files or (), output), lines)
    raise SystemExit(
        infer(
            Order(
                Target(url, key, ca), model, version, inputs, concurrency, batch, retries, timeout,
                output, form, resume, overwrite,
            )
        )
    )  # fmt: skip


@cli.command()
def models(json: Json = False, url: Url = LOCAL, key: Key = "", ca: Ca = None) -> None:
    """The models, and whether each is ready."""
    from gateway.client import tables

    show("models", tables.MODELS, tables.model_row, json, Target(url, key, ca))


@cli.command()
def replicas(json: Json = False, url: Url = LOCAL, key: Key = "", ca: Ca = None) -> None:
    """The Tritons behind the gateway, and how each is."""
    from gateway.client import tables

    show("replicas", tables.REPLICAS, tables.replica_row, json, Target(url, key, ca))


def show(
    what: str,
    columns: Sequence[str],
    row: Callable[[Any], Sequence[str]],
    json: bool,
    target: Target,
) -> None:
    from gateway.client import tables
    from gateway.client.api import Api

    with Api(target) as api:
        listed = api.get(f"/v1/{what}")[what]
    if json:
        tables.show_json(listed)
    else:
        tables.show(columns, map(row, listed))


@cli.command()
def ready(json: Json = False, url: Url = LOCAL, key: Key = "", ca: Ca = None) -> None:
    """Whether requests can be served; the exit status is 0 if so, and else 1."""
    from gateway.client import tables
    from gateway.client.api import sentence_of, told_by

    with connected(url, key, ca) as api:
        response = api.answer("GET", "/readyz")
    found = told_by(response)
    if "ready" not in found:
        raise refusal(response.status_code, sentence_of(response))
    if json:
        tables.show_json(found)
    elif found["ready"]:
        typer.echo("ready")
    if not found["ready"]:
        raise ClientError(unready(found))


def unready(found: dict[str, Any]) -> str:
    if found.get("draining"):
        return "not ready: the gateway is about to end"
    missing = found.get("missing") or {}
    if missing:
        return f"not ready: {', '.join(missing)} cannot be served"
    states = found.get("replicas", {}).items()
    told = [f"{address} is {state}" for address, state in states if state != "up"]
    return f"not ready: {', '.join(told) or 'no replica serves'}"


@cli.command()
def load(
    models: Models, json: Json = False, url: Url = LOCAL, key: Key = "", ca: Ca = None
) -> None:
    """Load models on every replica, and wait until they are."""
    manage("load", models, {}, json, Target(url, key, ca))


@cli.command()
def unload(
    models: Models,
    dependents: Annotated[
        bool, typer.Option("--dependents", help="The models of which an ensemble is made as well.")
    ] = False,
    json: Json = False,
    url: Url = LOCAL,
    key: Key = "",
    ca: Ca = None,
) -> None:
    """Unload models from every replica, and wait until they are."""
    body = {"parameters": {"unload_dependents": True}} if dependents else {}
    manage("unload", models, body, json, Target(url, key, ca))


def manage(
    action: str, names: Sequence[str], body: dict[str, Any], json: bool, target: Target
) -> None:
    """One after the other; a model that fails does not keep the next from its turn."""
    from urllib.parse import quote

    from gateway.client import tables
    from gateway.client.api import Api, sentence_of, told_by

    reports: list[dict[str, Any]] = []
    failures: list[ClientError] = []
    with Api(target, timeout_s=600) as api:
        for name in names:
            path = f"/v2/repository/models/{quote(name, safe='')}/{action}"
            response = api.answer("POST", path, body)
            told = told_by(response)
            if "replicas" in told:
                reports.append(told)
            if not response.is_success:
                failures.append(refusal(response.status_code, sentence_of(response)))
    if json:
        tables.show_json(reports)
    elif reports:
        tables.show(tables.REPORT, [row for told in reports for row in tables.report_rows(told)])
    if failures:
        raise type(failures[0])("; ".join(map(str, failures)))


@cli.command()
def top(
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
    url: Url = LOCAL,
    key: Key = "",
    ca: Ca = None,
) -> None:
    """What the gateway does right now; q ends it."""
    from gateway.client.top import top

    with connected(url, key, ca) as api, suppress(KeyboardInterrupt):
        top(api, interval)


@cli.command()
def curl(
    model: Model, version: Version = "", url: Url = LOCAL, key: Key = "", ca: Ca = None
) -> None:
    """Print a curl line that works with this model."""
    with connected(url, key, ca) as api:
        line = api.model(model, version)["curl"]
    # The key itself is in no output.
    header = ' -H "Authorization: Bearer $TRITON_GATEWAY_KEY"' if key else ""
    typer.echo(printable(line) + header)


@cli.command()
def bench(
    model: Model,
    file: Annotated[str | None, typer.Argument(help="What is sent; else what curl shows.")] = None,
    text: Annotated[str | None, typer.Option(help="A text that is sent.")] = None,
    version: Version = "",
    concurrency: Annotated[
        str, typer.Option(help="How many requests at a time, one after the other.")
    ] = "1,2,4,8,16,32",
    seconds: Annotated[float, typer.Option(min=0.01, help="How long each is measured.")] = 3.0,
    timeout: TimeoutS = 60.0,
    json: Json = False,
    url: Url = LOCAL,
    key: Key = "",
    ca: Ca = None,
) -> None:
    """Measure latency and throughput, with more and more requests at a time."""
    from gateway.client import bench, tables
    from gateway.client.inputs import Input

    if file and text is not None:
        raise Misused("a file or a text, not both")
    target = Target(url, key, ca)
    with connected(url, key, ca) as api:
        described = api.model(model, version)
    try:
        source = text.encode() if text is not None else file
        body = bench.example_of(described) if source is None else Input("", source).read()
    except OSError as exc:
        raise Misused(f"{file} cannot be read: {exc.strerror}") from None
    work = bench.Bench(
        target, model, version, body, seconds, timeout, streams=described["decoupled"]
    )
    levels = work.levels(numbers(concurrency))
    if json:
        tables.show_json(levels)
    else:
        tables.show(bench.COLUMNS, map(bench.row, levels))
        typer.echo(bench.plot(levels))
    if any(found.failed for found in levels):
        raise ClientError("not every request succeeded")


def numbers(written: str) -> list[int]:
    try:
        found = [int(word) for word in written.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or max(found) > 1024:
        raise Misused(f"--concurrency is numbers such as 1,2,4 up to 1024, and not {written!r}")
    return found


def connected(url: str, key: str, ca: Path | None) -> Api:
    from gateway.client.api import Api

    return Api(Target(url, key, ca))
