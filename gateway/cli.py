"""The command `triton-gateway`. Each command imports its modules when it is called, to start fast."""

from __future__ import annotations

import asyncio
import gc
import os
import pwd
import re
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from gateway import __version__
from gateway.access.keys import read_keys_file
from gateway.callers import CallerLimits, Priority, Role
from gateway.commands import client_commands
from gateway.commands.flags import (
    INFERENCE_PANEL,
    OPERATION_PANEL,
    JsonOption,
    add_flags,
    format_examples,
)
from gateway.commands.help import START_HERE, create_cli
from gateway.commands.job_commands import job_cli
from gateway.commands.target import OptionalTarget, report_gateway_errors
from gateway.embedded.flags import TritonFlags
from gateway.embedded.model_paths import exclude_startup_models
from gateway.messages import CommandError, format_utc_time, parse_time, print_message, quote_text

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from gateway.repository.state.store import StateStore

T = TypeVar("T")
IMPORT_COLLECTION_THRESHOLD = 200_000  # more than the imports of any command
NO_SETTINGS: Final[Mapping[str, Any]] = {}
root_cli = create_cli(epilog=START_HERE, pretty_exceptions_enable=False)
key_commands = create_cli(help="Manage the API keys of the gateway.")
state_commands = create_cli(help="Export or import the desired state.")
START_PANEL = "Start a gateway"
SERVERS = {"up", "serve", "triton"}  # commands that write a log
root_cli.add_typer(key_commands, name="key", rich_help_panel=START_PANEL)
root_cli.add_typer(client_commands.cli)
root_cli.add_typer(job_cli, name="jobs", rich_help_panel=INFERENCE_PANEL)
root_cli.add_typer(state_commands, name="state", rich_help_panel=OPERATION_PANEL)
diagnosis_commands = typer.Typer()  # the last group of the help, which lists groups in this order
root_cli.add_typer(diagnosis_commands)

Host = Annotated[str, typer.Option(help="Address that the gateway listens on.")]
Port = Annotated[int, typer.Option(help="Port that the gateway listens on.")]
GrpcPort = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="Port of the gateway's gRPC API; 0 for none."),
]
OpenPage = Annotated[bool, typer.Option("--open", help="Open the page in a browser when ready.")]
TritonHost = Annotated[
    str,
    typer.Option(
        "--host",
        help="Address that Triton listens on. Triton does not check keys: expose it to gateways only.",
    ),
]
WorkerCount = Annotated[
    int, typer.Option(min=1, help="Number of worker processes; at most one per core.")
]
ReplicaCount = Annotated[
    int,
    typer.Option(
        min=1,
        max=16,
        help="Number of Tritons to start; the ports of each are 100 higher than the previous one's.",
    ),
]
OnDemandPatterns = Annotated[
    list[str] | None,
    typer.Option(
        "--on-demand",
        help="Model that is loaded when it is first requested, or a pattern such as 'ocr-*'; may be "
        "repeated, * stands for all.",
    ),
]
MaxLoadedModels = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of models that each Triton holds; for another one, the least recently used "
        "on-demand model is unloaded.",
    ),
]
StateUrl = Annotated[
    str,
    typer.Option("--state", help="URL of the state. Default: GATEWAY_STATE.", show_default=False),
]
DURATION: Final = re.compile(r"(\d{1,5})([dhm])", re.ASCII)
DURATION_UNITS: Final = {"d": "days", "h": "hours", "m": "minutes"}


def parse_moment(text: str) -> datetime:
    """Return a time, or a duration from now. Raises `typer.BadParameter`."""
    if match := DURATION.fullmatch(text):
        number, unit = match.groups()
        return datetime.now(timezone.utc) + timedelta(**{DURATION_UNITS[unit]: int(number)})
    time = parse_time(text)
    if time is None:
        raise typer.BadParameter(
            f"{quote_text(text)} is neither a time such as 2027-01-31T00:00:00Z nor a duration such as 90d"
        )
    return time


def parse_future_moment(text: str) -> datetime:
    """Do the same for a time that has not passed. Raises `typer.BadParameter`."""
    time = parse_moment(text)
    if time <= datetime.now(timezone.utc):
        raise typer.BadParameter(
            f"{quote_text(text)} has passed, so that the key could not be used"
        )
    return time


KeyName = Annotated[str, typer.Argument(help="Name of the key; the log shows it.")]
Roles = Annotated[
    list[Role],
    typer.Option("--role", help="Role of the key; may be repeated. admin includes the others."),
]
DEFAULT_ROLES: Final = [Role.infer]
ModelPatterns = Annotated[
    list[str],
    typer.Option(
        "--model", help="Model that the key may use, or a pattern such as 'res*'; may be repeated."
    ),
]
DEFAULT_MODEL_PATTERNS: Final = ["*"]
RequestRate = Annotated[
    float | None, typer.Option(min=0, help="Maximum number of requests per second.")
]
KeyPriority = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(Priority.__members__),
        help="Priority of its requests while requests wait. Default: that of the model, or normal.",
    ),
]
RequestsPerDay = Annotated[
    int | None, typer.Option(min=1, help="Maximum number of requests in a day (UTC).")
]
RequestsPerMonth = Annotated[
    int | None, typer.Option(min=1, help="Maximum number of requests in a month (UTC).")
]
MaxInflight = Annotated[
    int | None, typer.Option(min=1, help="Maximum number of its requests at the same time.")
]
NotBefore = Annotated[
    datetime | None,
    typer.Option(parser=parse_moment, metavar="TIME", help="When the key begins to be valid."),
]
TIME_HELP: Final = "a time such as 2027-01-31T00:00:00Z, or 90d, 12h or 30m from now."
Expires = Annotated[
    datetime | None,
    typer.Option(
        parser=parse_future_moment, metavar="TIME", help=f"When the key expires: {TIME_HELP}"
    ),
]
Overlap = Annotated[
    datetime | None,
    typer.Option(
        parser=parse_moment,
        metavar="TIME",
        help=f"When the old key expires: {TIME_HELP} Default: 1d.",
    ),
]
ExpiresAt = Annotated[
    datetime | None,
    typer.Option(
        "--at",
        parser=parse_moment,
        metavar="TIME",
        help=f"When they expire: {TIME_HELP} Default: now.",
    ),
]
KEY_COLUMNS: Final = (
    *("NAME", "ROLES", "MODELS", "REQUESTS PER SECOND", "PER DAY", "PER MONTH", "AT ONCE"),
    *("PRIORITY", "EXPIRES"),
)
KeysPath = Annotated[
    Path | None, typer.Option("--file", help="Keys file. Default: GATEWAY_KEYS_FILE.")
]


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"triton-gateway {__version__}")
        raise typer.Exit


@root_cli.callback()
def command(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """The REST front door of NVIDIA Triton Inference Server."""


@root_cli.command(
    rich_help_panel=START_PANEL,
    epilog=format_examples(
        "triton-gateway up model.onnx",
        "triton-gateway up path/to/repository --port 9000",
        "triton-gateway up --replicas 2",
    ),
)
@add_flags(TritonFlags)
def up(
    flags: TritonFlags,
    context: typer.Context,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    replicas: ReplicaCount = 1,
    open_page: OpenPage = False,
    grpc_port: GrpcPort = None,
    on_demand: OnDemandPatterns = None,
    max_loaded_models: MaxLoadedModels = None,
) -> None:
    """Start one or several embedded Tritons with a gateway in front of them."""
    from gateway.server import launch

    options = flags.to_options()
    settings: dict[str, Any] = {**context.obj}
    if on_demand:
        settings["on_demand_models"] = tuple(on_demand)
        if flags.load is None:
            options = exclude_startup_models(options, on_demand)
    if max_loaded_models is not None:
        settings["max_loaded_models"] = max_loaded_models
    if grpc_port is not None:
        os.environ["GATEWAY_GRPC_PORT"] = str(grpc_port)
    launch.run_with_embedded_triton(options, host, port, replicas, settings, opens_page=open_page)


@root_cli.command(rich_help_panel=START_PANEL)
@add_flags(TritonFlags)
def triton(flags: TritonFlags, host: TritonHost = "127.0.0.1") -> None:
    """Start an embedded Triton without a gateway."""
    from gateway.server import launch

    launch.run_triton(flags.to_options(), host)


@root_cli.command(
    rich_help_panel=START_PANEL,
    epilog=format_examples("GATEWAY_TRITON_URLS=http://triton:8000 triton-gateway serve"),
)
def serve(
    context: typer.Context,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    workers: WorkerCount = 1,
) -> None:
    """Start the gateway for the Tritons of GATEWAY_TRITON_URLS."""
    from gateway.server import launch

    launch.run_gateway(host, port, workers, context.obj)


@state_commands.command("export")
@add_flags(OptionalTarget)
def export_command(target: OptionalTarget, state: StateUrl = "") -> None:
    """Print what the API changed (loaded and unloaded models, labels, cordons) as JSON."""
    if state or not target.url:
        from gateway.repository.state.transfer import export_state, format_export

        sys.stdout.buffer.write(format_export(run_with_store(state, export_state)))
        return
    from gateway.commands.tables import print_json

    with report_gateway_errors(target.url), target.connect() as client:
        print_json(client.request("GET", "/v1/state"))


@state_commands.command("import")
def import_command(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Exported state; - is standard input.")
    ],
    state: StateUrl = "",
) -> None:
    """Replace the state with an exported one; running gateways apply it within seconds."""
    from gateway.capabilities.installed import TABLES
    from gateway.repository.state.transfer import import_state, parse_export

    try:
        raw = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as exc:
        raise CommandError(f"cannot read {file}: {exc.strerror}") from None
    exported = parse_export(raw, TABLES)
    caller = f"{find_user()}@{socket.gethostname()}"
    run_with_store(state, lambda store: import_state(store, exported, caller))
    models, cordons = exported["models"], exported["cordons"]
    print_message(f"imported {len(models)} models and {len(set(cordons))} cordons")


def find_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # as in a container
        return str(os.getuid())


def run_with_store(url: str, work: Callable[[StateStore], Coroutine[Any, Any, T]]) -> T:
    """Run work on the state at the URL, or of GATEWAY_STATE. Raises `CommandError`."""
    from gateway.config.settings import read_settings
    from gateway.errors import GatewayError
    from gateway.repository.state.places import open_state_store, read_state_password

    settings = read_settings()
    url = url or settings.state
    if not url.startswith(("file:", "redis:", "rediss:")):
        raise CommandError(
            "only a state in a file or in Redis can be exported and imported; "
            "set --state or GATEWAY_STATE to its URL"
        )

    async def run() -> T:
        store = open_state_store(url, read_state_password(settings))
        try:
            return await work(store)
        finally:
            await store.close()

    try:
        return asyncio.run(run())
    except GatewayError as exc:
        raise CommandError(exc.detail) from None


@diagnosis_commands.command(
    rich_help_panel=OPERATION_PANEL,
    epilog=format_examples(
        "triton-gateway doctor",
        "triton-gateway doctor --port 9000 --json",
        "triton-gateway doctor --url https://gateway.example.com --key KEY",
    ),
)
@add_flags(OptionalTarget)
def doctor(
    target: OptionalTarget,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    json: JsonOption = False,
) -> None:
    """Check this machine and its settings, or a running gateway. Exits with 1 if a check fails."""
    from gateway.capabilities.capability import FAILED
    from gateway.doctor.checks import ask_gateway, print_findings, run_checks

    if target.url:
        with report_gateway_errors(target.url):
            findings = list(ask_gateway(target))
    else:
        findings = run_checks(host, port)
    print_findings(findings, json=json)
    if any(finding.status == FAILED for finding in findings):
        raise SystemExit(1)


@key_commands.command(
    "create",
    epilog=format_examples(
        "triton-gateway key create team-a --file keys.yaml",
        "triton-gateway key create team-a --model 'res*' --requests-per-second 50",
        "triton-gateway key create trial --expires 30d --requests-per-day 1000",
    ),
)
def create_key(
    name: KeyName,
    role: Roles = DEFAULT_ROLES,
    model: ModelPatterns = DEFAULT_MODEL_PATTERNS,
    requests_per_second: RequestRate = None,
    requests_per_day: RequestsPerDay = None,
    requests_per_month: RequestsPerMonth = None,
    max_inflight: MaxInflight = None,
    priority: KeyPriority = None,
    not_before: NotBefore = None,
    expires: Expires = None,
    file: KeysPath = None,
) -> None:
    """Create a key and store its hash in the keys file. The key itself is printed once."""
    from gateway.access.keys_editor import add_key

    path = resolve_keys_path(file)
    key = add_key(
        path,
        name,
        role,
        model,
        requests_per_second=requests_per_second,
        requests_per_day=requests_per_day,
        requests_per_month=requests_per_month,
        max_inflight=max_inflight,
        priority=priority,
        not_before=not_before and format_utc_time(not_before),
        expires=expires and format_utc_time(expires),
    )
    print_new_key(name, path, key)


def print_new_key(name: str, path: Path, key: str) -> None:
    print_message(f"added key {name} to {path}, which stores its hash; the key is not shown again:")
    typer.echo(key)


@key_commands.command("list")
def list_keys(file: KeysPath = None) -> None:
    """List the keys with their roles, models, limits, and when they expire."""
    from gateway.commands.tables import print_table

    rows = []
    for caller in read_keys_file(resolve_keys_path(file)).values():
        limits = caller.limits or CallerLimits()
        rate = limits.requests_per_second
        rows.append(
            (
                caller.name,
                ",".join(caller.roles),
                ",".join(caller.models),
                "unlimited" if rate is None else f"{rate:g}",
                str(limits.requests_per_day or ""),
                str(limits.requests_per_month or ""),
                str(limits.max_inflight or ""),
                "" if caller.priority is None else caller.priority.name,
                "" if caller.expires is None else format_utc_time(caller.expires),
            )
        )
    print_table(KEY_COLUMNS, rows)


@key_commands.command(
    "rotate",
    epilog=format_examples("triton-gateway key rotate team-a --overlap 7d --file keys.yaml"),
)
def rotate_old_key(
    name: KeyName,
    overlap: Overlap = None,
    expires: Expires = None,
    file: KeysPath = None,
) -> None:
    """Create a second key of a name, with the same rights and counted together; the old one expires."""
    from gateway.access.keys_editor import rotate_key

    path = resolve_keys_path(file)
    old_expires = overlap or parse_moment("1d")
    key = rotate_key(path, name, old_expires, expires)
    print_message(
        f"the old key {name} expires at {format_utc_time(old_expires)}, or earlier if it does"
    )
    print_new_key(name, path, key)


@key_commands.command("expire")
def end_key(name: KeyName, expires: ExpiresAt = None, file: KeysPath = None) -> None:
    """Let the keys of a name expire: now, or at a time. They are refused with the reason then."""
    from gateway.access.keys_editor import expire_key

    path = resolve_keys_path(file)
    at = expires or parse_moment("0m")
    expire_key(path, name, at)
    print_message(f"key {name} in {path} expires at {format_utc_time(at)}, or earlier if it did")


@key_commands.command("revoke")
def revoke_key(name: KeyName, file: KeysPath = None) -> None:
    """Remove the keys of a name from the keys file; running gateways apply it within two seconds."""
    from gateway.access.keys_editor import remove_key

    path = resolve_keys_path(file)
    remove_key(path, name)
    print_message(f"removed key {name} from {path}")


def resolve_keys_path(file: Path | None) -> Path:
    if file is not None:
        return file
    from gateway.config.settings import read_settings

    path = read_settings().keys_file
    if path is None:
        raise CommandError("no keys file: use --file FILE or set GATEWAY_KEYS_FILE")
    return path


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    # The exception unwinds the stack, so that context managers stop what was started.
    raise SystemExit(128 + number)


@cache
def build_command() -> Callable[..., object]:
    return typer.main.get_command(root_cli)


def main(settings: Mapping[str, Any] = NO_SETTINGS) -> None:
    """Run the command; print expected failures as one sentence on standard error.

    Tests pass values of settings that no variable sets.
    """
    # Imports create many objects and hardly any garbage. With the default of 700 new objects, the garbage
    # collector takes a quarter of the start.
    gc.set_threshold(IMPORT_COLLECTION_THRESHOLD)
    signal.signal(signal.SIGTERM, exit_on_signal)
    # Shells start background commands with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        build_command()(prog_name="triton-gateway", obj=settings)
    except CommandError as exc:
        if SERVERS.intersection(sys.argv[1:2]):
            from gateway.telemetry.logs import print_failure

            print_failure(exc)
        else:
            print_message(f"triton-gateway: {exc}")
        sys.exit(exc.status)
