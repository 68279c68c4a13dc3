"""One replica's HTTP API: an HTTP/1.1 client for this one purpose.

A general client costs more per request than everything else the gateway does together. This one keeps
a stack of idle connections per replica, writes a small request at once, and streams both ways with
back-pressure.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Final

import anyio

from gateway.errors import AnswerTooLarge, DeadlinePassed
from gateway.sse import EVENT_STREAM
from gateway.triton.wire import Connection, Headers, NotSent

JOIN_UNDER_BYTES: Final = 64 * 1024
MOST_ANSWER_BYTES: Final = (1 << 31) - 1
MOST_DOCUMENT_BYTES: Final = 16 << 20  # of a repository's index, or of what is known of a model


def header_of(headers: Headers, name: bytes) -> bytes:
    """The first of that name; empty if there is none."""
    for header in headers:
        if header[0] == name:
            return header[1]
    return b""


class Answer:
    """A replica's answer: status and headers now, the body as it comes. Leave it with `close()`."""

    __slots__ = ("_connection", "_give_back", "_most_bytes", "_sending", "headers", "status")

    def __init__(
        self, connection: Connection, give_back: Callable[[Connection], None], most_bytes: int
    ) -> None:
        self._connection: Connection | None = connection
        self._give_back = give_back
        self._most_bytes = most_bytes
        self._sending: asyncio.Task[None] | None = None
        self.status = connection.status
        self.headers = connection.headers

    def sending(self, task: asyncio.Task[None]) -> None:
        """The request's body is still on its way, by this task, which ends with the answer."""
        self._sending = task

    @property
    def complete(self) -> bool:
        return self._connection is None or self._connection.complete

    @property
    def is_event_stream(self) -> bool:
        return header_of(self.headers, b"content-type").startswith(EVENT_STREAM)

    def rest(self) -> bytes:
        """What has arrived of the body, and was not taken yet."""
        return b"" if self._connection is None else self._connection.taken()

    async def next_chunk(self) -> bytes:
        return b"" if self._connection is None else await self._connection.next_chunk()

    async def read(self, most_bytes: int = MOST_ANSWER_BYTES) -> bytes:
        """The whole body. Raises `AnswerTooLarge` for more than that, or than the replica may answer."""
        most_bytes = min(most_bytes, self._most_bytes)
        chunks: list[bytes] = []
        length = 0
        while chunk := await self.next_chunk():
            chunks.append(chunk)
            length += len(chunk)
            if length > most_bytes:
                raise AnswerTooLarge(most_bytes)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def allow(self, timeout_s: float) -> None:
        """What is waited for next may take this long."""
        if self._connection is not None and not self._connection.complete:
            self._connection.allow(timeout_s)

    def header(self, name: bytes) -> bytes:
        return header_of(self.headers, name)

    def close(self) -> None:
        """Give the connection back; one that is not at its answer's end is closed."""
        if self._sending is not None:
            self._sending.cancel()
        if self._connection is not None:
            connection, self._connection = self._connection, None
            self._give_back(connection)


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int
    headers: Headers
    body: bytes

    def header(self, name: bytes) -> bytes:
        return header_of(self.headers, name)


class Upstream:
    """The connections to one replica's HTTP API."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        server_name: str = "",
        connect_timeout_s: float = 0.5,
        idle_s: float = 4.0,
        max_answer_bytes: int = MOST_ANSWER_BYTES,
    ) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._server_name = server_name or host
        self.keeps = True  # whether a connection that has served waits for the next request
        self.outstanding = 0
        self.last_answer = 0.0  # by perf_counter
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        self._max_answer_bytes = max_answer_bytes
        # Kept: asking for the running loop is a system call each time.
        self._loop = asyncio.get_running_loop()
        self._idle: list[Connection] = []  # a stack: the most recently used first
        self._sweeper: asyncio.TimerHandle | None = None
        self._authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._host_line = f"host: {self._authority}\r\n".encode("latin-1")

    async def send(
        self,
        method: bytes,
        target: bytes,
        headers: Iterable[tuple[bytes, bytes]],
        body: bytes | AsyncIterator[bytes] = b"",
        *,
        timeout_s: float,
        fresh: bool = False,
    ) -> Answer:
        """Send a request; the answer's head is here when this returns.

        `headers` hold the framing (Content-Length, or Transfer-Encoding: chunked, for which a streamed
        `body` is then cut into chunks). `fresh` asks for a new connection. Raises `NotSent`,
        `BadUpstream` or `DeadlinePassed`.
        """
        connection: Connection | None = None
        sending: asyncio.Task[None] | None = None
        finish = self._drop if fresh else self._end
        self.outstanding += not fresh  # which only looks whether somebody is there
        try:
            connection = None if fresh else self._take()
            if connection is None:
                connection = await self._connect(timeout_s)
                if not connection.usable:
                    raise NotSent(f"the replica {self._authority} closes connections")
            head, chunked = self._head(method, target, headers)
            connection.begin(timeout_s)
            if isinstance(body, bytes):
                write_at_once(connection, head, body)
            else:
                connection.write(head)
                sending = self._loop.create_task(pump(connection, body, chunked=chunked))
                sending.add_done_callback(partial(pumped, connection))
            while connection.waiting:
                await connection.arriving()
            if connection.error is not None and not connection.complete:
                raise connection.error
        except BaseException:
            if sending is not None:
                sending.cancel()
            finish(connection)
            raise
        self.last_answer = perf_counter()
        answer = Answer(connection, finish, self._max_answer_bytes)
        if sending is not None:
            answer.sending(sending)
        return answer

    async def ask(
        self,
        method: bytes,
        target: bytes,
        body: bytes = b"",
        headers: Iterable[tuple[bytes, bytes]] = (),
        *,
        timeout_s: float,
        fresh: bool = False,
        most_bytes: int = MOST_ANSWER_BYTES,
    ) -> Reply:
        """Send a whole request and read the whole answer, of so many bytes. Raises as `send` does, and
        `AnswerTooLarge`."""
        framing = (b"content-length", str(len(body)).encode())
        answer = await self.send(
            method, target, [framing, *headers], body, timeout_s=timeout_s, fresh=fresh
        )
        try:
            return Reply(answer.status, answer.headers, await answer.read(most_bytes))
        finally:
            answer.close()

    def close(self) -> None:
        """Close the idle connections; a busy one closes itself when its exchange ends."""
        self._idle_s = 0.0
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.drop_idle()

    def drop_idle(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _head(
        self, method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]]
    ) -> tuple[bytes, bool]:
        lines = [method, b" ", target, b" HTTP/1.1\r\n", self._host_line]
        chunked = False
        for name, value in headers:
            chunked = chunked or name == b"transfer-encoding"
            lines += (name, b": ", value, b"\r\n")
        lines.append(b"\r\n")
        return b"".join(lines), chunked

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            fresh = self._loop.time() - connection.idle_since < self._idle_s
            if fresh and connection.usable:
                return connection
            connection.close()
        return None

    async def _connect(self, timeout_s: float) -> Connection:
        if timeout_s <= 0:
            raise DeadlinePassed(0)
        try:
            with anyio.fail_after(min(self._connect_timeout_s, timeout_s)):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self._loop),
                    self._host,
                    self._port,
                    ssl=self._tls,
                    server_hostname=self._server_name if self._tls else None,
                )
        except (OSError, UnicodeError) as exc:
            if timeout_s < self._connect_timeout_s and isinstance(exc, TimeoutError):
                raise DeadlinePassed(round(timeout_s, 3)) from exc
            refused = not isinstance(exc, TimeoutError)
            raise NotSent(
                f"the replica {self._authority} cannot be reached", refused=refused
            ) from exc
        return connection

    def _drop(self, connection: Connection | None) -> None:
        """A fresh connection was asked for to see that there is one: it is not kept."""
        if connection is not None and connection.end():
            connection.close()

    def _end(self, connection: Connection | None) -> None:
        """The exchange is over; its connection waits for the next, if it can."""
        self.outstanding -= 1
        if connection is None or not connection.end():
            return
        if self._idle_s <= 0 or not self.keeps:
            connection.close()
            return
        connection.idle_since = self._loop.time()
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(self._idle_s, self._sweep)

    def _sweep(self) -> None:
        """Triton's shutdown waits for idle connections: none stays longer than the limit."""
        now = self._loop.time()
        kept = []
        for connection in self._idle:
            if now - connection.idle_since < self._idle_s and connection.usable:
                kept.append(connection)
            else:
                connection.close()
        self._idle = kept
        self._sweeper = None
        if kept:
            wait = self._idle_s - (now - kept[0].idle_since)
            self._sweeper = self._loop.call_later(max(wait, 0.05), self._sweep)


def write_at_once(connection: Connection, head: bytes, body: bytes) -> None:
    """A small request leaves in one write, and so in one packet."""
    if len(body) < JOIN_UNDER_BYTES:
        connection.write(head + body)
    else:
        connection.write(head)
        connection.write(body)
    connection.sent()


async def pump(connection: Connection, body: AsyncIterator[bytes], *, chunked: bool) -> None:
    """Pass a request's body on as it comes."""
    async for data in body:
        if data:
            connection.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
            await connection.drain()
    if chunked:
        connection.write(b"0\r\n\r\n")
    connection.sent()


def pumped(connection: Connection, task: asyncio.Task[None]) -> None:
    """What the client did wrong while sending ends the exchange."""
    if not task.cancelled() and (error := task.exception()) is not None:
        connection.fail(error)
