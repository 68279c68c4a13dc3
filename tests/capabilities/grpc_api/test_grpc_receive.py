"""Messages that arrive slowly, or while the event loop is busy, and the places that they take."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from threading import Event
from typing import Any

import grpc
import psutil
import pytest

from gateway.capabilities.grpc_api.receive import (
    FAST_RECEIVE_S,
    MAX_FAST_MESSAGES,
    MessagePlaces,
    MessageReceiver,
    TooManyLargeMessages,
)
from gateway.capabilities.grpc_api.server import build_options
from gateway.config.settings import Settings
from gateway.errors import RequestTooSlow
from gateway.tasks import cancel_tasks
from gateway.telemetry.metrics import Metrics
from tests.support.wait import TIMEOUT_S, wait_until, wait_until_async

METHOD = "/test.Service/Method"


class OneMethod(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    def __init__(self, handle: Any) -> None:
        self._handler = grpc.stream_unary_rpc_method_handler(handle)

    def service(self, _: Any) -> Any:
        return self._handler


class EndlessCall:
    """The context of a call whose message does not arrive."""

    def __init__(self) -> None:
        self.is_reading = False
        self.is_cancelled = False

    async def read(self) -> None:
        self.is_reading = True
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise


def make_receiver(places: int) -> MessageReceiver:
    return MessageReceiver(MessagePlaces(places, TooManyLargeMessages, Metrics()))


async def test_late_message_has_a_place_until_its_call_ends() -> None:
    receiver = make_receiver(1)
    calls = [EndlessCall() for _ in range(3)]
    with pytest.raises(RequestTooSlow):
        await receiver.read(calls[0], "caller", FAST_RECEIVE_S)
    reading = asyncio.create_task(receiver.read(calls[1], "caller", TIMEOUT_S))
    with pytest.raises(TooManyLargeMessages):
        await asyncio.gather(reading, receiver.read(calls[2], "other", TIMEOUT_S))
    await cancel_tasks([reading])
    with pytest.raises(RequestTooSlow):  # its place is free again
        await receiver.read(calls[2], "other", FAST_RECEIVE_S)
    assert not any(call.is_cancelled for call in calls)  # a cancelled read leaks its message


async def test_messages_of_one_caller_delay_no_other_caller() -> None:
    receiver = make_receiver(4)
    calls = [EndlessCall() for _ in range(2 * MAX_FAST_MESSAGES)]
    other = EndlessCall()
    reading = [asyncio.create_task(receiver.read(call, "caller", TIMEOUT_S)) for call in calls]
    reading.append(asyncio.create_task(receiver.read(other, "other", TIMEOUT_S)))
    for _ in range(3):
        await asyncio.sleep(0)
    assert sum(call.is_reading for call in calls) == MAX_FAST_MESSAGES
    assert other.is_reading
    await wait_until_async(lambda: all(call.is_reading for call in calls))
    await cancel_tasks(reading)


async def test_stream_that_is_not_read_receives_little() -> None:
    """Messages that are read do not open the window for those that are not."""
    piece = bytes(256 << 10)
    read_count = 256
    has_read = Event()
    is_counted = Event()
    sent = [0]

    async def handle(_: Any, context: Any) -> bytes:
        for _ in range(read_count):
            await context.read()
        has_read.set()
        await asyncio.to_thread(is_counted.wait, TIMEOUT_S)
        return b""

    def send_messages() -> Iterator[bytes]:
        while not is_counted.is_set():
            sent[0] += 1
            yield piece

    def count_unread(port: int) -> int:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_unary(METHOD).future(send_messages(), timeout=TIMEOUT_S)
            assert has_read.wait(TIMEOUT_S / 6), call
            counts = [0]

            def is_steady() -> bool:
                counts.append(sent[0])
                return len(counts) > 25 and counts[-1] == counts[-25]

            wait_until(is_steady)
            unread = sent[0] - read_count
            is_counted.set()
            return unread

    server = grpc.aio.server(options=build_options(Settings(), shares_port=False))
    server.add_generic_rpc_handlers((OneMethod(handle),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        assert await asyncio.to_thread(count_unread, port) <= 3
    finally:
        await server.stop(0)


async def test_message_in_time_for_a_busy_loop_needs_no_place() -> None:
    is_reading = Event()
    is_sent = Event()
    receiver = make_receiver(0)

    def block_loop() -> None:
        is_reading.set()
        is_sent.wait(TIMEOUT_S)
        time.sleep(2 * FAST_RECEIVE_S)

    async def handle(_: Any, context: Any) -> bytes:
        asyncio.get_running_loop().call_soon(block_loop)
        return bytes(await receiver.read(context, "", TIMEOUT_S))

    def send_messages() -> Iterator[bytes]:
        is_reading.wait(TIMEOUT_S)
        yield b"in time"
        is_sent.set()  # the library asks for the next message when it has sent one

    def call(port: int) -> bytes:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            return bytes(channel.stream_unary(METHOD)(send_messages(), timeout=TIMEOUT_S))

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((OneMethod(handle),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        assert await asyncio.to_thread(call, port) == b"in time"
    finally:
        await server.stop(0)


async def test_message_that_arrives_when_its_call_ends_is_freed() -> None:
    """grpc.aio leaks a message whose read is cancelled: 80 of these take 320 MiB."""
    calls = 80
    message = bytes(4 << 20)
    is_reading = Event()
    is_sent = Event()

    def block_loop() -> None:
        is_reading.set()
        is_sent.wait(TIMEOUT_S)
        time.sleep(0.02)  # until the message is there

    async def handle(_: Any, context: Any) -> bytes:
        reading = asyncio.create_task(make_receiver(1).read(context, "", TIMEOUT_S))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(block_loop)
        await asyncio.sleep(0)
        await cancel_tasks([reading])
        return b""

    def send_messages() -> Iterator[bytes]:
        is_reading.wait(TIMEOUT_S)
        yield message
        is_sent.set()  # the library asks for the next message when it has sent one

    def make_calls(port: int) -> None:
        options = [("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            method = channel.stream_unary(METHOD)
            for _ in range(calls):
                is_reading.clear()
                is_sent.clear()
                method(send_messages(), timeout=TIMEOUT_S)

    server = grpc.aio.server(options=build_options(Settings(), shares_port=False))
    server.add_generic_rpc_handlers((OneMethod(handle),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    process = psutil.Process()
    try:
        memory = process.memory_info().rss
        await asyncio.to_thread(make_calls, port)
        assert process.memory_info().rss - memory < calls * len(message) / 2
    finally:
        await server.stop(0)
