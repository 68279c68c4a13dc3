"""Messages that arrive at a grpc.aio server while its event loop is busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from threading import Event
from typing import Any

import grpc
import pytest

from gateway.grpc_server.receive import FAST_RECEIVE_S, MessageReader, ReceiveSlots
from tests.support.wait import TIMEOUT_S

METHOD = "/test.Service/Method"


class OneMethod(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    def __init__(self, handle: Any) -> None:
        self._handler = grpc.stream_unary_rpc_method_handler(handle)

    def service(self, _: Any) -> Any:
        return self._handler


class AbandonedCall:
    """The context of a call that is cancelled, by its client, when its reader stops to wait."""

    async def read(self) -> None:
        message = asyncio.get_running_loop().create_future()
        call = asyncio.current_task()
        assert call is not None
        message.add_done_callback(lambda _: call.cancel())  # before the task is woken
        await message


@pytest.mark.parametrize("free_slots", [1, 0], ids=["at its deadline", "without a slot"])
async def test_call_cancelled_at_its_deadline_stays_cancelled(free_slots: int) -> None:
    slots = ReceiveSlots(1, 1, idle_s=60)
    if not free_slots:
        slots.acquire()
    reading = asyncio.create_task(MessageReader(AbandonedCall(), slots, FAST_RECEIVE_S / 10).read())
    await asyncio.wait([reading])
    assert reading.cancelled()
    assert slots.try_acquire() == free_slots


async def test_message_that_arrives_while_the_loop_is_busy_needs_no_slot() -> None:
    is_reading, is_sent = Event(), Event()
    slots = ReceiveSlots(1, 1, idle_s=60)
    assert slots.try_acquire()  # the only one

    def block_loop() -> None:
        is_reading.set()
        is_sent.wait(TIMEOUT_S)
        time.sleep(2 * FAST_RECEIVE_S)

    async def handle(_: Any, context: Any) -> bytes:
        asyncio.get_running_loop().call_soon(block_loop)
        return bytes(await MessageReader(context, slots, TIMEOUT_S).read())

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
