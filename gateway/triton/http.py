"""One replica's HTTP API: an HTTP/1.1 client for this one purpose, on httptools and asyncio.

A general client costs more per request than everything else the gateway does together. This one keeps
a stack of idle connections per replica, writes a small request at once, streams both ways with
back-pressure, and uses a connection again only after a complete and clean answer (RFC 9112, section 9.3).
Every failure of the wire leaves here as one of our errors, body iteration included.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Final, cast

import httptools

from gateway.errors import BadUpstream, DeadlinePassed, Unavailable
from gateway.sse import EVENT_STREAM

Headers = list[tuple[bytes, bytes]]

HIGH_WATER_BYTES: Final = 256 * 1024
JOIN_UNDER_BYTES: Final = 64 * 1024
MAX_HEADERS: Final = 200
MAX_HEAD_BYTES: Final = 128 * 1024
FRAMING: Final = (b"content-length", b"transfer-encoding")


class NotSent(Unavailable):
    """Nothing of the request reached the replica: it cannot have run, and may go to another.

    `refused` when nobody listens there; else no connection came about in time.
    """

    def __init__(self, sentence: str, *, refused: bool = True) -> None:
        super().__init__(sentence)
        self.refused = refused


# The states of an exchange; bare numbers, because they are compared a dozen times per request.
IDLE: Final = 0
HEAD: Final = 1  # the request is on its way; no answer yet
BODY: Final = 2
DONE: Final = 3


class Connection(asyncio.Protocol):
    """A connection to a replica, and the exchange that is on it. One exchange at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._state = IDLE
        self._clean = True
        self._request_sent = True
        self.error: BaseException | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._deadline = 0.0
        self._limit_s = 0.0
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._paused = False
        self._until_close = False
        self._head_bytes = 0
        self._body_bytes = 0
        self.status = 0
        self.headers: Headers = []
        self.idle_since = 0.0

    # The transport calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._state == IDLE:
            self.abort()  # nobody asked: whatever it is, it must not become somebody's answer
            return
        body_bytes = self._body_bytes
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self.fail(BadUpstream("the replica's answer is not HTTP/1.1"), exc)
        # Without end, neither a header nor a trailer would ever reach a callback.
        if self._state in (HEAD, BODY) and self._body_bytes == body_bytes:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.fail(BadUpstream("the replica's answer has too large a header"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._clean = False
        if self._state == BODY and self._until_close and self.error is exc is None:
            self.on_message_complete()  # RFC 9112, section 6.3: without a length it ends here
        elif self._state in (HEAD, BODY):
            self.fail(
                BadUpstream("the replica closed the connection before its answer was complete"), exc
            )
        self._wake_writer()

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        self._wake_writer()

    # The parser calls these.

    def on_message_begin(self) -> None:
        if self._state == DONE:
            raise httptools.HttpParserError("a second answer, for which nobody asked")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._state == HEAD:  # and not in the trailers, which nobody announced
            self.headers.append((name.lower(), value))
            if len(self.headers) > MAX_HEADERS:
                raise httptools.HttpParserError("too many headers")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 100:
            raise httptools.HttpParserError("a status that is none")
        if self.status < 200:
            return
        if not self._parser.should_keep_alive():
            self._clean = False
            self._until_close = not any(name in FRAMING for name, _ in self.headers)
        self._state = BODY
        self._arrived()

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._buffered += len(body)
        self._body_bytes += len(body)
        self._head_bytes = 0
        if self._buffered > HIGH_WATER_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._arrived()

    def on_message_complete(self) -> None:
        if self._state == HEAD:  # an interim answer, such as 100 Continue
            self.headers = []
        elif self._state == BODY:
            self._clean = self._clean and self._parser.should_keep_alive()  # a trailer may close
            self._state = DONE
            self._arrived()

    # The exchange calls these.

    @property
    def usable(self) -> bool:
        return self._clean and self._transport is not None and not self._transport.is_closing()

    @property
    def waiting(self) -> bool:
        """The answer's status and headers are not here yet; nor has it failed."""
        return self._state == HEAD

    def begin(self, timeout_s: float) -> None:
        """Open an exchange that must be answered within that time."""
        self._state = HEAD
        self._request_sent = False
        self.error = None
        self._until_close = False
        self._head_bytes = 0
        self._body_bytes = 0
        self.headers = []
        self.allow(timeout_s)

    def allow(self, timeout_s: float) -> None:
        """What is waited for must come within this time from now.

        A timer per exchange would cost more than reading its answer: the one that is running stays,
        and looks, when it fires, whether it is time.
        """
        self._limit_s = timeout_s
        self._deadline = self._loop.time() + timeout_s
        if self._timer is None or self._timer_at > self._deadline:
            self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._deadline
        self._timer = self._loop.call_at(self._deadline, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._state == IDLE or self._state == DONE:
            return
        if self._loop.time() >= self._deadline:
            self.fail(DeadlinePassed(round(self._limit_s, 3)))
        else:
            self._arm()

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def sent(self) -> None:
        """The request is complete: with a complete answer the connection may serve again."""
        self._request_sent = True

    async def drain(self) -> None:
        """Wait until the replica takes more; raises when it no longer can."""
        if self._writable is not None:
            await self._writable
        if self.error is not None:
            raise self.error

    async def next_chunk(self) -> bytes:
        """What has arrived of the body since the last call; empty at its end."""
        while not self._chunks and self._state == BODY:
            if self.error is not None:
                raise self.error
            await self.arriving()
        return self.taken()

    def taken(self) -> bytes:
        if not self._chunks:
            return b""
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._buffered = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    @property
    def complete(self) -> bool:
        """The whole answer is here; `next_chunk` will not wait."""
        return self._state == DONE

    def end(self) -> bool:
        """Close the exchange: true if the connection can serve another."""
        reusable = self._state == DONE and self._request_sent and self.usable and self._drained
        self._state = IDLE
        self._chunks.clear()
        self._buffered = 0
        if not reusable:
            self.abort()
        return reusable

    @property
    def _drained(self) -> bool:
        """Nothing of this exchange is left, on its way out or in, that would meet the next one."""
        transport = cast(asyncio.Transport, self._transport)
        return not self._paused and transport.get_write_buffer_size() == 0

    def abort(self) -> None:
        self._clean = False
        self._disarm()
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        self._disarm()
        if self._transport is not None:
            self._transport.close()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def fail(self, error: BaseException, cause: BaseException | None = None) -> None:
        """End the exchange: whoever waits for anything of it gets this error."""
        error.__cause__ = cause or error.__cause__
        if self.error is None:
            self.error = error
        if self._state == HEAD:
            self._state = BODY  # whoever waits for the head finds the error
        self.abort()
        self._arrived()
        self._wake_writer()

    def arriving(self) -> asyncio.Future[None]:
        self._arrival = self._loop.create_future()
        return self._arrival

    def _arrived(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _wake_writer(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None


def header_of(headers: Headers, name: bytes) -> bytes:
    """The first of that name; empty if there is none."""
    for header in headers:
        if header[0] == name:
            return header[1]
    return b""


class Answer:
    """A replica's answer: status and headers now, the body as it comes. Leave it with `close()`."""

    __slots__ = ("_connection", "_give_back", "_sending", "headers", "status")

    def __init__(self, connection: Connection, give_back: Callable[[Connection], None]) -> None:
        self._connection: Connection | None = connection
        self._give_back = give_back
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

    async def read(self) -> bytes:
        """The whole body."""
        first = await self.next_chunk()
        if self.complete and not first:
            return first
        chunks = [first]
        while chunk := await self.next_chunk():
            chunks.append(chunk)
        return b"".join(chunks) if len(chunks) > 1 else first

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
        answer = Answer(connection, finish)
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
    ) -> Reply:
        """Send a whole request and read the whole answer."""
        framing = (b"content-length", str(len(body)).encode())
        answer = await self.send(
            method, target, [framing, *headers], body, timeout_s=timeout_s, fresh=fresh
        )
        try:
            return Reply(answer.status, answer.headers, await answer.read())
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
            _, connection = await asyncio.wait_for(
                self._loop.create_connection(
                    lambda: Connection(self._loop),
                    self._host,
                    self._port,
                    ssl=self._tls,
                    server_hostname=self._server_name if self._tls else None,
                ),
                min(self._connect_timeout_s, timeout_s),
            )
        except (OSError, UnicodeError, asyncio.TimeoutError) as exc:
            if timeout_s < self._connect_timeout_s and isinstance(exc, asyncio.TimeoutError):
                raise DeadlinePassed(round(timeout_s, 3)) from exc
            refused = not isinstance(exc, asyncio.TimeoutError)
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
