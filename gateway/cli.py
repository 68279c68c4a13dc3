"""The command `triton-gateway`."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, cast

import typer
from pydantic import ValidationError

from gateway import logs
from gateway.app import create_app
from gateway.auth import is_loopback
from gateway.client import commands
from gateway.flags import TritonFlags, with_triton_flags
from gateway.fleet.declared import BadModelsFile
from gateway.fleet.replica import BadAddress
from gateway.keys import BadKeysFile, Role, create, read, revoke
from gateway.server import run_workers, server
from gateway.settings import Settings
from gateway.state.wishes import BadState
from gateway.tracing import BadTracing
from gateway.triton.embedded import EmbeddedTriton, say, side_by_side
from gateway.triton.installation import CannotInstall
from gateway.triton.options import CannotStart, Options, check_distinct, check_port, ports_of

log = logging.getLogger(__name__)

cli = typer.Typer(
    help="The REST front door of NVIDIA Triton Inference Server.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

key = typer.Typer(
    help="Keys: who may call the gateway.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cli.add_typer(key, name="key")
cli.add_typer(commands.cli)

Host = Annotated[str, typer.Option(help="The address that the gateway listens on.")]
Port = Annotated[int, typer.Option(help="The port that the gateway listens on.")]
TritonHost = Annotated[
    str,
    typer.Option(
        "--host",
        help="The address that Triton listens on. It asks nobody for a key: for gateways only.",
    ),
]
Workers = Annotated[int, typer.Option(min=1, help="Processes that serve; one per core at most.")]
Replicas = Annotated[
    int,
    typer.Option(
        min=1,
        max=16,
        help="How many Tritons to start; each has ports 100 higher than the one before.",
    ),
]

KeyName = Annotated[str, typer.Argument(help="What the key is called, in the log as well.")]
Roles = Annotated[
    list[Role],
    typer.Option("--role", help="What it is for; may be repeated. admin includes the others."),
]
Globs = Annotated[
    list[str],
    typer.Option(
        "--model", help="A model that it sees, or a pattern such as 'res*'; may be repeated."
    ),
]
Rate = Annotated[
    float | None, typer.Option(min=0, help="How many requests per second it may send.")
]
KeysPath = Annotated[
    Path | None, typer.Option("--file", help="The keys file. Default: that of GATEWAY_KEYS_FILE.")
]


class Failure(Exception):
    """A command that ends: the sentence goes to standard error, the exit status is 1."""


@cli.command()
@with_triton_flags
def up(
    flags: TritonFlags, host: Host = "127.0.0.1", port: Port = 8080, replicas: Replicas = 1
) -> None:
    """Start an embedded Triton, or several, and the gateway before it."""
    began = time.monotonic()
    options = flags.options()
    fleet = [options.replica(number) for number in range(replicas)]
    check_distinct({"--port": port, **ports_of(fleet)})
    check_port(host, port, "--port")
    # Nobody looks at the readiness of a laptop: what ends, ends at once.
    settings = read_settings(triton_urls=tuple(options.url for options in fleet), drain_s=0)

    def ready() -> None:
        say(
            f"ready after {time.monotonic() - began:.1f} s on http://{host}:{port}  (Ctrl-C ends it)"
        )

    warn_if_open(settings, host)
    gateway = server(create_app(settings), settings, host, port, ready)
    reasons: list[str] = []

    def gone(reason: str) -> None:
        reasons.append(reason)
        if len(reasons) == replicas:
            gateway.should_exit = True
        else:
            say(f"{reason}; the gateway goes on with the others")

    with side_by_side(tritons_of(fleet, gone)):
        gateway.run()
    if len(reasons) == replicas:
        raise Failure(reasons[-1])


@cli.command()
@with_triton_flags
def triton(flags: TritonFlags, host: TritonHost = "127.0.0.1") -> None:
    """Start the embedded Triton alone."""
    options = replace(flags.options(), host=host)
    if not is_loopback(host):
        say(f"whoever reaches {host} may do anything with this Triton: it asks nobody for a key")
    reasons: list[str] = []

    def gone(reason: str) -> None:
        reasons.append(reason)
        # From another thread: only a signal to the main one wakes it.
        signal.pthread_kill(cast(int, threading.main_thread().ident), signal.SIGTERM)

    with EmbeddedTriton(options, on_gone=gone):
        say(f"Triton is ready: {options.url}  (Ctrl-C ends it)")
        try:
            signal.pause()
        except SystemExit:
            if reasons:
                raise Failure(reasons[0]) from None
            raise


@cli.command()
def serve(host: Host = "127.0.0.1", port: Port = 8080, workers: Workers = 1) -> None:
    """Start the gateway alone, before the Tritons of GATEWAY_TRITON_URLS."""
    check_port(host, port, "--port")
    settings = read_settings()
    tritons = ", ".join(settings.triton_urls)
    ready = partial(say, f"serving {tritons} on http://{host}:{port}  (Ctrl-C ends it)")
    warn_if_open(settings, host)
    app = create_app(settings)  # what cannot be used is said here, and not by each worker
    if workers > 1:
        run_workers(settings, host, port, workers, ready)
    else:
        server(app, settings, host, port, ready).run()


@key.command("create")
def create_key(
    name: KeyName,
    role: Roles = [Role.infer],  # noqa: B006 - typer's own way
    model: Globs = ["*"],  # noqa: B006
    requests_per_second: Rate = None,
    file: KeysPath = None,
) -> None:
    """Make a key and write its hash into the keys file. The key itself is printed, once."""
    path = keys_path(file)
    made = create(path, name, role, model, requests_per_second)
    say(f"the key {name} is in {path} as a hash; this is the only time that it is shown:")
    typer.echo(made)


@key.command("list")
def list_keys(file: KeysPath = None) -> None:
    """Show who has a key, and for what."""
    rows = [("NAME", "ROLES", "MODELS", "REQUESTS PER SECOND")]
    for found in read(keys_path(file)).values():
        rate = found.requests_per_second
        limit = "no limit of its own" if rate is None else f"{rate:g}"
        rows.append((found.name, ",".join(found.roles), ",".join(found.models), limit))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


@key.command("revoke")
def revoke_key(name: KeyName, file: KeysPath = None) -> None:
    """Take a key out of the keys file; running gateways notice within two seconds."""
    path = keys_path(file)
    revoke(path, name)
    say(f"the key {name} is not in {path} any more")


def keys_path(file: Path | None) -> Path:
    path = file or read_settings().keys_file
    if path is None:
        raise Failure("which keys file? Say --file FILE, or set GATEWAY_KEYS_FILE")
    return path


def warn_if_open(settings: Settings, host: str) -> None:
    if settings.keys_file is None and not is_loopback(host):
        log.warning(
            "whoever reaches %s may use every model and read the metrics: there is no keys file "
            "(GATEWAY_KEYS_FILE; triton-gateway key create makes one)",
            host,
        )


def tritons_of(fleet: Sequence[Options], on_gone: Callable[[str], None]) -> list[EmbeddedTriton]:
    """What one of several says begins with its address."""
    return [
        EmbeddedTriton(
            options, on_gone=on_gone, label=f"{options.address}: " if len(fleet) > 1 else ""
        )
        for options in fleet
    ]


def read_settings(**known: Any) -> Settings:
    """The settings of the environment; the log is set up with them."""
    try:
        settings = Settings(**known)
        logs.configure(settings)
    except ValidationError as exc:
        wrong = exc.errors()[0]
        name = "GATEWAY_" + "_".join(map(str, wrong["loc"])).upper()
        raise Failure(f"{name} cannot be {wrong['input']!r}: {wrong['msg']}") from exc
    return settings


def end(number: int, frame: FrameType | None) -> None:
    """SIGTERM unwinds the stack, so that whatever was started is stopped."""
    raise SystemExit(128 + number)


def main() -> None:
    """Every failure that is foreseen is one sentence on standard error."""
    signal.signal(signal.SIGTERM, end)
    # A shell starts what it puts in the background with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        cli(prog_name="triton-gateway")
    except (
        Failure,
        CannotInstall,
        CannotStart,
        BadAddress,
        BadKeysFile,
        BadModelsFile,
        BadState,
        BadTracing,
    ) as exc:
        say(f"triton-gateway: {exc}")
        sys.exit(1)
