"""The gRPC server: its options, certificates and life cycle, and the way of a call through it."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import grpc

from gateway.access.peers import ClientCounts
from gateway.capabilities.grpc_api.call import (
    GRPC_ROUTE,
    MIN_CHARGED_BYTES,
    CallEnvironment,
    IncomingCall,
    MethodAccess,
)
from gateway.capabilities.grpc_api.health import HealthService
from gateway.capabilities.grpc_api.methods import Method, list_methods
from gateway.capabilities.grpc_api.receive import (
    MessagePlaces,
    MessageReceiver,
    TooManyLargeMessages,
    TooManyStreams,
)
from gateway.capabilities.grpc_api.settings import GrpcSettings
from gateway.capabilities.grpc_api.streams import InferStream
from gateway.config.files import WatchedFile, check_regular_file
from gateway.config.settings import (
    ClientAuth,
    Settings,
    describe_os_errors,
    load_authority,
    load_certificate,
)
from gateway.errors import GatewayError
from gateway.listeners import join_host_port
from gateway.messages import CommandError
from gateway.process_exit import Drain
from gateway.services import Services
from gateway.triton.grpc.byte_channel import STREAM_METHOD

log = logging.getLogger(__name__)

KEEP_ALIVE_TIMEOUT_S: Final = 20
# gRPC does not say when a client's certificate expires, which is checked again with a new connection.
MAX_CONNECTION_AGE_MS: Final = 3_600_000
# When this many calls wait for their handlers, gRPC refuses further ones with CANCELLED, which tells clients
# nothing. Otherwise it would refuse some of them at random from 1,000 on.
MAX_WAITING_CALLS: Final = 3000
MAX_METADATA_BYTES: Final = 64 << 10
MAX_STREAMS: Final = 1024  # concurrent calls of a connection; further ones wait in the client
UNKNOWN_METHOD: Final = MethodAccess("")
STREAM_ACCESS: Final = MethodAccess(STREAM_METHOD, is_unlimited=True, is_container=True)
STREAM_REQUEST_ACCESS: Final = MethodAccess(STREAM_METHOD)


class UnknownMethod(GatewayError):
    status = 501
    code = "UNKNOWN_METHOD"
    message = (
        "unknown gRPC method; the gateway serves inference.GRPCInferenceService, grpc.health.v1.Health and "
        "server reflection"
    )


class CannotListen(CommandError):
    """The gRPC port cannot be used."""


class UnusableCertificate(CommandError):
    """The certificate or its key changed, and cannot be loaded."""


class MethodRouter(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Finds the handler of a call by its method."""

    def __init__(self, environment: CallEnvironment, drain: Drain) -> None:
        make = partial(make_handler, environment)
        self._refusal = make("", Method(UNKNOWN_METHOD, refuse_unknown_method))
        methods = list_methods(HealthService(drain))
        self._handlers = {path: make(path, method) for path, method in methods.items()}
        self._handlers[STREAM_METHOD] = make_infer_stream_handler(environment)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return self._handlers.get(details.method, self._refusal)


async def refuse_unknown_method(call: IncomingCall) -> bytes:
    raise UnknownMethod


def make_handler(environment: CallEnvironment, path: str, method: Method) -> Any:
    """Return a handler that reads its request itself, after the checks that do not need it."""

    async def handle(_: Any, context: Any) -> bytes | None:
        call = IncomingCall(environment, context, path, method.access)
        is_unread = False
        try:
            call.count_client()
            await call.identify_caller()
            response = await method.serve(call)
            if response is not None:
                if len(response) > MIN_CHARGED_BYTES:
                    call.charge_response(response)
                    is_unread = True
                call.succeed(response)
                call.record_response(response)
            context.set_trailing_metadata((("x-request-id", call.info.request_id),))
            return response
        except Exception as exc:
            await abort_call(call, exc)
            raise
        finally:
            if is_unread:
                call_when_done(lambda _: call.end())  # it is sent, or the client is gone
            else:
                call.end()

    if method.is_stream:
        return grpc.stream_stream_rpc_method_handler(handle)
    return grpc.stream_unary_rpc_method_handler(handle)


def make_infer_stream_handler(environment: CallEnvironment) -> Any:
    """Return the handler of `ModelStreamInfer`, whose requests are counted and logged one by one."""
    start_request = partial(
        IncomingCall, environment, path=STREAM_METHOD, access=STREAM_REQUEST_ACCESS
    )

    async def serve(call: IncomingCall) -> None:
        with environment.streams.take():
            await InferStream(call, partial(start_request, context=call.context)).run()

    return make_handler(environment, STREAM_METHOD, Method(STREAM_ACCESS, serve, is_stream=True))


def call_when_done(callback: Callable[[asyncio.Task[Any]], None]) -> None:
    """Call back when gRPC's task of this call has ended.

    A callback of the context would stay in a cycle with it, and so with the call and its metadata.
    """
    cast("asyncio.Task[Any]", asyncio.current_task()).add_done_callback(callback)


async def abort_call(call: IncomingCall, exc: Exception) -> None:
    """End the call with the status of an error, by raising gRPC's own exception."""
    if isinstance(exc, grpc.aio.AbortError):
        raise exc
    status = call.fail(exc)
    try:
        await call.context.abort(status.code, status.detail, status.trailers)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None  # the client is gone
    except grpc.aio.AbortError as abort:
        # gRPC's state of the call keeps this error, whose frames keep that state and the messages: a cycle.
        call_when_done(partial(forget_frames, abort))
        raise


def forget_frames(error: Exception, _: object) -> None:
    error.__traceback__ = None
    error.__context__ = None


class GrpcCertificate:
    """The certificate of HTTPS and its key, in the form that gRPC takes, reloaded when the files change."""

    def __init__(self, cert_file: Path, key_file: Path | None, client_ca_file: Path | None) -> None:
        self._key_file = key_file or cert_file
        self._client_ca_file = client_ca_file
        companions = filter(None, (self._key_file, client_ca_file))
        self._file: WatchedFile[Any] = WatchedFile(cert_file, self._load, *companions)

    def create_credentials(self) -> Any:
        return grpc.dynamic_ssl_server_credentials(
            self._file.value, self._reload_if_changed, self._client_ca_file is not None
        )

    def _reload_if_changed(self) -> Any:
        """Return the new certificate, or None to keep the previous one. gRPC asks for each handshake.

        With a client authority each handshake gets a configuration of its own, which knows no sessions: a
        resumed one would keep the rights of a certificate that has expired.
        """
        has_changed = self._file.reload_if_changed()
        return self._file.value if has_changed or self._client_ca_file is not None else None

    def _load(self, cert_file: Path) -> Any:
        with describe_os_errors(UnusableCertificate, f"the certificate {cert_file}"):
            for path in filter(None, (cert_file, self._key_file, self._client_ca_file)):
                check_regular_file(path.stat())
            # A pair that does not match would make gRPC refuse every connection.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            load_certificate(context, cert_file, self._key_file)
            pair = (self._key_file.read_bytes(), cert_file.read_bytes())
            client_ca = None
            if self._client_ca_file is not None:
                load_authority(context, self._client_ca_file, ClientAuth.required)
                client_ca = self._client_ca_file.read_bytes()
        return grpc.ssl_server_certificate_configuration((pair,), client_ca)


def asks_for_certificates(settings: Settings) -> bool:
    is_required = settings.tls_client_auth is ClientAuth.required
    return is_required and settings.tls_client_ca_file is not None


def build_options(settings: Settings, *, shares_port: bool) -> list[tuple[str, int]]:
    keep_alive_ms = settings.keep_alive_s * 1000
    ages = []
    if asks_for_certificates(settings):
        # Calls in progress then have the time that one may take.
        grace_ms = int(settings.max_request_timeout_s * 1000)
        ages.append(("grpc.max_connection_age_ms", MAX_CONNECTION_AGE_MS))
        ages.append(("grpc.max_connection_age_grace_ms", grace_ms))
    return [
        *ages,
        ("grpc.max_receive_message_length", settings.max_body_bytes),
        ("grpc.max_send_message_length", -1),
        # The probe raises the window of every stream to megabytes, which arrive although nobody reads them.
        # A message that is read opens the window for itself.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.server.max_pending_requests", MAX_WAITING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_WAITING_CALLS),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.max_connection_idle_ms", keep_alive_ms),
        # Connections whose client is gone are found, and closed, by pings.
        ("grpc.keepalive_time_ms", keep_alive_ms),
        ("grpc.keepalive_timeout_ms", KEEP_ALIVE_TIMEOUT_S * 1000),
        ("grpc.server_handshake_timeout_ms", int(settings.header_timeout_s * 1000)),
        # Only the workers of one gateway share a port.
        ("grpc.so_reuseport", int(shares_port)),
    ]


@asynccontextmanager
async def run_grpc_server(
    services: Services, drain: Drain, grpc_settings: GrpcSettings, places: int
) -> AsyncIterator[None]:
    """Serve gRPC until the gateway stops; calls then have `shutdown_s` to end.

    There may be as many streams, and large messages, as places. Raises `CannotListen`.
    """
    settings = services.settings
    services.metrics.in_flight[GRPC_ROUTE] = 0
    environment = CallEnvironment(
        services,
        MessageReceiver(MessagePlaces(places, TooManyLargeMessages, services.metrics)),
        MessagePlaces(places, TooManyStreams, services.metrics),
        ClientCounts(),
        drain.stopping,
    )
    is_worker = multiprocessing.parent_process() is not None
    options = build_options(settings, shares_port=is_worker)
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((MethodRouter(environment, drain),))
    address = join_host_port(grpc_settings.grpc_host, grpc_settings.grpc_port)
    try:
        if settings.tls_cert_file is None:
            server.add_insecure_port(address)
        else:
            client_ca_file = (
                settings.tls_client_ca_file if asks_for_certificates(settings) else None
            )
            certificate = GrpcCertificate(
                settings.tls_cert_file, settings.tls_key_file, client_ca_file
            )
            server.add_secure_port(address, certificate.create_credentials())
    except RuntimeError:
        raise CannotListen(f"gRPC cannot be served on {address}: the port is in use") from None
    await server.start()
    log.info(
        "gRPC listens on %s; the memory budget has room for %d streams, and as many large messages",
        address,
        places,
    )
    stopper = asyncio.create_task(stop_with_gateway(server, drain, settings.shutdown_s))
    try:
        yield
    finally:
        drain.stopping.set()
        await stopper


async def stop_with_gateway(server: grpc.aio.Server, drain: Drain, grace_s: float) -> None:
    """Send GOAWAY to all clients when the gateway stops, and wait for the calls in progress."""
    await drain.stopping.wait()
    await server.stop(grace_s)
