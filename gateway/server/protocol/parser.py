"""An HTTP/1.1 request parser without I/O: it is fed bytes and delivers events.

httptools has no limits and accepts ambiguous request lengths, so both are checked here while data arrives.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import unquote

import httptools
from starlette.types import Scope

from gateway.errors import GatewayError, HeaderTooLarge, MalformedRequest, UrlTooLong
from gateway.server.protocol.limits import ProtocolLimits
from gateway.telemetry.request_info import HEADER_FACTS

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
PERSISTENT_VERSIONS: Final = ("1.1", "1.0")  # 1.0 if the client asks for it
VALID_HOST: Final = re.compile(
    rb"(?:[\w.~!$&'()*+,;=%-]*|\[[\da-fA-Fv.:]+\])(?::\d*)?[ \t]*", re.ASCII
)
SMALL_READ_BYTES: Final = 2048  # smaller reads are parsed at once, even if they are pipelined
MIN_FEED_BYTES: Final = 64
MAX_KNOWN_HEADER_BYTES: Final = 2048  # of each connection


class BodyReceiver(Protocol):
    def feed_body(self, body: bytes) -> None: ...


class RequestReceiver(Protocol):
    """The receiver of the requests. A `GatewayError` that it raises rejects the request."""

    def begin_request(
        self, scope: Scope, keep_alive: bool, expects_continue: bool
    ) -> BodyReceiver: ...
    def end_request(self) -> None: ...


class KnownRequest(NamedTuple):
    """A request after which the connection persists, and what was delivered for its header."""

    header: bytes
    size: int  # with the body
    scope: dict[str, Any]
    expects_continue: bool


class RequestParser:
    """Splits the data of a connection into requests, and delivers their ASGI scopes and bodies.

    Many clients send the same header again and again. A request with the header of the last one, byte for
    byte, is delivered without being parsed, which costs a tenth of what the gateway does for a request.
    """

    def __init__(
        self, receiver: RequestReceiver, limits: ProtocolLimits, common_scope: Scope
    ) -> None:
        self.is_closed = False  # all further data is ignored
        self.pending = 0  # pipelined requests that wait; the receiver sets it
        self.unparsed = b""  # data that is parsed when fewer requests wait
        self._receiver = receiver
        self._limits = limits
        self._scope = {**SCOPE, **common_scope}
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: HeaderPairs = []
        self._critical_headers: HeaderPairs = []
        # The critical headers of the last request if they were only a valid Host.
        self._usual_critical_headers: HeaderPairs = [(b"", b"")]
        # The framing headers of a request with an Upgrade, after which httptools stops.
        self._declined_upgrade: bytes | None = None
        self._ignores_next_header = False  # a restarted parser gets the framing headers again
        self._is_between_requests = True
        self._known_request: KnownRequest | None = None  # the last read, if it was just this
        # What was delivered for the last header of this read.
        self._delivered: tuple[dict[str, Any], bool, bool] | None = None
        self._was_at_request_end = True  # the last read ended with a request, or there was none
        self._fed_bytes = SMALL_READ_BYTES  # the maximum size of the data that httptools is given
        self._header_bytes = 0  # of an incomplete header, without those
        self._request_headers: HeaderPairs = []
        self._body_receiver: BodyReceiver | None = None  # while a body is received
        self._body_bytes = 0
        self._seen_body_bytes = -1  # at the end of the last read, if a body comes in several
        self.content_length = 0  # of such a body; 0 if it comes in chunks
        self._remaining_body_bytes = 0
        self._framing_bytes = 0  # chunk framing since the last body data

    def close(self) -> None:
        """Ignore all further data."""
        self.is_closed = True
        self.unparsed = b""
        self._known_request = None

    def release(self) -> None:
        """Close, and break the reference cycles."""
        self.close()
        del self._parser, self._receiver, self._body_receiver

    def feed(self, data: bytes) -> bool:
        """Deliver the events of the data; return whether it ends within a request.

        Raises `GatewayError` if a request is invalid or too large.
        """
        if self.is_closed:
            return False
        size, known = len(data), self._known_request
        if (
            known is not None
            and size == known.size
            and data.startswith(known.header)
            and not self.pending
        ):
            self._repeat_request(known, data)
            return False
        begins_request = self._was_at_request_end
        self._was_at_request_end = 0 < size == self._remaining_body_bytes
        self._known_request = self._delivered = None
        is_incomplete = self._parse(data)
        if begins_request and self._delivered is not None and not is_incomplete:
            self._learn_request(data, *self._delivered)
        return is_incomplete

    def _learn_request(
        self, data: bytes, scope: dict[str, Any], keep_alive: bool, expects_continue: bool
    ) -> None:
        """Keep the header if the data is one request without chunks, and nothing else."""
        header_bytes = data.find(REQUEST_HEADER_END) + len(REQUEST_HEADER_END)
        size = len(data)
        if header_bytes + self._body_bytes != size or header_bytes > MAX_KNOWN_HEADER_BYTES:
            return
        self._was_at_request_end = True
        if keep_alive:
            header = data[:header_bytes]
            scope[HEADER_FACTS] = {}
            self._known_request = KnownRequest(header, size, scope, expects_continue)

    def _repeat_request(self, known: KnownRequest, data: bytes) -> None:
        scope = known.scope.copy()
        body_receiver = self._receiver.begin_request(scope, True, known.expects_continue)
        if len(known.header) < known.size:
            body_receiver.feed_body(data[len(known.header) :])
        self._receiver.end_request()

    def _parse(self, data: bytes) -> bool:
        size = len(data)
        try:
            if self.unparsed or (
                size > self._remaining_body_bytes and (size > SMALL_READ_BYTES or self.pending)
            ):
                return self._feed_in_pieces(self.unparsed + data)
            if self._remaining_body_bytes:
                self._remaining_body_bytes -= size
            self._is_between_requests = False
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            self._decline_upgrade()
            rest = data[exc.args[0] :]
            return self.feed(rest) if rest else self._check_incomplete(rest)
        except httptools.HttpParserError as exc:
            raise find_cause(exc) from None
        if self._is_between_requests and not self._url:
            return False
        return self._check_incomplete(data)

    # Called by httptools.

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
        parser, limits, headers = self._parser, self._limits, self._headers
        if parser.should_upgrade():
            self._check_upgrade()
        version = parser.get_http_version()
        expects_continue = False
        if self._critical_headers != self._usual_critical_headers:
            expects_continue = check_critical_headers(self._critical_headers, version)
            if len(self._critical_headers) == 1 and version == "1.1":
                self._usual_critical_headers = self._critical_headers
        self._critical_headers = []
        if (
            self._header_bytes + self._fed_bytes > limits.max_header_bytes
            or len(headers) > limits.max_header_fields
        ):
            self._check_header_size(
                len(parser.get_method()) + len(self._url) + len("  HTTP/1.1\r\n")
            )
        self._header_bytes = 0
        if len(self._url) > limits.max_url_bytes:
            raise UrlTooLong(limits.max_url_bytes)
        url = httptools.parse_url(self._url)
        raw_path = url.path or b"/"
        path = raw_path.decode("ascii")
        scope = self._scope.copy()
        scope["http_version"] = version
        scope["method"] = parser.get_method().decode("ascii")
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"] = raw_path
        scope["query_string"] = url.query or b""
        scope["headers"] = headers
        self._is_between_requests = False  # it may follow another request in the same read
        self._request_headers = headers
        self._url = b""
        self._headers = []
        self._body_bytes = 0
        keep_alive = version in PERSISTENT_VERSIONS and parser.should_keep_alive()
        self._delivered = scope.copy(), keep_alive, expects_continue
        self._body_receiver = self._receiver.begin_request(scope, keep_alive, expects_continue)

    def on_body(self, data: bytes) -> None:
        self._body_bytes += len(data)
        if self._body_receiver is not None:
            self._body_receiver.feed_body(data)

    def on_message_complete(self) -> None:
        if self._declined_upgrade is not None:
            return  # httptools treats the body as data of the other protocol
        self._is_between_requests = True
        self._body_receiver = None
        self._remaining_body_bytes = 0
        self._seen_body_bytes = -1
        if self._headers:
            # Trailers are not merged into the headers (RFC 9110, section 6.5.1).
            self._check_header_size(0)
            self._headers = []
            self._critical_headers = []
        self._receiver.end_request()

    def _feed_in_pieces(self, data: bytes) -> bool:
        """Parse in pieces of few headers, so that the number of pipelined requests stays near its limit."""
        view = memoryview(data)
        start, size, piece = 0, len(data), view
        self.unparsed = b""
        try:
            while start < size and not self.is_closed:
                if self.pending >= self._limits.max_pipelined:
                    self.unparsed = data[start:]
                    return False
                end = start + self._remaining_body_bytes
                if end <= start:
                    header_end = data.find(REQUEST_HEADER_END, start + MIN_FEED_BYTES)
                    end = size if header_end < 0 else header_end + len(REQUEST_HEADER_END)
                piece = view[start:end]
                self._fed_bytes = len(piece)
                self._remaining_body_bytes -= min(self._remaining_body_bytes, len(piece))
                self._is_between_requests = False
                try:
                    self._parser.feed_data(piece)
                except httptools.HttpParserUpgrade as exc:
                    self._decline_upgrade()
                    end = start + exc.args[0]
                if self._body_receiver is not None and not self._remaining_body_bytes:
                    self._measure_body()
                start = end
                if start < size and not self._is_between_requests and self._body_receiver is None:
                    self._header_bytes += len(piece)  # empty lines before a request
        finally:
            self._fed_bytes = SMALL_READ_BYTES
        return self._check_incomplete(piece)

    def _measure_body(self) -> None:
        for name, value in self._request_headers:
            if name == b"content-length":
                self.content_length = int(value)
                self._remaining_body_bytes = self.content_length - self._body_bytes
                return
        self.content_length = 0

    def _check_incomplete(self, data: bytes | memoryview) -> bool:
        """Check the sizes of a request that the data ends within; return whether there is one."""
        if self.is_closed or (self._is_between_requests and not self._url):
            return False
        limits = self._limits
        if len(self._headers) > limits.max_header_fields:
            raise HeaderTooLarge(limits.max_header_bytes, limits.max_header_fields)
        if self._body_receiver is None:
            self._header_bytes += len(data)
            if len(self._url) > limits.max_url_bytes:
                raise UrlTooLong(limits.max_url_bytes)
            # A small read that was parsed at once may contain the end of another request.
            if self._header_bytes > limits.max_header_bytes + SMALL_READ_BYTES:
                raise HeaderTooLarge(limits.max_header_bytes, limits.max_header_fields)
            return bool(self._url or bytes(data).strip(b"\r\n"))
        if self._seen_body_bytes < 0:
            self._measure_body()
        if self._body_bytes != self._seen_body_bytes:
            self._framing_bytes = 0
        else:
            self._framing_bytes += len(data)  # chunk extensions or trailers
            if self._framing_bytes > limits.max_header_bytes:
                raise HeaderTooLarge(limits.max_header_bytes, limits.max_header_fields)
        self._seen_body_bytes = self._body_bytes
        return True

    def _check_header_size(self, first_line_bytes: int) -> None:
        limits, headers = self._limits, self._headers
        size = first_line_bytes + sum(len(name) + len(value) + 4 for name, value in headers)
        if size > limits.max_header_bytes or len(headers) > limits.max_header_fields:
            raise HeaderTooLarge(limits.max_header_bytes, limits.max_header_fields)

    def _check_upgrade(self) -> None:
        """Accept an offer of h2c, as of Java's client, to be ignored (RFC 9110, section 7.8)."""
        protocols = [value.lower() for name, value in self._headers if name == b"upgrade"]
        if protocols != [b"h2c"] or self._parser.get_method() == b"CONNECT":
            raise MalformedRequest("protocol upgrades are not supported; remove the Upgrade header")
        framing = [pair for pair in self._headers if pair[0] in FRAMING_FIELDS]
        self._declined_upgrade = b"".join(b"%b: %b\r\n" % pair for pair in framing)

    def _decline_upgrade(self) -> None:
        """Continue after the header with a new parser that does not see the Upgrade."""
        framing, self._declined_upgrade = self._declined_upgrade, None
        if framing is None:
            raise MalformedRequest(NOT_HTTP_MESSAGE)
        self._parser = httptools.HttpRequestParser(self)
        self._ignores_next_header = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)


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
