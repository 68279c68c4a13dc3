"""The commands for who uses a gateway. Each imports what it needs when it is called, to answer soon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.client.errors import ClientError, UsageError, make_client_error
from gateway.client.target import Target
from gateway.messages import escape_unprintable

if TYPE_CHECKING:
    from gateway.client.api import ApiClient

cli = typer.Typer()

UrlOption = Annotated[
    str, typer.Option(envvar="TRITON_GATEWAY_URL", help="Where the gateway is.", show_envvar=True)
]
KeyOption = Annotated[
    str,
    typer.Option(
        envvar="TRITON_GATEWAY_KEY", help="The key to it, if it wants one.", show_default=False
    ),
]
CaOption = Annotated[
    Path | None,
    typer.Option(envvar="TRITON_GATEWAY_CA", help="Whose certificates are trusted, as a PEM file."),
]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="The model's name.")]
ModelsArgument = Annotated[list[str], typer.Argument(metavar="MODELS", help="The models' names.")]
VersionOption = Annotated[str, typer.Option("--version", help="Of the model; else the newest.")]
JsonOption = Annotated[bool, typer.Option("--json", help="As JSON, for scripts.")]
TextsOption = Annotated[
    list[str] | None, typer.Option("--text", help="A text to infer; may be repeated.")
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.001, help="Seconds that a request may take.")
]

DEFAULT_URL = "http://localhost:8080"


@cli.command()
def infer(
    model: ModelArgument,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILES",
            help="Files, folders and patterns; - is standard input, a text per line.",
        ),
    ] = None,
    text: TextsOption = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of a file is a text.")] = False,
    version: VersionOption = "",
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
    timeout: TimeoutOption = 60.0,
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = "",
    ca: CaOption = None,
) -> None:
    """Infer many files or texts: a record for each, in their order."""
    from gateway.client.infer import InferOptions, run_infer
    from gateway.client.inputs import InputSource, find_input_files
    from gateway.client.records import OutputFormat

    if resume and (output is None or overwrite):
        raise UsageError("--resume goes on with a file: it needs --output FILE, and no --overwrite")
    if not (files or text):
        raise UsageError("nothing to infer: name files, a folder, - or --text")
    names = [form.value for form in OutputFormat]
    if format_ not in (None, *names):
        raise UsageError(f"--format is {' or '.join(names)}, and not {format_!r}")
    suffix = output.suffix[1:] if output is not None else ""
    form = OutputFormat(format_ or (suffix if suffix in names else OutputFormat.jsonl))
    inputs = InputSource(text or (), find_input_files(files or (), output), lines)
    raise SystemExit(
        run_infer(
            InferOptions(
                Target(url, key, ca), model, version, inputs, concurrency, batch, retries, timeout,
                output, form, resume, overwrite,
            )
        )
    )  # fmt: skip


@cli.command()
def models(
    json: JsonOption = False, url: UrlOption = DEFAULT_URL, key: KeyOption = "", ca: CaOption = None
) -> None:
    """The models, and whether each is ready."""
    from gateway.client import tables

    print_resource_list(
        "models", tables.MODEL_COLUMNS, tables.format_model_row, json, Target(url, key, ca)
    )


@cli.command()
def replicas(
    json: JsonOption = False, url: UrlOption = DEFAULT_URL, key: KeyOption = "", ca: CaOption = None
) -> None:
    """The Tritons behind the gateway, and how each is."""
    from gateway.client import tables

    print_resource_list(
        "replicas", tables.REPLICA_COLUMNS, tables.format_replica_row, json, Target(url, key, ca)
    )


def print_resource_list(
    resource: str,
    columns: Sequence[str],
    format_row: Callable[[Any], Sequence[str]],
    json: bool,
    target: Target,
) -> None:
    from gateway.client import tables
    from gateway.client.api import ApiClient

    with ApiClient(target) as api:
        listed = api.get(f"/v1/{resource}")[resource]
    if json:
        tables.print_json(listed)
    else:
        tables.print_table(columns, map(format_row, listed))


@cli.command()
def ready(
    json: JsonOption = False, url: UrlOption = DEFAULT_URL, key: KeyOption = "", ca: CaOption = None
) -> None:
    """Whether requests can be served; the exit status is 0 if so, and else 1."""
    from gateway.client import tables
    from gateway.client.api import decode_json_object, extract_error_message

    with create_api_client(url, key, ca) as api:
        response = api.request("GET", "/readyz")
    found = decode_json_object(response)
    if "ready" not in found:
        raise make_client_error(response.status_code, extract_error_message(response))
    if json:
        tables.print_json(found)
    elif found["ready"]:
        typer.echo("ready")
    if not found["ready"]:
        raise ClientError(explain_not_ready(found))


def explain_not_ready(readiness: dict[str, Any]) -> str:
    if readiness.get("draining"):
        return "not ready: the gateway is about to end"
    missing = readiness.get("missing") or {}
    if missing:
        return f"not ready: {', '.join(missing)} cannot be served"
    states = readiness.get("replicas", {}).items()
    told = [f"{address} is {state}" for address, state in states if state != "up"]
    return f"not ready: {', '.join(told) or 'no replica serves'}"


@cli.command()
def load(
    models: ModelsArgument,
    json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = "",
    ca: CaOption = None,
) -> None:
    """Load models on every replica, and wait until they are."""
    manage_models("load", models, {}, json, Target(url, key, ca))


@cli.command()
def unload(
    models: ModelsArgument,
    dependents: Annotated[
        bool, typer.Option("--dependents", help="The models of which an ensemble is made as well.")
    ] = False,
    json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = "",
    ca: CaOption = None,
) -> None:
    """Unload models from every replica, and wait until they are."""
    body = {"parameters": {"unload_dependents": True}} if dependents else {}
    manage_models("unload", models, body, json, Target(url, key, ca))


def manage_models(
    action: str, names: Sequence[str], body: dict[str, Any], json: bool, target: Target
) -> None:
    """One after the other; a model that fails does not keep the next from its turn."""
    from urllib.parse import quote

    from gateway.client import tables
    from gateway.client.api import ApiClient, decode_json_object, extract_error_message

    reports: list[dict[str, Any]] = []
    failures: list[ClientError] = []
    with ApiClient(target, timeout_s=600) as api:
        for name in names:
            path = f"/v2/repository/models/{quote(name, safe='')}/{action}"
            response = api.request("POST", path, body)
            told = decode_json_object(response)
            if "replicas" in told:
                reports.append(told)
            if not response.is_success:
                failures.append(
                    make_client_error(response.status_code, extract_error_message(response))
                )
    if json:
        tables.print_json(reports)
    elif reports:
        tables.print_table(
            tables.REPORT_COLUMNS,
            [row for told in reports for row in tables.format_report_rows(told)],
        )
    if failures:
        raise type(failures[0])("; ".join(map(str, failures)))


@cli.command()
def top(
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = "",
    ca: CaOption = None,
) -> None:
    """What the gateway does right now; q ends it."""
    from gateway.client.top import run_top

    with create_api_client(url, key, ca) as api, suppress(KeyboardInterrupt):
        run_top(api, interval)


@cli.command()
def curl(
    model: ModelArgument,
    version: VersionOption = "",
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = "",
    ca: CaOption = None,
) -> None:
    """Print a curl line that works with this model."""
    with create_api_client(url, key, ca) as api:
        line = api.get_model(model, version)["curl"]
    # The key itself is in no output.
    header = ' -H "Authorization: Bearer $TRITON_GATEWAY_KEY"' if key else ""
    typer.echo(escape_unprintable(line) + header)


@cli.command()
def bench(
    model: ModelArgument,
    file: Annotated[str | None, typer.Argument(help="What is sent; else what curl shows.")] = None,
    text: Annotated[str | None, typer.Option(help="A text that is sent.")] = None,
    version: VersionOption = "",
    concurrency: Annotated[
        str, typer.Option(help="How many requests at a time, one after the other.")
    ] = "1,2,4,8,16,32",
    seconds: Annotated[float, typer.Option(min=0.01, help="How long each is measured.")] = 3.0,
    timeout: TimeoutOption = 60.0,
    json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = "",
    ca: CaOption = None,
) -> None:
    """Measure latency and throughput, with more and more requests at a time."""
    from gateway.client import bench, tables
    from gateway.client.inputs import Input

    if file and text is not None:
        raise UsageError("a file or a text, not both")
    target = Target(url, key, ca)
    with create_api_client(url, key, ca) as api:
        described = api.get_model(model, version)
    try:
        source = text.encode() if text is not None else file
        body = bench.build_bench_body(described) if source is None else Input("", source).read()
    except OSError as exc:
        raise UsageError(f"{file} cannot be read: {exc.strerror}") from None
    work = bench.Benchmark(
        target, model, version, body, seconds, timeout, is_decoupled=described["decoupled"]
    )
    levels = work.measure(parse_concurrencies(concurrency))
    if json:
        tables.print_json(levels)
    else:
        tables.print_table(bench.BENCH_COLUMNS, map(bench.format_bench_row, levels))
        typer.echo(bench.plot_results(levels))
    if any(found.failed for found in levels):
        raise ClientError("not every request succeeded")


def parse_concurrencies(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or max(found) > 1024:
        raise UsageError(f"--concurrency is numbers such as 1,2,4 up to 1024, and not {text!r}")
    return found


def create_api_client(url: str, key: str, ca: Path | None) -> ApiClient:
    from gateway.client.api import ApiClient

    return ApiClient(Target(url, key, ca))
