"""The command `triton-gateway`. Each command imports what it needs when it is called, to answer soon."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from gateway import __version__
from gateway.client import commands
from gateway.embedded.flags import TritonFlags, add_triton_flags
from gateway.keys import Role, add_key, read_keys_file, remove_key
from gateway.messages import CommandError, print_message

root_cli = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

key_commands = typer.Typer(
    help="Keys: who may call the gateway.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
root_cli.add_typer(key_commands, name="key")
root_cli.add_typer(commands.cli)

Host = Annotated[str, typer.Option(help="The address that the gateway listens on.")]
Port = Annotated[int, typer.Option(help="The port that the gateway listens on.")]
TritonHost = Annotated[
    str,
    typer.Option(
        "--host",
        help="The address that Triton listens on. It asks nobody for a key: for gateways only.",
    ),
]
WorkerCount = Annotated[
    int, typer.Option(min=1, help="Processes that serve; one per core at most.")
]
ReplicaCount = Annotated[
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
ModelPatterns = Annotated[
    list[str],
    typer.Option(
        "--model", help="A model that it sees, or a pattern such as 'res*'; may be repeated."
    ),
]
RequestRate = Annotated[
    float | None, typer.Option(min=0, help="How many requests per second it may send.")
]
KeysPath = Annotated[
    Path | None, typer.Option("--file", help="The keys file. Default: that of GATEWAY_KEYS_FILE.")
]


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"triton-gateway {__version__}")
        raise typer.Exit


@root_cli.callback()
def command(
    _: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Say its version."),
    ] = False,
) -> None:
    """The REST front door of NVIDIA Triton Inference Server."""


@root_cli.command()
@add_triton_flags
def up(
    flags: TritonFlags, host: Host = "127.0.0.1", port: Port = 8080, replicas: ReplicaCount = 1
) -> None:
    """Start an embedded Triton, or several, and the gateway before it."""
    from gateway import launch

    launch.run_with_embedded_triton(flags.to_options(), host, port, replicas)


@root_cli.command()
@add_triton_flags
def triton(flags: TritonFlags, host: TritonHost = "127.0.0.1") -> None:
    """Start the embedded Triton alone."""
    from gateway import launch

    launch.run_triton(flags.to_options(), host)


@root_cli.command()
def serve(host: Host = "127.0.0.1", port: Port = 8080, workers: WorkerCount = 1) -> None:
    """Start the gateway alone, before the Tritons of GATEWAY_TRITON_URLS."""
    from gateway import launch

    launch.run_gateway(host, port, workers)


@key_commands.command("create")
def create_key(
    name: KeyName,
    role: Roles = [Role.infer],  # noqa: B006 - typer's own way
    model: ModelPatterns = ["*"],  # noqa: B006
    requests_per_second: RequestRate = None,
    file: KeysPath = None,
) -> None:
    """Make a key and write its hash into the keys file. The key itself is printed, once."""
    path = resolve_keys_path(file)
    made = add_key(path, name, role, model, requests_per_second)
    print_message(f"the key {name} is in {path} as a hash; this is the only time that it is shown:")
    typer.echo(made)


@key_commands.command("list")
def list_keys(file: KeysPath = None) -> None:
    """Show who has a key, and for what."""
    rows = [("NAME", "ROLES", "MODELS", "REQUESTS PER SECOND")]
    for found in read_keys_file(resolve_keys_path(file)).values():
        rate = found.requests_per_second
        limit = "no limit of its own" if rate is None else f"{rate:g}"
        rows.append((found.name, ",".join(found.roles), ",".join(found.models), limit))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


@key_commands.command("revoke")
def revoke_key(name: KeyName, file: KeysPath = None) -> None:
    """Take a key out of the keys file; running gateways notice within two seconds."""
    path = resolve_keys_path(file)
    remove_key(path, name)
    print_message(f"the key {name} is not in {path} any more")


def resolve_keys_path(file: Path | None) -> Path:
    if file is not None:
        return file
    from gateway.settings import read_settings

    path = read_settings().keys_file
    if path is None:
        raise CommandError("which keys file? Say --file FILE, or set GATEWAY_KEYS_FILE")
    return path


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    """SIGTERM unwinds the stack, so that whatever was started is stopped."""
    raise SystemExit(128 + number)


def main() -> None:
    """Every failure that is foreseen is one sentence on standard error."""
    signal.signal(signal.SIGTERM, exit_on_signal)
    # A shell starts what it puts in the background with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        root_cli(prog_name="triton-gateway")
    except CommandError as exc:
        print_message(f"triton-gateway: {exc}")
        sys.exit(exc.status)
