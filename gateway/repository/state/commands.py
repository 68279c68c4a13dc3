"""The commands `state`: export and import of what `GATEWAY_STATE` stores, with or without a gateway."""

from __future__ import annotations

import asyncio
import os
import pwd
import socket
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from gateway.messages import CommandError, print_message

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from gateway.repository.state.desired import StateStore
    from gateway.repository.state.tables import Table

T = TypeVar("T")
state_commands = typer.Typer(no_args_is_help=True, help="Export or import the desired state.")

StateUrl = Annotated[
    str,
    typer.Option("--state", help="URL of the state. Default: GATEWAY_STATE.", show_default=False),
]


def print_state(url: str) -> None:
    """Print the state at the URL, or of GATEWAY_STATE. Raises `CommandError`."""
    from gateway.repository.state.transfer import ExportedState, export_state

    async def export() -> ExportedState:
        async with open_store(url) as store:
            return await export_state(store)

    sys.stdout.buffer.write(run(export()).to_json())


def import_file(file: Path, url: str, capability_tables: Iterable[Table[Any]]) -> None:
    """Replace the state by the one in the file. Raises `CommandError`."""
    from gateway.repository.state.transfer import import_state, parse_export

    try:
        raw = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as exc:
        raise CommandError(f"cannot read {file}: {exc.strerror}") from None
    exported = parse_export(raw, capability_tables)

    async def replace() -> None:
        async with open_store(url) as store:
            await import_state(store, exported, f"{find_user()}@{socket.gethostname()}")

    run(replace())
    print_message(f"imported {len(exported.models)} models and {len(exported.cordons)} cordons")


def find_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # as in a container
        return str(os.getuid())


@asynccontextmanager
async def open_store(url: str) -> AsyncIterator[StateStore]:
    """Open the state of the URL or of GATEWAY_STATE. Raises `CommandError`."""
    from gateway.repository.state.store import open_state_store, read_state_password
    from gateway.settings import read_settings

    settings = read_settings()
    url = url or settings.state
    if not url.startswith(("file:", "redis:", "rediss:")):
        raise CommandError(
            "only a state in a file or in Redis can be exported and imported; "
            "set --state or GATEWAY_STATE to its URL"
        )
    store = open_state_store(url, read_state_password(settings))
    try:
        yield store
    finally:
        await store.close()


def run(work: Coroutine[None, None, T]) -> T:
    from gateway.errors import GatewayError

    try:
        return asyncio.run(work)
    except GatewayError as exc:
        raise CommandError(exc.detail) from None
