"""uvicorn, set up for the gateway."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.settings import Settings

KEEP_ALIVE_S = 75
# Collecting every 700 new objects is every few requests; what a request leaves has no cycles.
GC_THRESHOLD = 10_000
JOIN_UNDER_BYTES = 64 * 1024


class Corked:
    """A transport that joins an answer's head with its first body: one packet, one system call.

    uvicorn writes the two one after the other. What is written is held until the next write, or until
    the event loop comes round.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""

    def write(self, data: bytes) -> None:
        if self._held:
            held, self._held = self._held, b""
            self._transport.write(held + data if len(data) < JOIN_UNDER_BYTES else held)
            if len(data) >= JOIN_UNDER_BYTES:
                self._transport.write(data)
        elif len(data) >= JOIN_UNDER_BYTES:
            self._transport.write(data)
        elif data:
            self._held = data
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            self._transport.write(held)


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol on httptools, with corked answers."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(
            cast(asyncio.Transport, Corked(cast(asyncio.Transport, transport), self.loop))
        )


class Server(uvicorn.Server):
    """uvicorn's server, which tells when it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # What is alive now stays: the collector need not look at it again, which would take 30 ms.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD, 20, 50)
        if self.started:
            self._on_ready()


def server(
    app: ASGIApp, settings: Settings, host: str, port: int, on_ready: Callable[[], None]
) -> Server:
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        # Triton's own are passed on; a second pair would be a second answer's.
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(settings.drain_s) or None,
        proxy_headers=False,
    )
    return Server(config, on_ready)
