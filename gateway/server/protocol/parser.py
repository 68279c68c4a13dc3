"""An HTTP/1.1 request parser without I/O: it is fed bytes and delivers events.

httptools has no limits and accepts ambiguous request lengths, so both are checked here while data arrives.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Any, Final, Protocol
from urllib.parse import unquote

import httptools
from starlette.types import Scope

from gateway.errors import GatewayError, HeaderTooLarge, MalformedRequest, UrlTooLong
from gateway.telemetry.request_info import HEADER_FACTS

MAX_HEADER_BYTES: Final = 64 << 10  # of a header with the request line, and of trailers
MAX_HEADER_FIELDS: Final = 100
MAX_URL_BYTES: Final = 8 << 10
MAX_PIPELINED: Final = 16  # requests that wait for the response before theirs
# Copied for each request; a copy that has all keys is faster than one that grows.
SCOPE: Final[Scope] = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.3"},
    "root_path": "",
    **dict.fromkeys(("http_version", "method", "path", "raw_path", "query_string", "headers")),
}
HeaderPairs = list[tuple[bytes, bytes]]
NOT_HTTP_MESSAGE: Final = "this is not an HTTP/1.1 request"
LENGTH_HEADERS: Final = ("Content-Length", "Transfer-Encoding")  # RFC 9112, section 6.1
REQUEST_HEADER_END: Final = b"\r\n\r\n"
# Fields that change how a request is read; each may occur once. httptools checks Content-Length strictly.
CRITICAL_HEADERS: Final = frozenset((b"host", b"transfer-encoding", b"expect"))
FRAMING_FIELDS: Final = frozenset((b"content-length", b"transfer-encoding"))
PERSISTENT_VERSIONS: Final = ("1.1", "1.0")  # clients ask for it in HTTP/1.0
VALID_HOST: Final = re.compile(
    rb"(?:[\w.~!$&'()*+,;=%-]*|\[[\da-fA-Fv.:]+\])(?::\d*)?[ \t]*", re.ASCII
)
SMALL_READ_BYTES: Final = 2048  # smaller reads are parsed at once, even if they are pipelined
MIN_PIECE_BYTES: Final = 64
# A longer header is not kept by its connection, to be recognized when it is repeated.
MAX_KNOWN_HEADER_BYTES: Final = 2048


class BodyReceiver(Protocol):
    def feed_body(self, body: bytes) -> None: ...


class RequestReceiver(Protocol):
    """The receiver of the requests. A `GatewayError` that it raises rejects the request."""

    def begin_request(
        self, scope: Scope, keep_alive: bool, expects_continue: bool
    ) -> BodyReceiver: ...
    def end_request(self) -> None: ...


class Phase(Enum):
    """The part of a request that the parsed data ends with."""

    REQUEST_END = auto()  # also before the first data
    EMPTY_LINES = auto()  # no header has begun since the last request
    HEADER = auto()
    BODY = auto()


# A request compares several members, and each costs 0.4 µs more if it is read from its class.
REQUEST_END, EMPTY_LINES, HEADER, BODY = Phase


class IncomingBody:
    __slots__ = ("_content_length", "_headers", "_receiver", "received_bytes")

    def __init__(self, receiver: BodyReceiver, headers: HeaderPairs) -> None:
        self._receiver = receiver
        self._headers = headers
        self._content_length: int | None = None
        self.received_bytes = 0

    def feed(self, data: bytes) -> None:
        self.received_bytes += len(data)
        self._receiver.feed_body(data)

    @property
    def content_length(self) -> int:
        """The length that the header declares; 0 if the body comes in chunks."""
        # Only a body that comes in several reads needs it.
        if self._content_length is None:
            self._content_length = parse_content_length(self._headers)
        return self._content_length

    @property
    def remaining_bytes(self) -> int:
        return max(self.content_length - self.received_bytes, 0)


class RepeatedHead:
    """The header of the last request, if its read contained nothing else.

    Many clients send the same header again and again. A request with the header of the last one, byte for
    byte, is delivered without being parsed, which costs a tenth of what the gateway does for a request.
    """

    def __init__(self, receiver: RequestReceiver) -> None:
        self._receiver = receiver
        self.is_known = False
        self._header = b""
        self._request_bytes = 0  # the header and the body
        self._scope: dict[str, Any] = {}
        self._keep_alive = False
        self._expects_continue = False

    def deliver(self, data: bytes) -> bool:
        """Deliver a read that has the known header and a body of the same size; return whether it has."""
        if len(data) != self._request_bytes or not data.startswith(self._header):
            return False
        receiver = self._receiver
        body_receiver = receiver.begin_request(self._scope.copy(), True, self._expects_continue)
        if len(self._header) < self._request_bytes:
            body_receiver.feed_body(data[len(self._header) :])
        receiver.end_request()
        return True

    def record(self, scope: dict[str, Any], keep_alive: bool, expects_continue: bool) -> None:
        """Keep a copy of the values that are delivered for a header; the receiver changes the scope."""
        self._scope = scope.copy()
        self._keep_alive = keep_alive
        self._expects_continue = expects_continue

    def learn(self, data: bytes, body_bytes: int) -> None:
        """Recognize the recorded header from now on, if the data is its request and nothing else."""
        header_bytes = data.find(REQUEST_HEADER_END) + len(REQUEST_HEADER_END)
        is_whole_request = header_bytes + body_bytes == len(data)
        if is_whole_request and self._keep_alive and header_bytes <= MAX_KNOWN_HEADER_BYTES:
            self.is_known = True
            self._header = data[:header_bytes]
            self._request_bytes = len(data)
            self._scope[HEADER_FACTS] = {}

    def forget(self) -> None:
        self.is_known = False


class SizeGuard:
    """The limits that httptools lacks. Raises `HeaderTooLarge` or `UrlTooLong`."""

    def __init__(self) -> None:
        self._header_bytes = 0  # bytes of the header in earlier pieces
        self._framing_bytes = 0  # chunk extensions and trailers since the last body data

    def end_header(self, piece_bytes: int, method: bytes, url: bytes, headers: HeaderPairs) -> None:
        if self._header_bytes + piece_bytes > MAX_HEADER_BYTES or len(headers) > MAX_HEADER_FIELDS:
            self.check_fields(headers, len(method) + len(url) + len("  HTTP/1.1\r\n"))
        if len(url) > MAX_URL_BYTES:
            raise UrlTooLong(MAX_URL_BYTES)
        self._header_bytes = 0
        self._framing_bytes = 0

    def end_piece_in_header(self, piece_bytes: int, url: bytes) -> None:
        self._header_bytes += piece_bytes
        if len(url) > MAX_URL_BYTES:
            raise UrlTooLong(MAX_URL_BYTES)
        # A small read that was parsed at once may contain the end of another request.
        if self._header_bytes > MAX_HEADER_BYTES + SMALL_READ_BYTES:
            raise self._too_large()

    def end_read_in_body(self, read_bytes: int, body_bytes: int) -> None:
        self._framing_bytes = 0 if body_bytes else self._framing_bytes + read_bytes
        if self._framing_bytes > MAX_HEADER_BYTES:
            raise self._too_large()

    def check_fields(self, headers: HeaderPairs, first_line_bytes: int = 0) -> None:
        self.check_field_count(headers)
        size = first_line_bytes + sum(len(name) + len(value) + 4 for name, value in headers)
        if size > MAX_HEADER_BYTES:
            raise self._too_large()

    def check_field_count(self, headers: HeaderPairs) -> None:
        if len(headers) > MAX_HEADER_FIELDS:
            raise self._too_large()

    def _too_large(self) -> HeaderTooLarge:
        return HeaderTooLarge(MAX_HEADER_BYTES, MAX_HEADER_FIELDS)


class RequestParser:
    """Splits the data of a connection into requests, and delivers their ASGI scopes and bodies."""

    def __init__(self, receiver: RequestReceiver, common_scope: Scope) -> None:
        self.is_closed = False  # all further data is ignored
        self.pending = 0  # pipelined requests that wait; the receiver sets it
        self.unparsed = b""  # data that is parsed when fewer requests wait
        self._receiver = receiver
        self._scope = {**SCOPE, **common_scope}
        self._parser = httptools.HttpRequestParser(self)
        self._sizes = SizeGuard()
        self._repeated = RepeatedHead(receiver)
        self._phase = REQUEST_END
        self._body: IncomingBody | None = None  # None unless a body is being received
        self._body_bytes = 0  # received of the last body, when it was complete
        self._piece_bytes = 0  # size of the data that httptools is parsing
        self._url = b""
        self._headers: HeaderPairs = []
        self._critical_headers: HeaderPairs = []
        # The critical headers of the last request if they were only a valid Host.
        self._usual_critical_headers: HeaderPairs = [(b"", b"")]
        # The framing headers of a request with an Upgrade, after which httptools stops.
        self._declined_upgrade: bytes | None = None
        self._ignores_next_header = False  # a restarted parser gets the framing headers again

    @property
    def content_length(self) -> int:
        """The length of the body that is being received; 0 if it comes in chunks, or there is none."""
        return 0 if self._body is None else self._body.content_length

    def close(self) -> None:
        """Ignore all further data."""
        self.is_closed = True
        self.unparsed = b""
        self._repeated.forget()

    def release(self) -> None:
        """Close, and break the reference cycles."""
        self.close()
        del self._parser, self._receiver, self._repeated, self._body

    def feed(self, data: bytes) -> bool:
        """Deliver the events of the data; return whether it ends within a request.

        Raises `GatewayError` if a request is invalid or too large.
        """
        if self.is_closed:
            return False
        if self._repeated.is_known:
            if not self.pending and self._repeated.deliver(data):
                return False
            self._repeated.forget()
        begins_request = self._phase is REQUEST_END and not self.unparsed
        self._parse(data)
        if self.is_closed:
            return False
        if begins_request and self._phase is REQUEST_END:
            self._repeated.learn(data, self._body_bytes)
        return self._phase is HEADER or self._phase is BODY

    def _parse(self, data: bytes) -> None:
        size = len(data)
        body = self._body
        if body is not None and size <= body.remaining_bytes and not self.unparsed:
            self._parse_piece(data)
            return
        received_bytes = 0 if body is None else body.received_bytes
        if size > SMALL_READ_BYTES or self.pending or self.unparsed:
            self._parse_in_pieces(self.unparsed + data)
        else:
            rest = data
            while rest and not self.is_closed:
                rest = rest[self._parse_piece(rest) :]
        if body is not None and body is self._body:
            self._sizes.end_read_in_body(size, body.received_bytes - received_bytes)

    def _parse_in_pieces(self, data: bytes) -> None:
        """Parse pieces of few headers, so that the number of pipelined requests stays near its limit."""
        view = memoryview(data)
        start = 0
        self.unparsed = b""
        while start < len(data) and not self.is_closed:
            if self.pending >= MAX_PIPELINED:
                self.unparsed = data[start:]
                return
            body_bytes = 0 if self._body is None else self._body.remaining_bytes
            end = start + body_bytes if body_bytes else find_piece_end(data, start)
            start += self._parse_piece(view[start:end])

    def _parse_piece(self, piece: bytes | memoryview) -> int:
        """Return how much of the piece was parsed: all of it, or the header of a declined Upgrade."""
        if self._phase is REQUEST_END:
            self._phase = EMPTY_LINES
        self._piece_bytes = parsed_bytes = len(piece)
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as exc:
            self._decline_upgrade()
            parsed_bytes = exc.args[0]
        except httptools.HttpParserError as exc:
            raise find_cause(exc) from None
        if self._phase is REQUEST_END or self.is_closed:
            return parsed_bytes
        if self._phase is not BODY:
            self._sizes.end_piece_in_header(self._piece_bytes, self._url)
        if self._headers:  # the header or the trailers are incomplete
            self._sizes.check_field_count(self._headers)
        return parsed_bytes

    def _start_header(self) -> None:
        self._url = b""
        self._headers = []
        self._critical_headers = []

    # Called by httptools.

    def on_message_begin(self) -> None:
        self._phase = HEADER

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in CRITICAL_HEADERS:
            self._critical_headers.append((name, value))
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._phase = BODY
        if self._ignores_next_header:
            self._ignores_next_header = False
            self._start_header()
            return
        parser = self._parser
        headers = self._headers
        method = parser.get_method()
        version = parser.get_http_version()
        if parser.should_upgrade():
            self._check_upgrade(method)
        expects_continue = False
        if self._critical_headers != self._usual_critical_headers:
            expects_continue = self._check_critical_headers(version)
        self._sizes.end_header(self._piece_bytes, method, self._url, headers)
        url = httptools.parse_url(self._url)
        raw_path = url.path or b"/"
        path = raw_path.decode("ascii")
        scope = self._scope.copy()
        scope["http_version"] = version
        scope["method"] = method.decode("ascii")
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"] = raw_path
        scope["query_string"] = url.query or b""
        scope["headers"] = headers
        self._start_header()
        keep_alive = version in PERSISTENT_VERSIONS and parser.should_keep_alive()
        self._repeated.record(scope, keep_alive, expects_continue)
        receiver = self._receiver.begin_request(scope, keep_alive, expects_continue)
        self._body = IncomingBody(receiver, headers)

    def on_body(self, data: bytes) -> None:
        if self._body is not None:
            self._body.feed(data)

    def on_message_complete(self) -> None:
        if self._declined_upgrade is not None:
            return  # httptools treats the body as data of the other protocol
        self._phase = REQUEST_END
        if self._body is not None:
            self._body_bytes = self._body.received_bytes
            self._body = None
        if self._headers:
            # Trailers are not merged into the headers (RFC 9110, section 6.5.1).
            self._sizes.check_fields(self._headers)
            self._start_header()
        self._receiver.end_request()

    def _check_critical_headers(self, version: str) -> bool:
        headers = self._critical_headers
        expects_continue = check_critical_headers(headers, version)
        if len(headers) == 1 and version == "1.1":
            self._usual_critical_headers = headers
        return expects_continue

    def _check_upgrade(self, method: bytes) -> None:
        """Accept an offer of h2c, as of Java's client, to be ignored (RFC 9110, section 7.8)."""
        protocols = [value.lower() for name, value in self._headers if name == b"upgrade"]
        if protocols != [b"h2c"] or method == b"CONNECT":
            raise MalformedRequest("protocol upgrades are not supported; remove the Upgrade header")
        framing = [pair for pair in self._headers if pair[0] in FRAMING_FIELDS]
        self._declined_upgrade = b"".join(b"%b: %b\r\n" % pair for pair in framing)

    def _decline_upgrade(self) -> None:
        """Continue after the header with a new parser that does not see the Upgrade."""
        framing = self._declined_upgrade
        if framing is None:
            raise MalformedRequest(NOT_HTTP_MESSAGE)
        self._declined_upgrade = None
        self._parser = httptools.HttpRequestParser(self)
        self._ignores_next_header = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)


def parse_content_length(headers: HeaderPairs) -> int:
    for name, value in headers:
        if name == b"content-length":
            return int(value)
    return 0


def find_piece_end(data: bytes, start: int) -> int:
    header_end = data.find(REQUEST_HEADER_END, start + MIN_PIECE_BYTES)
    return len(data) if header_end < 0 else header_end + len(REQUEST_HEADER_END)


def check_critical_headers(pairs: HeaderPairs, version: str) -> bool:
    """Return whether the client waits for 100 Continue. Raises `MalformedRequest`.

    The rules of RFC 9112, sections 3.2 and 6.3, without their leniencies, so that no other server can read
    the request differently.
    """
    headers = dict(pairs)
    if len(headers) != len(pairs):
        raise MalformedRequest(f"{NOT_HTTP_MESSAGE}: a header that may occur once is repeated")
    host = headers.pop(b"host", None)
    if host is None:
        if version == "1.1":
            raise MalformedRequest(f"{NOT_HTTP_MESSAGE}: the Host header is missing")
    elif not VALID_HOST.fullmatch(host):
        raise MalformedRequest(f"{NOT_HTTP_MESSAGE}: the Host header is invalid")
    coding = headers.get(b"transfer-encoding", b"chunked").rstrip(b" \t").lower()
    if coding != b"chunked" or (b"transfer-encoding" in headers and version != "1.1"):
        raise MalformedRequest(
            f"{NOT_HTTP_MESSAGE}: only Transfer-Encoding 'chunked' of HTTP/1.1 is supported"
        )
    return headers.get(b"expect", b"").lower() == b"100-continue" and version == "1.1"


def find_cause(exc: httptools.HttpParserError) -> GatewayError:
    """Return the error that a callback of httptools raised, or the one that describes the invalid bytes."""
    if isinstance(exc.__context__, GatewayError):
        return exc.__context__
    if all(name in str(exc) for name in LENGTH_HEADERS):
        return MalformedRequest(f"{NOT_HTTP_MESSAGE}: it has both {' and '.join(LENGTH_HEADERS)}")
    return MalformedRequest(NOT_HTTP_MESSAGE)
