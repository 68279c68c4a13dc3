"""One client connection: parsing, limits, timeouts and pipelining."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections import deque
from socket import SO_LINGER, SOL_SOCKET
from struct import pack
from typing import Any, Final, cast
from urllib.parse import unquote

import httptools
import uvicorn
from prometheus_client import Counter, Gauge
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from gateway.errors import (
    GatewayError,
    HeaderTooLarge,
    MalformedRequest,
    RequestTooSlow,
    TooManyConnections,
    UrlTooLong,
)
from gateway.protocol.exchange import RequestCycle, encode_error_response
from gateway.protocol.limits import (
    MIN_CHECK_INTERVAL_S,
    ClientRegistry,
    ProtocolLimits,
    RateCredit,
    client_network,
    parse_socket_name,
)
from gateway.tracing import choose_request_id

log = logging.getLogger(__name__)

MAX_JOINED_WRITE_BYTES: Final = 64 * 1024
ASGI: Final = {"version": "3.0", "spec_version": "2.3"}
HeaderPairs = list[tuple[bytes, bytes]]
NOT_HTTP_MESSAGE: Final = "this is not an HTTP/1.1 request"
LENGTH_HEADERS: Final = ("Content-Length", "Transfer-Encoding")  # RFC 9112, section 6.1
REQUEST_HEADER_END: Final = b"\r\n\r\n"
# Fields that change how a request is read; each may occur once. httptools checks Content-Length strictly.
CRITICAL_HEADERS: Final = frozenset((b"host", b"transfer-encoding", b"expect"))
FRAMING_FIELDS: Final = frozenset((b"content-length", b"transfer-encoding"))
PERSISTENT_VERSIONS: Final = ("1.1", "1.0")  # 1.0 if the client asks for it
VALID_HOST: Final = re.compile(
    rb"(?:[\w.~!$&'()*+,;=%-]*|\[[\da-fA-Fv.:]+\])(?::\d*)?[ \t]*", re.ASCII
)
SMALL_READ_BYTES: Final = 2048  # smaller reads are parsed at once, even if they are pipelined
MIN_FEED_BYTES: Final = 64
HEALTH_PATHS: Final = frozenset((b"/livez", b"/readyz", b"/v2/health/live", b"/v2/health/ready"))
RESERVED_CONNECTIONS: Final = 32  # connections over the limit that may send health probes
RESERVED_HEADER_TIMEOUT_S: Final = 1.0
CLOSE_LINGER_S: Final = 1.0
RESPONSE_NOT_READ: Final = "answer_not_taken"
LINGER_ZERO: Final = pack("ii", 1, 0)  # for SO_LINGER: enabled, zero seconds


def describe_parse_error(exc: Exception) -> str:
    if all(name in str(exc) for name in LENGTH_HEADERS):
        return f"{NOT_HTTP_MESSAGE}: it has both {' and '.join(LENGTH_HEADERS)}"
    return NOT_HTTP_MESSAGE


class HttpProtocol(asyncio.Protocol):
    """One client connection. uvicorn's server creates it and calls `shutdown`."""

    # Without slots, attribute access is slow for so many attributes.
    __slots__ = (
        "_addresses",
        "_app_state",
        "_body_checked_at",
        "_body_credit_s",
        "_client_network",
        "_clients",
        "_connections",
        "_connections_gauge",
        "_critical_headers",
        "_current_cycle",
        "_declined_upgrade",
        "_drain",
        "_fed_bytes",
        "_framing_bytes",
        "_has_body_data",
        "_header_bytes",
        "_header_started_at",
        "_headers",
        "_idle_since",
        "_ignores_next_header",
        "_is_between_requests",
        "_is_last_request",
        "_is_reading",
        "_is_refused",
        "_is_reserved",
        "_keep_alive_s",
        "_limits",
        "_max_header_bytes",
        "_max_header_fields",
        "_max_url_bytes",
        "_next_check_at",
        "_opened_at",
        "_parser",
        "_pipelined_cycles",
        "_received_body_bytes",
        "_receiving_cycle",
        "_refusals_counter",
        "_remaining_body_bytes",
        "_task",
        "_tasks",
        "_timer",
        "_unparsed",
        "_unwritten_bytes",
        "_url",
        "_usual_critical_headers",
        "_was_last_refused",
        "_was_paused",
        "_write_credit",
        "app",
        "drain_waiter",
        "loop",
        "transport",
    )

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ProtocolLimits,
        clients: ClientRegistry,
    ) -> None:
        if not config.loaded:
            config.load()
        self.loop = _loop or asyncio.get_running_loop()
        self.app: ASGIApp = cast(ASGIApp, config.loaded_app)
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._tasks = server_state.tasks
        self._connections = cast("set[HttpProtocol]", server_state.connections)
        self._app_state = app_state
        # The lifespan of the application may yield these.
        self._connections_gauge: Gauge | None = app_state.get("connections")
        self._refusals_counter: Counter | None = app_state.get("refusals")
        self._drain: Any = app_state.get("drain")
        self._keep_alive_s = config.timeout_keep_alive
        self._limits = limits
        self._max_url_bytes = limits.max_url_bytes
        self._max_header_bytes = limits.max_header_bytes
        self._max_header_fields = limits.max_header_fields
        self._clients = clients
        self._client_network = ""  # the client as it is counted
        self._is_reserved = False  # over the limit: only health probes are served
        self._parser = httptools.HttpRequestParser(self)
        self._addresses: dict[str, Any] = {}
        self._url = b""
        self._headers: HeaderPairs = []
        self._critical_headers: HeaderPairs = []
        # The critical headers of the last request if they were only a valid Host.
        self._usual_critical_headers: HeaderPairs = [(b"", b"")]
        # The framing headers of a request with an Upgrade, after which the parser stops.
        self._declined_upgrade: bytes | None = None
        self._ignores_next_header = False  # a restarted parser gets the framing headers again
        self._is_between_requests = True
        self._fed_bytes = SMALL_READ_BYTES  # the maximum size of the data that the parser is given
        self._header_bytes = 0  # of an incomplete header, without those
        self._header_started_at: float | None = None
        self._remaining_body_bytes = (
            0  # of a body with a Content-Length that comes in several reads
        )
        self._has_body_data = False  # the last read contained body data
        self._framing_bytes = 0  # chunk framing since the last body data
        self._unparsed = b""
        self._receiving_cycle: RequestCycle | None = None  # the body of which is being received
        self._current_cycle: RequestCycle | None = None  # the response of which is being sent
        self._pipelined_cycles: deque[RequestCycle] = deque()  # RFC 9112, section 9.3.2
        self._was_last_refused = False  # the last response was a 4xx
        self._task: asyncio.Task[None] | None = None
        self.drain_waiter: asyncio.Future[None] | None = None
        self._is_reading = True
        # Since the last check, reading was paused or the client waited for 100 Continue.
        self._was_paused = False
        self._is_last_request = False  # all further data is ignored
        self._is_refused = False
        self._opened_at: float | None = None  # None after the first header
        self._idle_since = 0.0
        self._body_checked_at: float | None = None  # of a body that comes in several reads
        self._body_credit_s = 0.0
        self._received_body_bytes = 0
        self._write_credit: RateCredit | None = None  # while the client has not read all responses
        self._unwritten_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._next_check_at = math.inf

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        if self._connections_gauge is not None:
            self._connections_gauge.inc()
        tls = transport.get_extra_info("sslcontext") is not None
        self._addresses = {
            "server": parse_socket_name(transport.get_extra_info("sockname")),
            "client": parse_socket_name(transport.get_extra_info("peername")),
            "scheme": "https" if tls else "http",
        }
        self._opened_at = self._idle_since = now = self.loop.time()
        excess = self._count_excess()
        self._is_reserved = excess > 0
        if excess > RESERVED_CONNECTIONS:
            self.refuse(TooManyConnections(), linger=False)
            return
        self._schedule_check(now + min(self._header_timeout_s, self._keep_alive_s))

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the work for the client."""
        self._connections.discard(self)
        if self._connections_gauge is not None:
            self._connections_gauge.dec()
        if self._client_network:
            self._clients.remove_connection(self._client_network)
        if self._timer is not None:
            self._timer.cancel()
        self.resume_writing()
        self._pipelined_cycles.clear()
        self._unparsed = b""
        self._receiving_cycle = None
        if self._current_cycle is not None and not self._is_refused:
            self._abandon_cycle(self._current_cycle)
        if self._task is None:
            self._current_cycle = None  # breaks a reference cycle, as does the next line
        del self._parser

    def data_received(self, data: bytes) -> None:
        if self._is_last_request:
            return
        if self._unparsed:
            self._unparsed += data
            return
        size = len(data)
        if size > self._remaining_body_bytes and (
            size > SMALL_READ_BYTES or self._pipelined_cycles
        ):
            self._feed_in_pieces(data)
            return
        if self._remaining_body_bytes:
            self._remaining_body_bytes -= size
        self._is_between_requests = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            self._restart_parser(data[exc.args[0] :])
            return
        except httptools.HttpParserError as exc:
            self._refuse_malformed(exc)
        if not self._is_between_requests or self._url:
            self._on_partial_data(data)

    def eof_received(self) -> None:
        """Return None: the transport closes the connection when the client has closed its half."""

    def pause_writing(self) -> None:
        self.drain_waiter = self.loop.create_future()
        self._watch_writes()

    def resume_writing(self) -> None:
        self._write_credit = None
        if self.drain_waiter is not None and not self.drain_waiter.done():
            self.drain_waiter.set_result(None)
        self.drain_waiter = None

    # Called by the parser.

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in CRITICAL_HEADERS:
            self._critical_headers.append((name, value))
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._ignores_next_header:
            self._ignores_next_header, self._url = False, b""
            self._headers, self._critical_headers = [], []
            return
        parser = self._parser
        if parser.should_upgrade():
            self._decline_upgrade()
        version = parser.get_http_version()
        expects_continue = (
            self._critical_headers != self._usual_critical_headers
            and self._check_critical_headers(version)
        )
        self._critical_headers = []
        if (
            self._header_bytes + self._fed_bytes > self._max_header_bytes
            or len(self._headers) > self._max_header_fields
        ):
            self._check_header_size(
                len(parser.get_method()) + len(self._url) + len("  HTTP/1.1\r\n")
            )
        if self._header_bytes:
            self._header_bytes, self._header_started_at = 0, None
        self._opened_at = None
        if len(self._url) > self._max_url_bytes:
            raise UrlTooLong(self._max_url_bytes)
        url = httptools.parse_url(self._url)
        raw_path = url.path or b"/"
        path = raw_path.decode("ascii")
        keep_alive = version in PERSISTENT_VERSIONS and parser.should_keep_alive()
        if self._is_reserved:
            if raw_path not in HEALTH_PATHS:
                raise TooManyConnections
            keep_alive = False
        if self._drain is not None and self._drain.is_draining:
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
            "state": self._app_state.copy(),
            **self._addresses,
        }
        self._is_between_requests = False  # it may follow another request in the same read
        cycle = self._receiving_cycle = RequestCycle(self, scope, keep_alive, expects_continue)
        self._url = b""
        self._headers = []
        if self._current_cycle is None:
            self._current_cycle = cycle
        else:
            self._pipelined_cycles.append(cycle)
            self.pause_reading()

    def on_body(self, body: bytes) -> None:
        self._has_body_data = True
        if self._receiving_cycle is not None:
            self._receiving_cycle.feed_body(body)

    def on_message_complete(self) -> None:
        if self._declined_upgrade is not None:
            return  # httptools treats the body as data of the other protocol
        self._is_between_requests = True
        self._remaining_body_bytes = 0
        self._body_checked_at = None
        if self._headers:
            # Trailers are not merged into the headers (RFC 9110, section 6.5.1).
            self._check_header_size(0)
            self._headers = []
            self._critical_headers = []
        if self._receiving_cycle is not None:
            self._is_last_request = not self._receiving_cycle.keep_alive
            self._receiving_cycle.end_body()
            if self._task is None and self._current_cycle is self._receiving_cycle:
                self._start_cycle()
            self._receiving_cycle = None

    # Called by the request cycles.

    def pause_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._was_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_reading and not self._pipelined_cycles and not self._unparsed:
            self._is_reading = True
            self.transport.resume_reading()

    async def wait_writable(self) -> None:
        while self.drain_waiter is not None:
            await asyncio.shield(self.drain_waiter)  # other waiters share it

    def write(self, head: bytes, body: bytes) -> None:
        if len(body) < MAX_JOINED_WRITE_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    def end_cycle(self, cycle: RequestCycle) -> None:
        """Finish a request: start the next pipelined one, or wait for data."""
        self._current_cycle = None
        self._was_last_refused = 400 <= cycle.status < 500
        if self._task is not None:
            self._tasks.discard(self._task)
            self._task = None
        if self.transport.is_closing() or self._is_refused:
            return
        if not cycle.complete:
            self.transport.abort()  # the response must not look complete
        elif not cycle.keep_alive:
            self._close()
        else:
            self._idle_since = self.loop.time()
            if self._pipelined_cycles:
                self._current_cycle = self._pipelined_cycles.popleft()
                if self._current_cycle is self._receiving_cycle:
                    self._start_early()
                else:
                    self._start_cycle()
                if self._unparsed:
                    data, self._unparsed = self._unparsed, b""
                    self._feed_in_pieces(data)
            self.resume_reading()

    def refuse(self, error: GatewayError, *, linger: bool = True) -> None:
        """Send an error response and close the connection."""
        self._is_last_request = True
        self._unparsed = b""
        if self._pipelined_cycles and self._receiving_cycle is not None:
            self._pipelined_cycles.pop()  # the rest of it is not read
        last = self._pipelined_cycles[-1] if self._pipelined_cycles else self._current_cycle
        if last is not None and last is not self._receiving_cycle:
            last.keep_alive = False  # closes the connection after its response
            return
        if self._receiving_cycle is not None and self._receiving_cycle.started:
            self._close()
            return
        self._is_refused = True
        self._send_refusal(error)
        if self._current_cycle is not None:
            self._current_cycle.mute()
            # Deferred, because a task that is cancelled before its first step never calls `end_cycle`.
            self.loop.call_soon(self._abandon_cycle, self._current_cycle)
        if not linger:
            self._close()
            return
        # Closing while the client is still sending would reset the connection and lose the response.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._schedule_check(self.loop.time() + CLOSE_LINGER_S)

    def shutdown(self) -> None:
        """Close the connection after the current request."""
        if self._current_cycle is None:
            self._close()
        else:
            self._current_cycle.keep_alive = False

    def _start_cycle(self) -> None:
        cycle = cast(RequestCycle, self._current_cycle)
        turn = self._clients.refused_clients.enqueue(self.loop) if self._was_last_refused else None
        self._task = self.loop.create_task(cycle.run(self.app, turn))
        self._tasks.add(self._task)

    def _start_early(self) -> None:
        """Start the request before its body is complete, if enough of it was received.

        Starting earlier would let a thousand slow clients cost as much as a thousand responses. A body with
        a Content-Length above the limit is rejected at once.
        """
        cycle = self._receiving_cycle
        if cycle is None or self._task is not None or cycle is not self._current_cycle:
            return
        if not cycle.is_gathering(self._limits.max_body_bytes):
            self._start_cycle()

    def _abandon_cycle(self, cycle: RequestCycle) -> None:
        cycle.disconnect()
        if self._task is not None and not cycle.complete:
            self._task.cancel()

    def _close(self) -> None:
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._watch_writes()

    def _send_refusal(self, error: GatewayError) -> None:
        request_id = choose_request_id(())
        self.transport.write(encode_error_response(error, request_id))
        self._count_refusal(error.code.lower())
        if isinstance(error, TooManyConnections):
            self._clients.log_rejection(self.loop.time(), self._log_fields)
        else:
            extra = {"status": error.status, "request_id": request_id, **self._log_fields}
            log.info("rejected: %s", error.detail, extra=extra)

    def _count_refusal(self, reason: str) -> None:
        if self._refusals_counter is not None:
            self._refusals_counter.labels(reason).inc()

    @property
    def _log_fields(self) -> dict[str, str]:
        address = self._addresses["client"]
        return {"client": "" if address is None else address[0]}

    def _count_excess(self) -> int:
        """Count this connection; return by how many its limits are exceeded, in total or for this client."""
        excess = len(self._connections) - self._limits.max_connections
        per_client = self._limits.max_connections_per_client
        address = self._addresses["client"]
        if per_client and address is not None:
            self._client_network = client_network(address[0])
            excess = max(excess, self._clients.add_connection(self._client_network) - per_client)
        return excess

    # Parsing.

    def _refuse_malformed(self, exc: Exception) -> None:
        cause = exc.__context__  # raised by a callback of the parser
        self.refuse(
            cause
            if isinstance(cause, GatewayError)
            else MalformedRequest(describe_parse_error(exc))
        )

    def _feed_in_pieces(self, data: bytes) -> None:
        """Parse in pieces of few headers, so that the number of pipelined requests stays near its limit."""
        view = memoryview(data)
        start, size, piece = 0, len(data), view
        try:
            while start < size and not self._is_last_request:
                if len(self._pipelined_cycles) >= self._limits.max_pipelined:
                    self._unparsed = data[start:]
                    return
                end = start + self._remaining_body_bytes
                if end <= start:
                    header_end = data.find(REQUEST_HEADER_END, start + MIN_FEED_BYTES)
                    end = size if header_end < 0 else header_end + len(REQUEST_HEADER_END)
                piece = view[start:end]
                self._fed_bytes = len(piece)
                self._remaining_body_bytes -= min(self._remaining_body_bytes, len(piece))
                self._is_between_requests = False
                self._parser.feed_data(piece)
                if self._receiving_cycle is not None and not self._remaining_body_bytes:
                    self._remaining_body_bytes = self._receiving_cycle.remaining_length()
                start = end
                if start < size and not self._is_between_requests and self._receiving_cycle is None:
                    self._header_bytes += len(piece)  # empty lines before a request
        except httptools.HttpParserUpgrade as exc:
            self._restart_parser(data[start + exc.args[0] :])
            return
        except httptools.HttpParserError as exc:
            self._refuse_malformed(exc)
        finally:
            self._fed_bytes = SMALL_READ_BYTES
        if not self._is_between_requests or self._url:
            self._on_partial_data(piece)

    def _decline_upgrade(self) -> None:
        """Ignore an offer of h2c, as of Java's client (RFC 9110, section 7.8); reject other upgrades."""
        protocols = [value.lower() for name, value in self._headers if name == b"upgrade"]
        if protocols != [b"h2c"] or self._parser.get_method() == b"CONNECT":
            raise MalformedRequest("protocol upgrades are not supported; remove the Upgrade header")
        framing = [pair for pair in self._headers if pair[0] in FRAMING_FIELDS]
        self._declined_upgrade = b"".join(b"%b: %b\r\n" % pair for pair in framing)

    def _restart_parser(self, rest: bytes) -> None:
        """Continue after the header with a new parser that does not see the Upgrade."""
        framing, self._declined_upgrade = self._declined_upgrade, None
        if framing is None:
            self._refuse_malformed(httptools.HttpParserUpgrade())
            return
        self._parser = httptools.HttpRequestParser(self)
        self._ignores_next_header = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)
        self._feed_in_pieces(rest)

    def _check_critical_headers(self, version: str) -> bool:
        """Return whether the client waits for 100 Continue. Raises `MalformedRequest`.

        The rules of RFC 9112, sections 3.2 and 6.3, without their leniencies, so that no other server can
        read the request differently.
        """
        headers = dict(self._critical_headers)
        if len(headers) != len(self._critical_headers):
            raise MalformedRequest(f"{NOT_HTTP_MESSAGE}: a header that may occur once is repeated")
        host = headers.pop(b"host", None)
        if host is None:
            if version == "1.1":
                raise MalformedRequest(f"{NOT_HTTP_MESSAGE}: the Host header is missing")
        elif not VALID_HOST.fullmatch(host):
            raise MalformedRequest(f"{NOT_HTTP_MESSAGE}: the Host header is invalid")
        if not headers and version == "1.1":
            self._usual_critical_headers = self._critical_headers
        coding = headers.get(b"transfer-encoding", b"chunked").rstrip(b" \t").lower()
        if coding != b"chunked" or (b"transfer-encoding" in headers and version != "1.1"):
            raise MalformedRequest(
                f"{NOT_HTTP_MESSAGE}: only Transfer-Encoding 'chunked' of HTTP/1.1 is supported"
            )
        return headers.get(b"expect", b"").lower() == b"100-continue" and version == "1.1"

    def _check_header_size(self, first_line_bytes: int) -> None:
        size = first_line_bytes + sum(len(name) + len(value) + 4 for name, value in self._headers)
        if size > self._max_header_bytes or len(self._headers) > self._max_header_fields:
            raise HeaderTooLarge(self._max_header_bytes, self._max_header_fields)

    def _on_partial_data(self, data: bytes | memoryview) -> None:
        """Handle data that ends within a header or a body."""
        if self._is_last_request:
            return
        if len(self._headers) > self._max_header_fields:
            self._refuse_header()
        elif self._receiving_cycle is None:
            self._on_partial_header(data)
        elif self._body_checked_at is None:
            self._body_checked_at = now = self.loop.time()
            self._body_credit_s = self._limits.body_stall_s
            self._received_body_bytes = self._framing_bytes = 0
            self._was_paused = self._was_paused or self._receiving_cycle.is_awaiting_continue()
            self._remaining_body_bytes = self._receiving_cycle.remaining_length()
            self._schedule_check(now + self._body_credit_s)
            self._start_early()
        else:
            self._on_partial_body(len(data))
            self._start_early()

    def _on_partial_header(self, data: bytes | memoryview) -> None:
        self._header_bytes += len(data)
        if len(self._url) > self._max_url_bytes:
            self.refuse(UrlTooLong(self._max_url_bytes))
        elif self._header_bytes > self._max_header_bytes + SMALL_READ_BYTES:
            # A small read that was parsed at once may contain the end of another request.
            self._refuse_header()
        elif self._header_started_at is None and (self._url or bytes(data).strip(b"\r\n")):
            self._header_started_at = (
                self.loop.time() if self._opened_at is None else self._opened_at
            )
            self._schedule_check(self._header_started_at + self._header_timeout_s)

    def _on_partial_body(self, size: int) -> None:
        self._received_body_bytes += size
        if self._has_body_data:
            self._has_body_data, self._framing_bytes = False, 0
            return
        self._framing_bytes += size  # chunk extensions or trailers
        if self._framing_bytes > self._max_header_bytes:
            self._refuse_header()

    def _refuse_header(self) -> None:
        self.refuse(HeaderTooLarge(self._max_header_bytes, self._max_header_fields))

    # Timeouts: each connection has one timer, which runs all checks.

    @property
    def _header_timeout_s(self) -> float:
        return RESERVED_HEADER_TIMEOUT_S if self._is_reserved else self._limits.header_timeout_s

    def _schedule_check(self, when: float) -> None:
        if when < self._next_check_at:
            if self._timer is not None:
                self._timer.cancel()
            self._next_check_at = when
            self._timer = self.loop.call_at(
                when, self._clients.schedule_check, self.loop, self._run_checks
            )

    def _run_checks(self) -> None:
        if self not in self._connections:
            return  # the connection is closed
        self._next_check_at = math.inf
        now = self.loop.time()
        if self._is_refused and not self.transport.is_closing():
            self._close()  # after `CLOSE_LINGER_S`
        checks = (
            self._check_responses(now),
            self._check_header_timeout(now),
            self._check_body_rate(now),
        )
        self._schedule_check(min(checks))

    def _check_responses(self, now: float) -> float:
        """Disconnect a client that reads too slowly; return the time of the next check."""
        if self._write_credit is None and not self.transport.is_closing():
            return now + self._keep_alive_s
        previous = self._write_credit or self._watch_writes()
        unwritten = self.transport.get_write_buffer_size()
        credit = self._advance_credit(
            previous, now, self._unwritten_bytes - unwritten, self._limits.write_timeout_s
        )
        self._write_credit, self._unwritten_bytes = credit, unwritten
        if credit.remaining_s <= 0:
            log.info("disconnected: the client does not read its response", extra=self._log_fields)
            self._count_refusal(RESPONSE_NOT_READ)
            self._reset_connection()
        return credit.next_check_at

    def _reset_connection(self) -> None:
        # Otherwise the kernel would keep the unread data while the client reads it slowly.
        socket: Any = self.transport.get_extra_info("socket")
        if socket is not None:
            socket.setsockopt(SOL_SOCKET, SO_LINGER, LINGER_ZERO)
        self.transport.abort()

    def _check_header_timeout(self, now: float) -> float:
        """Enforce the header and keep-alive timeouts; return the time of the next check."""
        if self._is_last_request:
            return math.inf
        if self._header_started_at is not None:
            if not self._is_reading:
                self._header_started_at = now  # the client cannot send while reading is paused
            due = self._header_started_at + self._header_timeout_s
        elif self._current_cycle is None:
            idle_s = self._keep_alive_s if self._opened_at is None else self._header_timeout_s
            due = self._idle_since + min(idle_s, self._keep_alive_s)
        else:
            return math.inf
        if due <= now:
            if self._is_reserved:
                self.refuse(TooManyConnections())
            elif self._header_started_at is not None:
                self.refuse(RequestTooSlow())
            else:
                self._close()
        return max(due, now + MIN_CHECK_INTERVAL_S)

    def _check_body_rate(self, now: float) -> float:
        since = self._body_checked_at
        if since is None or self._receiving_cycle is None or self._is_last_request:
            return math.inf
        credit = RateCredit(self._body_credit_s, since)
        is_paused = not self._is_reading or self._receiving_cycle.is_awaiting_continue()
        if self._was_paused or is_paused:  # the client was not the one who waited
            self._was_paused = is_paused
            credit = RateCredit(credit.remaining_s, now)
        else:
            credit = self._advance_credit(
                credit, now, self._received_body_bytes, self._limits.body_stall_s
            )
        self._body_credit_s, self._body_checked_at = credit
        self._received_body_bytes = 0
        if credit.remaining_s <= 0:
            self.refuse(RequestTooSlow())
        return credit.next_check_at

    def _watch_writes(self) -> RateCredit:
        now = self.loop.time()
        self._write_credit = credit = RateCredit(self._limits.write_timeout_s, now)
        self._unwritten_bytes = self.transport.get_write_buffer_size()
        self._schedule_check(credit.next_check_at)
        return credit

    def _advance_credit(
        self, credit: RateCredit, now: float, moved_bytes: int, max_s: float
    ) -> RateCredit:
        return credit.advance(now, moved_bytes, self._limits.min_bytes_per_s, max_s)
