"""The connections to one server, and the responses that arrive on them."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from time import perf_counter
from typing import Final, NamedTuple

from gateway.errors import DeadlinePassed, GatewayError, UpstreamResponseTooLarge
from gateway.http_client.connection import Buffer, RequestNotSent, UpstreamConnection
from gateway.http_client.response import DONE, Headers
from gateway.media_types import EVENT_STREAM
from gateway.tasks import TaskTimeout

MAX_RESPONSE_BYTES: Final = (1 << 31) - 1
MAX_PENDING_WORK: Final = 4096  # requests whose deadline has passed
EVENT_STREAM_TYPE: Final = EVENT_STREAM.encode()


def find_header(headers: Headers, name: bytes) -> bytes:
    for header in headers:
        if header[0] == name:
            return header[1]
    return b""


class UpstreamResponse:
    """A response: status and headers, and the body as a stream. It must be closed."""

    def __init__(
        self,
        connection: UpstreamConnection,
        release: Callable[[UpstreamConnection], None],
        send_task: asyncio.Task[None] | None,
        max_bytes: int,
    ) -> None:
        self._connection: UpstreamConnection | None = connection
        self._release = release
        self._send_task = send_task  # still sends the body of the request, perhaps
        self._max_bytes = max_bytes
        self.status = connection.response.status
        self.headers = connection.response.headers
        self.first_error: GatewayError | None = None  # the first event of a stream, in place of it

    @property
    def is_complete(self) -> bool:
        return self._connection is None or self._connection.response.state is DONE

    @property
    def is_event_stream(self) -> bool:
        return self.header(b"content-type").startswith(EVENT_STREAM_TYPE)

    def header(self, name: bytes) -> bytes:
        return find_header(self.headers, name)

    def take_buffered(self) -> bytes:
        return b"" if self._connection is None else self._connection.take_buffered()

    def unread(self, data: bytes) -> None:
        if data and self._connection is not None:
            self._connection.response.unread(data)

    async def next_chunk(self) -> bytes:
        return b"" if self._connection is None else await self._connection.next_chunk()

    async def read(self, max_bytes: int = MAX_RESPONSE_BYTES) -> bytes:
        """Return the whole body. Raises `UpstreamResponseTooLarge` above this or the client's limit."""
        max_bytes = min(max_bytes, self._max_bytes)
        # Joining the chunks of a large body at its end would hold the event loop.
        file = io.BytesIO()
        chunk = self.take_buffered()
        if self.is_complete and len(chunk) <= max_bytes:  # as nearly all small responses
            return chunk
        while chunk or not self.is_complete:
            if file.write(chunk) and file.tell() > max_bytes:
                raise UpstreamResponseTooLarge(max_bytes)
            chunk = await self.next_chunk()
        return file.getvalue()

    async def read_complete(self, max_bytes: int = MAX_RESPONSE_BYTES) -> CompleteResponse:
        """Return the response with its whole body, and close it. Raises `UpstreamResponseTooLarge`."""
        try:
            return CompleteResponse(self.status, self.headers, await self.read(max_bytes))
        finally:
            self.close()

    def set_timeout(self, timeout_s: float) -> None:
        if self._connection is not None and not self.is_complete:
            self._connection.set_timeout(timeout_s)

    def close(self) -> None:
        """Release the connection; it is closed if the response is incomplete."""
        if self._send_task is not None:
            self._send_task.cancel()
        if self._connection is not None:
            connection, self._connection = self._connection, None
            self._release(connection)


class CompleteResponse(NamedTuple):
    """A response with its whole body; a tuple, because a frozen dataclass costs 1 µs more."""

    status: int
    headers: Headers
    body: bytes

    def header(self, name: bytes) -> bytes:
        return find_header(self.headers, name)


class HttpClient:
    """The connections to one server."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        server_name: str = "",
        connect_timeout_s: float = 0.5,
        idle_timeout_s: float = 4.0,
        max_answer_bytes: int = MAX_RESPONSE_BYTES,
        max_work_s: float = 300.0,
    ) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._server_name = server_name or host
        self.keep_alive = True  # reuse connections
        self.outstanding = 0
        self.last_response_at = 0.0  # a time of `perf_counter`
        self._connect_timeout_s = connect_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._max_answer_bytes = max_answer_bytes
        self._max_work_s = max_work_s
        self._is_closed = False
        # Stored, because getting the running loop is a system call each time.
        self._loop = asyncio.get_running_loop()
        # A stack: the connection that was used last is used next.
        self._idle_connections: list[UpstreamConnection] = []
        # The requests whose deadline has passed, and on which the server still works.
        self._pending_work: set[UpstreamConnection] = set()
        self._sweep_timer: asyncio.TimerHandle | None = None
        self.authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._host_header = f"host: {self.authority}".encode("latin-1")

    async def send(
        self,
        method: bytes,
        target: bytes,
        *,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes | list[Buffer] | AsyncIterator[bytes] = b"",
        timeout_s: float,
        fresh: bool = False,
        outlives_client: bool = True,
    ) -> UpstreamResponse:
        """Send a request and return once the response's head has arrived.

        `headers` contain the framing: Content-Length, or Transfer-Encoding: chunked, for which a streamed
        `body` is encoded in chunks. `fresh` requests a new connection. Raises `RequestNotSent`,
        `BadUpstream` or `DeadlinePassed`. The server goes on with a POST that `outlives_client` when its
        deadline has passed: the connection stays open until it answers, at most `max_work_s` in all.
        """
        connection: UpstreamConnection | None = None
        send_task: asyncio.Task[None] | None = None
        release = self._release_fresh if fresh else self._release
        if not fresh:  # health checks and loads are not counted
            self.outstanding += 1
        try:
            connection = None if fresh else self._take_idle()
            if connection is None:
                connection = await self._connect(timeout_s)
                if not connection.is_usable:
                    raise RequestNotSent("the replica closed a new connection")
            head = encode_head(method, target, self._host_header, headers)
            connection.begin_request(timeout_s)
            if isinstance(body, (bytes, list)):
                connection.send(head, body)
            else:
                is_chunked = any(name == b"transfer-encoding" for name, _ in headers)
                sending = connection.send_chunks(head, body, is_chunked=is_chunked)
                send_task = self._loop.create_task(sending)
            await connection.wait_for_head()
        except BaseException as exc:
            if send_task is not None:
                send_task.cancel()
            if (
                isinstance(exc, DeadlinePassed)
                and outlives_client
                and method == b"POST"
                and connection is not None
                and connection.is_work_pending
                and len(self._pending_work) < MAX_PENDING_WORK
            ):
                exc.work_ended = self._wait_for_end(connection, self._max_work_s - timeout_s)
            else:
                release(connection)
            raise
        self.last_response_at = perf_counter()
        return UpstreamResponse(connection, release, send_task, self._max_answer_bytes)

    async def request(
        self,
        method: bytes,
        target: bytes,
        *,
        headers: Sequence[tuple[bytes, bytes]] = (),
        body: bytes = b"",
        timeout_s: float,
        fresh: bool = False,
        max_bytes: int = MAX_RESPONSE_BYTES,
    ) -> CompleteResponse:
        """Send a request and read the whole response.

        Raises the same errors as `send`, and `UpstreamResponseTooLarge`.
        """
        framing = (b"content-length", str(len(body)).encode())
        response = await self.send(
            method,
            target,
            headers=[framing, *headers],
            body=body,
            timeout_s=timeout_s,
            fresh=fresh,
            outlives_client=False,
        )
        return await response.read_complete(max_bytes)

    def close(self) -> None:
        """Close the idle connections; a busy one is closed when its exchange ends."""
        self._is_closed = True
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        self.drop_idle()

    def drop_idle(self) -> None:
        for connection in self._idle_connections:
            connection.close()
        self._idle_connections.clear()
        self.drop_pending_work()

    def drop_pending_work(self) -> None:
        """Expect no more that the server ends what it does for requests whose deadline has passed."""
        for connection in list(self._pending_work):
            connection.abort()

    def _wait_for_end(
        self, connection: UpstreamConnection, timeout_s: float
    ) -> asyncio.Future[None]:
        """Return a future that is done when the server has answered or the connection is closed."""
        ended = self._loop.create_future()

        def end() -> None:
            self._pending_work.discard(connection)
            self._release(connection)
            ended.set_result(None)

        self._pending_work.add(connection)
        connection.wait_for_end(timeout_s, end)
        return ended

    def _take_idle(self) -> UpstreamConnection | None:
        while self._idle_connections:
            connection = self._idle_connections.pop()
            if self._is_fresh(connection):
                return connection
            connection.close()
        return None

    async def _connect(self, timeout_s: float) -> UpstreamConnection:
        if timeout_s <= 0:
            raise DeadlinePassed(0)
        try:
            with TaskTimeout(self._loop, min(self._connect_timeout_s, timeout_s)):
                _, connection = await self._loop.create_connection(
                    lambda: UpstreamConnection(self._loop),
                    self._host,
                    self._port,
                    ssl=self._tls,
                    server_hostname=self._server_name if self._tls else None,
                )
        except (OSError, UnicodeError) as exc:
            if timeout_s < self._connect_timeout_s and isinstance(exc, TimeoutError):
                raise DeadlinePassed(round(timeout_s, 3)) from exc
            refused = not isinstance(exc, TimeoutError)
            reason = f"the replica cannot be reached ({describe_connect_failure(exc)})"
            raise RequestNotSent(reason, is_refused=refused) from exc
        return connection

    def _release_fresh(self, connection: UpstreamConnection | None) -> None:
        # A fresh connection only proves that the server accepts connections: it is not reused.
        if connection is not None and connection.end_request():
            connection.close()

    def _release(self, connection: UpstreamConnection | None) -> None:
        self.outstanding -= 1
        if connection is None or not connection.end_request():
            return
        if self._is_closed or not self.keep_alive:
            connection.close()
            return
        connection.idle_since = self._loop.time()
        self._idle_connections.append(connection)
        if self._sweep_timer is None:
            self._sweep_timer = self._loop.call_later(self._idle_timeout_s, self._close_expired)

    def _close_expired(self) -> None:
        # A server's shutdown may wait for idle connections.
        self._sweep_timer = None
        connections, self._idle_connections = self._idle_connections, []
        for connection in connections:
            if self._is_fresh(connection):
                self._idle_connections.append(connection)
            else:
                connection.close()
        if self._idle_connections:
            idle_s = self._loop.time() - self._idle_connections[0].idle_since
            wait_s = max(self._idle_timeout_s - idle_s, 0.05)
            self._sweep_timer = self._loop.call_later(wait_s, self._close_expired)

    def _is_fresh(self, connection: UpstreamConnection) -> bool:
        idle_s = self._loop.time() - connection.idle_since
        return idle_s < self._idle_timeout_s and connection.is_usable


def describe_connect_failure(error: OSError | UnicodeError) -> str:
    """Return why a connection could not be established, without addresses."""
    match error:
        case ssl.SSLCertVerificationError():
            return error.verify_message.partition(",")[0]
        case ssl.SSLError():
            return error.reason or "TLS failed"
        case socket.gaierror():
            return "its name is unknown"
        case OSError(errno=int(number)):
            return os.strerror(number).lower()
    return "no connection in time" if isinstance(error, TimeoutError) else "no connection"


def encode_head(
    method: bytes, target: bytes, host_header: bytes, headers: Sequence[tuple[bytes, bytes]]
) -> bytes:
    first_line = b"%b %b HTTP/1.1" % (method, target)
    return b"\r\n".join((first_line, host_header, *map(b": ".join, headers), b"\r\n"))
