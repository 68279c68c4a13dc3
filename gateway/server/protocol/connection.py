"""The asyncio side of a client connection: its transport, the order of its requests, and its deadlines."""

from __future__ import annotations

import asyncio
import http
import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from socket import SO_LINGER, SOL_SOCKET
from ssl import cert_time_to_seconds
from struct import pack
from typing import Any, Final, NoReturn, cast

import uvicorn
from starlette.types import ASGIApp, Message, Scope
from uvicorn.server import ServerState

from gateway.access.peers import ClientCounts, client_network
from gateway.config.settings import Settings
from gateway.errors import (
    GatewayError,
    MalformedRequest,
    RequestTooSlow,
    TooManyConnections,
    serialize_error,
)
from gateway.server.protocol.parser import Phase, RequestParser
from gateway.telemetry.tracing import create_request_id

log = logging.getLogger(__name__)

HEALTH_PATHS: Final = frozenset((b"/livez", b"/readyz", b"/v2/health/live", b"/v2/health/ready"))
CERTIFICATE_NAME_KINDS: Final = ("URI", "DNS", "email")
RESERVED_CONNECTIONS: Final = 32  # connections over the limit that may send health probes
RESERVED_HEADER_TIMEOUT_S: Final = 1.0
MAX_PIPELINED: Final = 16  # requests that wait for the response before theirs
SWEEP_INTERVAL_S: Final = 1.0
# Refusing a client takes up to 0.1 ms, and hundreds may become overdue in the same sweep.
OVERDUE_PER_STEP: Final = 4
MIN_BYTES_PER_S: Final = 1 << 10  # the average rate at which a body is sent or a response read
LINGER_S: Final = 1.0
LAST_REQUEST_S: Final = 1.0  # when the server stops, a request may be on its way for this time
REJECTION_LOG_INTERVAL_S: Final = 1.0
RESPONSE_NOT_READ: Final = "answer_not_taken"
LINGER_ZERO: Final = pack("ii", 1, 0)  # the option SO_LINGER: enabled, zero seconds
EARLY_START_BYTES: Final = 64 * 1024  # of a body that is incomplete
REQUEST_HIGH_WATER_BYTES: Final = (
    256 * 1024
)  # as much as one read: less would pause reading after each
MIN_SEPARATE_WRITE_BYTES: Final = 64 * 1024  # a shorter body is copied behind its head
# A client may send the rest of its request before it reads an early response, but not without limit.
MAX_DISCARDED_BYTES: Final = 64 << 20
CONTINUE_RESPONSE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
DISCONNECT_MESSAGE: Final = {"type": "http.disconnect"}
BODILESS_STATUSES: Final = (204, 304)
STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}".encode() for status in http.HTTPStatus
}
HeaderPairs = Sequence[tuple[bytes, bytes]]
SocketName = tuple[str, int]  # host and port


class Patience:
    """The time for which a client may still stall; what it moves earns time, up to the limit."""

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._left_s = limit_s
        self._spent_at = now

    def spend(self, now: float, moved_bytes: int) -> bool:
        """Count the time since the last call; return whether none is left."""
        earned_s = max(moved_bytes, 0) / MIN_BYTES_PER_S
        self._left_s = min(self._left_s - (now - self._spent_at) + earned_s, self._limit_s)
        self._spent_at = now
        return self._left_s < 0

    def skip(self, now: float) -> None:
        """Let the time since the last call pass without counting it."""
        self._spent_at = now


class ClientRegistry:
    """The connections of each client, and the sweep over all of them."""

    def __init__(self) -> None:
        self.connections = ClientCounts()
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._rejected_count = 0
        self._rejection_logged_at = -math.inf

    def log_rejection(self, now: float, log_fields: dict[str, str]) -> None:
        # At most one line per interval, so that a flood of connections does not flood the log.
        self._rejected_count += 1
        if now - self._rejection_logged_at >= REJECTION_LOG_INTERVAL_S:
            log.warning("too many connections: %d rejected", self._rejected_count, extra=log_fields)
            self._rejected_count = 0
            self._rejection_logged_at = now

    def watch(self, loop: asyncio.AbstractEventLoop, connections: set[HttpProtocol]) -> None:
        """Check all connections once per interval, while there are any."""
        if self._sweep_timer is None and connections:
            self._sweep_timer = loop.call_later(SWEEP_INTERVAL_S, self._sweep, loop, connections)

    def _sweep(self, loop: asyncio.AbstractEventLoop, connections: set[HttpProtocol]) -> None:
        overdue = (each for each in list(connections) if each.check(loop.time()))
        self._enforce(loop, connections, overdue)

    def _enforce(
        self,
        loop: asyncio.AbstractEventLoop,
        connections: set[HttpProtocol],
        overdue: Iterator[HttpProtocol],
    ) -> None:
        if len(list(islice(overdue, OVERDUE_PER_STEP))) == OVERDUE_PER_STEP:
            loop.call_soon(self._enforce, loop, connections, overdue)
            return
        self._sweep_timer = None
        self.watch(loop, connections)


class HttpProtocol(asyncio.Protocol):
    """One client connection. uvicorn's server creates it and calls `shutdown`."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: Settings,
        clients: ClientRegistry,
    ) -> None:
        if not config.loaded:
            config.load()
        self.loop = _loop or asyncio.get_running_loop()
        self.app: ASGIApp = cast(ASGIApp, config.loaded_app)
        self.transport: asyncio.Transport
        self.drain_waiter: asyncio.Future[None] | None = None
        self._tasks = server_state.tasks
        self._connections = cast("set[HttpProtocol]", server_state.connections)
        self._app_state = app_state
        # The lifespan of the application may yield these.
        self._drain: Any = app_state.get("drain")
        self._open_connections: Any = app_state.get("connections")
        self._refusals_counter: Any = app_state.get("refusals")
        self._keep_alive_s = config.timeout_keep_alive
        self._limits = limits
        self._clients = clients
        self._host = ""
        self._network = ""  # the client as it is counted
        self._is_reserved = False  # over the limit: only health probes are served
        self._parser: RequestParser
        self._cycles: deque[RequestCycle] = deque()  # the first is being answered
        # The request whose body is being received: the last of these, or one that was answered early.
        self._receiving: RequestCycle | None = None
        self._is_stopping = False  # one more request is read, because it may be on its way
        self._is_refused = False  # an error response is sent, and nothing else is read or sent
        self._is_reading = True
        self._was_paused = False  # reading was paused since the last sweep
        self._idle_since = 0.0
        # The start of an incomplete header; the first one counts from the start of the connection.
        self._header_since: float | None = None
        self._header_timeout_s = limits.header_timeout_s
        self._body_patience: Patience | None = None
        self._body_bytes = 0  # received since the last sweep
        self._write_patience: Patience | None = None  # None unless a response waits for the client
        self._unwritten_bytes = 0
        self._lingers_until = math.inf

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._idle_since = self._header_since = self.loop.time()
        scope = build_common_scope(transport)
        self._parser = RequestParser(self, scope)
        excess = self._count_connection(scope["client"])
        self._is_reserved = excess > 0
        if self._is_reserved:
            self._header_timeout_s = RESERVED_HEADER_TIMEOUT_S
        if excess > RESERVED_CONNECTIONS:
            self.refuse(TooManyConnections(), linger=False)
        self._clients.watch(self.loop, self._connections)

    def _count_connection(self, client: SocketName | None) -> int:
        """Count the connection; return by how many its limits are exceeded, in total or for this client."""
        limits = self._limits
        if self._open_connections is not None:
            self._open_connections.open(limits.max_connections)
        excess = len(self._connections) - limits.max_connections
        if client is not None:
            self._host = client[0]
            if limits.max_connections_per_client:
                self._network = client_network(self._host)
                count = self._clients.connections.add(self._network)
                excess = max(excess, count - limits.max_connections_per_client)
        return excess

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        if self._open_connections is not None:
            self._open_connections.close()
        if self._network:
            self._clients.connections.remove(self._network)
        self.resume_writing()
        if self._cycles and not self._is_refused:
            self._cycles[0].abandon()
        # This breaks reference cycles, as does the next line.
        self._receiving = None
        self._cycles.clear()
        self._parser.release()

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        try:
            parser.feed(data)
        except GatewayError as error:
            self.refuse(error)
            return
        if parser.phase is Phase.BODY:
            self._watch_body(len(data))
        elif parser.phase is Phase.HEADER and self._header_since is None:
            self._header_since = self.loop.time()

    def pause_writing(self) -> None:
        self.drain_waiter = self.loop.create_future()
        self._watch_writes()

    def resume_writing(self) -> None:
        self._write_patience = None
        if self.drain_waiter is not None and not self.drain_waiter.done():
            self.drain_waiter.set_result(None)
        self.drain_waiter = None

    # Called by the parser.

    def begin_request(self, scope: Scope, keep_alive: bool, expects_continue: bool) -> RequestCycle:
        if self._is_reserved:
            if scope["raw_path"] not in HEALTH_PATHS:
                raise TooManyConnections
            keep_alive = False
        if self._is_stopping or (self._drain is not None and self._drain.is_draining):
            keep_alive = False
        self._header_since = None
        scope["state"] = self._app_state.copy()
        cycles = self._cycles
        if cycles:
            if len(cycles) > MAX_PIPELINED:
                raise MalformedRequest("too many requests wait for their responses")
            self.pause_reading()
        cycle = self._receiving = RequestCycle(self, scope, keep_alive, expects_continue)
        cycles.append(cycle)
        return cycle

    def end_request(self) -> None:
        cycle = self._receiving
        self._receiving = None
        self._body_patience = None
        if cycle is None:
            return
        if not cycle.keep_alive:
            self._parser.close()
        cycle.end_body()
        if cycle.task is None and self._cycles and self._cycles[0] is cycle:
            self._start_cycle(cycle)

    # Called by the request cycles.

    def pause_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._was_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_reading and len(self._cycles) < 2 and not self.transport.is_closing():
            self._is_reading = True
            self.transport.resume_reading()

    def end_cycle(self, cycle: RequestCycle) -> None:
        """Finish a request: start the next pipelined one, or wait for data."""
        cycles = self._cycles
        if cycles:  # otherwise the connection is lost
            cycles.popleft()
        self._tasks.discard(cycle.task)
        cycle.task = None
        if self.transport.is_closing() or self._is_refused:
            return
        if not cycle.complete:
            self.transport.abort()  # the response must not look complete
        elif not cycle.keep_alive:
            self._close()
        else:
            self._idle_since = self.loop.time()
            if cycles and (
                cycles[0] is not self._receiving
                or cycles[0].should_start(self._limits.max_body_bytes)
            ):
                self._start_cycle(cycles[0])
            self.resume_reading()

    # Called by the server.

    def shutdown(self) -> None:
        """Close the connection after the current request, or after one that may be on its way."""
        if self._cycles:
            self._cycles[0].keep_alive = False
        elif self._header_since is not None:
            self._is_stopping = True
            self._header_since = self.loop.time()
            self._header_timeout_s = min(self._header_timeout_s, LAST_REQUEST_S)
            self.loop.call_later(self._header_timeout_s, self.check, math.inf)
        else:
            self._close()

    def refuse(self, error: GatewayError, *, linger: bool = True) -> None:
        """Reject the request that is being received, and close the connection."""
        self._parser.close()
        self._header_since = self._body_patience = None
        refused = self._receiving
        if refused is not None and len(self._cycles) > 1:
            self._cycles.pop()  # the rest of the request is not read
        if self._cycles and self._cycles[-1] is not refused:
            # Earlier requests get their responses, and no other request does.
            self._cycles[-1].keep_alive = False
        elif refused is not None and refused.started:
            self._close()  # its response has begun, so that no error can be sent
        else:
            self._send_refusal(error, linger=linger)

    def _send_refusal(self, error: GatewayError, *, linger: bool) -> None:
        self._is_refused = True
        request_id = create_request_id()
        self.transport.write(encode_error_response(error, request_id))
        self._count_refusal(error.code.lower())
        if isinstance(error, TooManyConnections):
            self._clients.log_rejection(self.loop.time(), {"client": self._host})
        else:
            extra = {"status": error.status, "request_id": request_id, "client": self._host}
            log.info("rejected: %s", error.detail, extra=extra)
        if self._cycles:
            self._cycles[0].mute()
            # Deferred, because a task that is cancelled before its first step never calls `end_cycle`.
            self.loop.call_soon(self._cycles[0].abandon)
        if not linger:
            self._close()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._lingers_until = self.loop.time() + LINGER_S

    def _count_refusal(self, reason: str) -> None:
        if self._refusals_counter is not None:
            self._refusals_counter.labels(reason).inc()

    def _start_cycle(self, cycle: RequestCycle) -> None:
        cycle.task = self.loop.create_task(cycle.run(self.app))
        self._tasks.add(cycle.task)

    def _close(self) -> None:
        self.transport.close()
        self._watch_writes()

    # Slow clients.

    def _watch_body(self, size: int) -> None:
        """Note data of a body that is incomplete, and start its request if enough of it was received."""
        self._body_bytes += size
        cycle = self._receiving
        if cycle is None:
            return
        if self._body_patience is None:
            self._body_patience = Patience(self._limits.body_stall_s, self.loop.time())
            self._body_bytes = 0
        if (
            cycle.task is None
            and self._cycles
            and self._cycles[0] is cycle
            and cycle.should_start(self._limits.max_body_bytes)
        ):
            self._start_cycle(cycle)

    def send_continue(self) -> None:
        """Ask the client for the body; its time begins now."""
        self.transport.write(CONTINUE_RESPONSE)
        if self._body_patience is not None:
            self._body_patience.skip(self.loop.time())

    def _watch_writes(self) -> None:
        self._unwritten_bytes = self.transport.get_write_buffer_size()
        if self._unwritten_bytes and self._write_patience is None:
            self._write_patience = Patience(self._limits.write_timeout_s, self.loop.time())

    def check(self, now: float) -> bool:
        """End a connection whose client is overdue; return whether it is."""
        if self._write_patience is not None:
            unwritten_bytes = self.transport.get_write_buffer_size()
            moved_bytes = self._unwritten_bytes - unwritten_bytes
            self._unwritten_bytes = unwritten_bytes
            if self._write_patience.spend(now, moved_bytes):
                self._drop_unread_response()
                return True
        if self.transport.is_closing():
            return False
        if self._is_refused:
            if now >= self._lingers_until:
                self._close()
            return False
        if self._header_since is not None:
            return self._check_header(now)
        if self._body_patience is not None and self._check_body(now, self._body_patience):
            return True
        if not self._cycles and now - self._idle_since >= self._keep_alive_s:
            self._close()
        return False

    def _check_header(self, now: float) -> bool:
        if not self._is_reading:  # behind requests that wait
            self._header_since = now
        is_begun = self._parser.phase is Phase.HEADER
        limit_s = (
            self._header_timeout_s if is_begun else min(self._header_timeout_s, self._keep_alive_s)
        )
        is_overdue = self._header_since is not None and now - self._header_since >= limit_s
        if is_overdue and self._is_reserved:
            self.refuse(TooManyConnections())
        elif is_overdue and is_begun:
            self.refuse(RequestTooSlow())
        elif is_overdue:
            self._close()
        return is_overdue

    def _check_body(self, now: float, patience: Patience) -> bool:
        moved_bytes = self._body_bytes
        self._body_bytes = 0
        was_paused = self._was_paused
        self._was_paused = not self._is_reading
        if was_paused or (self._receiving is not None and self._receiving.is_awaiting_continue):
            patience.skip(now)
            return False
        is_overdue = patience.spend(now, moved_bytes)
        if is_overdue:
            self.refuse(RequestTooSlow())
        return is_overdue

    def _drop_unread_response(self) -> None:
        self._count_refusal(RESPONSE_NOT_READ)
        log.info(
            "disconnected: the client does not read its response", extra={"client": self._host}
        )
        # Otherwise the kernel would keep the unread data while the client reads it slowly.
        socket: Any = self.transport.get_extra_info("socket")
        if socket is not None:
            socket.setsockopt(SOL_SOCKET, SO_LINGER, LINGER_ZERO)
        self.transport.abort()


class RequestCycle:
    """A request and its response, as ASGI's `scope`, `receive` and `send`."""

    def __init__(
        self, connection: HttpProtocol, scope: Scope, keep_alive: bool, expects_continue: bool
    ) -> None:
        self._connection = connection
        self._scope = scope
        self.keep_alive = keep_alive
        self.expects_continue = expects_continue
        self._chunks: list[bytes] = []
        self._unread_bytes = 0
        self._discarded_bytes = 0
        self._is_request_complete = False  # the end of the request was received
        self._is_request_delivered = False  # the application has received the end of the request
        self._is_disconnected = False
        self._receive_waiter: asyncio.Future[None] | None = None
        self._pending_head = b""
        # How the client finds the end of the response's body (RFC 9112, section 6.3).
        self._has_body = False
        self._is_chunked = False
        self._remaining_bytes: int | None = None  # the unsent part of its Content-Length
        self.started = False
        self.complete = False
        self.task: asyncio.Task[None] | None = None  # set while the application runs

    async def run(self, app: ASGIApp) -> None:
        try:
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
        self._is_disconnected = True

    def abandon(self) -> None:
        """Tell the application that the client is gone, and cancel it unless its response is complete."""
        self.mute()
        self._wake_receiver()
        if self.task is not None and not self.complete:
            self.task.cancel()

    def should_start(self, max_body_bytes: int) -> bool:
        """Return whether the application starts although the body is incomplete."""
        return (
            self._unread_bytes > EARLY_START_BYTES
            or self.expects_continue
            or parse_content_length(self._scope["headers"]) > max_body_bytes
        )

    @property
    def is_awaiting_continue(self) -> bool:
        """Whether the client waits for 100 Continue, which the application triggers by reading."""
        return self.expects_continue and not self.complete

    # Called by the application.

    async def receive(self) -> Message:
        if self.expects_continue:
            self.expects_continue = False
            if not (
                self._chunks
                or self._is_request_complete
                or (self.started and not self._pending_head)  # the response has begun
                or self._is_disconnected
            ):
                self._connection.send_continue()
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
        while (waiter := self._connection.drain_waiter) is not None:
            await asyncio.shield(waiter)  # other waiters share it
        if self._is_disconnected:
            return
        if message["type"] == "http.response.body":
            self._send_body(message.get("body", b""), message.get("more_body", False))
        elif message["type"] == "http.response.start":
            self._start_response(message["status"], message.get("headers", ()))

    def _start_response(self, status: int, headers: HeaderPairs) -> None:
        if self.started:
            raise RuntimeError("the response was already started")
        self.started = True
        fields = dict(headers)
        length = fields.get(b"content-length")
        says_close = b"close" in fields.get(b"connection", b"").lower()
        is_old = self._scope["http_version"] == "1.0"
        self._has_body = self._scope["method"] != "HEAD" and status not in BODILESS_STATUSES
        self._remaining_bytes = None if length is None else int(length)
        self._is_chunked = (
            self._has_body and length is None and self._scope["http_version"] == "1.1"
        )
        if says_close or (self._has_body and length is None and not self._is_chunked):
            self.keep_alive = False  # the end of the connection is the end of the body
        # Joined without a loop in Python, which would cost 3 % of the instructions of a `/v2` request.
        lines = [STATUS_LINES.get(status) or b"HTTP/1.1 %d " % status, *map(b": ".join, headers)]
        if not self.keep_alive and not says_close:
            lines.append(b"connection: close")
        elif self.keep_alive and is_old:
            lines.append(b"connection: keep-alive")
        if self._is_chunked:
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
        if not self._has_body:
            body = b""
        elif self._remaining_bytes is not None:
            self._remaining_bytes -= len(body)
            if self._remaining_bytes < 0 or (self._remaining_bytes and not has_more):
                self._abort("the response body does not match its Content-Length")
        elif self._is_chunked:
            if body:
                head += b"%x\r\n" % len(body)
                body += b"\r\n"
            if not has_more:
                body += b"0\r\n\r\n"
        if head or body:
            self._write(head, body)
        if not has_more:
            self.complete = True
            self._wake_receiver()

    def _write(self, head: bytes, body: bytes) -> None:
        if len(body) < MIN_SEPARATE_WRITE_BYTES:
            self._connection.transport.write(head + body)
        else:
            self._connection.transport.writelines((head, body))

    def _abort(self, reason: str) -> NoReturn:
        # An application that catches the error must not be able to complete the response.
        self._connection.transport.abort()
        raise RuntimeError(reason)

    def _wake_receiver(self) -> None:
        if self._receive_waiter is not None and not self._receive_waiter.done():
            self._receive_waiter.set_result(None)


def parse_content_length(headers: HeaderPairs) -> int:
    """Return the length that a header declares; 0 if the body comes in chunks, or there is none."""
    return next((int(value) for name, value in headers if name == b"content-length"), 0)


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


def build_common_scope(transport: asyncio.BaseTransport) -> Scope:
    tls = transport.get_extra_info("sslcontext") is not None
    certificate = (transport.get_extra_info("peercert") if tls else None) or {}
    names = certificate.get("subjectAltName", ())
    not_after = certificate.get("notAfter")
    return {
        "server": parse_socket_name(transport.get_extra_info("sockname")),
        "client": parse_socket_name(transport.get_extra_info("peername")),
        "scheme": "https" if tls else "http",
        # The names in the client's certificate, which is verified, with their kinds.
        "certificate_names": tuple(each for each in names if each[0] in CERTIFICATE_NAME_KINDS),
        "certificate_expires_at": not_after and cert_time_to_seconds(not_after),
    }


def parse_socket_name(name: Any) -> SocketName | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None
