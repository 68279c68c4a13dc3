"""The request parser and the deadlines of a connection, without sockets, clocks or an event loop."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.types import Scope

from gateway.errors import GatewayError, TooManyConnections
from gateway.server.protocol.deadlines import ConnectionLimits, Deadlines, Due
from gateway.server.protocol.parser import (
    MAX_HEADER_BYTES,
    MAX_HEADER_FIELDS,
    MAX_PIPELINED,
    MAX_URL_BYTES,
    RequestParser,
)
from gateway.telemetry.request_info import HEADER_FACTS
from tests.support.framing import AMBIGUOUS, UNAMBIGUOUS

LIMITS = ConnectionLimits(header_timeout_s=10, body_stall_s=10, write_timeout_s=30)
KEEP_ALIVE_S = 75
OPENED_AT = 1000.0
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
REQUESTS = {
    "pipelined": GET * 3,
    "a length": b"POST /a%20b?c HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello" + GET,
    "chunks and trailers": b"PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2;a=b\r\nhe\r\n3\r\nllo\r\n0\r\nX-Sum: 1\r\n\r\n" + GET,
    "an offer of HTTP/2": b"POST / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n"
    b"Content-Length: 5\r\n\r\nhello" + GET,
    "Expect": b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nok",
    "HTTP/1.0": b"\r\nGET / HTTP/1.0\r\n\r\n",
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


def test_feed_returns_whether_a_request_is_incomplete() -> None:
    parser = Recorder().parser
    data = (b"\r\n", b"POST / HT", b"TP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbo", b"d")
    assert [parser.feed(piece) for piece in data] == [False, True, True, True]
    assert parser.content_length == 4
    assert parser.feed(b"y") is False


def test_pipelined_requests_are_parsed_while_few_wait() -> None:
    recorder = Recorder()
    parser = recorder.parser
    parser.pending = MAX_PIPELINED
    assert recorder.feed(GET, GET * 200) == ""
    assert recorder.events == []
    parser.pending = MAX_PIPELINED - 1
    assert recorder.feed(GET) == ""
    assert len(recorder.events) == 2 * 202
    assert parser.unparsed == b""


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


# Deadlines.


def opened(**options: bool) -> Deadlines:
    return Deadlines(LIMITS, KEEP_ALIVE_S, OPENED_AT, **options)


def used() -> Deadlines:
    """The deadlines of a connection on which a request was answered at once."""
    deadlines = opened()
    deadlines.end_receiving()
    return deadlines


def first_due(deadlines: Deadlines, until_s: float = 200, **state: Any) -> tuple[Due | None, float]:
    """Return what is due first and the seconds until then, if each check is made when it was asked for."""
    now = OPENED_AT
    while now <= OPENED_AT + until_s:
        due, next_check_at = deadlines.check(now, **state)
        if due is not None:
            return due, now - OPENED_AT
        assert now < next_check_at <= now + KEEP_ALIVE_S
        now = next_check_at
    return None, 0


def test_idle_connection_is_due_after_the_timeout_of_its_state() -> None:
    assert first_due(opened(), is_idle=True) == (Due.IDLE, 10)
    assert first_due(opened(is_reserved=True), is_idle=True) == (Due.IDLE, 1)
    assert first_due(used(), is_idle=True) == (Due.IDLE, KEEP_ALIVE_S)
    assert first_due(used()) == (None, 0)  # it answers a request
    # One that closes waits for its client to read.
    assert first_due(opened(), is_idle=True, is_closing=True) == (Due.RESPONSE, 30)
    rejected = opened()
    rejected.receive_header(OPENED_AT)
    rejected.end_receiving()
    rejected.start_linger(OPENED_AT)
    assert first_due(rejected, is_idle=True) == (Due.LINGER, 1)


def test_header_is_due_after_its_timeout_unless_reading_is_paused() -> None:
    first = opened()
    later = used()
    for deadlines, due_s in ((first, 10), (later, 16)):  # the first one since the start
        for second in (6, 7, 8):
            end = deadlines.receive_header(OPENED_AT + second)
            assert end == OPENED_AT + due_s
        assert first_due(deadlines, is_idle=True) == (Due.HEADER, due_s)
    later.end_receiving()
    assert first_due(later, is_idle=True) == (Due.IDLE, KEEP_ALIVE_S)
    paused = used()
    paused.receive_header(OPENED_AT)
    assert first_due(paused, is_paused=True) == (None, 0)
    assert first_due(paused, 300)[0] is Due.HEADER


def test_body_is_due_below_an_average_rate_unless_reading_is_paused() -> None:
    deadlines = opened()
    for second, size, remaining_s in (
        (0, 1 << 30, 10),  # the first part does not count
        (8, 4 * 1024, 6),
        (9, 1 << 30, 10),  # haste is not saved up
        (19, 1024, 1),
        (19.5, 0, 0.5),
        (20, 0, 0),
    ):
        now = OPENED_AT + second
        deadlines.receive_body(now, size, is_paused=False)
        due, next_check_at = deadlines.check(now)
        assert due is (None if remaining_s else Due.BODY)
        assert next_check_at == now + max(remaining_s, 0.25)
    deadlines = opened()
    deadlines.receive_body(OPENED_AT, 0, is_paused=True)
    for second in range(0, 100, 5):
        assert deadlines.check(OPENED_AT + second, is_paused=True)[0] is None
    # It may have begun to send just now.
    assert deadlines.check(OPENED_AT + 100) == (None, OPENED_AT + 110)
    assert deadlines.check(OPENED_AT + 110)[0] is Due.BODY


def test_response_is_due_below_an_average_rate() -> None:
    deadlines = used()
    deadlines.start_sending(OPENED_AT, 100 * 1024)
    assert deadlines.check(OPENED_AT + 20, unwritten_bytes=95 * 1024)[1] == OPENED_AT + 35
    assert deadlines.check(OPENED_AT + 35, unwritten_bytes=95 * 1024)[0] is Due.RESPONSE
    deadlines.end_sending()
    assert first_due(deadlines) == (None, 0)
