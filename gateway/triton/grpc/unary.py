"""Calls of a replica with one request and one response, as bytes."""

from __future__ import annotations

import asyncio
from typing import cast

import grpc

from gateway.errors import DeadlinePassed
from gateway.triton.grpc.byte_channel import (
    CLEANUPS,
    MAX_CANCEL_GRACE_S,
    GrpcByteChannel,
    Metadata,
    map_rpc_error,
)
from gateway.triton.request_target import RequestTarget


async def send_bytes(
    channel: GrpcByteChannel,
    target: RequestTarget,
    method: str,
    message: bytes,
    metadata: Metadata,
) -> bytes:
    """Return Triton's response; cancelling this coroutine cancels the call.

    Raises `GrpcUnreachable` if it cannot have been sent, `DeadlinePassed` after `target.timeout_s`, and
    the mapped error of Triton.
    """
    client = channel.acquire()
    call: grpc.aio.UnaryUnaryCall[bytes, bytes] | None = None
    try:
        if channel.is_new:
            await channel.check_server(client)
        # The deadline is enforced here: gRPC would cancel the call in Triton without the grace period.
        call = client.start_call(
            method, message, target.timeout_s + 2 * MAX_CANCEL_GRACE_S, metadata
        )
        await wait_for_status(call, target.timeout_s)
        if not call.done():
            raise DeadlinePassed(target.timeout_s)
        return cast(bytes, await call)
    except grpc.aio.AioRpcError as exc:
        raise map_rpc_error(exc, target, channel) from exc
    finally:
        if call is None:
            channel.release(is_complete=False)
        elif call.done():
            channel.release(is_complete=not call.cancelled())
        else:
            CLEANUPS.start(finish_or_cancel(call, channel))


async def wait_for_status(call: grpc.aio.Call, timeout_s: float) -> None:
    """Return when the call is complete, or after the timeout. A cancellation does not cancel the call."""
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[None] = loop.create_future()

    def finish(_: object = None) -> None:
        if not finished.done():
            finished.set_result(None)

    call.add_done_callback(finish)
    timer = loop.call_later(max(timeout_s, 0), finish)
    try:
        await finished
    finally:
        timer.cancel()


async def finish_or_cancel(call: grpc.aio.Call, channel: GrpcByteChannel) -> None:
    """Cancel an abandoned call, unless it completes within the grace period."""
    try:
        await wait_for_status(call, channel.choose_cancel_delay_s())
    finally:
        is_complete = call.done()
        call.cancel()
        channel.release(is_complete=is_complete)
