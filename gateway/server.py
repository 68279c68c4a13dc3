"""uvicorn, set up for the gateway."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import tempfile
from collections.abc import Callable
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.supervisors import Multiprocess

from gateway.errors import Malformed, body_of
from gateway.settings import Settings
from gateway.tracing import request_id_of

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
        held, self._held = self._held, b""
        if held and not self._transport.is_closing():
            self._transport.write(held)


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol on httptools, with answers in one write, and stricter in four places."""

    _task: asyncio.Task[None] | None = None
    _idle_timer: asyncio.TimerHandle | None = None
    _idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        corked = Corked(cast(asyncio.Transport, transport), self.loop)
        super().connection_made(cast(asyncio.Transport, corked))

    def connection_lost(self, exc: Exception | None) -> None:
        """A client that leaves is not waited for: what works for it is cancelled."""
        super().connection_lost(exc)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._task is not None and self.cycle is not None and not self.cycle.response_complete:
            self._task.cancel()

    def on_response_complete(self) -> None:
        """As uvicorn's, but for the timer: one per connection looks, when it fires, if it is time."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        self._idle_since = self.loop.time()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._idle_timer is None:
            self._look_later(self.timeout_keep_alive)

    def _look_later(self, seconds: float) -> None:
        self._idle_timer = self.loop.call_later(seconds, self._look_if_idle)

    def _look_if_idle(self) -> None:
        self._idle_timer = None
        if self.transport.is_closing() or not self.cycle.response_complete:
            return  # the end of the answer sets the next timer
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._look_later(left)
        else:
            self.transport.close()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            # httptools would take the body for the other protocol's, and so for the next request.
            self.send_400_response("this server does not change protocols: send no Upgrade header")
            return
        # A copy: trailers, which come later, are no headers (RFC 9110, section 6.5.1).
        self.scope["headers"] = list(self.headers)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self.cycle is not None:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is answered in the shape of every other error."""
        request_id = request_id_of(())
        body = body_of(msg, Malformed.code, request_id)
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {request_id}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._task = self.loop.create_task(cycle.run_asgi(app))
        self._task.add_done_callback(self.tasks.discard)
        self.tasks.add(self._task)

    def _unsupported_upgrade_warning(self) -> None:
        """It was answered."""


class Server(uvicorn.Server):
    """uvicorn's server, which tells when it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


def config_of(
    app: ASGIApp | str, settings: Settings, host: str, port: int, workers: int = 1
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        factory=isinstance(app, str),
        host=host,
        port=port,
        workers=workers,
        loop="uvloop",
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        # Triton's own are passed on; a second pair would be a second answer's.
        server_header=False,
        date_header=False,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=max(math.ceil(settings.drain_s), 1),
        proxy_headers=False,
    )


def server(
    app: ASGIApp, settings: Settings, host: str, port: int, on_ready: Callable[[], None]
) -> Server:
    """One process. The settings are those that the app was made with."""
    return Server(config_of(app, settings, host, port), on_ready)


def run_workers(
    settings: Settings, host: str, port: int, workers: int, on_ready: Callable[[], None]
) -> None:
    """Several processes on one socket, each with an app of its own, made from the environment.

    Their metrics add up: each writes into files of one folder, and any of them reads all.
    """
    with tempfile.TemporaryDirectory(prefix="triton-gateway-metrics-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        config = config_of("gateway.app:app_from_environment", settings, host, port, workers)
        listening = config.bind_socket()
        listening.listen(
            config.backlog
        )  # who comes before the first worker is up has to wait, no more
        on_ready()
        Multiprocess(config, sockets=[listening]).run()
