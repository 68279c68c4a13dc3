"""The request parser, without sockets or an event loop: bytes in, scopes and bodies out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.types import Scope

from gateway.errors import GatewayError, TooManyConnections
from gateway.server.protocol.parser import (
    MAX_HEADER_BYTES,
    MAX_HEADER_FIELDS,
    MAX_URL_BYTES,
    RequestParser,
)
from gateway.telemetry.request_info import HEADER_FACTS
from tests.support.framing import AMBIGUOUS, UNAMBIGUOUS

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
REQUESTS = {
    "pipelined": GET * 3,
    "a length": b"POST /a%20b?c HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello" + GET,
    "chunks and trailers": b"PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2;a=b\r\nhe\r\n3\r\nllo\r\n0\r\nX-Sum: 1\r\n\r\n" + GET,
    "an offer of HTTP/2": b"POST / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n"
    b"Content-Length: 5\r\n\r\nhello" + GET,
    "Expect": b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nok",
    "HTTP/1.0": b"\r\nGET / HTTP/1.0\r\n\r\n",
    "HTTP/1.0 that stays": b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    "headers": b"GET / HTTP/1.1\r\nHost: x\r\nACCEPT: b; c\r\nx-empty:\r\nX-High:  \xe9\xff\r\n\r\n",
    "a length of nothing": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n" + GET,
    "a body that looks like a request": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
    % (len(GET), GET),
    "a chunk that looks like a request": CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(GET), GET),
    "no chunk": CHUNKED + b"0\r\n\r\n" + GET,
    "chunk sizes and extensions": CHUNKED
    + b'A;a=b\r\n0123456789\r\n00b;c="d;e"\r\nabcdefghijk\r\n000;last\r\n\r\n',
    "trailers that mean something in a header": CHUNKED
    + b"2\r\nok\r\n0\r\nExpect: 100-continue\r\nHost: y\r\n\r\n"
    + GET,
    "Connection: close": b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Close\r\n\r\n",
}


class Recorder:
    """The events of a parser; the pieces of a body are joined."""

    def __init__(self, allowed: int = 1000) -> None:
        self.events: list[Any] = []
        self.body = b""
        self.allowed = allowed
        self.parser = RequestParser(self, {"scheme": "http"})

    def begin_request(self, scope: Scope, keep_alive: bool, expects_continue: bool) -> Recorder:
        if len(self.events) >= self.allowed:
            raise TooManyConnections
        scope.pop(HEADER_FACTS, None)
        self.events.append((scope, keep_alive, expects_continue))
        return self

    def feed_body(self, body: bytes) -> None:
        self.body += body

    def end_request(self) -> None:
        self.events.append(self.body)
        self.body = b""

    def feed(self, *pieces: bytes) -> str:
        """Return the code of the error that ends the parsing, if any."""
        try:
            for piece in pieces:
                self.parser.feed(piece)
        except GatewayError as error:
            return error.code
        return ""


def cut_everywhere(wire: bytes) -> list[list[bytes]]:
    cuts = [(), *((cut,) for cut in range(1, len(wire))), tuple(range(1, len(wire)))]
    return [[wire[a:b] for a, b in pairwise((0, *cut, len(wire)))] for cut in cuts]


# Reads of a client that repeats its requests, cuts them at odd places, or means to confuse the parser.
POST = REQUESTS["a length"].removesuffix(GET)
READS = st.sampled_from(
    [
        *(GET, GET * 2, POST, POST.replace(b"hello", b"HELLO"), POST.replace(b"5", b"05")),
        *(
            GET[:2],
            GET[2:],
            POST[:-2],
            POST[-2:],
            POST[-2:] + GET,
            POST + GET[:2],
            b"\r\n",
            b"\r\n\r\n",
        ),
        *(
            REQUESTS["HTTP/1.0"],
            REQUESTS["Expect"],
            REQUESTS["chunks and trailers"].removesuffix(GET),
        ),
        *(REQUESTS["an offer of HTTP/2"].removesuffix(GET), b"GET / HTTP/1.1\r\nHost: x\r\n"),
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(GET),
    ]
)


@given(
    st.lists(READS, max_size=8).map(lambda reads: [each for read in reads for each in (read,) * 2])
)
@example([GET + GET[:2], GET[2:], GET[2:]])
@example([POST[:-2], POST[-2:] + GET, POST[-2:] + GET])
def test_repeated_reads_are_parsed_like_single_bytes(reads: list[bytes]) -> None:
    recorder = Recorder()
    others = Recorder()
    code = recorder.feed(*reads)
    assert code == others.feed(*(b"%c" % byte for read in reads for byte in read))
    assert recorder.events == others.events


def test_repeated_header_is_not_parsed_again() -> None:
    recorder = Recorder()
    assert recorder.feed(POST, POST, POST.replace(b"hello", b"HELLO")) == ""
    (first, *_), (second, *_), (third, *_) = recorder.events[::2]
    assert first["headers"] is second["headers"] is third["headers"]
    assert first is not second
    assert recorder.events[1::2] == [b"hello", b"hello", b"HELLO"]


@pytest.mark.parametrize("wire", [*REQUESTS.values(), *UNAMBIGUOUS.values()])
def test_events_are_the_same_wherever_the_bytes_are_cut(wire: bytes) -> None:
    whole = Recorder()
    assert whole.feed(wire) == ""
    assert len(whole.events) >= 2
    for pieces in cut_everywhere(wire):
        recorder = Recorder()
        assert recorder.feed(*pieces) == ""
        assert recorder.events == whole.events, pieces


BODIES = {
    "a body that looks like a request": GET,
    "a chunk that looks like a request": GET,
    "chunk sizes and extensions": b"0123456789abcdefghijk",
    "trailers that mean something in a header": b"ok",
}


@pytest.mark.parametrize("name", BODIES)
def test_body_is_what_its_framing_says(name: str) -> None:
    recorder = Recorder()
    assert recorder.feed(REQUESTS[name]) == ""
    (scope, _, expects_continue), body, *others = recorder.events
    assert (body, expects_continue) == (BODIES[name], False)
    assert len(scope["headers"]) == 2  # trailers never become headers
    assert all(scope["method"] == "GET" for scope, *_ in others[::2])


def test_ambiguous_request_is_rejected_wherever_it_is_cut(subtests: pytest.Subtests) -> None:
    for name, wire in AMBIGUOUS.items():
        with subtests.test(name):
            for pieces in cut_everywhere(wire):
                recorder = Recorder()
                assert recorder.feed(*pieces, GET) == "MALFORMED_REQUEST", pieces
                assert not any(isinstance(event, bytes) for event in recorder.events)


def test_scope_has_the_values_of_the_header() -> None:
    recorder = Recorder()
    assert recorder.feed(REQUESTS["a length"]) == ""
    (scope, keep_alive, expects_continue), body, *_ = recorder.events
    assert scope == {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/a b",
        "raw_path": b"/a%20b",
        "query_string": b"c",
        "root_path": "",
        "headers": [(b"host", b"x"), (b"content-length", b"5")],
        "scheme": "http",
    }
    assert (keep_alive, expects_continue, body) == (True, False, b"hello")


@pytest.mark.parametrize(
    ("wire", "code"),
    [
        (b"GET /" + b"a" * MAX_URL_BYTES, "URL_TOO_LONG"),
        (GET[:-2] + b"X: " + b"a" * (MAX_HEADER_BYTES + 4096), "HEADER_TOO_LARGE"),
        (GET[:-2] + b"X: y\r\n" * (MAX_HEADER_FIELDS + 1), "HEADER_TOO_LARGE"),
    ],
)
def test_endless_header_is_rejected(wire: bytes, code: str) -> None:
    for size in (7, len(wire)):
        pieces = [wire[at : at + size] for at in range(0, len(wire), size)]
        recorder = Recorder()
        assert recorder.feed(*pieces, b"a") == code
        assert recorder.events == []


def test_parser_stops_after_an_error_of_its_receiver_or_its_close() -> None:
    recorder = Recorder(allowed=2)
    assert recorder.feed(GET + GET) == "TOO_MANY_CONNECTIONS"
    assert len(recorder.events) == 2
    recorder = Recorder()
    assert recorder.feed(GET[:9]) == ""
    recorder.parser.close()
    assert recorder.feed(GET[9:], b"\0") == ""
    assert recorder.events == []
