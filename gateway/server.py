"""uvicorn, set up for the gateway."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from gateway.settings import Settings

KEEP_ALIVE_S = 75


class Server(uvicorn.Server):
    """uvicorn's server, which tells when it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
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
        http="httptools",
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
