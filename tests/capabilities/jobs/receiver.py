"""A server that receives callbacks."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from anyio.from_thread import start_blocking_portal

from tests.support.wait import wait_until_async

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Received:
    request: str  # its first line
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """Answers requests with these responses, the last one again and again."""

    port: int = 0
    responses: list[bytes] = field(default_factory=lambda: [answer(204)])
    received: list[Received] = field(default_factory=list)
    connections: list[asyncio.Task[Any] | None] = field(default_factory=list)
    is_held: bool = False  # no response is sent
    in_progress: int = 0
    max_in_progress: int = 0

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/done"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(asyncio.current_task())
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            request, *lines = head.rstrip().split("\r\n")
            headers = {
                name.lower(): value for name, value in (each.split(": ", 1) for each in lines)
            }
            body = await reader.readexactly(int(headers["content-length"]))
            self.in_progress += 1
            self.max_in_progress = max(self.max_in_progress, self.in_progress)
            self.received.append(Received(request, headers, body))
            await wait_until_async(lambda: not self.is_held)
            self.in_progress -= 1
            writer.write(self.responses.pop(0) if self.responses[1:] else self.responses[0])
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


@asynccontextmanager
async def receiving(
    host: str = HOST, port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Receiver]:
    receiver = Receiver()
    server = await asyncio.start_server(receiver.serve, host, port, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    async with server:
        yield receiver
        await asyncio.gather(*filter(None, receiver.connections))


@contextmanager
def receiving_in_thread() -> Iterator[Receiver]:
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(receiving()) as receiver,
    ):
        yield receiver


def answer(status: int, *headers: str, body: bytes = b"") -> bytes:
    lines = (f"HTTP/1.1 {status} x", f"Content-Length: {len(body)}", *headers)
    return "\r\n".join((*lines, "", "")).encode() + body
