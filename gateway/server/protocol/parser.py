"""An HTTP/1.1 request parser without I/O: it is fed bytes and delivers scopes and bodies."""

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

    REQUEST_END = auto()  # also before the first data, and after empty lines
    HEADER = auto()
    BODY = auto()


class RequestParser:
    """Splits the data of a connection into requests, and delivers their ASGI scopes and bodies."""

    def __init__(self, receiver: RequestReceiver, common_scope: Scope) -> None:
        self.is_closed = False  # all further data is ignored
        self.phase = Phase.REQUEST_END
        self._receiver = receiver
        self._scope = {**SCOPE, **common_scope}
        self._parser = httptools.HttpRequestParser(self)
        # The last request, if its connection persists and its read contained nothing else.
        self._known_header = b""
        self._known_bytes = 0  # the header and the body; 0: none is known
        self._last_scope: dict[str, Any] = {}
        self._last_keeps_alive = False
        self._last_expects_continue = False
        self._body_receiver: BodyReceiver | None = None
        self._completed_requests = 0
        self._url = b""
        self._headers: HeaderPairs = []  # or trailers
        self._critical_headers: HeaderPairs = []
        # The sizes that httptools does not limit.
        self._read_bytes = 0  # of the data that httptools is parsing
        self._header_bytes = 0  # bytes of the header in earlier reads
        self._body_bytes = 0
        self._framing_bytes = 0  # chunk extensions and trailers since the last body data
        # The framing headers of a request with an Upgrade, after which httptools stops.
        self._declined_upgrade: bytes | None = None
        self._ignores_next_header = False  # a restarted parser gets the framing headers again

    def close(self) -> None:
        """Ignore all further data."""
        self.is_closed = True
        self._known_bytes = 0

    def release(self) -> None:
        """Close, and break the reference cycles."""
        self.close()
        del self._parser, self._receiver, self._body_receiver

    def feed(self, data: bytes) -> None:
        """Deliver the requests in the data. Raises `GatewayError` if one is invalid or too large."""
        if self.is_closed:
            return
        if len(data) == self._known_bytes and data.startswith(self._known_header):
            self._repeat_request(data)
            return
        self._known_bytes = 0
        previous_phase = self.phase
        previous_requests = self._completed_requests
        previous_body_bytes = self._body_bytes
        self._read_bytes = len(data)
        self._parse(data)
        if self.is_closed:
            return
        completed = self._completed_requests - previous_requests
        if self.phase is Phase.BODY:
            has_body = self._body_bytes > previous_body_bytes or previous_phase is not Phase.BODY
            self._framing_bytes = 0 if has_body or completed else self._framing_bytes + len(data)
            if self._framing_bytes > MAX_HEADER_BYTES:
                raise header_too_large()
        elif not completed:
            # A header, or empty lines. A read that ends an earlier request is small enough not to be counted.
            self._header_bytes += len(data)
            self._check_url()
            if self._header_bytes > MAX_HEADER_BYTES:
                raise header_too_large()
        elif completed == 1 and self.phase is previous_phase:
            self._learn_request(data)

    def _repeat_request(self, data: bytes) -> None:
        receiver = self._receiver
        scope = self._last_scope.copy()
        body_receiver = receiver.begin_request(scope, True, self._last_expects_continue)
        if len(self._known_header) < len(data):
            body_receiver.feed_body(data[len(self._known_header) :])
        receiver.end_request()

    def _learn_request(self, data: bytes) -> None:
        """Recognize the header from now on, if the data is its request and nothing else."""
        header_bytes = data.find(REQUEST_HEADER_END) + len(REQUEST_HEADER_END)
        is_whole_request = header_bytes + self._body_bytes == len(data)
        if self._last_keeps_alive and is_whole_request and header_bytes <= MAX_KNOWN_HEADER_BYTES:
            self._known_header = data[:header_bytes]
            self._known_bytes = len(data)
            self._last_scope[HEADER_FACTS] = {}

    def _parse(self, data: bytes) -> None:
        while data and not self.is_closed:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as exc:
                self._decline_upgrade()
                data = data[exc.args[0] :]
            except httptools.HttpParserError as exc:
                raise find_cause(exc) from None
            else:
                return

    def _start_header(self) -> None:
        self._url = b""
        self._headers = []
        self._critical_headers = []

    # Called by httptools.

    def on_message_begin(self) -> None:
        self.phase = Phase.HEADER
        self._header_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in CRITICAL_HEADERS:
            self._critical_headers.append((name, value))
        self._headers.append((name, value))
        if len(self._headers) > MAX_HEADER_FIELDS:
            raise header_too_large()

    def on_headers_complete(self) -> None:
        self.phase = Phase.BODY
        if self._ignores_next_header:
            self._ignores_next_header = False
            self._start_header()
            return
        if self.is_closed:
            return
        parser = self._parser
        headers = self._headers
        method = parser.get_method()
        version = parser.get_http_version()
        if parser.should_upgrade():
            self._check_upgrade(method)
        expects_continue = check_critical_headers(self._critical_headers, version)
        if self._header_bytes + self._read_bytes > MAX_HEADER_BYTES:
            check_field_sizes(headers, len(method) + len(self._url) + len("  HTTP/1.1\r\n"))
        self._check_url()
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
        self._body_bytes = 0
        self._framing_bytes = 0
        keep_alive = version in PERSISTENT_VERSIONS and parser.should_keep_alive()
        self._last_scope = scope.copy()  # the receiver changes it
        self._last_keeps_alive = keep_alive
        self._last_expects_continue = expects_continue
        self._body_receiver = self._receiver.begin_request(scope, keep_alive, expects_continue)

    def on_body(self, data: bytes) -> None:
        if self._body_receiver is not None:
            self._body_bytes += len(data)
            self._body_receiver.feed_body(data)

    def on_message_complete(self) -> None:
        if self._declined_upgrade is not None or self.is_closed:
            return  # httptools treats the body as data of the other protocol
        self.phase = Phase.REQUEST_END
        self._completed_requests += 1
        self._body_receiver = None
        if self._headers:
            # Trailers are not merged into the headers (RFC 9110, section 6.5.1).
            check_field_sizes(self._headers)
            self._start_header()
        self._receiver.end_request()

    def _check_url(self) -> None:
        if len(self._url) > MAX_URL_BYTES:
            raise UrlTooLong(MAX_URL_BYTES)

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


def check_field_sizes(headers: HeaderPairs, first_line_bytes: int = 0) -> None:
    size = first_line_bytes + sum(len(name) + len(value) + 4 for name, value in headers)
    if size > MAX_HEADER_BYTES:
        raise header_too_large()


def header_too_large() -> HeaderTooLarge:
    return HeaderTooLarge(MAX_HEADER_BYTES, MAX_HEADER_FIELDS)


def find_cause(exc: httptools.HttpParserError) -> GatewayError:
    """Return the error that a callback of httptools raised, or the one that describes the invalid bytes."""
    if isinstance(exc.__context__, GatewayError):
        return exc.__context__
    if all(name in str(exc) for name in LENGTH_HEADERS):
        return MalformedRequest(f"{NOT_HTTP_MESSAGE}: it has both {' and '.join(LENGTH_HEADERS)}")
    return MalformedRequest(NOT_HTTP_MESSAGE)
