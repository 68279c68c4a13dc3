"""gRPC calls to a host that does not exist, and to one that sends more than is read."""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any

import grpc
import pytest

from gateway.errors import BadUpstream, GatewayError, UpstreamResponseTooLarge
from gateway.triton.grpc.byte_channel import (
    INFER_METHOD,
    STREAM_METHOD,
    ByteStream,
    GrpcByteChannel,
    GrpcUnreachable,
    map_grpc_error,
    send_bytes,
)
from gateway.triton.grpc.management import build_load_request, call_management_api
from gateway.triton.request_target import RequestTarget
from tests.support.wait import TIMEOUT_S, wait_until_async

MIB = 1 << 20
NOBODY = "nobody.invalid:8001"  # RFC 6761, section 6.4


async def test_calls_to_an_unknown_host_raise_unreachable() -> None:
    target = RequestTarget("m", timeout_s=TIMEOUT_S)
    with pytest.raises(GrpcUnreachable):
        await send_bytes(GrpcByteChannel(NOBODY, None), target, INFER_METHOD, b"", ())
    with pytest.raises(GrpcUnreachable):
        await call_management_api(NOBODY, build_load_request("m", {}), TIMEOUT_S)


async def test_connection_that_is_lost_while_a_request_is_written_is_no_error_of_triton() -> None:
    async with grpc.aio.insecure_channel(NOBODY) as channel:
        call = channel.stream_stream(STREAM_METHOD)()
        # What a write of grpc.aio does then, at a moment that no test can choose.
        call._cython_call.set_internal_error("the connection was lost")
        code = (await call.code()).name
        error = map_grpc_error(code, await call.details(), RequestTarget("m"), MIB)
    assert isinstance(error, BadUpstream)


class Sender(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """A server whose stream has many small messages, and large ones after them."""

    def __init__(self) -> None:
        self.large_count = 0

    def service(self, details: Any) -> Any:
        if details.method != STREAM_METHOD:
            return None
        return grpc.stream_stream_rpc_method_handler(self.stream)

    async def stream(self, _: Any, context: Any) -> None:
        for _ in range(700):
            await context.write(bytes(100))
        while True:
            await context.write(bytes(MIB))
            self.large_count += 1


class HastySender(Sender):
    """A server that responds before it has read the request."""

    async def stream(self, _: Any, context: Any) -> None:
        await context.write(bytes(2000))
        await context.read()


async def test_response_that_is_too_large_is_told_while_the_request_is_sent() -> None:
    """In about one of a hundred calls, the response fails before the request is complete."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((HastySender(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = GrpcByteChannel(f"127.0.0.1:{port}", None, max_answer_bytes=1000)
    target = RequestTarget("m")
    try:
        for _ in range(5):
            opening = (
                ByteStream.open(channel, target, bytes(MIB), (), TIMEOUT_S) for _ in range(40)
            )
            outcomes = await asyncio.gather(*opening, return_exceptions=True)
            # If the write itself fails, gRPC does not keep the reason.
            assert {type(each) for each in outcomes} <= {UpstreamResponseTooLarge, BadUpstream}
    finally:
        await server.stop(0)


async def test_stream_that_is_read_slowly_is_not_read_ahead_of_its_reader() -> None:
    """Each message that is taken makes room for no more than its bytes."""
    sender = Sender()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((sender,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        channel = GrpcByteChannel(f"127.0.0.1:{port}", None)
        stream = await ByteStream.open(channel, RequestTarget("m"), b"", (), TIMEOUT_S)
        for _ in range(300):
            assert await stream.read_message(TIMEOUT_S) == bytes(100)
            await asyncio.sleep(0.001)
        # gRPC itself receives some messages that nobody has read.
        assert sender.large_count < 50
        stream.close()
    finally:
        await server.stop(0)


async def test_request_is_freed_when_its_stream_has_failed() -> None:
    """A cycle of references would keep it until the garbage collector finds it."""
    server = grpc.aio.server()  # without any method
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    message = bytes(MIB)
    channel = GrpcByteChannel(f"127.0.0.1:{port}", None)
    channel.is_new = False
    gc.disable()
    try:
        references = sys.getrefcount(message)
        with pytest.raises(GatewayError):
            await ByteStream.open(channel, RequestTarget("m"), message, (), TIMEOUT_S)
        await wait_until_async(lambda: sys.getrefcount(message) == references)
    finally:
        gc.enable()
        await server.stop(0)
