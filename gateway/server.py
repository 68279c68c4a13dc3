"""uvicorn, set up for the gateway."""

from __future__ import annotations

import math
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp
from uvicorn.supervisors import Multiprocess

from gateway.protocol import Protocol
from gateway.settings import Settings


class Server(uvicorn.Server):
    """uvicorn's server, which tells when it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn raises again what it caught; to have ended when asked to is no failure."""
        with super().capture_signals():
            yield
            self._captured_signals = [
                number for number in self._captured_signals if number != signal.SIGTERM
            ]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


class Workers(Multiprocess):
    """uvicorn's supervisor, which lets go of the port when it ends: else who comes then waits in vain."""

    def terminate_all(self) -> None:
        super().terminate_all()
        for listening in self.sockets:
            listening.close()


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
        timeout_graceful_shutdown=max(math.ceil(settings.shutdown_s), 1),
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
        Workers(config, sockets=[listening]).run()
