"""Calls of the gRPC front end, which go to a replica over gRPC as the client's bytes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from gateway.fleet.replica import Replica
from gateway.fleet.transports import trace_grpc_attempt
from gateway.http_client.connection import Headers
from gateway.tracing import TRACE_CONTEXT_HEADERS, Trace
from gateway.triton.error_mapping import RequestTarget
from gateway.triton.grpc.byte_channel import ByteStream, Metadata
from gateway.triton.grpc.errors import GrpcUnreachable
from gateway.triton.grpc.messages import build_grpc_metadata
from gateway.triton.grpc.unary import send_bytes

log = logging.getLogger(__name__)

NO_HEADERS: Headers = []


@dataclass(frozen=True, slots=True)
class GrpcBytesCall:
    """A call whose messages are bytes. Cancelling the task cancels it in Triton."""

    target: RequestTarget
    method: str
    message: bytes
    metadata: Metadata = ()
    # Sent to the replica in addition: they authorize calls of its management APIs.
    is_management: bool = False
    is_idempotent: ClassVar[bool] = False
    is_resendable: ClassVar[bool] = True
    needs_grpc: ClassVar[bool] = True

    async def send(self, replica: Replica, timeout_s: float, trace: Trace | None) -> bytes:
        metadata = self.metadata
        if self.is_management and replica.restricted_api is not None:
            metadata += replica.restricted_api.metadata
        target = self.target._replace(timeout_s=timeout_s)
        channel = replica.byte_channel
        try:
            if trace is None:
                return await send_bytes(channel, target, self.method, self.message, metadata)
            with trace_grpc_attempt(trace, replica, NO_HEADERS) as headers:
                metadata = add_trace_context(metadata, headers)
                return await send_bytes(channel, target, self.method, self.message, metadata)
        except GrpcUnreachable:
            mark_unavailable(replica)
            raise


@dataclass(frozen=True, slots=True)
class GrpcBytesStreamCall:
    """A streaming inference with any number of responses; an attempt ends with the first."""

    target: RequestTarget
    message: bytes
    metadata: Metadata = ()
    is_idempotent: ClassVar[bool] = False
    is_resendable: ClassVar[bool] = True
    needs_grpc: ClassVar[bool] = True

    async def send(
        self, replica: Replica, timeout_s: float, trace: Trace | None
    ) -> tuple[ByteStream, bytes | None]:
        with trace_grpc_attempt(trace, replica, NO_HEADERS) as headers:
            metadata = add_trace_context(self.metadata, headers)
            target = self.target._replace(timeout_s=timeout_s)
            try:
                stream = await ByteStream.open(replica.byte_channel, target, metadata)
            except GrpcUnreachable:
                mark_unavailable(replica)
                raise
            try:
                await stream.send_request(self.message)
                return stream, await stream.read_response(timeout_s)
            except BaseException:
                stream.close()
                raise


def mark_unavailable(replica: Replica) -> None:
    """Prefer other replicas for a while; the replica's HTTP may work."""
    if replica.byte_channel.mark_unavailable():
        log.warning("the gRPC port of %s is unreachable; gRPC clients need it", replica.address)


def add_trace_context(metadata: Metadata, headers: Headers) -> Metadata:
    """Return the metadata with the trace context of an attempt instead of the client's."""
    if not headers:
        return metadata
    names = {name.decode() for name in TRACE_CONTEXT_HEADERS}
    others = tuple(pair for pair in metadata if pair[0] not in names)
    return (*others, *build_grpc_metadata(headers))
