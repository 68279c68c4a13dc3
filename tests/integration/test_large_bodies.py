"""Bodies of many megabytes, of which no step holds the event loop as long as one copy would take.

The event loop's longest turn is compared with a copy in the same process, in CPU time of the thread.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import socket
import statistics
import time
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from prometheus_client import Counter
from starlette.types import Message

from gateway.copying import copy_bytes
from gateway.decoding.messages import pack_message, unpack_message
from gateway.decoding.pool import DecodePool
from gateway.http_client.client import HttpClient
from gateway.inference.body import RequestBody
from gateway.memory import MemoryBudget, MemoryCharge, limit_heap_growth
from gateway.request_info import RequestInfo
from gateway.tensors.dtypes import build_bytes_array
from tests.support.wait import TIMEOUT_S

MIB = 1 << 20
SIZE_BYTES = 64 * MIB
CHUNK = bytes(256 << 10)
BEAT_S = 0.0005


def cpu_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return statistics.median(times)


@pytest.fixture(scope="module")
def copy_s() -> float:
    """The time of one copy of a large body."""
    limit_heap_growth()  # as the gateway does: buffers that grow are moved instead of copied
    body = bytearray(SIZE_BYTES)
    return cpu_s(lambda: bytes(body))


async def longest_turn_s(work: Callable[[], Awaitable[object]]) -> float:
    """Return the most CPU time that the event loop used between two of its turns meanwhile."""
    turns: list[float] = []

    async def beat() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(BEAT_S)
            now = time.thread_time()
            turns.append(now - last)
            last = now

    gc.disable()  # it would scan all objects of the tests
    try:
        beating = asyncio.create_task(beat())
        await asyncio.sleep(2 * BEAT_S)
        turns.clear()
        await work()
        await asyncio.sleep(2 * BEAT_S)
        beating.cancel()
    finally:
        gc.enable()
    return max(turns)


async def receive_body() -> bytes:
    remaining = SIZE_BYTES

    async def receive() -> Message:
        nonlocal remaining
        await asyncio.sleep(0)
        remaining -= len(CHUNK)
        return {"type": "http.request", "body": CHUNK, "more_body": remaining > 0}

    headers = [(b"content-type", b"application/octet-stream")]
    scope = {"type": "http", "headers": headers, "request_info": RequestInfo("")}
    shed = Counter("shed", "Requests refused.", registry=None)
    charge = MemoryCharge(MemoryBudget(4 * SIZE_BYTES, shed))
    return await RequestBody(scope, receive).read(SIZE_BYTES, charge)


def test_receiving_a_large_body_holds_no_turn(copy_s: float) -> None:
    assert asyncio.run(longest_turn_s(receive_body)) < copy_s / 2
    assert asyncio.run(receive_body()) == bytes(SIZE_BYTES)


def answer_large(listening: socket.socket) -> None:
    connection, _ = listening.accept()
    with connection:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % SIZE_BYTES)
        connection.sendall(bytes(SIZE_BYTES))


def test_receiving_a_large_response_holds_no_turn(copy_s: float) -> None:
    async def request() -> None:
        client = HttpClient("127.0.0.1", port, max_answer_bytes=SIZE_BYTES)
        response = await client.request(b"GET", b"/", b"", timeout_s=TIMEOUT_S)
        assert len(response.body) == SIZE_BYTES
        client.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        # Its own GIL: the thread would otherwise take the turns that are measured.
        server = multiprocessing.get_context("fork").Process(target=answer_large, args=(listening,))
        server.start()
        longest_s = asyncio.run(longest_turn_s(request))
        server.join()
    assert longest_s < copy_s / 2


@pytest.mark.parametrize("work", [bytes.upper, bytes.split])
def test_decoding_a_large_body_in_a_process_holds_no_turn(
    copy_s: float, work: Callable[[bytes], bytes | list[bytes]]
) -> None:
    """The body goes to the process, and comes back as it is or in a list."""
    body = bytes(SIZE_BYTES)

    async def decode() -> None:
        pool = DecodePool(1, 8 * SIZE_BYTES)
        result = await pool.run(work, (body,), TIMEOUT_S)
        assert len(b"".join(result) if isinstance(result, list) else result) == SIZE_BYTES
        await pool.close()

    assert asyncio.run(longest_turn_s(decode)) < copy_s / 2


def test_arrays_of_texts_keep_their_shape_and_values() -> None:
    """They are one frame: unpickling each of them would hold the GIL."""
    texts = build_bytes_array([b"", b"a" * MIB, *[b"text"] * 9998]).reshape(5000, 2)
    others = np.array([None, "text"], object)
    _, *frames = pack_message([texts, others, texts[:0]])
    assert len(frames[0]) < 1000
    unpacked, unpacked_others, empty = unpack_message(list(map(bytes, frames)))
    assert unpacked.tolist() == texts.tolist()
    assert unpacked_others.tolist() == others.tolist()
    assert empty.shape == (0, 2)


def test_a_large_file_of_a_form_is_copied_in_pieces() -> None:
    content = bytearray(b"0123456789") * (SIZE_BYTES // 80)
    assert copy_bytes(content) == content
    assert copy_bytes(memoryview(content)[1:3]) == b"12"
    assert copy_bytes(whole := bytes(content)) is whole
