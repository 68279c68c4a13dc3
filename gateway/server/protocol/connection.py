"""The asyncio side of a client connection: its parser, deadlines and request cycles."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping
from enum import Enum, auto
from socket import SO_ERROR, SO_LINGER, SOL_SOCKET
from ssl import cert_time_to_seconds
from struct import pack
from typing import Any, Final, cast

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.server import ServerState

from gateway.errors import GatewayError, RequestTooSlow, TooManyConnections
from gateway.server.protocol.clients import ClientAccount, ClientRegistry, parse_socket_name
from gateway.server.protocol.deadlines import ConnectionLimits, Deadlines, Due
from gateway.server.protocol.exchange import RequestCycle, encode_error_response
from gateway.server.protocol.parser import RequestParser
from gateway.telemetry.tracing import create_request_id

HEALTH_PATHS: Final = frozenset((b"/livez", b"/readyz", b"/v2/health/live", b"/v2/health/ready"))
CERTIFICATE_NAME_KINDS: Final = ("URI", "DNS", "email")
RESERVED_CONNECTIONS: Final = 32  # connections over the limit that may send health probes
LINGER_ZERO: Final = pack("ii", 1, 0)  # the option SO_LINGER: enabled, zero seconds


class ConnectionPhase(Enum):
    OPEN = auto()
    STOPPING = auto()  # one more request is read, because it may be on its way
    REFUSED = auto()  # an error response is sent, and nothing else is read or sent


# Each request compares members, which costs 0.4 µs more if they are read from their class.
OPEN, STOPPING, REFUSED = ConnectionPhase


class HttpProtocol(asyncio.Protocol):
    """One client connection. uvicorn's server creates it and calls `shutdown`."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
        clients: ClientRegistry,
    ) -> None:
        if not config.loaded:
            config.load()
        self.loop = _loop or asyncio.get_running_loop()
        self.app: ASGIApp = cast(ASGIApp, config.loaded_app)
        self.transport: asyncio.Transport
        self._tasks = server_state.tasks
        self._connections = cast("set[HttpProtocol]", server_state.connections)
        self._app_state = app_state
        self._drain: Any = app_state.get("drain")  # the lifespan of the application may yield it
        self._keep_alive_s = config.timeout_keep_alive
        self._limits = limits
        self._clients = clients
        self._account: ClientAccount
        self._is_reserved = False  # over the limit: only health probes are served
        self._parser: RequestParser
        self._deadlines: Deadlines
        # The requests without a complete response, in order; the first is being answered, and the others
        # wait for it (RFC 9112, section 9.3.2).
        self._cycles: deque[RequestCycle] = deque()
        # The request whose body is being received: the last of these, or one that was answered early.
        self._receiving: RequestCycle | None = None
        self._was_last_refused = False  # the last response was a 4xx
        self.drain_waiter: asyncio.Future[None] | None = None
        self._is_reading = True
        self._phase = OPEN
        self._timer: asyncio.TimerHandle | None = None
        self._next_check_at = math.inf

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        scope = build_common_scope(transport)
        self._parser = RequestParser(self, scope)
        self._account = ClientAccount(self._clients, scope["client"], self._app_state)
        excess = self._account.open(len(self._connections), self._limits)
        self._is_reserved = excess > 0
        self._deadlines = Deadlines(
            self._limits, self._keep_alive_s, self.loop.time(), is_reserved=self._is_reserved
        )
        if excess > RESERVED_CONNECTIONS:
            self.refuse(TooManyConnections(), linger=False)
            return
        self._schedule_check(self._deadlines.idle_end)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._account.close()
        if self._timer is not None:
            self._timer.cancel()
        self.resume_writing()
        if self._cycles and self._phase is not REFUSED:
            self._cycles[0].abandon()
        # This breaks reference cycles, as does the next line.
        self._receiving = None
        self._cycles.clear()
        self._parser.release()

    def data_received(self, data: bytes) -> None:
        try:
            if self._parser.feed(data):
                self._watch_request(len(data))
        except GatewayError as error:
            self.refuse(error)
        if self._parser.is_closed:
            self.yield_reading()  # all further data is discarded

    def eof_received(self) -> bool:
        """Return whether to keep the connection open, for the response to a complete request.

        The client has closed its half. Nothing tells one that waits for its response from one that is gone,
        until it is sent something.
        """
        if not self._cycles or self._cycles[0] is self._receiving:
            return False  # no complete request waits for its response
        cycle = self._cycles[0]
        if cycle.is_responding or self._phase is REFUSED:
            return False
        if self.transport.get_extra_info("sslcontext") is not None:
            return False  # TLS has no half-closed connections here: asyncio closes them
        cycle.keep_alive = False
        self._parser.close()
        self._schedule_check(self._deadlines.start_half_closed(self.loop.time()))
        return True

    def pause_writing(self) -> None:
        self.drain_waiter = self.loop.create_future()
        self._watch_writes()

    def resume_writing(self) -> None:
        self._deadlines.end_sending()
        if self.drain_waiter is not None and not self.drain_waiter.done():
            self.drain_waiter.set_result(None)
        self.drain_waiter = None

    # Called by the parser.

    def begin_request(self, scope: Scope, keep_alive: bool, expects_continue: bool) -> RequestCycle:
        if self._is_reserved:
            if scope["raw_path"] not in HEALTH_PATHS:
                raise TooManyConnections
            keep_alive = False
        if self._phase is STOPPING or (self._drain is not None and self._drain.is_draining):
            keep_alive = False
        scope["state"] = self._app_state.copy()
        cycle = self._receiving = RequestCycle(self, scope, keep_alive, expects_continue)
        cycles = self._cycles
        if cycles:
            self._parser.pending = len(cycles)
            self.pause_reading()
        cycles.append(cycle)
        return cycle

    def end_request(self) -> None:
        cycle = self._receiving
        self._receiving = None
        if self._deadlines.is_receiving:
            self._deadlines.end_receiving()
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
            self._deadlines.was_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_reading and not self._parser.pending and not self._parser.unparsed:
            self._is_reading = True
            self._clients.large_reads.add(self.loop, self._continue_reading)

    def yield_reading(self) -> None:
        """Let others read before this connection reads on. Does not count as a pause of the client."""
        if self._is_reading and not self.transport.is_closing():
            self.transport.pause_reading()
            self._clients.large_reads.add(self.loop, self._continue_reading)

    async def wait_writable(self) -> None:
        while self.drain_waiter is not None:
            await asyncio.shield(self.drain_waiter)  # other waiters share it

    def end_cycle(self, cycle: RequestCycle) -> None:
        """Finish a request: start the next pipelined one, or wait for data."""
        cycles = self._cycles
        if cycles:  # otherwise the connection is lost
            cycles.popleft()
        self._was_last_refused = 400 <= cycle.status < 500
        self._tasks.discard(cycle.task)
        cycle.task = None
        if self.transport.is_closing() or self._phase is REFUSED:
            return
        if not cycle.complete:
            self.transport.abort()  # the response must not look complete
        elif not cycle.keep_alive:
            self._close()
        else:
            self._deadlines.idle_since = self.loop.time()
            if cycles:
                self._start_pipelined(cycles[0])
            self.resume_reading()

    def refuse(self, error: GatewayError, *, linger: bool = True) -> None:
        """Reject the request that is being received, and close the connection."""
        self._parser.close()
        self._deadlines.end_receiving()
        refused = self._receiving
        if refused is not None and len(self._cycles) > 1:
            self._cycles.pop()  # the rest of the request is not read
            self._parser.pending = len(self._cycles) - 1
        if self._cycles and self._cycles[-1] is not refused:
            # Earlier requests get their responses, and no other request does.
            self._cycles[-1].keep_alive = False
        elif refused is not None and refused.started:
            self._close()  # its response has begun, so that no error can be sent
        else:
            self._send_refusal(error, linger=linger)

    def _send_refusal(self, error: GatewayError, *, linger: bool) -> None:
        self._phase = REFUSED
        now = self.loop.time()
        request_id = create_request_id()
        self.transport.write(encode_error_response(error, request_id))
        self._account.record_refusal(error, request_id, now)
        if self._cycles:
            self._cycles[0].mute()
            # Deferred, because a task that is cancelled before its first step never calls `end_cycle`.
            self.loop.call_soon(self._cycles[0].abandon)
        if not linger:
            self._close()
            return
        # Closing while the client is still sending would reset the connection and lose the response.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._schedule_check(self._deadlines.start_linger(now))

    def shutdown(self) -> None:
        """Close the connection after the current request, or after one that may be on its way."""
        if self._cycles:
            self._cycles[0].keep_alive = False
        elif self._deadlines.is_receiving:
            self._phase = STOPPING
            self._schedule_check(self._deadlines.limit_last_request(self.loop.time()))
        else:
            self._close()

    def _start_cycle(self, cycle: RequestCycle) -> None:
        turn = self._clients.enqueue_refused(self.loop) if self._was_last_refused else None
        cycle.task = self.loop.create_task(cycle.run(self.app, turn))
        self._tasks.add(cycle.task)

    def _start_pipelined(self, cycle: RequestCycle) -> None:
        self._parser.pending = len(self._cycles) - 1
        if cycle is self._receiving:
            self._start_early(cycle)
        else:
            self._start_cycle(cycle)
        if self._parser.unparsed:
            self.data_received(b"")

    def _start_early(self, cycle: RequestCycle) -> None:
        """Start the request whose turn it is before its body is complete, if enough of it was received.

        Starting earlier would let a thousand slow clients cost as much as a thousand responses. A body with
        a Content-Length above the limit is rejected at once.
        """
        is_too_large = self._parser.content_length > self._limits.max_body_bytes
        if is_too_large or not cycle.is_gathering():
            self._start_cycle(cycle)

    def _continue_reading(self) -> None:
        if self._is_reading and not self.transport.is_closing():
            self.transport.resume_reading()

    def _close(self) -> None:
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._watch_writes()

    # Deadlines: each connection has one timer, which runs all checks.

    def _watch_request(self, size: int) -> None:
        now = self.loop.time()
        cycle = self._receiving
        if cycle is None:
            self._schedule_check(self._deadlines.receive_header(now))
            return
        is_paused = cycle.is_awaiting_continue()
        self._schedule_check(self._deadlines.receive_body(now, size, is_paused=is_paused))
        if cycle.task is None and self._cycles and self._cycles[0] is cycle:
            self._start_early(cycle)

    def _watch_writes(self) -> None:
        unwritten_bytes = self.transport.get_write_buffer_size()
        self._schedule_check(self._deadlines.start_sending(self.loop.time(), unwritten_bytes))

    def _schedule_check(self, when: float) -> None:
        if when < self._next_check_at:
            if self._timer is not None:
                self._timer.cancel()
            self._next_check_at = when
            self._timer = self.loop.call_at(
                when, self._clients.checks.add, self.loop, self._run_checks
            )

    def _run_checks(self) -> None:
        if self not in self._connections:
            return  # the connection is closed
        self._next_check_at = math.inf
        cycle = self._receiving
        due, next_check_at = self._deadlines.check(
            self.loop.time(),
            is_idle=not self._cycles,
            is_paused=not self._is_reading or (cycle is not None and cycle.is_awaiting_continue()),
            is_closing=self.transport.is_closing(),
            unwritten_bytes=self.transport.get_write_buffer_size(),
        )
        if due is not None:
            self._enforce(due)
        self._schedule_check(next_check_at)

    def _check_half_closed(self) -> None:
        """Abort if the client is gone: it answers an interim response with a reset, and others ignore it."""
        is_gone = was_reset(self.transport)
        if self._cycles and not is_gone:
            is_gone = not self._cycles[0].send_continue()
        if is_gone:
            self.transport.abort()
        else:
            self._schedule_check(self._deadlines.defer_half_closed(self.loop.time()))

    def _enforce(self, due: Due) -> None:
        if due is Due.HALF_CLOSED:
            self._check_half_closed()
        elif due is Due.RESPONSE:
            self._account.record_unread_response()
            reset_connection(self.transport)
        elif due is Due.LINGER or (due is Due.IDLE and not self._is_reserved):
            self._close()
        elif self._is_reserved and due is not Due.BODY:
            self.refuse(TooManyConnections())
        else:
            self.refuse(RequestTooSlow())


def build_common_scope(transport: asyncio.BaseTransport) -> Scope:
    tls = transport.get_extra_info("sslcontext") is not None
    certificate = (transport.get_extra_info("peercert") if tls else None) or {}
    not_after = certificate.get("notAfter")
    return {
        "server": parse_socket_name(transport.get_extra_info("sockname")),
        "client": parse_socket_name(transport.get_extra_info("peername")),
        "scheme": "https" if tls else "http",
        "certificate_names": list_certificate_names(certificate),
        "certificate_expires_at": not_after and cert_time_to_seconds(not_after),
    }


def list_certificate_names(certificate: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the names of the client's certificate, which is verified, with their kinds."""
    names = certificate.get("subjectAltName", ())
    return tuple((kind, name) for kind, name in names if kind in CERTIFICATE_NAME_KINDS)


def was_reset(transport: asyncio.Transport) -> bool:
    socket: Any = transport.get_extra_info("socket")
    return socket is not None and socket.getsockopt(SOL_SOCKET, SO_ERROR) != 0


def reset_connection(transport: asyncio.Transport) -> None:
    # Otherwise the kernel would keep the unread data while the client reads it slowly.
    socket: Any = transport.get_extra_info("socket")
    if socket is not None:
        socket.setsockopt(SOL_SOCKET, SO_LINGER, LINGER_ZERO)
    transport.abort()
