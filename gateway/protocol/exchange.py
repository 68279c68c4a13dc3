"""A request and its answer: what comes of the connection on one side, ASGI on the other."""

from __future__ import annotations

import asyncio
import http
import logging
from typing import TYPE_CHECKING, Any, Final, NoReturn

from starlette.types import ASGIApp, Message, Scope

from gateway.errors import GatewayError, body_of

if TYPE_CHECKING:
    from gateway.protocol.connection import Protocol

log = logging.getLogger(__name__)

HIGH_WATER_BYTES: Final = 64 * 1024
# A client that was answered early may send the rest, and read the answer then; but not for ever.
MOST_WASTED_BYTES: Final = 64 << 20
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
GONE: Final = {"type": "http.disconnect"}
WITHOUT_BODY: Final = (204, 304)
STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
    for status in http.HTTPStatus
}


class Exchange:
    """A request and its answer, as ASGI's `scope`, `receive` and `send`."""

    __slots__ = (
        "_arrival",
        "_chunked",
        "_chunks",
        "_connection",
        "_expects_continue",
        "_gone",
        "_head",
        "_hushed",
        "_left",
        "_received",
        "_scope",
        "_taken",
        "_unread",
        "_wasted",
        "complete",
        "keep_alive",
        "started",
        "status",
    )

    def __init__(
        self, connection: Protocol, scope: Scope, keep_alive: bool, expects_continue: bool
    ) -> None:
        self._connection = connection
        self._scope = scope
        self.keep_alive = keep_alive
        self._expects_continue = expects_continue
        self._chunks: list[bytes] = []
        self._unread = 0
        self._wasted = 0
        self._received = False  # the request's end is here
        self._taken = False  # … and was given to the application
        self._gone = False
        self._hushed = False
        self._arrival: asyncio.Future[None] | None = None
        self._head = b""
        self._chunked = False
        self._left: int | None = None  # of the announced length; None where there is none
        self.started = False
        self.status = 0  # until the answer begins
        self.complete = False

    async def run(self, app: ASGIApp, turn: asyncio.Future[None] | None) -> None:
        """Answer the request; begin when `turn` is done, if there is one."""
        try:
            if turn is not None:
                await turn
            await app(self._scope, self.receive, self.send)
        except Exception:  # the border of the process: the connection ends, the server does not
            log.exception("a fault in the application")
        finally:
            self._connection.ended(self)

    # The connection calls these.

    def arrived(self, body: bytes) -> None:
        if self.complete:  # answered already: nobody reads it
            self._wasted += len(body)
            if self._wasted > MOST_WASTED_BYTES:
                self._connection.transport.abort()
            return
        self._chunks.append(body)
        self._unread += len(body)
        if self._unread > HIGH_WATER_BYTES:
            self._connection.pause_reading()
        self._wake()

    def arrived_whole(self) -> None:
        self._received = True
        self._wake()

    def hush(self) -> None:
        """What the application sends reaches nobody any more."""
        self._hushed = True

    def leave(self) -> None:
        self._gone = self._hushed = True
        self._wake()

    def length_to_come(self) -> int:
        """Of the announced length, while nothing was taken of it yet; 0 where there is none."""
        announced = self._announced
        return announced and announced - self._unread

    def is_gathering(self, most_bytes: int) -> bool:
        """Little is here of a body that may be sent, and that comes without being asked for."""
        few = self._unread <= HIGH_WATER_BYTES and not self._received
        return few and not self._expects_continue and self._announced <= most_bytes

    @property
    def _announced(self) -> int:
        for name, value in self._scope["headers"]:
            if name == b"content-length":
                return int(value)
        return 0

    def is_not_asked_for(self) -> bool:
        """The client waits for 100 Continue, which the application has not wanted yet."""
        return self._expects_continue and not self.complete

    # The application calls these.

    async def receive(self) -> Message:
        if self._expects_continue:
            self._expects_continue = False
            answering = self.started and not self._head
            if not (self._chunks or self._received or answering or self._gone):
                self._connection.transport.write(CONTINUE)
        while not (self._chunks or self._gone or self.complete or self._received > self._taken):
            self._arrival = self._connection.loop.create_future()
            await self._arrival
        if self._gone or self.complete:
            return GONE
        chunks = self._chunks
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        self._chunks = []
        if self._unread > HIGH_WATER_BYTES:
            self._connection.resume_reading()  # at the end, too: a client that leaves is to be noticed
        self._unread = 0
        self._taken = self._received
        return {"type": "http.request", "body": body, "more_body": not self._received}

    async def send(self, message: Message) -> None:
        if self._connection.unwritable is not None:
            await self._connection.writable()
        if self._hushed:
            return
        if message["type"] == "http.response.body":
            self._send_body(message.get("body", b""), message.get("more_body", False))
        elif message["type"] == "http.response.start":
            self._begin(message["status"], message.get("headers", ()))

    def _begin(self, status: int, headers: Any) -> None:
        if self.started:
            raise RuntimeError("an answer begins once")
        self.started = True
        self.status = status
        lines = [STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        count = 1
        says_close = False
        for name, value in headers:
            if name == b"content-length":
                self._left = int(value)
            elif name == b"connection" and b"close" in value.lower():
                says_close, self.keep_alive = True, False
            lines += (name, b": ", value, b"\r\n")
            count += 1
        added = self._frame(status, says_close=says_close)
        lines += added
        count += len(added)
        lines.append(b"\r\n")
        self._head = head = b"".join(lines)
        if head.count(b"\n") != count + 1 or head.count(b"\r") != count + 1:
            self._cut("a header of the answer holds a line's end")

    def _frame(self, status: int, *, says_close: bool) -> list[bytes]:
        """Choose how the body's end is told, and whether the connection stays; return the header lines
        that say so beside the application's own."""
        version = self._scope["http_version"]
        if self._scope["method"] == "HEAD" or status in WITHOUT_BODY:
            self._left = -1
        elif self._left is None:
            self._chunked = version == "1.1"
            self.keep_alive = (
                self.keep_alive and self._chunked
            )  # or the connection's end is the body's
        added = []
        if not self.keep_alive and not says_close:
            added.append(b"connection: close\r\n")
        elif self.keep_alive and version == "1.0":
            added.append(b"connection: keep-alive\r\n")
        if self._chunked:
            added.append(b"transfer-encoding: chunked\r\n")
        return added

    def _send_body(self, body: bytes, more: bool) -> None:
        if self.complete or not self.started:
            raise RuntimeError("a body out of turn")
        head, self._head = self._head, b""
        left = self._left
        if left == -1:
            body = b""
        elif left is not None:
            self._left = left = left - len(body)
            if left < 0 or (left and not more):
                self._cut("an answer's body is not as long as its Content-Length")
        elif self._chunked:
            if body:
                head += b"%x\r\n" % len(body)
                body += b"\r\n"
            if not more:
                body += b"0\r\n\r\n"
        if head or body:
            self._connection.write(head, body)
        if not more:
            self.complete = True
            self._wake()

    def _cut(self, fault: str) -> NoReturn:
        """An application that goes on all the same must not mend it."""
        self._connection.transport.abort()
        raise RuntimeError(fault)

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


def refusal(error: GatewayError, request_id: str) -> bytes:
    body = body_of(error.detail, error.code, request_id)
    headers = {
        "content-type": "application/json",
        **{name.lower(): value for name, value in (error.headers or {}).items()},
        "connection": "close",
        "content-length": str(len(body)),
        "x-request-id": request_id,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return STATUS_LINES[error.status] + lines.encode() + b"\r\n" + body
