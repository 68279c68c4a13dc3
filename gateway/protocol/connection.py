"""A client's connection: what comes in, in what time, and who is next."""

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
    Malformed,
    TooManyConnections,
    TooSlow,
    UrlTooLong,
)
from gateway.protocol.exchange import Exchange, refusal
from gateway.protocol.limits import LEAST_LOOK_S, Credit, Crowd, Limits, address_of, network_of
from gateway.tracing import request_id_of

log = logging.getLogger(__name__)

JOIN_UNDER_BYTES: Final = 64 * 1024
ASGI: Final = {"version": "3.0", "spec_version": "2.3"}
Pairs = list[tuple[bytes, bytes]]
NOT_HTTP: Final = "this is not an HTTP/1.1 request"
TWO_LENGTHS: Final = ("Content-Length", "Transfer-Encoding")  # RFC 9112, section 6.1
HEAD_END: Final = b"\r\n\r\n"
# Of the fields that say how a request is read there is one at most.
# What changes how a request is read; its length is httptools' business, which is strict about it.
NOTED: Final = frozenset((b"host", b"transfer-encoding", b"expect"))
FRAMING: Final = frozenset((b"content-length", b"transfer-encoding"))
PERSISTENT: Final = ("1.1", "1.0")  # the latter where the client asks for it
HOST: Final = re.compile(rb"(?:[\w.~!$&'()*+,;=%-]*|\[[\da-fA-Fv.:]+\])(?::\d*)?[ \t]*", re.ASCII)
WHOLE_BYTES: Final = 2048  # a read as small as this is parsed at once, pipelined or not
LEAST_PIECE_BYTES: Final = 64
HEALTH_PATHS: Final = frozenset((b"/livez", b"/readyz", b"/v2/health/live", b"/v2/health/ready"))
RESERVED: Final = 32  # connections over the limit that may ask how the gateway is
RESERVED_S: Final = 1.0
LINGER_S: Final = 1.0
NOT_TAKEN: Final = "answer_not_taken"
AT_ONCE: Final = pack("ii", 1, 0)  # for SO_LINGER: on, and for no time


def describe(exc: Exception) -> str:
    """Return the sentence for an error of the parser."""
    if all(name in str(exc) for name in TWO_LENGTHS):
        return f"{NOT_HTTP}: it has both {' and '.join(TWO_LENGTHS)}"
    return NOT_HTTP


class Protocol(asyncio.Protocol):
    """A connection; made by uvicorn's server, which calls `shutdown` and counts `connections`."""

    # More attributes than the interpreter keeps quick to find without them.
    __slots__ = (
        "_addresses",
        "_arriving",
        "_began",
        "_between",
        "_body_left",
        "_came",
        "_client",
        "_coming_left_s",
        "_coming_since",
        "_connections",
        "_counted",
        "_crowd",
        "_current",
        "_declined",
        "_drain",
        "_dry_bytes",
        "_fed",
        "_flowing",
        "_head_bytes",
        "_head_since",
        "_headers",
        "_held",
        "_idle_since",
        "_keep_alive_s",
        "_last",
        "_limits",
        "_looks_at",
        "_most_fields",
        "_most_header_bytes",
        "_most_url_bytes",
        "_muted",
        "_noted",
        "_parser",
        "_reading",
        "_refusals",
        "_refused",
        "_reserved",
        "_state",
        "_taking",
        "_task",
        "_tasks",
        "_timer",
        "_unparsed",
        "_untaken",
        "_url",
        "_usual",
        "_waiting",
        "_was_refused",
        "app",
        "loop",
        "transport",
        "unwritable",
    )

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: Limits,
        crowd: Crowd,
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
        self._refusals: Counter | None = app_state.get("refusals")
        self._drain: Any = app_state.get("drain")  # … and may say when it is to end
        self._keep_alive_s = config.timeout_keep_alive
        self._limits = limits
        self._most_url_bytes = limits.url_bytes
        self._most_header_bytes = limits.header_bytes
        self._most_fields = limits.header_fields
        self._crowd = crowd
        self._client = ""  # as it is counted
        self._reserved = False  # over the limit, and may ask only how the gateway is
        self._parser = httptools.HttpRequestParser(self)
        self._addresses: dict[str, Any] = {}
        self._url = b""
        self._headers: Pairs = []
        self._noted: Pairs = []
        # What was noted of the last request, if it was a Host and nothing else.
        self._usual: Pairs = [(b"", b"")]
        self._declined: bytes | None = None  # an upgrade, after which the parser goes no further
        self._muted = False  # it is told again how long the body is
        self._between = True  # two requests, as far as is known
        self._fed = WHOLE_BYTES  # that the parser is being given, at most
        self._head_bytes = 0  # of a header that is not whole, before those
        self._head_since: float | None = None
        self._body_left = 0  # of the announced length of one that does not come in one piece
        self._flowing = False  # there was body in what came
        self._dry_bytes = 0  # of its framing, since there was
        self._unparsed = b""
        self._arriving: Exchange | None = None  # whose body is being received
        self._current: Exchange | None = None  # whose answer is being sent
        self._waiting: deque[Exchange] = deque()  # pipelined (RFC 9112, section 9.3.2)
        self._was_refused = False  # the last request, by a 4xx
        self._task: asyncio.Task[None] | None = None
        self.unwritable: asyncio.Future[None] | None = None
        self._reading = True
        self._held = False  # reading was paused, or a body not asked for, since the last look
        self._last = False  # what comes after it is not looked at
        self._refused = False
        self._began: float | None = None  # until the first header is whole
        self._idle_since = 0.0
        self._coming_since: float | None = None  # a body that did not come in one piece
        self._coming_left_s = 0.0
        self._came = 0
        self._taking: Credit | None = None  # of answers that the client does not take at once
        self._untaken = 0
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at = math.inf

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
        self._began = self._idle_since = now = self.loop.time()
        excess = self._excess()
        self._reserved = excess > 0
        if excess > RESERVED:
            self.refuse(TooManyConnections(), linger=False)
            return
        self._look_by(now + min(self._first_s, self._keep_alive_s))

    def connection_lost(self, exc: Exception | None) -> None:
        """A client that leaves is not waited for: what works for it is cancelled."""
        self._connections.discard(self)
        if self._counted is not None:
            self._counted.dec()
        if self._client:
            self._crowd.leave(self._client)
        if self._timer is not None:
            self._timer.cancel()
        self.resume_writing()
        self._waiting.clear()
        self._unparsed = b""
        self._arriving = None
        if self._current is not None and not self._refused:
            self._give_up(self._current)
        if self._task is None:
            self._current = None  # which holds this object, as does the parser
        del self._parser

    def data_received(self, data: bytes) -> None:
        if self._last:
            return
        if self._unparsed:
            self._unparsed += data
            return
        size = len(data)
        if size > self._body_left and (size > WHOLE_BYTES or self._waiting):
            self._feed_in_pieces(data)
            return
        if self._body_left:
            self._body_left -= size
        self._between = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            self._go_on(data[exc.args[0] :])
            return
        except httptools.HttpParserError as exc:
            self._fail(exc)
        if not self._between or self._url:
            self._part_came(data)

    def eof_received(self) -> None:
        """Who closes its half has left: the transport closes the other."""

    def pause_writing(self) -> None:
        self.unwritable = self.loop.create_future()
        self._watch_taking()

    def resume_writing(self) -> None:
        self._taking = None
        if self.unwritable is not None and not self.unwritable.done():
            self.unwritable.set_result(None)
        self.unwritable = None

    # The parser calls these.

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in NOTED:
            self._noted.append((name, value))
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._muted:
            self._muted, self._url, self._headers, self._noted = False, b"", [], []
            return
        parser = self._parser
        if parser.should_upgrade():
            self._decline_upgrade()
        version = parser.get_http_version()
        expects_continue = self._noted != self._usual and self._check_noted(version)
        self._noted = []
        if (
            self._head_bytes + self._fed > self._most_header_bytes
            or len(self._headers) > self._most_fields
        ):
            self._check_size(len(parser.get_method()) + len(self._url) + len("  HTTP/1.1\r\n"))
        if self._head_bytes:
            self._head_bytes, self._head_since = 0, None
        self._began = None
        if len(self._url) > self._most_url_bytes:
            raise UrlTooLong(self._most_url_bytes)
        url = httptools.parse_url(self._url)
        raw_path = url.path or b"/"
        path = raw_path.decode("ascii")
        keep_alive = version in PERSISTENT and parser.should_keep_alive()
        if self._reserved:
            if raw_path not in HEALTH_PATHS:
                raise TooManyConnections
            keep_alive = False
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
        self._between = False  # perhaps it began behind the end of another
        exchange = self._arriving = Exchange(self, scope, keep_alive, expects_continue)
        self._url = b""
        self._headers = []
        if self._current is None:
            self._current = exchange
        else:
            self._waiting.append(exchange)
            self.pause_reading()

    def on_body(self, body: bytes) -> None:
        self._flowing = True
        if self._arriving is not None:
            self._arriving.arrived(body)

    def on_message_complete(self) -> None:
        if self._declined is not None:
            return  # httptools takes the body for the other protocol's
        self._between = True
        self._body_left = 0
        self._coming_since = None
        if self._headers:
            # Trailers are no headers, of this or the next (RFC 9110, section 6.5.1).
            self._check_size(0)
            self._headers = []
            self._noted = []
        if self._arriving is not None:
            self._last = not self._arriving.keep_alive
            self._arriving.arrived_whole()
            if self._task is None and self._current is self._arriving:
                self._start()
            self._arriving = None

    # The exchanges call these.

    def pause_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._held = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._reading and not self._waiting and not self._unparsed:
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
        self._was_refused = 400 <= exchange.status < 500
        if self._task is not None:
            self._tasks.discard(self._task)
            self._task = None
        if self.transport.is_closing() or self._refused:
            return
        if not exchange.complete:
            self.transport.abort()  # cut off: it must not look like an answer
        elif not exchange.keep_alive:
            self._close()
        else:
            self._idle_since = self.loop.time()
            if self._waiting:
                self._current = self._waiting.popleft()
                if self._current is self._arriving:
                    self._start_early()
                else:
                    self._start()
                if self._unparsed:
                    data, self._unparsed = self._unparsed, b""
                    self._feed_in_pieces(data)
            self.resume_reading()

    def refuse(self, error: GatewayError, *, linger: bool = True) -> None:
        """What cannot be served is answered like every other error, and not listened to again."""
        self._last = True
        self._unparsed = b""
        if self._waiting and self._arriving is not None:
            self._waiting.pop()  # it will never come whole
        whole = self._waiting[-1] if self._waiting else self._current
        if whole is not None and whole is not self._arriving:
            whole.keep_alive = False  # its answer is the last
            return
        if self._arriving is not None and self._arriving.started:
            self._close()
            return
        self._refused = True
        self._tell(error)
        if self._current is not None:
            self._current.hush()
            # Later: a task that is cancelled before its first step never runs, and would never end.
            self.loop.call_soon(self._give_up, self._current)
        if not linger:
            self._close()
            return
        # Closing under a client that is still sending would reset the connection, and the answer with it.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._look_by(self.loop.time() + LINGER_S)

    def shutdown(self) -> None:
        """The server stops: the request that is being answered is the last."""
        if self._current is None:
            self._close()
        else:
            self._current.keep_alive = False

    def _start(self) -> None:
        current = cast(Exchange, self._current)
        turn = self._crowd.refused.turn(self.loop) if self._was_refused else None
        self._task = self.loop.create_task(current.run(self.app, turn))
        self._tasks.add(self._task)

    def _start_early(self) -> None:
        """Before its body is whole, but not before much of it is here: a thousand that trickle would cost as
        much as a thousand answers. One that says it is too large is told so at once."""
        arriving = self._arriving
        if arriving is None or self._task is not None or arriving is not self._current:
            return
        if not arriving.is_gathering(self._limits.body_bytes):
            self._start()

    def _give_up(self, exchange: Exchange) -> None:
        exchange.leave()
        if self._task is not None and not exchange.complete:
            self._task.cancel()

    def _close(self) -> None:
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._watch_taking()

    def _tell(self, error: GatewayError) -> None:
        request_id = request_id_of(())
        self.transport.write(refusal(error, request_id))
        self._count(error.code.lower())
        if isinstance(error, TooManyConnections):
            self._crowd.send_away(self.loop.time(), self._whose)
        else:
            extra = {"status": error.status, "request_id": request_id, **self._whose}
            log.info("refused: %s", error.detail, extra=extra)

    def _count(self, reason: str) -> None:
        if self._refusals is not None:
            self._refusals.labels(reason).inc()

    @property
    def _whose(self) -> dict[str, str]:
        """For a line in the log."""
        address = self._addresses["client"]
        return {"client": "" if address is None else address[0]}

    def _excess(self) -> int:
        """By how many there are too many, in all or of this client; a socket file has no address."""
        excess = len(self._connections) - self._limits.connections
        per_client = self._limits.connections_per_client
        address = self._addresses["client"]
        if per_client and address is not None:
            self._client = network_of(address[0])
            excess = max(excess, self._crowd.enter(self._client) - per_client)
        return excess

    # How a request is read.

    def _fail(self, exc: Exception) -> None:
        raised = exc.__context__  # by a callback
        self.refuse(raised if isinstance(raised, GatewayError) else Malformed(describe(exc)))

    def _feed_in_pieces(self, data: bytes) -> None:
        """Few headers in each, so that hardly more requests are begun than may wait."""
        view = memoryview(data)
        start, size, piece = 0, len(data), view
        try:
            while start < size and not self._last:
                if len(self._waiting) >= self._limits.pipelined:
                    self._unparsed = data[start:]
                    return
                end = start + self._body_left
                if end <= start:
                    found = data.find(HEAD_END, start + LEAST_PIECE_BYTES)
                    end = size if found < 0 else found + len(HEAD_END)
                piece = view[start:end]
                self._fed = len(piece)
                self._body_left -= min(self._body_left, len(piece))
                self._between = False
                self._parser.feed_data(piece)
                if self._arriving is not None and not self._body_left:
                    self._body_left = self._arriving.length_to_come()
                start = end
                if start < size and not self._between and self._arriving is None:
                    self._head_bytes += len(piece)  # empty lines
        except httptools.HttpParserUpgrade as exc:
            self._go_on(data[start + exc.args[0] :])
            return
        except httptools.HttpParserError as exc:
            self._fail(exc)
        finally:
            self._fed = WHOLE_BYTES
        if not self._between or self._url:
            self._part_came(piece)

    def _decline_upgrade(self) -> None:
        """Who offers HTTP/2, as Java's client does, is answered without (RFC 9110, section 7.8). Others
        would not understand the answer."""
        offered = [value.lower() for name, value in self._headers if name == b"upgrade"]
        if offered != [b"h2c"] or self._parser.get_method() == b"CONNECT":
            raise Malformed("this server does not change protocols: send no Upgrade header")
        framing = [pair for pair in self._headers if pair[0] in FRAMING]
        self._declined = b"".join(b"%b: %b\r\n" % pair for pair in framing)

    def _go_on(self, rest: bytes) -> None:
        """With a parser that knows nothing of an upgrade, behind the header."""
        framing, self._declined = self._declined, None
        if framing is None:
            self._fail(httptools.HttpParserUpgrade())
            return
        self._parser = httptools.HttpRequestParser(self)
        self._muted = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)
        self._feed_in_pieces(rest)

    def _check_noted(self, version: str) -> bool:
        """RFC 9112, sections 3.2 and 6.3, without its leniencies: nobody may read it otherwise.

        Returns whether the client waits for 100 Continue.
        """
        noted = dict(self._noted)
        if len(noted) != len(self._noted):
            raise Malformed(f"{NOT_HTTP}: it says twice what may be said once")
        host = noted.pop(b"host", None)
        if host is None:
            if version == "1.1":
                raise Malformed(f"{NOT_HTTP}: it has no Host")
        elif not HOST.fullmatch(host):
            raise Malformed(f"{NOT_HTTP}: its Host is none")
        if not noted and version == "1.1":
            self._usual = self._noted
        coding = noted.get(b"transfer-encoding", b"chunked").rstrip(b" \t").lower()
        if coding != b"chunked" or (b"transfer-encoding" in noted and version != "1.1"):
            raise Malformed(f"{NOT_HTTP}: the one Transfer-Encoding is 'chunked', of HTTP/1.1")
        return noted.get(b"expect", b"").lower() == b"100-continue" and version == "1.1"

    def _check_size(self, first_line_bytes: int) -> None:
        size = first_line_bytes + sum(len(name) + len(value) + 4 for name, value in self._headers)
        if size > self._most_header_bytes or len(self._headers) > self._most_fields:
            raise HeaderTooLarge(self._most_header_bytes, self._most_fields)

    def _part_came(self, data: bytes | memoryview) -> None:
        """The data ended within a header or a body."""
        if self._last:
            return
        if len(self._headers) > self._most_fields:
            self._refuse_header()
        elif self._arriving is None:
            self._part_of_header_came(data)
        elif self._coming_since is None:
            self._coming_since = now = self.loop.time()
            self._coming_left_s = self._limits.body_stall_s
            self._came = self._dry_bytes = 0
            self._held = self._held or self._arriving.is_not_asked_for()
            self._body_left = self._arriving.length_to_come()
            self._look_by(now + self._coming_left_s)
            self._start_early()
        else:
            self._part_of_body_came(len(data))
            self._start_early()

    def _part_of_header_came(self, data: bytes | memoryview) -> None:
        self._head_bytes += len(data)
        if len(self._url) > self._most_url_bytes:
            self.refuse(UrlTooLong(self._most_url_bytes))
        elif self._head_bytes > self._most_header_bytes + WHOLE_BYTES:
            # A read that was parsed at once may have begun with another request's end.
            self._refuse_header()
        elif self._head_since is None and (self._url or bytes(data).strip(b"\r\n")):
            self._head_since = self.loop.time() if self._began is None else self._began
            self._look_by(self._head_since + self._first_s)

    def _part_of_body_came(self, size: int) -> None:
        self._came += size
        if self._flowing:
            self._flowing, self._dry_bytes = False, 0
            return
        self._dry_bytes += size  # of a chunk's extension, or of trailers
        if self._dry_bytes > self._most_header_bytes:
            self._refuse_header()

    def _refuse_header(self) -> None:
        self.refuse(HeaderTooLarge(self._most_header_bytes, self._most_fields))

    # One timer per connection, which looks, when it fires, whether it is time for anything.

    @property
    def _first_s(self) -> float:
        """For how long a header may come, and its first byte on a new connection."""
        return RESERVED_S if self._reserved else self._limits.header_timeout_s

    def _look_by(self, when: float) -> None:
        if when < self._looks_at:
            if self._timer is not None:
                self._timer.cancel()
            self._looks_at = when
            self._timer = self.loop.call_at(when, self._crowd.look, self.loop, self._look)

    def _look(self) -> None:
        if self not in self._connections:
            return  # it is gone
        self._looks_at = math.inf
        now = self.loop.time()
        if self._refused and not self.transport.is_closing():
            self._close()  # it has lingered
        looks = (self._look_at_answers(now), self._look_at_header(now), self._look_at_body(now))
        self._look_by(min(looks))

    def _look_at_answers(self, now: float) -> float:
        """Answers are not kept for who does not take them."""
        if self._taking is None and not self.transport.is_closing():
            return now + self._keep_alive_s
        taking = self._taking or self._watch_taking()
        left = self.transport.get_write_buffer_size()
        credit = self._after(taking, now, self._untaken - left, self._limits.write_timeout_s)
        self._taking, self._untaken = credit, left
        if credit.left_s <= 0:
            log.info("cut off: the client does not take its answer", extra=self._whose)
            self._count(NOT_TAKEN)
            self._reset()
        return credit.next_look

    def _reset(self) -> None:
        """Or the kernel would keep what was not taken for as long as the client goes on taking a little."""
        socket: Any = self.transport.get_extra_info("socket")
        if socket is not None:
            socket.setsockopt(SOL_SOCKET, SO_LINGER, AT_ONCE)
        self.transport.abort()

    def _look_at_header(self, now: float) -> float:
        """That it comes in time; or the first byte of the next one."""
        if self._last:
            return math.inf
        if self._head_since is not None:
            if not self._reading:
                self._head_since = now  # nobody can send what is not read
            due = self._head_since + self._first_s
        elif self._current is None:
            idle_s = self._keep_alive_s if self._began is None else self._first_s
            due = self._idle_since + min(idle_s, self._keep_alive_s)
        else:
            return math.inf
        if due <= now:
            if self._reserved:
                self.refuse(TooManyConnections())
            elif self._head_since is not None:
                self.refuse(TooSlow())
            else:
                self._close()
        return max(due, now + LEAST_LOOK_S)

    def _look_at_body(self, now: float) -> float:
        since = self._coming_since
        if since is None or self._arriving is None or self._last:
            return math.inf
        credit = Credit(self._coming_left_s, since)
        held = not self._reading or self._arriving.is_not_asked_for()
        if self._held or held:  # it is not the client who is slow
            self._held = held
            credit = Credit(credit.left_s, now)
        else:
            credit = self._after(credit, now, self._came, self._limits.body_stall_s)
        self._coming_left_s, self._coming_since = credit
        self._came = 0
        if credit.left_s <= 0:
            self.refuse(TooSlow())
        return credit.next_look

    def _watch_taking(self) -> Credit:
        now = self.loop.time()
        self._taking = credit = Credit(self._limits.write_timeout_s, now)
        self._untaken = self.transport.get_write_buffer_size()
        self._look_by(credit.next_look)
        return credit

    def _after(self, credit: Credit, now: float, moved: int, most_s: float) -> Credit:
        return credit.after(now, moved, self._limits.least_bytes_per_s, most_s)
