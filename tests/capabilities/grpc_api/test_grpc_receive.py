"""Messages that arrive slowly, or while the event loop is busy, and the slots that they take."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import nullcontext
from threading import Event
from typing import Any

import grpc
import psutil
import pytest
from prometheus_client import Counter

from gateway.capabilities.grpc_api.receive import (
    CHECK_PERIOD_S,
    FAST_RECEIVE_S,
    MIN_FAST_MESSAGES,
    MessageReader,
    ReceiveSlots,
)
from gateway.capabilities.grpc_api.server import build_options
from gateway.config.settings import Settings
from gateway.memory import (
    ALLOWED_EXCESS_BYTES,
    MIN_BUDGET_BYTES,
    MemoryBudget,
    MemoryBudgetExceeded,
    resident_bytes,
)
from gateway.tasks import cancel_tasks
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


class SilentCall:
    """A receiver whose message does not arrive."""

    def __init__(self, caller: str, *, can_end: bool = True) -> None:
        self.caller = caller
        self.can_end = can_end
        self.is_ended = False

    def end_for_others(self) -> None:
        self.is_ended = True


def make_slots(count: int, stall_s: float = 60, *, is_memory_scarce: bool = True) -> ReceiveSlots:
    """Slots for messages of one byte; scarce memory stays so until the process is looked at."""
    memory = MemoryBudget(MIN_BUDGET_BYTES, Counter("shed", "", ["reason"], registry=None))
    memory.update_excess(resident_bytes())
    memory.excess_bytes = int(is_memory_scarce)
    return ReceiveSlots(memory, count, 1, stall_s)


async def test_messages_without_a_slot_end_when_the_process_grows() -> None:
    """Until then, hundreds of streams may wait for their next message."""
    slots = make_slots(4, is_memory_scarce=False)
    calls = [SilentCall(caller) for caller in 100 * "a" + "bc"]
    busy = [SilentCall("a", can_end=False) for _ in range(2)]
    for call in calls:
        slots.acquire(call)
    assert slots.try_read_ahead(busy[0])
    assert not slots.try_read_ahead(busy[1])  # a caller has a quarter of the slots for these
    await asyncio.sleep(2 * CHECK_PERIOD_S)
    assert not any(call.is_ended for call in calls)
    growth = bytearray(b"1") * (3 * ALLOWED_EXCESS_BYTES)
    await wait_until_async(lambda: sum(call.is_ended for call in calls) == 99)
    assert [call.caller for call in calls if not call.is_ended] == ["a", "b", "c"]
    assert not busy[0].is_ended
    assert len(growth)


@pytest.mark.parametrize(
    ("holders", "caller", "stall_s", "victim"),
    [
        ("aaaaaaaa", "b", 60, 7),
        ("aaaaaabb", "b", 60, None),
        ("aaaaaabc", "c", 60, 5),
        ("aabbccdd", "e", 60, None),
        ("aaabbbcd", "a", 60, None),
        ("aabbccdd", "e", 0, 0),
        ("aabbccdd", "b", 0, 2),
        ("abcdefgh", "h", 0, 7),
        ("aaaabbcd", "a", 0, 0),
    ],
)
async def test_message_without_a_slot_takes_it_from_the_caller_that_has_most(
    holders: str, caller: str, stall_s: float, victim: int | None
) -> None:
    """A caller has a quarter of eight slots for itself, as long as its messages are not stalled."""
    slots = make_slots(8, stall_s)
    calls = [SilentCall(holder) for holder in holders]
    for call in calls:
        slots.acquire(call)
    with nullcontext() if victim is not None else pytest.raises(MemoryBudgetExceeded):
        slots.acquire(SilentCall(caller))
    ended = [number for number, call in enumerate(calls) if call.is_ended]
    assert ended == ([] if victim is None else [victim])


async def test_call_cancelled_at_its_deadline_stays_cancelled_and_its_read_goes_on() -> None:
    """A cancelled read leaks the message that arrives afterwards."""
    slots, call = make_slots(1), EndlessCall()
    reader = MessageReader(call, slots, "caller", FAST_RECEIVE_S)
    reading = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    reader.end_for_others()
    reading.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled()
    assert not call.is_cancelled
    slots.acquire(SilentCall("other"))  # the only slot is free again


async def test_messages_of_one_caller_arrive_some_at_a_time_and_delay_no_other_caller() -> None:
    slots = make_slots(4)
    calls = [EndlessCall() for _ in range(2 * MIN_FAST_MESSAGES)]
    readers = [MessageReader(call, slots, "caller", TIMEOUT_S) for call in calls]
    other = EndlessCall()
    reading = [asyncio.create_task(reader.read()) for reader in readers]
    reading.append(asyncio.create_task(MessageReader(other, slots, "other", TIMEOUT_S).read()))
    for _ in range(3):
        await asyncio.sleep(0)
    assert sum(call.is_reading for call in calls) == MIN_FAST_MESSAGES
    assert other.is_reading
    await wait_until_async(lambda: all(call.is_reading for call in calls))
    await cancel_tasks(reading)


async def test_stream_that_is_not_read_receives_little() -> None:
    """Messages that are read do not open the window for those that are not."""
    piece, read_count = bytes(256 << 10), 256
    has_read, is_counted, sent = Event(), Event(), [0]

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


async def test_message_that_arrives_while_the_loop_is_busy_needs_no_slot() -> None:
    is_reading, is_sent = Event(), Event()
    slots = make_slots(1)
    slots.acquire(SilentCall("other"))  # the only one

    def block_loop() -> None:
        is_reading.set()
        is_sent.wait(TIMEOUT_S)
        time.sleep(2 * FAST_RECEIVE_S)

    async def handle(_: Any, context: Any) -> bytes:
        asyncio.get_running_loop().call_soon(block_loop)
        return bytes(await MessageReader(context, slots, "", TIMEOUT_S).read())

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
    calls, message = 80, bytes(4 << 20)
    is_reading, is_sent = Event(), Event()

    def block_loop() -> None:
        is_reading.set()
        is_sent.wait(TIMEOUT_S)
        time.sleep(0.02)  # until the message is there

    async def handle(_: Any, context: Any) -> bytes:
        reader = MessageReader(context, make_slots(1), "", TIMEOUT_S)
        reading = asyncio.create_task(reader.read())
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
