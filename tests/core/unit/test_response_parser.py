"""The response parser, without sockets or an event loop: bytes in, one response out."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gateway.errors import BadUpstream
from gateway.http_client.response import DONE, ResponseParser

HEAD = b"HTTP/1.1 200 OK\r\n"
HEAD_CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
LIKE_A_RESPONSE = b"HTTP/1.1 500 No\r\nContent-Length: 1\r\n\r\n!"


def plain(body: bytes, *lines: bytes) -> bytes:
    return b"\r\n".join((HEAD + b"Content-Length: %d" % len(body), *lines, b"", body))


# The bytes, then the status, the other headers, the body, and what happens to the connection: it is `kept`,
# it `closes`, or its `end` is that of the body.
RESPONSES: dict[str, tuple[bytes, int, list[tuple[bytes, bytes]], bytes, str]] = {
    "a length": (plain(b"hello"), 200, [], b"hello", "kept"),
    "a length of nothing": (plain(b""), 200, [], b"", "kept"),
    "a body that looks like a response": (
        plain(LIKE_A_RESPONSE), 200, [], LIKE_A_RESPONSE, "kept"
    ),
    "many headers": (
        plain(b"x", b"Set-Cookie: a=1", b"SET-COOKIE: b=2; c", b"x-empty:", b"X-High: \xe9\xff"),
        200,
        [(b"set-cookie", b"a=1"), (b"set-cookie", b"b=2; c"), (b"x-empty", b""), (b"x-high", b"\xe9\xff")],
        b"x",
        "kept",
    ),
    "200 headers": (plain(b"ok", *[b"a: b"] * 199), 200, [(b"a", b"b")] * 199, b"ok", "kept"),
    "a status without a reason": (
        b"HTTP/1.1 429\r\nContent-Length: 2\r\n\r\nno", 429, [], b"no", "kept"
    ),
    "several chunks": (
        HEAD_CHUNKED + b"5\r\nhello\r\n1\r\n \r\n009\r\n\r\nworld\r\n\r\n0\r\n\r\n",
        200, [], b"hello \r\nworld\r\n", "kept",
    ),
    "chunk sizes and extensions": (
        HEAD_CHUNKED + b'A;a=b\r\n0123456789\r\n0b;c="d;e"\r\nabcdefghijk\r\n000;last\r\n\r\n',
        200, [], b"0123456789abcdefghijk", "kept",
    ),
    "trailers": (
        HEAD_CHUNKED + b"5\r\nhello\r\n0\r\nX-Sum: 1\r\nX-Next: 2\r\n\r\n", 200, [], b"hello", "kept"
    ),
    "a trailer that closes": (
        HEAD_CHUNKED + b"2\r\nok\r\n0\r\nConnection: close\r\n\r\n", 200, [], b"ok", "closes"
    ),
    "no chunk": (HEAD_CHUNKED + b"0\r\n\r\n", 200, [], b"", "kept"),
    "204": (b"HTTP/1.1 204 No Content\r\nX-A: b\r\n\r\n", 204, [(b"x-a", b"b")], b"", "kept"),
    "304 with the length of what it does not send": (
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", 304, [], b"", "kept"
    ),
    "100 and 103, with headers of their own": (
        b"HTTP/1.1 100 Continue\r\nX-A: b\r\n\r\nHTTP/1.1 103 Hints\r\nLink: </a>\r\n\r\n" + plain(b"hello"),
        200, [], b"hello", "kept",
    ),
    "HTTP/1.0 that stays": (
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok",
        200, [(b"connection", b"keep-alive")], b"ok", "kept",
    ),
    "HTTP/1.0 with a length": (
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, [], b"ok", "closes"
    ),
    "HTTP/1.0 until it closes": (b"HTTP/1.0 200 OK\r\n\r\nhello", 200, [], b"hello", "end"),
    "no framing, until it closes": (HEAD + b"\r\nhello", 200, [], b"hello", "end"),
    "no framing and no body, until it closes": (HEAD + b"\r\n", 200, [], b"", "end"),
    "a length, and Connection: close": (
        plain(b"hello", b"Connection: close"), 200, [(b"connection", b"close")], b"hello", "closes"
    ),
}  # fmt: skip
FRAMING = (b"content-length", b"transfer-encoding")


def expecting() -> ResponseParser:
    parser = ResponseParser()
    parser.begin()
    return parser


@pytest.mark.fault("a response arrives byte by byte")
@pytest.mark.parametrize("name", RESPONSES)
def test_response_is_read_the_same_wherever_it_is_cut(name: str) -> None:
    wire, status, headers, body, then = RESPONSES[name]
    every_byte = tuple(range(1, len(wire)))
    kept = ResponseParser()
    for cuts in ((), *((cut,) for cut in every_byte), every_byte):
        parser = kept if then == "kept" else ResponseParser()
        parser.begin()
        for start, end in pairwise((0, *cuts, len(wire))):
            parser.feed(wire[start:end])
        if then == "end":
            assert parser.is_receiving
            parser.feed_end(None)
        assert parser.state is DONE, cuts
        assert parser.status == status
        assert [pair for pair in parser.headers if pair[0] not in FRAMING] == headers
        assert parser.take() == body
        assert parser.can_keep_alive is (then == "kept")
        parser.end()


CUT_OFF = {
    "nothing": b"",
    "in the version": b"HTT",
    "in the status": b"HTTP/1.1 2",
    "in a header": HEAD + b"Content-Le",
    "before the empty line": HEAD + b"Content-Length: 5\r\n",
    "in an interim answer": b"HTTP/1.1 100 Conti",
    "after an interim answer": b"HTTP/1.1 100 Continue\r\n\r\n",
    "before a body with a length": HEAD + b"Content-Length: 5\r\n\r\n",
    "in a body with a length": HEAD + b"Content-Length: 5\r\n\r\nhell",
    "in a body with a length, HTTP/1.0": b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhell",
    "in a body with a length, Connection: close": HEAD
    + b"Connection: close\r\nContent-Length: 5\r\n\r\nhell",
    "before the chunks": HEAD_CHUNKED,
    "in a chunk's size": HEAD_CHUNKED + b"1",
    "in a chunk": HEAD_CHUNKED + b"5\r\nhell",
    "after a chunk": HEAD_CHUNKED + b"5\r\nhello\r\n",
    "before the end of the last chunk": HEAD_CHUNKED + b"5\r\nhello\r\n0\r\n",
    "in the trailers": HEAD_CHUNKED + b"5\r\nhello\r\n0\r\nX-A: b\r\n",
}


NONSENSE = {
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n",
    "an HTTP/2 frame": bytes.fromhex("00001204000000000000"),
    "a TLS alert": bytes.fromhex("15030100020246"),
    "bytes": bytes(range(255, 0, -1)),
    "a request": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "a version that is none": b"HTTP/7.3 200 OK\r\nContent-Length: 0\r\n\r\n",
    "a status of two digits": b"HTTP/1.1 20 OK\r\nContent-Length: 0\r\n\r\n",
    "a status below 100": b"HTTP/1.1 099 X\r\nContent-Length: 4\r\n\r\nevil" + plain(b"ok"),
    "a status above 599": b"HTTP/1.1 600 X\r\nContent-Length: 4\r\n\r\nevil" + plain(b"ok"),
    "the status 000": b"HTTP/1.1 000 X\r\nContent-Length: 4\r\n\r\nevil" + plain(b"ok"),
    "a header without a colon": HEAD + b"Content-Length 5\r\n\r\nhello",
    "a space before the colon": HEAD + b"Content-Length : 5\r\n\r\nhello",
    "a zero byte in a header": HEAD + b"X-A: a\0b\r\nContent-Length: 0\r\n\r\n",
    "a bare carriage return in a header": HEAD + b"X-A: a\rX-B: b\r\nContent-Length: 0\r\n\r\n",
    "a folded header": HEAD + b"X-A: a\r\n b\r\nContent-Length: 0\r\n\r\n",
    "a length with a sign": HEAD + b"Content-Length: +5\r\n\r\nhello",
    "a length below zero": HEAD + b"Content-Length: -5\r\n\r\nhello",
    "a length that is no number": HEAD + b"Content-Length: five\r\n\r\nhello",
    "a length that no number holds": HEAD + b"Content-Length: " + b"9" * 30 + b"\r\n\r\nhello",
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "a length and chunks": HEAD
    + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "chunks and a length": HEAD
    + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "a chunk size below zero": HEAD_CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n",
    "a chunk size that no number holds": HEAD_CHUNKED + b"f" * 30 + b"\r\nhello",
    "a chunk size that is no number": HEAD_CHUNKED + b"five\r\nhello\r\n0\r\n\r\n",
    "a chunk longer than its size": HEAD_CHUNKED + b"4\r\nhello\r\n0\r\n\r\n",
    "a length in the trailers": HEAD_CHUNKED + b"0\r\nContent-Length: 5\r\n\r\n",
    "an upgrade": b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nraw",
    "an upgrade to nothing": b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + plain(b"ok"),
    "201 headers": HEAD + b"A: b\r\n" * 200 + b"Content-Length: 0\r\n\r\n",
    "headers without end": HEAD + b"A: b\r\n" * 20_000,
    "an endless header": HEAD + b"X-A: " + b"a" * 200_000,
    "endless trailers": HEAD_CHUNKED + b"0\r\nX-A: " + b"a" * 200_000,
    "a second response": plain(b"ok") + plain(b"stolen"),
    "garbage behind a response": plain(b"ok") + b"\0\xffgarbage",
}


@pytest.mark.parametrize("name", CUT_OFF)
def test_response_that_ends_early_is_bad_upstream(name: str) -> None:
    for cause in (None, ConnectionResetError()):
        parser = expecting()
        parser.feed(CUT_OFF[name])
        with pytest.raises(BadUpstream, match="closed the connection before"):
            parser.feed_end(cause)


@pytest.mark.parametrize("name", NONSENSE)
@pytest.mark.parametrize("size", [1 << 20, 1000])
def test_invalid_or_endless_response_is_bad_upstream(name: str, size: int) -> None:
    parser = expecting()
    wire = NONSENSE[name]

    def feed() -> None:
        for start in range(0, len(wire), size):
            parser.feed(wire[start : start + size])

    with pytest.raises(BadUpstream, match=r"not HTTP/1\.1|too large"):
        feed()
    # The body of a complete response may be read all the same; the connection is not used again.
    assert parser.take() in (b"", b"ok", b"hello", b"hell")


def test_sizes_of_chunks_do_not_count_as_a_header() -> None:
    """A stream of hours has more bytes in its chunk sizes than a header may have."""
    parser = expecting()
    parser.feed(HEAD_CHUNKED)
    for _ in range(300):
        parser.feed(b"1;" + b"a" * 1000 + b"\r\n")
        parser.feed(b"x\r\n")
    parser.feed(b"0\r\n\r\n")
    assert parser.take() == b"x" * 300
