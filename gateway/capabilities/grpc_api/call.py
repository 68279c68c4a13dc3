"""One gRPC call: its caller, deadline and message, and its line in the log and the metrics."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter
from typing import Any, Final, cast
from urllib.parse import unquote

import grpc

from gateway.access.auth import (
    REFUSALS,
    UNAUTHENTICATED,
    authorize,
    authorize_all_models,
    name_caller,
    read_priority,
)
from gateway.access.peers import ClientCounts, client_network
from gateway.callers import RIGHT_TO_MANAGE, Right
from gateway.capabilities.grpc_api.receive import MessagePlaces, MessageReceiver, start_operation
from gateway.capabilities.grpc_api.status import CallStatus, describe_failure
from gateway.errors import (
    Forbidden,
    GatewayError,
    HeaderTooLarge,
    MalformedRequest,
    Overloaded,
    RequestTooSlow,
    Unavailable,
    UnknownModel,
)
from gateway.repository.resolver import ModelTarget, parse_triton_version
from gateway.routes.middleware import end_trace, log_request, release_resources
from gateway.routes.passthrough.headers import NOT_FORWARDED
from gateway.services import Services
from gateway.telemetry.request_info import (
    CLIENT_CLOSED_REQUEST,
    RequestInfo,
    RequestScope,
    current_request_info,
)
from gateway.telemetry.tracing import create_request_id, find_request_id
from gateway.triton.grpc.byte_channel import Metadata
from gateway.triton.grpc.messages import build_http_headers
from gateway.triton.restricted_api import GRPC_KEY_PREFIX

GRPC_ROUTE: Final = "grpc"  # the label of `gateway_requests_in_flight`
OK_STATUS: Final = 200
UNCOUNTED_STATUSES: Final = (OK_STATUS, CLIENT_CLOSED_REQUEST)
# Larger messages count against the memory budget, like the bodies of /v2.
MIN_CHARGED_BYTES: Final = 64 << 10
# grpcio has a copy of a message while it is sent, and cannot send without one.
COPIES: Final = 2
# A message of a few bytes has this time to arrive, whatever the deadline of its call.
SHORT_MESSAGE_TIMEOUT_S: Final = 5.0
# Triton accepts 8 KiB (RFC 9113, section 6.5.2), including what the gateway and gRPC add. Up to 16 KiB, it
# refuses calls at random.
MAX_CALL_METADATA_BYTES: Final = 7 << 10
# What HTTP/2 counts for a field besides its name and value.
FIELD_BYTES: Final = 32
# With `triton_grpc_error`, tritonserver 2.51 crashes when it ends a stream with an error.
DROPPED_METADATA: Final = frozenset(name.decode() for name in NOT_FORWARDED) | {
    "user-agent",
    "content-type",
    "triton_grpc_error",
}
# Of subject alternative names, by their fields in the context of a connection.
CERTIFICATE_NAME_KINDS: Final = {"peer_uri": "URI", "peer_dns": "DNS", "peer_email": "email"}
CERTIFICATE_FIELD: Final = "x509_pem_cert"
DROPPED_PREFIXES: Final = ("grpc-", GRPC_KEY_PREFIX)


class ShuttingDown(Unavailable):
    message = "the gateway is shutting down; open the stream again"


class NoRequest(MalformedRequest):
    message = "the call ended without a request"


class MetadataTooLarge(GatewayError):
    status = HeaderTooLarge.status
    code = HeaderTooLarge.code
    message = (
        "the call has more than 7 KiB of metadata for Triton, which accepts no more; send less"
    )


class ResponseNotRead(RequestTooSlow):
    message = "the responses were not read in time"


class TooManyCalls(Overloaded):
    message = "this address has too many calls in progress (GATEWAY_MAX_CONNECTIONS_PER_CLIENT)"


@dataclass(frozen=True)
class MethodAccess:
    """The access rules of a method, and how its calls are counted."""

    route: str  # the name of the method in the log and the metrics
    is_public: bool = False  # needs no key
    is_unlimited: bool = False  # does not count against the rate of the key
    is_container: bool = False  # a stream: its requests are counted, itself only if it fails
    http_method: str = "POST"  # what the call is over HTTP: a GET takes no turn of a split


@dataclass(frozen=True)
class CallEnvironment:
    """The objects that all calls share."""

    services: Services
    receiver: MessageReceiver
    streams: MessagePlaces  # of the open ones
    clients: ClientCounts  # counts the calls in progress by client
    stopping: asyncio.Event  # set when the server stops accepting calls


class IncomingCall:
    """One call of a client, or one request of a stream."""

    def __init__(
        self, environment: CallEnvironment, context: Any, path: str, access: MethodAccess
    ) -> None:
        self.environment = environment
        self.services = services = environment.services
        self.context = context
        self.metadata: Metadata = context.invocation_metadata() or ()
        self._access = access
        self._started_at = perf_counter()
        self._status = CLIENT_CLOSED_REQUEST
        self._client = ""  # as it is counted
        headers = build_http_headers(self.metadata)
        self.info = info = RequestInfo(find_request_id(headers) or create_request_id())
        info.route = access.route
        current_request_info.set(info)
        self.scope: RequestScope = {
            "method": access.http_method,
            "path": path,
            "raw_path": path.encode(),
            "scheme": "grpc",
            "http_version": "2",
            "headers": headers,
            "request_id": info.request_id,
            "request_info": info,
            "client": parse_peer(context.peer()),
            "server": None,
            "certificate_names": (),
            "certificate_expires_at": None,
        }
        if services.settings.tls_client_ca_file is not None:
            peer = context.auth_context()
            self.scope["certificate_names"] = list_peer_names(peer)
            if CERTIFICATE_FIELD in peer:
                self.scope["certificate_expires_at"] = math.inf  # see `MAX_CONNECTION_AGE_MS`
        if services.tracer is not None and not access.is_public:
            info.trace = services.tracer.start_trace(access.http_method, headers)
        self._recordings = [recorder.start(self.scope) for recorder in services.recorders]
        services.metrics.in_flight[GRPC_ROUTE] += 1

    # The caller, and what it may do.

    def count_client(self) -> None:
        """Count the call as one in progress of its client. Raises `TooManyCalls`."""
        address = self.scope["client"]
        if address is not None:
            client = client_network(address[0])
            clients = self.environment.clients
            limit = self.services.settings.max_connections_per_client
            if clients.add(client) > limit > 0:
                clients.remove(client)
                raise TooManyCalls
            self._client = client

    async def identify_caller(self) -> None:
        """Authenticate the caller, and count the call against its limits.

        Raises one of `REFUSALS`, or `LimitExceeded`.
        """
        info = self.info
        services = self.services
        access = services.access
        is_public = self._access.is_public
        try:
            caller = access.authenticate(self.scope) or await access.verify(
                self.scope, is_public=is_public
            )
        except REFUSALS:
            if not is_public:
                raise
            caller = UNAUTHENTICATED
        info.caller = caller
        info.key = caller.name
        info.caller_name = name_caller(caller, self.scope["client"])
        info.wanted_priority = read_priority(self.scope)
        if caller.limits is not None and not self._access.is_unlimited:
            await services.limiter.admit(info, caller.limits)

    def resolve(
        self,
        right: Right,
        model: str,
        version: str = "",
        not_found_error: type[UnknownModel] = UnknownModel,
    ) -> ModelTarget:
        """Return the target that the caller may use.

        Raises `Forbidden`, `InvalidVersion`, or `not_found_error` for a model that the caller cannot see.
        """
        self._check_administrator(right)
        if not model:
            raise not_found_error(model)
        resolve = self.services.resolver.resolve
        return resolve(self.scope, right, model, version, not_found_error, parse_triton_version)

    def check_access(self, right: Right, model: str) -> None:
        self._check_administrator(right)
        self.services.resolver.check_access(self.scope, right, model)

    def authorize(self, right: Right) -> None:
        self._check_administrator(right)
        authorize(self.scope, right)

    def authorize_all_models(self, right: Right) -> None:
        self._check_administrator(right)
        authorize_all_models(self.scope, right)

    def _check_administrator(self, right: Right) -> None:
        # A proxy on this machine can forward gRPC without leaving a trace in the call.
        if right is RIGHT_TO_MANAGE and self.info.caller.may_administer_locally:
            raise Forbidden(
                "administration over gRPC requires an admin key (GATEWAY_KEYS_FILE); without keys, local "
                "programs administer over HTTP"
            )

    # The request.

    def find_timeout_s(self) -> float:
        """Return the timeout: the call's own deadline, and X-Request-Timeout or the default."""
        requested = find_metadata(self.metadata, "x-request-timeout")
        services = self.services
        timeout_s = (
            services.default_timeout_s
            if requested is None
            else services.resolve_timeout_s(requested)
        )
        remaining_s: float | None = self.context.time_remaining()
        if remaining_s is not None:
            limit_s = services.settings.max_request_timeout_s if requested is None else timeout_s
            timeout_s = min(max(remaining_s, 0.0), limit_s)
        self.info.timeout_s = timeout_s
        return timeout_s

    async def read_message(self, timeout_s: float) -> bytes:
        """Return the request. Raises `RequestTooSlow`, `NoRequest` or `MemoryBudgetExceeded`."""
        started_at = perf_counter()
        try:
            caller = self.info.key or self._client
            message = await self.environment.receiver.read(self.context, caller, timeout_s)
        finally:
            self.info.add_phase("receive", perf_counter() - started_at)
        if message is grpc.aio.EOF:
            raise NoRequest
        self.count_message(cast(bytes, message))
        self.record_request(cast(bytes, message))
        return cast(bytes, message)

    async def read_short_message(self, max_bytes: int) -> bytes:
        """Return a request of a few bytes. Raises as `read_message`, or `MalformedRequest`."""
        message = await self.read_message(SHORT_MESSAGE_TIMEOUT_S)
        check_size(message, max_bytes)
        return message

    def count_message(self, message: bytes, min_charged_bytes: int = MIN_CHARGED_BYTES) -> None:
        """Count the message, and charge it. Raises `MemoryBudgetExceeded`."""
        self.info.bytes_in = size = len(message)
        if size > min_charged_bytes:
            self.services.get_charge(self.info, "message").add(COPIES * size)

    def record_request(self, message: bytes) -> None:
        for recording in filter(None, self._recordings):
            recording.request.add(message)

    def select_metadata(self) -> Metadata:
        """Return the metadata for Triton, which can turn it into parameters of the request.

        Raises `MetadataTooLarge`.
        """
        selected = tuple(pair for pair in self.metadata if is_forwarded(pair[0]))
        size = sum(len(name) + len(value) + FIELD_BYTES for name, value in selected)
        if size > MAX_CALL_METADATA_BYTES:
            raise MetadataTooLarge
        return selected

    # The response.

    def record_response(self, response: bytes, *, is_last: bool = True) -> None:
        for recording in filter(None, self._recordings):
            recording.response.add(response, is_last=is_last)

    def charge_response(self, response: bytes) -> None:
        """Charge a response in place of the request. Raises `MemoryBudgetExceeded` or `TooLarge`."""
        charge = self.services.get_charge(self.info)
        charge.change_kind("response")
        charge.resize(COPIES * len(response))

    async def write(self, response: bytes) -> None:
        """Send a response of a stream. Raises `ResponseNotRead`.

        It stays charged until grpcio drops it, even if that is after the call.
        """
        services = self.services
        writing = start_operation(self.context.write(response))
        try:
            await asyncio.wait([writing], timeout=services.settings.write_timeout_s)
            if writing.done():
                writing.result()
                return
        except grpc.aio.InternalError:
            raise asyncio.CancelledError from None  # the client is gone, and gRPC cancels the call
        finally:
            self.info.keep_charge_until(writing)
            del writing  # its exception's traceback has this frame: a cycle, with the response
        services.metrics.refusals.labels("answer_not_taken").inc()
        raise ResponseNotRead

    # The end.

    def succeed(self, response: bytes) -> None:
        if self._status == CLIENT_CLOSED_REQUEST:  # a stream may have failed before
            self._status = OK_STATUS
        self.info.bytes_out += len(response)

    def fail(self, exc: Exception) -> CallStatus:
        status = describe_failure(exc, self.info.request_id)
        self._status = status.http_status
        self.info.error_code = status.error_code
        self.info.error_reason = status.detail
        return status

    def end(self) -> None:
        info = self.info
        metrics = self.services.metrics
        release_resources(self.services, info)
        for recorder, recording in zip(self.services.recorders, self._recordings, strict=True):
            recorder.end(self.scope, recording, self._status)
        metrics.in_flight[GRPC_ROUTE] -= 1
        if self._client:
            self.environment.clients.remove(self._client)
        if self._access.is_container and self._status in UNCOUNTED_STATUSES:
            return
        duration_s = perf_counter() - self._started_at
        metrics.observe(info, self._status, duration_s)
        log_request(self.services, self.scope, info, self._status, duration_s)
        if info.trace is not None:
            end_trace(info.trace, self.scope, info, self._status)


def check_size(message: bytes, max_bytes: int) -> None:
    """Check that a message is decoded quickly on the event loop. Raises `MalformedRequest`."""
    if len(message) > max_bytes:
        raise MalformedRequest(
            f"the message has {len(message)} bytes; this method accepts at most {max_bytes}"
        )


def find_metadata(metadata: Metadata, name: str) -> str | None:
    for key, value in metadata:
        if key == name and isinstance(value, str):
            return value
    return None


def is_forwarded(name: str) -> bool:
    return name not in DROPPED_METADATA and not name.startswith(DROPPED_PREFIXES)


def list_peer_names(context: Mapping[str, Iterable[bytes]]) -> tuple[tuple[str, str], ...]:
    """Return the subject alternative names of the client's certificate, with their kinds."""
    if CERTIFICATE_FIELD not in context:
        return ()
    (text,) = context[CERTIFICATE_FIELD]
    certificate = decode_certificate(text)
    return tuple(
        (kind, name.decode(errors="replace"))
        for field, kind in CERTIFICATE_NAME_KINDS.items()
        for name in context.get(field, ())
        # gRPC cuts a name off at a NUL. No other name is followed by one.
        if name + b"\0" not in certificate
    )


@lru_cache(1024)
def decode_certificate(text: bytes) -> bytes:
    return ssl.PEM_cert_to_DER_cert(text.decode())


@lru_cache(1024)
def parse_peer(peer: str) -> tuple[str, int] | None:
    """Return the address of a peer such as `ipv4:127.0.0.1:4711` or `ipv6:%5B::1%5D:4711`."""
    family, _, address = peer.partition(":")
    host, _, port = address.rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return unquote(host).strip("[]"), int(port)
