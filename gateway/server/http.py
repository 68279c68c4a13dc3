"""uvicorn's server, configured for the gateway."""

from __future__ import annotations

import asyncio
import logging
import math
import multiprocessing
import os
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Final, cast

import anyio
import uvicorn
import uvloop
from starlette.types import ASGIApp
from uvicorn import _subprocess
from uvicorn.supervisors import multiprocess

from gateway.config.files import WatchedFile, check_regular_file
from gateway.config.settings import (
    MIN_OPEN_FILES,
    ClientAuth,
    Settings,
    describe_os_errors,
    load_authority,
    load_certificate,
)
from gateway.messages import CommandError
from gateway.server.protocol.connection import LAST_REQUEST_S, ClientRegistry, HttpProtocol

log = logging.getLogger(__name__)

# A connection is not counted before its handshake is complete.
TLS_HANDSHAKE_TIMEOUT_S: Final = 10.0
# Without this limit the kernel buffers megabytes of a response for a client that reads nothing, which costs
# memory and hides how slowly the client reads.
MAX_UNSENT_BYTES: Final = 256 * 1024
RESERVED_DESCRIPTORS: Final = 64  # left for files, and sockets other than connections


class Loop(uvloop.Loop):
    """A uvloop with a short TLS handshake timeout: uvicorn has no setting for it, and the default is 60 s."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        # When a connection is given up, uvloop forgets its lookup, and nobody can await why that failed.
        is_future = type(context.get("future")) is asyncio.Future
        if not (is_future and isinstance(context.get("exception"), socket.gaierror)):
            super().call_exception_handler(context)

    async def create_server(  # type: ignore[override]  # the overloads are passed on
        self, *args: Any, **kwargs: Any
    ) -> asyncio.AbstractServer:
        if kwargs.get("ssl") is not None:
            kwargs["ssl_handshake_timeout"] = TLS_HANDSHAKE_TIMEOUT_S
        return await super().create_server(*args, **kwargs)


class BadCertificate(CommandError):
    """The server's certificate or its private key cannot be loaded."""


class ServerCertificate:
    """The gateway's TLS certificate, which new connections use as soon as its files change.

    A worker process gets a copy, which is pickled before the context exists.
    """

    def __init__(
        self,
        cert_file: Path,
        key_file: Path | None,
        client_ca_file: Path | None = None,
        client_auth: ClientAuth = ClientAuth.required,
    ) -> None:
        self._cert_file = cert_file
        self._key_file = key_file
        self._client_ca_file = client_ca_file
        self._client_auth = client_auth
        self._file: WatchedFile[ssl.SSLContext] | None = None

    def create_context(self, *_: Any) -> ssl.SSLContext:
        """Return the context for new connections. Raises `BadCertificate`."""
        companions = filter(None, (self._key_file, self._client_ca_file))
        file = WatchedFile(self._cert_file, self._load, *companions, label="certificate")
        self._file = file
        context = file.value

        def choose_context(
            connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, initial: ssl.SSLContext
        ) -> None:
            del name, initial
            if file.value is not context:
                connection.context = file.value

        # OpenSSL calls it in each handshake, also of clients that send no name.
        context.sni_callback = choose_context
        return context

    async def refresh(self) -> None:
        """Reload the certificate if it changed; open connections keep the previous one."""
        if self._file is not None:
            await self._file.reload_in_background()

    def _load(self, cert_file: Path) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        paths = [cert_file, self._key_file, self._client_ca_file]
        with describe_os_errors(BadCertificate, f"the certificate {cert_file}"):
            for path in filter(None, paths):
                check_regular_file(path.stat())
            load_certificate(context, cert_file, self._key_file)
        if self._client_ca_file is not None:
            with describe_os_errors(BadCertificate, f"the CA certificate {self._client_ca_file}"):
                load_authority(context, self._client_ca_file, self._client_auth)
        return context


# Access to private attributes of uvicorn.


def forget_captured_signal(server: uvicorn.Server, number: signal.Signals) -> None:
    """Prevent the server from raising a signal again that it received while it ran."""
    server._captured_signals = [kept for kept in server._captured_signals if kept != number]


class WorkerProcess(multiprocess.Process):
    """A worker process of uvicorn's supervisor that runs a server of another class."""

    server_class: type[uvicorn.Server] = uvicorn.Server

    def target(self, sockets: list[socket.socket] | None = None) -> None:
        self._server = self.server_class(self.config)
        for listener in sockets or ():
            # Those that another process sent are inheritable. The process that decodes bodies would keep them
            # open, and clients would wait for a server that has ended.
            listener.set_inheritable(False)
        super().target(sockets)


def fork_workers(preload: str, process_class: type[WorkerProcess]) -> ForkServerContext:
    """Make uvicorn's supervisor fork its workers from a process that has imported the module `preload`.

    By default it starts an interpreter for each worker, and none shares the memory of its imports. Return the
    context, which starts other processes in the same way.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    multiprocess.Process = process_class  # type: ignore[misc]  # a class of another name
    _subprocess.spawn = context  # type: ignore[assignment]  # a context of another kind
    return context


class GatewayServer(uvicorn.Server):
    """A uvicorn server that answers the connections that wait when it stops."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            for server in self.servers:
                for listener in server.sockets:
                    limit_unsent_bytes(listener.fileno())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if not self.force_exit:
            await self._accept_waiting()
        await super().shutdown(sockets)
        if self.force_exit:
            # uvicorn leaves the rest to the end of the loop, which cancels the services while they close.
            for task in self.server_state.tasks:
                task.cancel()
            await self.lifespan.shutdown()

    async def _accept_waiting(self) -> None:
        """Stop listening. The kernel resets connections that wait when a listening socket is closed."""
        # uvloop's sockets have no accept.
        listeners = [
            socket.socket(fileno=os.dup(each.fileno()))
            for server in self.servers
            for each in server.sockets
        ]
        for server in self.servers:
            server.close()
        accepted = [
            connection
            for listener in listeners
            for connection in accept_and_close(listener, self.config.backlog)
        ]
        # Nothing tells which of the connections accepted before are in their TLS handshake.
        handshake_s = 0.0 if self.config.ssl is None else LAST_REQUEST_S
        await asyncio.gather(asyncio.sleep(handshake_s), *map(self._open_connection, accepted))

    async def _open_connection(self, connection: socket.socket) -> None:
        """Serve an accepted connection. Give up if its TLS handshake fails or takes long."""
        protocol = partial(
            cast("Callable[..., asyncio.Protocol]", self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        loop = asyncio.get_running_loop()
        with anyio.move_on_after(LAST_REQUEST_S), suppress(OSError):
            await loop.connect_accepted_socket(protocol, connection, ssl=self.config.ssl)


class CommandServer(GatewayServer):
    """The server of a command that serves in its own process; it calls `on_ready` when it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn raises captured signals again; SIGTERM after a graceful shutdown is not a failure.
        with super().capture_signals():
            yield
            forget_captured_signal(self, signal.SIGTERM)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


def accept_and_close(listener: socket.socket, limit: int) -> list[socket.socket]:
    """Accept connections until none waits, or no descriptor is left, and close the socket at once."""
    accepted = []
    listener.setblocking(False)
    with listener, suppress(OSError):
        for _ in range(limit):
            accepted.append(listener.accept()[0])  # noqa: PERF401 - an error leaves those before it
    return accepted


def limit_unsent_bytes(descriptor: int) -> None:
    """Limit the send buffer of connections that this listening socket accepts; they inherit it (tcp(7))."""
    # uvloop's sockets have no setsockopt.
    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
        if duplicate.family != socket.AF_UNIX:
            duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)


def fit_max_connections(max_connections: int) -> int:
    """Return `max_connections`, or fewer if there are not two file descriptors for each.

    Every client connection may need one to a replica. An accept that fails for lack of a descriptor would
    leave the client without a response. Raises `CommandError` if there are fewer than `MIN_OPEN_FILES`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < MIN_OPEN_FILES:
        raise CommandError(
            f"the gateway may open {hard} files, and needs {MIN_OPEN_FILES} or more: raise the limit "
            "(ulimit -Hn, LimitNOFILE=, --ulimit nofile=)"
        )
    needed = 2 * max_connections + RESERVED_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return max_connections
    limit = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit == needed:
        return max_connections
    fitted = max((limit - RESERVED_DESCRIPTORS) // 2, 1)
    message = "the limit of %d open files allows %d connections instead of %d"
    log.warning(message, limit, fitted, max_connections)
    return fitted


def create_uvicorn_config(
    app: ASGIApp | Callable[[], ASGIApp],
    settings: Settings,
    host: str,
    port: int,
    workers: int = 1,
) -> uvicorn.Config:
    """Return uvicorn's configuration. Each of several workers calls `app` for an application of its own."""
    certificate = None
    if settings.tls_cert_file is not None:
        certificate = ServerCertificate(
            settings.tls_cert_file,
            settings.tls_key_file,
            settings.tls_client_ca_file,
            settings.tls_client_auth,
        )
    max_connections = fit_max_connections(settings.max_connections)
    limits = settings.model_copy(update={"max_connections": max_connections})
    protocol = partial(HttpProtocol, limits=limits, clients=ClientRegistry())
    return uvicorn.Config(
        app,
        factory=workers > 1,
        host=host,
        port=port,
        workers=workers,
        loop="gateway.server.http:Loop",
        http=cast("type[HttpProtocol]", protocol),
        ssl_context_factory=None if certificate is None else certificate.create_context,
        callback_notify=None if certificate is None else certificate.refresh,
        timeout_notify=0,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        # Triton's Server and Date headers are passed on; uvicorn would add a second pair.
        server_header=False,
        date_header=False,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=max(math.ceil(settings.shutdown_s), 1),
        proxy_headers=False,
    )


def create_server(
    app: ASGIApp, settings: Settings, host: str, port: int, on_ready: Callable[[], None]
) -> CommandServer:
    return CommandServer(create_uvicorn_config(app, settings, host, port), on_ready)
