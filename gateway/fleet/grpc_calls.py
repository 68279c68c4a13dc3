"""Calls of the gRPC front end, which go to a replica over gRPC as the client's bytes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from gateway.fleet.replica import Replica
from gateway.fleet.transports import trace_grpc_attempt
from gateway.tracing import Trace
from gateway.triton.error_mapping import RequestTarget
from gateway.triton.grpc.byte_channel import ByteStream, Metadata
from gateway.triton.grpc.errors import GrpcUnreachable
from gateway.triton.grpc.unary import send_bytes

log = logging.getLogger(__name__)


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
        if self.is_management:
            metadata += replica.management_metadata
        target = self.target._replace(timeout_s=timeout_s)
        channel = replica.byte_channel
        try:
            with trace_grpc_attempt(trace, replica, metadata) as traced:
                return await send_bytes(channel, target, self.method, self.message, traced)
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
        with trace_grpc_attempt(trace, replica, self.metadata) as metadata:
            target = self.target._replace(timeout_s=timeout_s)
            try:
                stream = await ByteStream.open(replica.byte_channel, target, self.message, metadata)
            except GrpcUnreachable:
                mark_unavailable(replica)
                raise
            try:
                return stream, await stream.read_response(timeout_s)
            except BaseException:
                stream.close()
                raise


def mark_unavailable(replica: Replica) -> None:
    """Prefer other replicas for a while; the replica's HTTP may work."""
    if replica.byte_channel.mark_unavailable():
        log.warning("the gRPC port of %s is unreachable; gRPC clients need it", replica.address)
