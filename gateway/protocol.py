"""One client's connection: HTTP/1.1 on httptools on one side, ASGI on the other.

In place of uvicorn's own, which spends on a small request as much as the rest of the gateway does. An
answer's head is held until its first body, as ASGI asks, and leaves with it in one write.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections import deque
from typing import Any, Final, NoReturn, cast
from urllib.parse import unquote

import httptools
import uvicorn
from prometheus_client import Gauge
from starlette.types import ASGIApp, Message, Scope
from uvicorn.server import ServerState

from gateway.errors import Malformed, body_of
from gateway.tracing import request_id_of

log = logging.getLogger(__name__)

HIGH_WATER_BYTES: Final = 64 * 1024
JOIN_UNDER_BYTES: Final = 64 * 1024
ASGI: Final = {"version": "3.0", "spec_version": "2.3"}
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
GONE: Final = {"type": "http.disconnect"}
WITHOUT_BODY: Final = (204, 304)
STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
    for status in http.HTTPStatus
}


class Protocol(asyncio.Protocol):
    """A connection; made by uvicorn's server, which calls `shutdown` and counts `connections`."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        self.loop = _loop or asyncio.get_running_loop()
        self.app: ASGIApp = cast(ASGIApp, config.loaded_app)
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._tasks = server_state.tasks
        self._connections = cast("set[Protocol]", server_state.connections)
        self._state = app_state
        # The application may yield from its lifespan where connections are to be counted.
        self._counted: Gauge | None = app_state.get("connections")
        self._drain: Any = app_state.get("drain")  # … and may say when it is to end
        self._keep_alive_s = config.timeout_keep_alive
        self._parser = httptools.HttpRequestParser(self)
        self._addresses: dict[str, Any] = {}
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects_continue = False
        self._arriving: Exchange | None = None  # whose body is being received
        self._current: Exchange | None = None  # whose answer is being sent
        self._waiting: deque[Exchange] = deque()  # pipelined (RFC 9112, section 9.3.2)
        self._task: asyncio.Task[None] | None = None
        self.unwritable: asyncio.Future[None] | None = None
        self._reading = True
        self._last = False  # what comes after it is not looked at
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0

    # The transport calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        if self._counted is not None:
            self._counted.inc()
        tls = transport.get_extra_info("sslcontext") is not None
        self._addresses = {
            "server": address_of(transport.get_extra_info("sockname")),
            "client": address_of(transport.get_extra_info("peername")),
            "scheme": "https" if tls else "http",
        }
        self._idle_since = self.loop.time()
        self._look_later(self._keep_alive_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """A client that leaves is not waited for: what works for it is cancelled."""
        self._connections.discard(self)
        if self._counted is not None:
            self._counted.dec()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self.resume_writing()
        self._waiting.clear()
        self._arriving = None
        if self._current is not None:
            self._current.leave()
            if self._task is not None and not self._current.complete:
                self._task.cancel()
        del self._parser  # which holds this object

    def data_received(self, data: bytes) -> None:
        if self._last:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # refused when its header was complete
        except httptools.HttpParserError:
            self.refuse("this is not an HTTP/1.1 request")

    def eof_received(self) -> None:
        """Who closes its half has left: the transport closes the other."""

    def pause_writing(self) -> None:
        self.unwritable = self.loop.create_future()

    def resume_writing(self) -> None:
        if self.unwritable is not None and not self.unwritable.done():
            self.unwritable.set_result(None)
        self.unwritable = None

    # The parser calls these.

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        if parser.should_upgrade():
            # httptools would take the body for the other protocol's, and so for the next request.
            self.refuse("this server does not change protocols: send no Upgrade header")
            return
        url = httptools.parse_url(self._url)
        raw_path = url.path or b"/"
        path = raw_path.decode("ascii")
        version = parser.get_http_version()
        keep_alive = version == "1.1" and parser.should_keep_alive()
        if self._drain is not None and self._drain.began:
            keep_alive = False
        scope = {
            "type": "http",
            "asgi": ASGI,
            "http_version": version,
            "method": parser.get_method().decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": url.query or b"",
            "root_path": "",
            "headers": self._headers,
            "state": self._state.copy(),
            **self._addresses,
        }
        expects_continue = self._expects_continue and version == "1.1"
        exchange = self._arriving = Exchange(self, scope, keep_alive, expects_continue)
        self._url = b""
        self._headers = []
        self._expects_continue = False
        if self._current is None:
            self._start(exchange)
        else:
            self._waiting.append(exchange)
            self.pause_reading()

    def on_body(self, body: bytes) -> None:
        if self._arriving is not None:
            self._arriving.arrived(body)

    def on_message_complete(self) -> None:
        if self._headers:
            # Trailers are no headers, of this or the next (RFC 9110, section 6.5.1).
            self._headers = []
            self._expects_continue = False
        if self._arriving is not None:
            self._last = not self._arriving.keep_alive
            self._arriving.arrived_whole()
            self._arriving = None

    # The exchanges call these.

    def pause_reading(self) -> None:
        if self._reading:
            self._reading = False
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._reading and not self._waiting:
            self._reading = True
            self.transport.resume_reading()

    async def writable(self) -> None:
        """Wait until the client has taken most of what was written."""
        while self.unwritable is not None:
            await asyncio.shield(self.unwritable)  # others wait for it when this one gives up

    def write(self, head: bytes, body: bytes) -> None:
        if len(body) < JOIN_UNDER_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    def ended(self, exchange: Exchange) -> None:
        """The application is done with it: the next in line, or nothing until there is one."""
        self._current = None
        if self._task is not None:
            self._tasks.discard(self._task)
            self._task = None
        if self.transport.is_closing():
            return
        if not exchange.complete:
            self.transport.abort()  # cut off: it must not look like an answer
        elif not exchange.keep_alive:
            self.transport.close()
        else:
            self._idle_since = self.loop.time()
            if self._waiting:
                self._start(self._waiting.popleft())
            self.resume_reading()

    def refuse(self, sentence: str) -> None:
        """What is no HTTP is answered in the shape of every other error, and not listened to again."""
        self._last = True
        if self._waiting and self._arriving is not None:
            self._waiting.pop()  # it will never come whole
        whole = self._waiting[-1] if self._waiting else self._current
        if whole is not None and whole is not self._arriving:
            whole.keep_alive = False  # its answer is the last
            return
        if self._arriving is None or not self._arriving.started:
            self.transport.write(refusal(sentence))
        self.transport.close()

    def shutdown(self) -> None:
        """The server stops: the request that is being answered is the last."""
        if self._current is None:
            self.transport.close()
        else:
            self._current.keep_alive = False

    def _start(self, exchange: Exchange) -> None:
        self._current = exchange
        self._task = self.loop.create_task(exchange.run(self.app))
        self._tasks.add(self._task)

    def _look_later(self, seconds: float) -> None:
        self._idle_timer = self.loop.call_later(seconds, self._look_if_idle)

    def _look_if_idle(self) -> None:
        """One timer per connection looks, when it fires, whether it is time."""
        left = self._idle_since + self._keep_alive_s - self.loop.time()
        if self._current is not None:
            self._look_later(self._keep_alive_s)
        elif left > 0:
            self._look_later(left)
        else:
            self.transport.close()


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
        "_left",
        "_received",
        "_scope",
        "_taken",
        "_unread",
        "complete",
        "keep_alive",
        "started",
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
        self._received = False  # the request's end is here
        self._taken = False  # … and was given to the application
        self._gone = False
        self._arrival: asyncio.Future[None] | None = None
        self._head = b""
        self._chunked = False
        self._left: int | None = None  # of the announced length; None where there is none
        self.started = False
        self.complete = False

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self._scope, self.receive, self.send)
        except Exception:  # the border of the process: the connection ends, the server does not
            log.exception("a fault in the application")
        finally:
            self._connection.ended(self)

    # The connection calls these.

    def arrived(self, body: bytes) -> None:
        if self.complete:
            return  # answered already: nobody reads it
        self._chunks.append(body)
        self._unread += len(body)
        if self._unread > HIGH_WATER_BYTES:
            self._connection.pause_reading()
        self._wake()

    def arrived_whole(self) -> None:
        self._received = True
        self._wake()

    def leave(self) -> None:
        self._gone = True
        self._wake()

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
        if self._gone:
            return
        if message["type"] == "http.response.body":
            self._send_body(message.get("body", b""), message.get("more_body", False))
        elif message["type"] == "http.response.start":
            self._begin(message["status"], message.get("headers", ()))

    def _begin(self, status: int, headers: Any) -> None:
        if self.started:
            raise RuntimeError("an answer begins once")
        self.started = True
        lines = [STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        count = 1
        close = not self.keep_alive
        for name, value in headers:
            if name == b"content-length":
                self._left = int(value)
            elif name == b"connection" and b"close" in value.lower():
                close, self.keep_alive = False, False
            lines += (name, b": ", value, b"\r\n")
            count += 1
        if close:
            lines.append(b"connection: close\r\n")
            count += 1
        if self._scope["method"] == "HEAD" or status in WITHOUT_BODY:
            self._left = -1
        elif self._left is None:
            self._chunked = self._scope["http_version"] == "1.1"
            if self._chunked:
                lines.append(b"transfer-encoding: chunked\r\n")
                count += 1
            else:
                self.keep_alive = False
        lines.append(b"\r\n")
        self._head = head = b"".join(lines)
        if head.count(b"\n") != count + 1 or head.count(b"\r") != count + 1:
            self._cut("a header of the answer holds a line's end")

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


def address_of(name: Any) -> tuple[str, int] | None:
    """Host and port; a socket file has none."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


def refusal(sentence: str) -> bytes:
    request_id = request_id_of(())
    body = body_of(sentence, Malformed.code, request_id)
    head = (
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\nx-request-id: {request_id}\r\n\r\n"
    )
    return head.encode() + body
