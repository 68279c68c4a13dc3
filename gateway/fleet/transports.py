"""The transports of a request to a replica: HTTP; and gRPC, over which an inference can be cancelled."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Final, Protocol, TypeVar

import orjson

from gateway.errors import BadUpstream, DeadlinePassed, GatewayError
from gateway.fleet.replica import Replica
from gateway.http_client.client import UpstreamResponse
from gateway.http_client.connection import Buffer, RequestNotSent
from gateway.http_client.response import Headers
from gateway.messages import quote_path_segment
from gateway.telemetry.tracing import TRACEPARENT, ChildSpan, Trace
from gateway.triton.error_mapping import (
    MAX_METADATA_BYTES,
    map_triton_error,
    read_error_event,
    read_error_response,
)
from gateway.triton.grpc.byte_channel import (
    INFER_METHOD,
    ByteStream,
    GrpcUnreachable,
    Metadata,
    send_bytes,
)
from gateway.triton.grpc.messages import (
    build_grpc_metadata,
    build_http_headers,
    decode_grpc_response,
    encode_grpc_request,
    set_version,
)
from gateway.triton.inference import (
    InferRequest,
    InferResponse,
    build_http_request,
    decode_http_response,
)
from gateway.triton.request_target import RequestTarget

log = logging.getLogger(__name__)

JSON_HEADERS: Final = [(b"content-type", b"application/json")]
TRANSPORT_ERRORS: Final = (RequestNotSent, BadUpstream, DeadlinePassed)  # Triton may be healthy
T_co = TypeVar("T_co", covariant=True)
BytesCall = TypeVar("BytesCall", bound="GrpcBytesCall")


class FailedResponse(Exception):
    """A response that begins with an error of the model, which has run and can go on.

    The error is the `first_error` of the response, or of its stream.
    """

    def __init__(self, error: GatewayError, response: Any) -> None:
        super().__init__(error.detail)
        self.error = error
        self.response = response


class UpstreamCall(Protocol[T_co]):
    """A request in the form of one transport, which can be sent to any replica."""

    @property
    def target(self) -> RequestTarget: ...
    @property
    def is_idempotent(self) -> bool: ...
    @property
    def is_resendable(self) -> bool: ...
    @property
    def needs_grpc(self) -> bool: ...

    def with_version(self, version: str) -> UpstreamCall[T_co]:
        """Return the same request to another version."""

    def send(self, replica: Replica, timeout_s: float, trace: Trace | None) -> Awaitable[T_co]:
        """Make one attempt. Raises Triton's error, a transport error, or `FailedResponse`."""


@dataclass(slots=True)
class HttpCall:
    """A request over HTTP, which costs least. A client disconnect does not cancel it in Triton.

    A frozen dataclass would cost 2.8 % of the instructions of a `/v2` request.
    """

    target: RequestTarget
    method: bytes
    path: bytes
    headers: Headers  # the body's framing included
    body: bytes | list[Buffer] | AsyncIterator[bytes] = b""
    is_idempotent: bool = False

    @property
    def is_resendable(self) -> bool:
        return isinstance(self.body, (bytes, list))

    @property
    def needs_grpc(self) -> bool:
        return False

    def with_version(self, version: str) -> HttpCall:
        path, mark, query = self.path.partition(b"?")
        # "", "v2", "models", the model, and the version if there is one.
        segments = path.split(b"/")
        segments[4 : 6 if self.target.version else 4] = [b"versions", version.encode()]
        target = self.target._replace(version=version)
        return replace(self, target=target, path=b"/".join(segments) + mark + query)

    async def send(
        self, replica: Replica, timeout_s: float, trace: Trace | None
    ) -> UpstreamResponse:
        if trace is None:
            response = await replica.http.send(
                self.method,
                self.path,
                headers=self.headers,
                body=self.body,
                timeout_s=timeout_s,
            )
        else:
            port = replica.address.port
            method = self.method.decode()
            with start_attempt_span(trace, replica, port, method) as span:
                headers = span.inject_context(self.headers)
                response = await replica.http.send(
                    self.method,
                    self.path,
                    headers=headers,
                    body=self.body,
                    timeout_s=timeout_s,
                )
                span.set_response_status(response.status)
        if response.status >= 400:
            if not response.is_event_stream:
                raise await read_error_response(response, self.target)
            response.first_error = error = await read_error_event(response, self.target)
            raise FailedResponse(error, response)
        return response


async def prepare_http_infer(request: InferRequest, trace_headers: Headers) -> HttpCall:
    headers, body = await request.encode(build_http_request)
    path = f"{triton_model_path(request.target.model, request.target.version)}/infer".encode()
    return HttpCall(request.target, b"POST", path, [*headers, *trace_headers], body)


class GrpcCall:
    """A call over gRPC. Cancelling the task cancels it in Triton."""

    __slots__ = ()
    is_idempotent: ClassVar[bool] = False
    is_resendable: ClassVar[bool] = True
    needs_grpc: ClassVar[bool] = False  # false if HTTP can replace gRPC


@dataclass(frozen=True)
class GrpcUnaryCall(GrpcCall):
    """An inference with one response. HTTP is used while the replica's gRPC port is unreachable."""

    request: InferRequest

    @property
    def target(self) -> RequestTarget:
        return self.request.target

    def with_version(self, version: str) -> GrpcUnaryCall:
        target = self.target._replace(version=version)
        return replace(self, request=replace(self.request, target=target))

    async def send(self, replica: Replica, timeout_s: float, trace: Trace | None) -> InferResponse:
        reason = ""
        channel = replica.byte_channel
        client_metadata = build_grpc_metadata(self.request.trace_headers)
        with trace_grpc_attempt(trace, replica, client_metadata) as metadata:
            if not channel.is_unavailable:
                target = self.target._replace(timeout_s=timeout_s)
                message = await self.request.encode(encode_grpc_request)
                try:
                    reply = await send_bytes(channel, target, INFER_METHOD, message, metadata)
                    return await decode_grpc_response(reply)
                except GrpcUnreachable as exc:
                    reason = exc.detail
            call = await prepare_http_infer(self.request, build_http_headers(metadata))
            remaining_s = self.request.remaining_s
            response = await replica.http.send(
                call.method, call.path, headers=call.headers, body=call.body, timeout_s=remaining_s
            )
            if reason and channel.mark_unavailable():  # the replica itself works
                text = "%s (replica %s); client disconnects do not cancel inference there"
                log.warning(text, reason, replica.address)
            if response.status >= 400:
                raise await read_error_response(response, self.target)
            return await decode_http_response(await response.read_complete())


@dataclass(frozen=True)
class GrpcBytesCall(GrpcCall):
    """A call whose message goes to a replica as it is."""

    target: RequestTarget
    method: str
    message: bytes
    metadata: Metadata = ()
    # Sent to the replica in addition: they authorize calls of its management APIs.
    is_management: bool = False
    needs_grpc: ClassVar[bool] = True

    def with_version(self: BytesCall, version: str) -> BytesCall:
        target = self.target._replace(version=version)
        return replace(self, target=target, message=set_version(self.message, version))

    async def send(self, replica: Replica, timeout_s: float, trace: Trace | None) -> bytes:
        metadata = self.metadata
        if self.is_management:
            metadata += replica.management_metadata
        target = self.target._replace(timeout_s=timeout_s)
        channel = replica.byte_channel
        try:
            if (
                trace is None
            ):  # a context manager in Python costs as much as the choice of a replica
                return await send_bytes(channel, target, self.method, self.message, metadata)
            with trace_grpc_attempt(trace, replica, metadata) as traced:
                return await send_bytes(channel, target, self.method, self.message, traced)
        except GrpcUnreachable:
            mark_unavailable(replica)
            raise


class GrpcStreamCall(GrpcBytesCall):
    """A streaming inference with any number of responses; an attempt ends with the first message."""

    async def send(  # type: ignore[override]  # the result is a stream
        self, replica: Replica, timeout_s: float, trace: Trace | None
    ) -> ByteStream:
        try:
            with trace_grpc_attempt(trace, replica, self.metadata) as metadata:
                stream = await ByteStream.open(
                    replica.byte_channel, self.target, self.message, metadata, timeout_s
                )
        except GrpcUnreachable:
            mark_unavailable(replica)
            raise
        if stream.first_error is not None:
            raise FailedResponse(stream.first_error, stream)
        return stream


def mark_unavailable(replica: Replica) -> None:
    """Prefer other replicas for a while; the replica's HTTP may work."""
    if replica.byte_channel.mark_unavailable():
        log.warning(
            "the gRPC port %s of replica %s is unreachable; streams and gRPC clients need it; "
            "set another with ?grpc=PORT in GATEWAY_TRITON_URLS",
            replica.address.grpc_port,
            replica.address,
        )


@contextmanager
def trace_grpc_attempt(
    trace: Trace | None, replica: Replica, metadata: Metadata
) -> Iterator[Metadata]:
    """Yield the metadata for an attempt. In a traced request they carry its span, the parent of Triton's."""
    if trace is None:
        yield metadata
        return
    # gRPC calls are HTTP/2 POST requests.
    with start_attempt_span(trace, replica, replica.address.grpc_port, "POST") as span:
        others = (pair for pair in metadata if pair[0] != TRACEPARENT.decode())
        yield (*others, *build_grpc_metadata(span.inject_context([])))


def start_attempt_span(
    trace: Trace, replica: Replica, port: int, method: str
) -> AbstractContextManager[ChildSpan]:
    return trace.start_span(
        "triton",
        client=True,
        http__request__method=method,
        server__address=replica.address.host,
        server__port=port,
        triton__replica=replica.name,
    )


async def request_json(
    replica: Replica, target: RequestTarget, method: bytes, path: str, body: bytes = b""
) -> Any:
    """Return the JSON of one replica's response. Raises Triton's error or a transport error."""
    response = await replica.http.request(
        method,
        path.encode(),
        body=body,
        headers=JSON_HEADERS if body else (),
        timeout_s=target.timeout_s,
        max_bytes=MAX_METADATA_BYTES,
    )
    if response.status != 200:
        raise map_triton_error(response.status, response.body, target)
    return decode_json(response.body)


def decode_json(body: bytes) -> Any:
    try:
        return orjson.loads(body) if body else None
    except orjson.JSONDecodeError as exc:
        raise BadUpstream("the replica returned invalid JSON") from exc


@lru_cache(1024)
def triton_model_path(model: str, version: str = "") -> str:
    """Return Triton's path of a model. Triton does not decode it, so a quoted name matches no model."""
    path = f"/v2/models/{quote_path_segment(model)}"
    return f"{path}/versions/{version}" if version else path
