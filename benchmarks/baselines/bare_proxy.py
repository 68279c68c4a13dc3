"""The floor of Python: an ASGI proxy that reads bodies whole, keeps connections alive and checks nothing.

It runs on uvicorn with httptools and uvloop; `TRITON` is the address of the upstream server.
"""

from __future__ import annotations

import asyncio
import os
from typing import cast

import httptools
from starlette.types import Receive, Scope, Send

HOST, _, PORT = os.environ.get("TRITON", "127.0.0.1:8000").partition(":")


class PooledConnection(asyncio.Protocol):
    """A connection to the upstream server, with one exchange at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.chunks: list[bytes] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.chunks.append(body)

    def on_message_complete(self) -> None:
        self.complete.set_result(self.parser.get_status_code())

    async def exchange(self, request: bytes) -> int:
        self.complete: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self.complete


IDLE: list[PooledConnection] = []


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    chunks, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        chunks.append(message["body"])
        more = message["more_body"]
    lines = [scope["method"].encode(), b" ", scope["raw_path"], b" HTTP/1.1\r\n"]
    for name, value in scope["headers"]:
        lines += (name, b": ", value, b"\r\n")
    if IDLE:
        connection = IDLE.pop()
    else:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(PooledConnection, HOST, int(PORT))
    status = await connection.exchange(b"".join((*lines, b"\r\n", *chunks)))
    IDLE.append(connection)
    headers = [pair for pair in connection.headers if pair[0] != b"transfer-encoding"]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"".join(connection.chunks)})
