"""uvicorn's server, configured for the gateway."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import uvicorn
import uvloop
from starlette.types import ASGIApp

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
from gateway.server.protocol.connection import ClientRegistry, HttpProtocol

log = logging.getLogger(__name__)

# A connection is not counted before its handshake is complete.
TLS_HANDSHAKE_TIMEOUT_S: Final = 10.0
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


class GatewayServer(uvicorn.Server):
    """The server of a command that serves in its own process; it calls `on_ready` when it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # uvicorn raises the signals again that it received; but to end after SIGTERM is not a failure.
        previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            with super().capture_signals():
                yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:
            # uvicorn leaves the rest to the end of the loop, which cancels the services while they close.
            for task in self.server_state.tasks:
                task.cancel()
            await self.lifespan.shutdown()


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
) -> GatewayServer:
    return GatewayServer(create_uvicorn_config(app, settings, host, port), on_ready)
