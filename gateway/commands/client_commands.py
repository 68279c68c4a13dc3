"""The client commands. Each imports what it needs when it is called, so that the CLI starts fast."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gateway.commands.errors import ClientError, UsageError
from gateway.commands.flags import (
    INFERENCE_PANEL,
    MODELS_PANEL,
    OPERATION_PANEL,
    InferFlags,
    JsonOption,
    ModelArgument,
    OutputFormat,
    TimeoutOption,
    add_flags,
    add_target,
    format_examples,
)
from gateway.commands.help import create_cli
from gateway.commands.plain import LabelName, add_plain_commands
from gateway.commands.resources import (
    EVENTS,
    LABELS,
    MODELS,
    REPLICAS,
    REPORT_COLUMNS,
    describe_readiness,
    format_report_rows,
    read_readiness,
)
from gateway.commands.target import Target, complete_model_name, make_command_error
from gateway.messages import escape_unprintable

cli = typer.Typer()
replica_commands = typer.Typer(invoke_without_command=True)
cli.add_typer(replica_commands, name="replicas", rich_help_panel=OPERATION_PANEL)
add_plain_commands("replicas", replica_commands)
label_cli = create_cli(help="Manage the version labels of models.")
cli.add_typer(label_cli, name="label", rich_help_panel=MODELS_PANEL)
add_plain_commands("label", label_cli)

EVENTS_POLL_S: Final = 2.0
AGE: Final = re.compile(r"(\d{1,6})([smhd])", re.ASCII)
UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
ModelsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="MODELS", help="Names of the models.", autocompletion=complete_model_name
    ),
]
VersionOption = Annotated[
    str, typer.Option("--version", help="Model version. Default: the newest.")
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
    text: Annotated[
        list[str] | None, typer.Option("--text", help="Text to infer; may be repeated.")
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Treat each line of a file as a text.")
    ] = False,
    version: VersionOption = "",
) -> None:
    """Run inference on files and texts; print one record for each, in input order."""
    from gateway.commands.infer import InferRun
    from gateway.commands.inputs import InputSource, find_input_files, is_text

    check_infer_flags(flags, has_inputs=bool(files or text))
    arguments = files or ()
    words = () if lines else tuple(filter(is_text, arguments))
    paths = find_input_files([each for each in arguments if each not in words], flags.output)
    inputs = InputSource((*(text or ()), *words), paths, lines)
    if flags.is_async and version and inputs.total != 1:
        raise UsageError(
            "--async with several inputs runs the model's default version; leave out --version"
        )
    form = flags.format or (OutputFormat.text if sys.stdout.isatty() else OutputFormat.jsonl)
    if flags.json or flags.output is not None:
        form = OutputFormat.jsonl
    raise SystemExit(InferRun(target, model, version, inputs, flags, form, words).run())


def check_infer_flags(flags: InferFlags, *, has_inputs: bool) -> None:
    """Raise `UsageError` for flags that contradict each other."""
    is_new_job = flags.is_async
    is_text = flags.format is OutputFormat.text
    has_output = flags.output is not None
    for is_wrong, message in (
        (flags.resume and (not has_output or flags.overwrite), "--resume requires --output FILE alone"),
        (not is_new_job and (flags.callback or flags.no_wait), "--callback and --no-wait require --async"),
        (flags.batch > 1 and (is_new_job or flags.job), "--batch excludes --async and --job"),
        (flags.no_wait and (has_output or flags.format), "--no-wait excludes --output and --format"),
        (flags.job and (has_inputs or is_new_job), "--job excludes inputs and --async"),
        (not (flags.job or has_inputs), "nothing to infer: pass files, a folder, - or --text"),
        (has_output and is_text, "--format text excludes --output FILE"),
    ):  # fmt: skip
        if is_wrong:
            raise UsageError(message)


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
    with target.connect() as client:
        models = client.request("GET", "/v1/models")["models"]
    named = (model for model in models if text.lower() in model["name"].lower())
    MODELS.print([model for model in named if model["ready"] or not ready], json=json)


@replica_commands.callback()
@add_target
def replicas(target: Target, context: typer.Context, json: JsonOption = False) -> None:
    """List the Triton replicas and their state; cordon, drain or uncordon one."""
    if context.invoked_subcommand is None:
        REPLICAS.show(target, "GET", "/v1/replicas", json=json)
        return
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"write --{name} after {context.invoked_subcommand}")


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
        typer.echo(escape_unprintable(describe_readiness(readiness)))
    if not readiness["ready"]:
        raise ClientError(describe_readiness(readiness))


@cli.command(rich_help_panel=MODELS_PANEL, epilog=format_examples("triton-gateway load MODEL"))
@add_target
def load(target: Target, models: ModelsArgument, json: JsonOption = False) -> None:
    """Load models on every replica and wait for completion."""
    change_models(target, "load", models, json=json)


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
    change_models(target, "unload", models, json=json, dependents=dependents)


def change_models(
    target: Target, change: str, names: Sequence[str], *, json: bool, **options: Any
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
                report = getattr(client, change)(name, **options)
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
        rows = [row for report in reports for row in format_report_rows(report)]
        tables.print_table(REPORT_COLUMNS, rows)
    if failures:
        raise type(failures[0])("; ".join(map(str, failures)))


@cli.command(
    rich_help_panel=MODELS_PANEL,
    epilog=format_examples(
        "triton-gateway push model.onnx --name digits",
        "triton-gateway push model.onnx --config config.pbtxt --labels labels.txt",
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
        words = (
            "ready; for a request to paste: triton-gateway curl {model}"
            if published["ready"]
            else "not loaded; load it with: triton-gateway load {model}"
        )
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
    with target.connect() as client:
        for name in names:
            model, _, version = name.partition("/")
            client.delete(model, version)
            typer.echo(f"removed {escape_unprintable(name)}")


@label_cli.command("set")
@add_target
def set_model_label(
    target: Target,
    model: ModelArgument,
    label: LabelName,
    versions: Annotated[
        list[str],
        typer.Argument(
            metavar="VERSIONS", help="A version, or several with their shares, such as 1=90 2=10."
        ),
    ],
    sticky: Annotated[
        bool, typer.Option("--sticky", help="Each API key keeps its version of a split.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Let a label mean a version, or split its requests between versions."""
    from gateway.client.calls import build_label_path

    body = build_label(versions, sticky)
    LABELS.show(target, "PUT", build_label_path(model, label), body, json=json)


def build_label(versions: Sequence[str], sticky: bool) -> dict[str, Any]:
    document: dict[str, Any] = {"version": versions[0]}
    if len(versions) > 1 or "=" in versions[0]:
        document = {"versions": dict(map(parse_share, versions))}
        if len(document["versions"]) < len(versions):
            raise UsageError("a version is given twice")
    if sticky:
        document["sticky"] = "key"
    return document


def parse_share(text: str) -> tuple[str, int]:
    version, _, share = text.partition("=")
    if not (version.isdecimal() and share.isdecimal()):
        raise UsageError(f"expected VERSION=SHARE, such as 1=90, not {text!r}")
    return version, int(share)


@cli.command(rich_help_panel=OPERATION_PANEL)
@add_target
def top(
    target: Target,
    interval: Annotated[float, typer.Option(min=0.1, help="Refresh interval, in seconds.")] = 1.0,
) -> None:
    """Show live traffic, models and replicas, until Ctrl-C."""
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
    with target.connect() as client, suppress(KeyboardInterrupt):
        page = client.events(parse_since(since), limit=limit)
        if not follow:
            EVENTS.print(page["events"], json=json)
        while follow:
            for event in page["events"]:
                EVENTS.print_line(event, json=json)
            if not page["events"]:
                time.sleep(EVENTS_POLL_S)
            page = client.events(after=page["next"], limit=limit)


def parse_since(since: str) -> str | datetime:
    """Return the time of an age such as 5m; the gateway reads everything else."""
    match = AGE.fullmatch(since)
    if match is None:
        return since
    return datetime.now(timezone.utc) - timedelta(**{UNITS[match[2]]: int(match[1])})


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
    rich_help_panel=INFERENCE_PANEL, epilog=format_examples("triton-gateway describe MODEL")
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
        Path | None, typer.Argument(help="File with the request. Default: the model's example.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="Text to send.")] = None,
    version: VersionOption = "",
    concurrency: Annotated[
        str, typer.Option(help="Numbers of requests in flight to measure.")
    ] = "1,2,4,8,16,32",
    seconds: Annotated[
        float, typer.Option(min=0.01, help="Duration of each measurement, in seconds.")
    ] = 3.0,
    timeout: TimeoutOption = 60.0,
    json: JsonOption = False,
) -> None:
    """Measure latency and throughput at increasing concurrency."""
    import uvloop

    from gateway.client.bodies import encode_inputs
    from gateway.client.calls import ApiRequest, build_model_path
    from gateway.commands import bench, tables
    from gateway.media_types import NDJSON

    if file and text is not None:
        raise UsageError("pass either FILE or --text, not both")
    words = concurrency.split(",")
    if not all(each.isdecimal() and 0 < int(each) <= bench.MAX_CONCURRENCY for each in words):
        raise UsageError("--concurrency must be numbers up to 1024, such as 1,2,4")
    source = file if text is None else text
    with target.connect() as client:
        info = client.model(model, version)
        body: Any = bench.build_example(info.document) if source is None else encode_inputs(source)
    path = f"{build_model_path(model, version)}/infer"
    headers = {
        "content-type": body.content_type,
        "x-request-timeout": f"{timeout:g}",
        **target.access.create_headers(),
    }
    if info.is_decoupled:
        headers["accept"] = NDJSON
    request = ApiRequest("POST", path, headers=headers, body=body)
    results = uvloop.run(bench.measure(target, request, map(int, words), seconds))
    if json:
        tables.print_json(results)
    else:
        tables.print_table(bench.COLUMNS, map(bench.format_row, results))
    if any(result["failed"] for result in results):
        raise ClientError("some requests failed")
