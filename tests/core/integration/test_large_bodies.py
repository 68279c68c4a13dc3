"""Bodies of many megabytes, which are not copied as a whole: that would hold the event loop for 50 ms."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import tracemalloc
from collections.abc import Awaitable, Callable

from prometheus_client import Counter
from starlette.types import Message

from gateway.http_client.client import HttpClient
from gateway.inference.body import RequestBody
from gateway.memory import MemoryBudget, MemoryCharge
from gateway.telemetry.request_info import RequestInfo
from tests.support.wait import TIMEOUT_S

MIB = 1 << 20
SIZE_BYTES = 64 * MIB
CHUNK_BYTES = 256 << 10
# What grows has some reserve.
MOST_FOR_ONE_BYTES = SIZE_BYTES * 5 // 4


def run_within(most_bytes: int, work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        tracemalloc.start()
        try:
            await work()
            assert tracemalloc.get_traced_memory()[1] < most_bytes
        finally:
            tracemalloc.stop()

    asyncio.run(main())


def test_request_body_is_read_into_one_buffer() -> None:
    remaining = SIZE_BYTES

    async def receive() -> Message:
        nonlocal remaining
        remaining -= CHUNK_BYTES
        return {"type": "http.request", "body": bytes(CHUNK_BYTES), "more_body": remaining > 0}

    async def read() -> None:
        headers = [(b"content-type", b"application/octet-stream")]
        scope = {"type": "http", "headers": headers, "request_info": RequestInfo("")}
        shed = Counter("shed", "Requests refused.", registry=None)
        charge = MemoryCharge(MemoryBudget(4 * SIZE_BYTES, shed))
        body = await RequestBody(scope, receive).read(SIZE_BYTES, charge)
        assert len(body) == SIZE_BYTES

    run_within(MOST_FOR_ONE_BYTES, read)


def answer_large(listening: socket.socket) -> None:
    connection, _ = listening.accept()
    with connection:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % SIZE_BYTES)
        connection.sendall(bytes(SIZE_BYTES))


def test_response_body_is_read_into_one_buffer() -> None:
    async def request() -> None:
        client = HttpClient("127.0.0.1", port, max_answer_bytes=SIZE_BYTES)
        response = await client.request(b"GET", b"/", body=b"", timeout_s=TIMEOUT_S)
        assert len(response.body) == SIZE_BYTES
        client.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        server = multiprocessing.get_context("fork").Process(target=answer_large, args=(listening,))
        server.start()
        run_within(MOST_FOR_ONE_BYTES, request)
        server.join()
