"""uvicorn, set up for the gateway."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import resource
import signal
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import uvicorn
import uvloop
from starlette.types import ASGIApp
from uvicorn.supervisors import Multiprocess

from gateway.memory import MIN_BUDGET_BYTES, default_budget_bytes
from gateway.metrics import record_replaced_worker
from gateway.process_exit import CLOSE_TIMEOUT_S, KERNEL_KILL_GRACE_S
from gateway.protocol.connection import HttpProtocol
from gateway.protocol.limits import ClientRegistry, ProtocolLimits
from gateway.settings import Settings, load_certificate

log = logging.getLogger(__name__)

TLS_HANDSHAKE_TIMEOUT_S: Final = (
    10.0  # of TLS; until it is over, a connection is none that is counted
)
# The system would take megabytes of an answer for a client that reads none of them: nobody could tell how
# slow it is, and each costs that much memory.
MAX_UNSENT_BYTES: Final = 256 * 1024
RESERVED_DESCRIPTORS: Final = 64  # descriptors that are no client's and no replica's


class Loop(uvloop.Loop):
    """uvloop's, which would wait a minute for a client's handshake and cannot be told otherwise."""

    async def create_server(  # type: ignore[override]  # whose overloads are passed on
        self, *args: Any, **kwargs: Any
    ) -> asyncio.AbstractServer:
        if kwargs.get("ssl") is not None:
            kwargs["ssl_handshake_timeout"] = TLS_HANDSHAKE_TIMEOUT_S
        return await super().create_server(*args, **kwargs)


class ServerCertificate:
    """What the gateway shows its clients; read again when its files change.

    A worker process gets a copy, before it has made its context.
    """

    def __init__(self, cert_file: Path, key_file: Path | None) -> None:
        self._cert_file = cert_file
        self._key_file = key_file
        self._context: ssl.SSLContext | None = None
        self._stamps: list[tuple[int, int, int]] = []

    def create_context(self, *_: Any) -> ssl.SSLContext:
        """Raises OSError or ssl.SSLError."""
        self._stamps = self._read_stamps()
        self._context = self._load_context()
        return self._context

    async def refresh(self) -> None:
        """Connections that there are go on with the one they know."""
        seen = self._read_stamps()
        if self._context is None or seen == self._stamps:
            return
        self._stamps = seen
        try:
            self._load_context()  # a pair that does not fit would leave half of it in the context
            load_certificate(self._context, self._cert_file, self._key_file)
        except (OSError, ssl.SSLError) as exc:
            log.warning("the new certificate cannot be used, the old one stays: %s", exc)
        else:
            log.info("the certificate was read again")

    def _load_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        load_certificate(context, self._cert_file, self._key_file)
        return context

    def _read_stamps(self) -> list[tuple[int, int, int]]:
        try:
            found = [path.stat() for path in (self._cert_file, self._key_file) if path is not None]
        except OSError:
            return []  # it is being replaced
        return [(each.st_mtime_ns, each.st_size, each.st_ino) for each in found]


class GatewayServer(uvicorn.Server):
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
            for server in self.servers:
                for listening in server.sockets:
                    limit_unsent_bytes(listening.fileno())
            self._on_ready()


def limit_unsent_bytes(descriptor: int) -> None:
    """For the connections that this socket accepts from now on (tcp(7): they inherit it)."""
    with socket.socket(fileno=os.dup(descriptor)) as own:  # uvloop's cannot be set
        if own.family != socket.AF_UNIX:
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)


class WorkerSupervisor(Multiprocess):
    """uvicorn's supervisor, which lets go of the port when it ends: else who comes then waits in vain.

    A worker that does not even end when its time is over is killed.
    """

    stop_timeout_s: float = math.inf  # for the workers' end
    metrics_folder: Path | None = None
    on_ready: Callable[[], None] | None = None  # called once, when the first worker serves

    def keep_subprocess_alive(self) -> None:
        """Replace workers that ended or hang, and log and count them; called twice a second."""
        before = list(self.processes)
        super().keep_subprocess_alive()
        for gone, new in zip(before, self.processes, strict=True):
            if new is not gone:
                log.error(
                    "the worker %s ended unexpectedly (%s): the worker %s replaces it",
                    gone.pid,
                    describe_process_exit(gone.exitcode),
                    new.pid,
                )
                if self.metrics_folder is not None:
                    record_replaced_worker(self.metrics_folder)
        if self.on_ready is not None and any(process.is_ready() for process in self.processes):
            self.on_ready()
            self.on_ready = None

    def terminate_all(self) -> None:
        super().terminate_all()
        for listening in self.sockets:
            listening.close()

    def join_all(self) -> None:
        deadline = time.monotonic() + self.stop_timeout_s
        for process in self.processes:
            process.process.join(max(deadline - time.monotonic(), 0))
            if process.process.is_alive():
                log.error("the worker %d did not end in time: it is killed", process.pid)
                process.kill()
            process.join()


def describe_process_exit(exitcode: int | None) -> str:
    """Return how a process ended, in words."""
    return f"signal {-exitcode}" if exitcode is not None and exitcode < 0 else f"status {exitcode}"


def create_protocol_limits(settings: Settings) -> ProtocolLimits:
    return ProtocolLimits(
        max_header_bytes=settings.max_header_bytes,
        max_header_fields=settings.max_header_fields,
        max_url_bytes=settings.max_url_bytes,
        max_body_bytes=settings.max_body_bytes,
        max_pipelined=settings.max_pipelined,
        header_timeout_s=settings.header_timeout_s,
        body_stall_s=settings.body_stall_s,
        write_timeout_s=settings.write_timeout_s,
        min_bytes_per_s=settings.min_bytes_per_s,
        max_connections=fit_max_connections(settings.max_connections),
        max_connections_per_client=settings.max_connections_per_client,
    )


def fit_max_connections(max_connections: int) -> int:
    """As many as there are descriptors for, each with one to a replica.

    An accept that fails for want of one tells the client nothing, and a replica could not be reached.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * max_connections + RESERVED_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return max_connections
    most = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most == needed:
        return max_connections
    fitting = max((most - RESERVED_DESCRIPTORS) // 2, 1)
    log.warning(
        "%d open files are allowed: %d connections are taken and not %d",
        most,
        fitting,
        max_connections,
    )
    return fitting


def create_uvicorn_config(
    app: ASGIApp | str, settings: Settings, host: str, port: int, workers: int = 1
) -> uvicorn.Config:
    certificate = None
    if settings.tls_cert_file is not None:
        certificate = ServerCertificate(settings.tls_cert_file, settings.tls_key_file)
    protocol = partial(
        HttpProtocol, limits=create_protocol_limits(settings), clients=ClientRegistry()
    )
    return uvicorn.Config(
        app,
        factory=isinstance(app, str),
        host=host,
        port=port,
        workers=workers,
        loop="gateway.server:Loop",
        http=cast("type[HttpProtocol]", protocol),
        ssl_context_factory=None if certificate is None else certificate.create_context,
        callback_notify=None if certificate is None else certificate.refresh,
        timeout_notify=0,
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


def create_server(
    app: ASGIApp, settings: Settings, host: str, port: int, on_ready: Callable[[], None]
) -> GatewayServer:
    """One process. The settings are those that the app was made with."""
    return GatewayServer(create_uvicorn_config(app, settings, host, port), on_ready)


def run_workers(
    settings: Settings, host: str, port: int, workers: int, on_ready: Callable[[], None]
) -> None:
    """Several processes on one socket, each with an app of its own, made from the environment.

    Their metrics add up: each writes into files of one folder, and any of them reads all.
    """
    with tempfile.TemporaryDirectory(prefix="triton-gateway-metrics-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        if not settings.max_bytes_in_flight:  # they share the memory
            share = default_budget_bytes() // workers
            os.environ["GATEWAY_MAX_BYTES_IN_FLIGHT"] = str(max(share, MIN_BUDGET_BYTES))
        config = create_uvicorn_config(
            "gateway.app:app_from_environment", settings, host, port, workers
        )
        listening = config.bind_socket()
        listening.listen(
            config.backlog
        )  # who comes before the first worker is up has to wait, no more
        supervisor = WorkerSupervisor(config, sockets=[listening])
        supervisor.metrics_folder = Path(folder)
        supervisor.on_ready = on_ready
        supervisor.stop_timeout_s = (
            settings.drain_s + settings.shutdown_s + CLOSE_TIMEOUT_S + 2 * KERNEL_KILL_GRACE_S
        )
        supervisor.run()
