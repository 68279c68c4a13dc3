"""Triton's HTTP ports on IPv6, for `--host ::`.

Triton's HTTP servers listen on one family: libevhtp sets IPV6_V6ONLY. They listen on IPv4, and connections
over IPv6 are relayed to them. gRPC listens on both.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterable
from functools import partial
from typing import Final

from gateway.listeners import ALL_ADDRESSES, NO_FAMILY_ERRORS, open_listener

LOOPBACK: Final = "127.0.0.1"
CHUNK_BYTES: Final = 256 << 10


def start_relay(ports: Iterable[int]) -> None:
    """Relay until the process ends, where the kernel has IPv6. Raises `OSError` if a port is in use."""
    try:
        listeners = [open_listener(socket.AF_INET6, (ALL_ADDRESSES, port)) for port in ports]
    except OSError as exc:
        if exc.errno in NO_FAMILY_ERRORS:
            return
        raise
    work = partial(asyncio.run, relay(listeners))
    threading.Thread(target=work, name="http-relay", daemon=True).start()


async def relay(listeners: Iterable[socket.socket]) -> None:
    servers = [
        await asyncio.start_server(
            partial(relay_connection, listener.getsockname()[1]), sock=listener
        )
        for listener in listeners
    ]
    await asyncio.gather(*(server.serve_forever() for server in servers))


async def relay_connection(
    port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        triton_reader, triton_writer = await asyncio.open_connection(LOOPBACK, port)
    except OSError:  # Triton is being restarted
        writer.close()
        return
    try:
        await asyncio.gather(copy(reader, triton_writer), copy(triton_reader, writer))
    except OSError:  # one of them has closed its connection
        pass
    finally:
        triton_writer.close()
        writer.close()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
