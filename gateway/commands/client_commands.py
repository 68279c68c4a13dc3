"""The client commands. Each imports what it needs when it is called, so that the CLI starts fast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.commands.errors import ClientError, UsageError
from gateway.commands.flags import (
    INFERENCE_PANEL,
    MODELS_PANEL,
    OPERATION_PANEL,
    InferFlags,
    JsonOption,
    ModelArgument,
    TimeoutOption,
    add_flags,
    add_target,
    format_examples,
)
from gateway.commands.replica_commands import replica_commands
from gateway.commands.target import Target, complete_model_name, make_command_error
from gateway.messages import escape_unprintable

if TYPE_CHECKING:
    from gateway.client import Client
    from gateway.commands.inference.records import OutputFormat

cli = typer.Typer()
cli.add_typer(replica_commands, name="replicas", rich_help_panel=OPERATION_PANEL)

ModelsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="MODELS", help="Names of the models.", autocompletion=complete_model_name
    ),
]
VersionOption = Annotated[
    str, typer.Option("--version", help="Model version. Default: the newest.")
]
TextsOption = Annotated[
    list[str] | None, typer.Option("--text", help="Text to infer; may be repeated.")
]


@cli.command(
    rich_help_panel=INFERENCE_PANEL,
    epilog=format_examples(
        "triton-gateway infer MODEL photos/ --output results.jsonl",
        "triton-gateway infer MODEL 'some text'",
        "triton-gateway infer MODEL reviews.txt --lines --batch 8 --output out.jsonl",
        "triton-gateway infer MODEL photos/ --async --output results.jsonl",
    ),
)
@add_target
@add_flags(InferFlags)
def infer(
    flags: InferFlags,
    target: Target,
    model: ModelArgument,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILES",
            help="Files, folders, glob patterns, or a text; - is standard input, one text per line.",
        ),
    ] = None,
    text: TextsOption = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Treat each line of a file as a text.")
    ] = False,
    version: VersionOption = "",
) -> None:
    """Run inference on files and texts; print one record for each, in input order."""
    from gateway.commands.inference.infer import InferOptions, run_infer
    from gateway.commands.inference.inputs import InputSource, find_input_files, is_text

    if flags.resume and (flags.output is None or flags.overwrite):
        raise UsageError("--resume requires --output FILE and excludes --overwrite")
    check_job_flags(flags, has_inputs=bool(files or text))
    if not (files or text or flags.job):
        raise UsageError("nothing to infer: pass files, a folder, - or --text")
    form = choose_format(flags)
    arguments = files or ()
    words = () if lines else tuple(filter(is_text, arguments))
    paths = find_input_files([each for each in arguments if each not in words], flags.output)
    inputs = InputSource((*(text or ()), *words), paths, lines)
    if flags.is_async and version and inputs.total != 1:
        raise UsageError(
            "--async with several inputs runs the model's default version; leave out --version"
        )
    raise SystemExit(run_infer(InferOptions(target, model, version, inputs, flags, form, words)))


def check_job_flags(flags: InferFlags, *, has_inputs: bool) -> None:
    if (flags.callback or flags.no_wait) and not flags.is_async:
        raise UsageError("--callback and --no-wait require --async")
    if (flags.is_async or flags.job) and flags.batch > 1:
        raise UsageError("--batch excludes --async and --job")
    if flags.no_wait and (flags.output is not None or flags.format):
        raise UsageError("--no-wait writes no results, and excludes --output and --format")
    if flags.job and (has_inputs or flags.is_async):
        raise UsageError("--job writes the results of a job, and excludes inputs and --async")


def choose_format(flags: InferFlags) -> OutputFormat:
    """Return the format of the records. Raises `UsageError`."""
    from gateway.commands.inference.records import OutputFormat

    names = [form.value for form in OutputFormat]
    name = OutputFormat.jsonl if flags.json else flags.format
    if name not in (None, *names):
        raise UsageError(f"--format must be {' or '.join(names)}, not {name!r}")
    if flags.output is None:
        return OutputFormat(name or ("text" if sys.stdout.isatty() else "jsonl"))
    if name == OutputFormat.text:
        raise UsageError("--format text is for the standard output, not for --output FILE")
    return OutputFormat.jsonl


@cli.command(rich_help_panel=MODELS_PANEL)
@add_target
def models(
    target: Target,
    ready: Annotated[bool, typer.Option("--ready", help="Only models that are ready.")] = False,
    text: Annotated[
        str, typer.Option("--filter", help="Only models with this in their names.")
    ] = "",
    json: JsonOption = False,
) -> None:
    """List the models with their states."""
    from gateway.commands.tables import print_resource_list

    def is_wanted(model: Mapping[str, Any]) -> bool:
        return text.lower() in model["name"].lower() and (model["ready"] or not ready)

    print_resource_list("models", target, json=json, is_wanted=is_wanted)


@cli.command(rich_help_panel=OPERATION_PANEL)
@add_target
def ready(target: Target, json: JsonOption = False) -> None:
    """Report whether requests can be served. The exit status is 1 if they cannot."""
    from gateway.commands import tables

    with target.connect() as client:
        readiness = read_readiness(client)
    if json:
        tables.print_json(readiness)
    elif readiness["ready"]:
        typer.echo(escape_unprintable(describe_ready(readiness)))
    if not readiness["ready"]:
        raise ClientError(explain_not_ready(readiness))


def read_readiness(client: Client) -> Mapping[str, Any]:
    """Return the document of `/readyz`. Raises `GatewayError`."""
    from gateway.client import GatewayError

    try:
        return client.request("GET", "/readyz")
    except GatewayError as exc:
        if "ready" not in exc.document:
            raise
        return exc.document


def describe_ready(readiness: Mapping[str, Any]) -> str:
    missing = ", ".join(readiness.get("missing") or {})
    return f"ready, but {missing} cannot be served" if missing else "ready"


def explain_not_ready(readiness: Mapping[str, Any]) -> str:
    if readiness.get("draining"):
        return "not ready: the gateway is shutting down"
    if "replicas" not in readiness:
        return "not ready; a key with the role admin sees why"
    missing = readiness.get("missing") or {}
    if missing:
        return f"not ready: {', '.join(missing)} cannot be served"
    states = readiness.get("replicas", {}).items()  # none of them can serve requests
    unusable = ", ".join(f"{address} is {state}" for address, state in states)
    return f"not ready: {unusable or 'no replica is available'}"


@cli.command(rich_help_panel=MODELS_PANEL, epilog=format_examples("triton-gateway load MODEL"))
@add_target
def load(
    target: Target,
    models: ModelsArgument,
    json: JsonOption = False,
) -> None:
    """Load models on every replica and wait for completion."""
    change_models(target, models, lambda client, name: client.load(name), json=json)


@cli.command(
    rich_help_panel=MODELS_PANEL,
    epilog=format_examples("triton-gateway unload ENSEMBLE --dependents"),
)
@add_target
def unload(
    target: Target,
    models: ModelsArgument,
    dependents: Annotated[
        bool, typer.Option("--dependents", help="Also unload the models of an ensemble.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Unload models from every replica and wait for completion."""

    def unload(client: Client, name: str) -> dict[str, Any]:
        return client.unload(name, dependents=dependents)

    change_models(target, models, unload, json=json)


def change_models(
    target: Target,
    names: Sequence[str],
    change: Callable[[Client, str], dict[str, Any]],
    *,
    json: bool,
) -> None:
    """Load or unload the models one by one; a failure does not stop the others."""
    from gateway.client import GatewayError
    from gateway.client.errors import UNREACHABLE
    from gateway.commands import tables

    reports: list[dict[str, Any]] = []
    failures: list[ClientError] = []
    with target.connect() as client:
        for name in names:
            try:
                report = change(client, name)
            except GatewayError as exc:
                if exc.code == UNREACHABLE:
                    raise
                failures.append(make_command_error(exc))
                report = exc.document
            if "replicas" in report:
                reports.append(report)
    if json:
        tables.print_json(reports)
    elif reports:
        rows = [row for report in reports for row in tables.format_report_rows(report)]
        tables.print_table(tables.REPORT_COLUMNS, rows)
    if failures:
        raise type(failures[0])("; ".join(map(str, failures)))


@cli.command(
    rich_help_panel=MODELS_PANEL,
    epilog=format_examples(
        "triton-gateway push model.onnx --name digits",
        "triton-gateway push model.onnx --name digits --config config.pbtxt --labels labels.txt",
    ),
)
@add_target
def push(
    target: Target,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Model file, archive or model folder.")
    ],
    name: Annotated[
        str, typer.Option(help="Name of the model. Default: that of the file.", show_default=False)
    ] = "",
    version: Annotated[
        str, typer.Option(help="Version. Default: the next number.", show_default=False)
    ] = "",
    config: Annotated[Path | None, typer.Option(help="config.pbtxt, or a config in JSON.")] = None,
    labels: Annotated[
        Path | None, typer.Option(help="File with one label per line, which the config names.")
    ] = None,
    load: Annotated[bool, typer.Option(help="Load the model on every replica.")] = True,
    json: JsonOption = False,
) -> None:
    """Upload a model, and load it on every replica."""
    from gateway.commands import tables
    from gateway.commands.model_transfer import push_model

    options = {"version": version, "config": config, "labels": labels, "load": load}
    published = push_model(target, file, name, **options)
    if json:
        tables.print_json(published)
    else:
        words = "{model} version {version}: {bytes} bytes, sha256 {sha256}"
        typer.echo(escape_unprintable(words.format_map(published)))


@cli.command(
    rich_help_panel=MODELS_PANEL,
    epilog=format_examples("triton-gateway pull digits --output backup/"),
)
@add_target
def pull(
    target: Target,
    model: ModelArgument,
    version: Annotated[str, typer.Option(help="Version. Default: all.", show_default=False)] = "",
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder in which the model's folder is created.")
    ] = Path(),
) -> None:
    """Download the files of a model, with its config."""
    from gateway.commands.model_transfer import pull_model

    for path in pull_model(target, model, version, output):
        typer.echo(escape_unprintable(path))


@cli.command(
    "rm", rich_help_panel=MODELS_PANEL, epilog=format_examples("triton-gateway rm digits/1")
)
@add_target
def remove(
    target: Target,
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAMES",
            help="Models, or versions of models as NAME/VERSION.",
            autocompletion=complete_model_name,
        ),
    ],
) -> None:
    """Unload models and remove their files."""
    from gateway.commands.model_transfer import remove_models

    for name in remove_models(target, names):
        typer.echo(f"removed {escape_unprintable(name)}")


@cli.command(rich_help_panel=OPERATION_PANEL)
@add_target
def top(
    target: Target,
    interval: Annotated[float, typer.Option(min=0.1, help="Refresh interval, in seconds.")] = 1.0,
) -> None:
    """Show live traffic, models and replicas; press q to quit."""
    from gateway.commands.top import run_top

    with target.connect() as client, suppress(KeyboardInterrupt):
        run_top(client, interval)


@cli.command(
    rich_help_panel=OPERATION_PANEL,
    epilog=format_examples(
        "triton-gateway events --since 1h", "triton-gateway events --follow --json"
    ),
)
@add_target
def events(
    target: Target,
    since: Annotated[
        str,
        typer.Option(
            help="A time such as 2026-01-31T14:03:00Z, or an age such as 90s, 5m, 2h or 1d.",
            show_default=False,
        ),
    ] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of events.")] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with later events until interrupted.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show what changed, by whom, and with which outcome."""
    from gateway.commands.events import print_events

    with target.connect() as client, suppress(KeyboardInterrupt):
        print_events(client, since, limit, follow=follow, json=json)


@cli.command(rich_help_panel=INFERENCE_PANEL)
@add_target
def curl(target: Target, model: ModelArgument, version: VersionOption = "") -> None:
    """Print a curl command for the model."""
    with target.connect() as client:
        line = client.model(model, version).document["curl"]
    typer.echo(escape_unprintable(line) + format_curl_header(target))


def format_curl_header(target: Target) -> str:
    # The key itself is never printed.
    return ' -H "Authorization: Bearer $TRITON_GATEWAY_KEY"' if target.key else ""


@cli.command(
    rich_help_panel=INFERENCE_PANEL,
    epilog=format_examples("triton-gateway describe MODEL"),
)
@add_target
def describe(
    target: Target, model: ModelArgument, version: VersionOption = "", json: JsonOption = False
) -> None:
    """Show the versions, inputs and outputs of a model, and a curl command for it."""
    from gateway.commands import tables

    with target.connect() as client:
        description = client.model(model, version).document
    if json:
        tables.print_json(description)
    else:
        tables.print_model(description, format_curl_header(target))


@cli.command(
    rich_help_panel=INFERENCE_PANEL,
    epilog=format_examples(
        "triton-gateway bench MODEL --concurrency 1,4,16 --seconds 5",
        "triton-gateway bench MODEL photo.jpg",
    ),
)
@add_target
def bench(
    target: Target,
    model: ModelArgument,
    file: Annotated[
        str | None,
        typer.Argument(help="File with the request. Default: the request that curl shows."),
    ] = None,
    text: Annotated[str | None, typer.Option(help="Text to send.")] = None,
    version: VersionOption = "",
    concurrency: Annotated[
        str, typer.Option(help="Concurrency levels to measure.")
    ] = "1,2,4,8,16,32",
    seconds: Annotated[
        float, typer.Option(min=0.01, help="Duration of each measurement, in seconds.")
    ] = 3.0,
    timeout: TimeoutOption = 60.0,
    json: JsonOption = False,
) -> None:
    """Measure latency and throughput at increasing concurrency."""
    from gateway.commands import bench, tables
    from gateway.commands.inference.inputs import Input, report_unreadable

    if file and text is not None:
        raise UsageError("pass either FILE or --text, not both")
    with target.connect() as client:
        model_info = client.model(model, version)
    source = text.encode() if text is not None else file
    with report_unreadable(str(file)):
        body = (
            bench.build_bench_body(model_info.document)
            if source is None
            else Input("", source).read()
        )
    benchmark = bench.Benchmark(
        target, model, version, body, seconds, timeout, is_decoupled=model_info.is_decoupled
    )
    results = benchmark.measure(bench.parse_concurrencies(concurrency))
    if json:
        tables.print_json(results)
    else:
        tables.print_table(bench.BENCH_COLUMNS, map(bench.format_bench_row, results))
        typer.echo(bench.plot_results(results))
    if any(result.failed for result in results):
        raise ClientError("some requests failed")
