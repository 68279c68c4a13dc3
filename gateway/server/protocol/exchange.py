"""One request and its response: the connection on one side, ASGI on the other."""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Sequence
from enum import Enum, auto
from typing import Final, NoReturn, Protocol

from starlette.types import ASGIApp, Message, Scope

from gateway.errors import GatewayError, serialize_error

log = logging.getLogger(__name__)

REQUEST_HIGH_WATER_BYTES: Final = 64 * 1024
MIN_SEPARATE_WRITE_BYTES: Final = 64 * 1024  # a shorter body is copied behind its head
# A client may send the rest of its request before it reads an early response, but not without limit.
MAX_DISCARDED_BYTES: Final = 64 << 20
CONTINUE_RESPONSE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
DISCONNECT_MESSAGE: Final = {"type": "http.disconnect"}
BODILESS_STATUSES: Final = (204, 304)


HeaderPairs = Sequence[tuple[bytes, bytes]]


class BodyFraming(Enum):
    """The sign by which the client finds the end of a body (RFC 9112, section 6.3)."""

    LENGTH = auto()  # Content-Length
    CHUNKS = auto()  # Transfer-Encoding: chunked
    CLOSE = auto()  # the end of the connection, for HTTP/1.0
    NO_BODY = auto()  # the response has none


# A response compares several members, and each costs 0.4 µs more if it is read from its class.
LENGTH, CHUNKS, CLOSE, NO_BODY = BodyFraming

STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}".encode() for status in http.HTTPStatus
}


class ClientConnection(Protocol):
    """The part of a connection that a request cycle uses."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    drain_waiter: asyncio.Future[None] | None

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def yield_reading(self) -> None: ...
    async def wait_writable(self) -> None: ...
    def end_cycle(self, cycle: RequestCycle) -> None: ...


class RequestCycle:
    """A request and its response, as ASGI's `scope`, `receive` and `send`."""

    __slots__ = (
        "_chunks",
        "_connection",
        "_discarded_bytes",
        "_expects_continue",
        "_framing",
        "_is_disconnected",
        "_is_muted",
        "_is_request_complete",
        "_is_request_delivered",
        "_pending_head",
        "_receive_waiter",
        "_remaining_bytes",
        "_scope",
        "_unread_bytes",
        "complete",
        "keep_alive",
        "started",
        "status",
        "task",
    )

    def __init__(
        self, connection: ClientConnection, scope: Scope, keep_alive: bool, expects_continue: bool
    ) -> None:
        self._connection = connection
        self._scope = scope
        self.keep_alive = keep_alive
        self._expects_continue = expects_continue
        self._chunks: list[bytes] = []
        self._unread_bytes = 0
        self._discarded_bytes = 0
        self._is_request_complete = False  # the end of the request was received
        self._is_request_delivered = False  # the application has received the end of the request
        self._is_disconnected = False
        self._is_muted = False
        self._receive_waiter: asyncio.Future[None] | None = None
        self._pending_head = b""
        self._framing = NO_BODY
        self._remaining_bytes = 0  # the unsent part of the response's Content-Length
        self.started = False
        self.status = 0  # 0: the response has not started
        self.complete = False
        self.task: asyncio.Task[None] | None = None  # set while the application runs

    async def run(self, app: ASGIApp, turn: asyncio.Future[None] | None) -> None:
        try:
            if turn is not None:
                await turn
            await app(self._scope, self.receive, self.send)
        except Exception:  # must end the connection, not the server
            log.exception("unhandled exception in the application")
        finally:
            self._connection.end_cycle(self)

    # Called by the connection.

    def feed_body(self, body: bytes) -> None:
        if self.complete:  # the response is sent, and the application reads no more
            self._discarded_bytes += len(body)
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                self._connection.transport.abort()
            self._connection.yield_reading()
            return
        self._chunks.append(body)
        self._unread_bytes += len(body)
        if self._unread_bytes > REQUEST_HIGH_WATER_BYTES:
            self._connection.pause_reading()
        if self._receive_waiter is not None:
            self._wake_receiver()

    def end_body(self) -> None:
        self._is_request_complete = True
        if self._receive_waiter is not None:
            self._wake_receiver()

    def mute(self) -> None:
        """Discard all that the application sends from now on."""
        self._is_muted = True

    def abandon(self) -> None:
        """Tell the application that the client is gone, and cancel it unless its response is complete."""
        self._is_disconnected = True
        self._is_muted = True
        self._wake_receiver()
        if self.task is not None and not self.complete:
            self.task.cancel()

    def is_gathering(self) -> bool:
        """Return whether to wait for more of the body before the application starts."""
        is_small = self._unread_bytes <= REQUEST_HIGH_WATER_BYTES and not self._is_request_complete
        return is_small and not self._expects_continue

    def is_awaiting_continue(self) -> bool:
        """Return whether the client waits for 100 Continue, which the application triggers by reading."""
        return self._expects_continue and not self.complete

    @property
    def is_responding(self) -> bool:
        return self.started and not self._pending_head

    def send_continue(self) -> bool:
        """Send an interim response unless the response has begun; return False if HTTP/1.0 forbids it."""
        if self.is_responding:
            return True
        is_allowed: bool = self._scope["http_version"] == "1.1"
        if is_allowed:
            self._connection.transport.write(CONTINUE_RESPONSE)
        return is_allowed

    # Called by the application.

    async def receive(self) -> Message:
        if self._expects_continue:
            self._expects_continue = False
            if not (
                self._chunks
                or self._is_request_complete
                or self.is_responding
                or self._is_disconnected
            ):
                self._connection.transport.write(CONTINUE_RESPONSE)
        while not (
            self._chunks
            or self._is_disconnected
            or self.complete
            or (self._is_request_complete and not self._is_request_delivered)
        ):
            self._receive_waiter = self._connection.loop.create_future()
            await self._receive_waiter
        if self._is_disconnected or self.complete:
            return DISCONNECT_MESSAGE
        chunks = self._chunks
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        self._chunks = []
        if self._unread_bytes > REQUEST_HIGH_WATER_BYTES:
            self._connection.resume_reading()  # also at the end, to notice a disconnect
        self._unread_bytes = 0
        self._is_request_delivered = self._is_request_complete
        return {"type": "http.request", "body": body, "more_body": not self._is_request_complete}

    async def send(self, message: Message) -> None:
        if self._connection.drain_waiter is not None:
            await self._connection.wait_writable()
        if self._is_muted:
            return
        if message["type"] == "http.response.body":
            self._send_body(message.get("body", b""), message.get("more_body", False))
        elif message["type"] == "http.response.start":
            self._start_response(message["status"], message.get("headers", ()))

    def _start_response(self, status: int, headers: HeaderPairs) -> None:
        if self.started:
            raise RuntimeError("the response was already started")
        self.started = True
        self.status = status
        fields = dict(headers)
        length = fields.get(b"content-length")
        if length is not None:
            self._remaining_bytes = int(length)
        says_close = b"connection" in fields and says_connection_close(headers)
        self._framing = framing = choose_framing(self._scope, status, has_length=length is not None)
        if says_close or framing is CLOSE:
            self.keep_alive = False
        # Joined without a loop in Python, which would cost 3 % of the instructions of a `/v2` request.
        lines = [STATUS_LINES.get(status) or b"HTTP/1.1 %d " % status, *map(b": ".join, headers)]
        if not self.keep_alive and not says_close:
            lines.append(b"connection: close")
        elif self.keep_alive and self._scope["http_version"] == "1.0":
            lines.append(b"connection: keep-alive")
        if framing is CHUNKS:
            lines.append(b"transfer-encoding: chunked")
        line_breaks = len(lines) + 1
        lines.append(b"\r\n")
        self._pending_head = head = b"\r\n".join(lines)
        if head.count(b"\n") != line_breaks or head.count(b"\r") != line_breaks:
            self._abort("a response header contains a line break")

    def _send_body(self, body: bytes, has_more: bool) -> None:
        if self.complete or not self.started:
            raise RuntimeError("unexpected response body")
        head = self._pending_head
        self._pending_head = b""
        if self._framing is NO_BODY:
            body = b""
        elif self._framing is LENGTH:
            self._remaining_bytes -= len(body)
            if self._remaining_bytes < 0 or (self._remaining_bytes and not has_more):
                self._abort("the response body does not match its Content-Length")
        elif self._framing is CHUNKS:
            if body:
                head += b"%x\r\n" % len(body)
                body += b"\r\n"
            if not has_more:
                body += b"0\r\n\r\n"
        if head or body:
            write_parts(self._connection.transport, head, body)
        if not has_more:
            self.complete = True
            self._wake_receiver()

    def _abort(self, reason: str) -> NoReturn:
        # An application that catches the error must not be able to complete the response.
        self._connection.transport.abort()
        raise RuntimeError(reason)

    def _wake_receiver(self) -> None:
        if self._receive_waiter is not None and not self._receive_waiter.done():
            self._receive_waiter.set_result(None)


def says_connection_close(headers: HeaderPairs) -> bool:
    return any(name == b"connection" and b"close" in value.lower() for name, value in headers)


def choose_framing(scope: Scope, status: int, *, has_length: bool) -> BodyFraming:
    if scope["method"] == "HEAD" or status in BODILESS_STATUSES:
        return NO_BODY
    if has_length:
        return LENGTH
    return CHUNKS if scope["http_version"] == "1.1" else CLOSE


def write_parts(transport: asyncio.Transport, head: bytes, body: bytes) -> None:
    if len(body) < MIN_SEPARATE_WRITE_BYTES:
        transport.write(head + body)
    else:
        transport.writelines((head, body))


def encode_error_response(error: GatewayError, request_id: str) -> bytes:
    body = serialize_error(error.detail, error.code, request_id)
    headers = {
        "content-type": "application/json",
        **{name.lower(): value for name, value in (error.headers or {}).items()},
        "connection": "close",
        "content-length": str(len(body)),
        "x-request-id": request_id,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return b"%b\r\n%b\r\n%b" % (STATUS_LINES[error.status], lines.encode(), body)
