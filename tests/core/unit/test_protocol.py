"""The server's own HTTP/1.1, on real connections, before applications that are the tests'."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.server.protocol.connection import LAST_REQUEST_S, HttpProtocol
from tests.support.http_server import (
    ENOUGH,
    GET,
    HEAD,
    HOST,
    KIB,
    LIKE_A_REQUEST,
    MIB,
    PATIENCE_S,
    POST,
    START,
    TOO_SLOW,
    Answer,
    Asked,
    Client,
    Faults,
    Stage,
    Work,
    begins,
    echo,
    last,
    length,
    part,
    read,
    refused,
    say,
    start,
    turns,
)
from tests.support.wait import Pace, retry_when_late, wait_until

# The server.


@pytest.fixture(scope="module")
def module_stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


@pytest.fixture
def stage(module_stage: Stage) -> Iterator[Stage]:
    """The server, with the application that echoes; nothing is left in it when the test is over."""
    module_stage.app = echo
    module_stage.asked.clear()
    handler = Faults(module_stage.faults)
    logging.getLogger("gateway.server.protocol").addHandler(handler)
    try:
        yield module_stage
        wait_until(module_stage.quiet)
        assert module_stage.faults == []
    finally:
        logging.getLogger("gateway.server.protocol").removeHandler(handler)
        module_stage.faults.clear()


# The client.


# Words of the tests.


def sends(*messages: Message) -> ASGIApp:
    """The application that reads its request and sends these."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read(receive)
        for message in messages:
            await send(dict(message))

    return app


# A request is the same however it is cut.


CHUNKED = (b"transfer-encoding", b"chunked")


def test_small_body_is_passed_when_it_is_complete(stage: Stage) -> None:
    started = threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        started.set()
        await echo(scope, receive, send)

    stage.app = app
    with stage.client() as client:
        client.say(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\n", b"ab", b"cd")
        stage.settle()
        assert not started.is_set()
        client.say(b"efPOST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nx")
        assert client.answer().body == b"abcdef"
        stage.settle()
        assert len(stage.asked) == 1
        client.say(b"y")
        assert client.answer().body == b"xy"
        assert client.is_still_served()


def test_large_body_is_passed_in_pieces_as_they_arrive(stage: Stage) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        more = True
        while more:
            message = await receive()
            more = message["more_body"]
            await send(part(b"<%b>" % message["body"], more=more))

    stage.app = app
    with stage.client() as client:
        rest = bytes({*range(256)} - {*b"<>"}) * 40 * KIB  # about 10 MiB: neither side can hold it
        size = len(ENOUGH) + 4 + len(rest)
        client.say(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
        client.say(ENOUGH[1:])
        assert client.receives_nothing()
        client.say(ENOUGH[:1])
        client.head()
        assert client.chunk() == b"<%b>" % ENOUGH
        for piece in (b"ab", b"cd"):
            client.say(piece)
            assert client.chunk() == b"<%b>" % piece
        sending = threading.Thread(target=client.say, args=(rest,))
        sending.start()
        assert b"".join(iter(client.chunk, b"")).translate(None, b"<>") == rest
        sending.join()
        client.say(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n")
        assert client.receives_nothing()
        client.say(b"%x\r\n%b\r\n" % (len(ENOUGH), ENOUGH))
        client.head()
        assert client.chunk() == b"<ab%b>" % ENOUGH
        client.say(b"2\r\ncd\r\n")
        assert client.chunk() == b"<cd>"
        client.say(b"0\r\nX: y\r\n\r\n")
        assert [*iter(client.chunk, b"")] == [b"<>"]
        stage.app = echo
        assert client.is_still_served()


@pytest.mark.parametrize(
    "trailers",
    [
        b"Connection: close\r\n",
        b"Connection: upgrade\r\nUpgrade: h2c\r\n",
        b"Content-Length: 40\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: gzip\r\n",
    ],
)
def test_trailer_about_the_connection_hides_and_invents_no_request(
    stage: Stage, trailers: bytes
) -> None:
    """The next request is answered as it is, or the connection ends."""
    first = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n"
    with stage.client() as client:
        client.say(first + trailers + b"\r\n")
        first_answer = client.answer()
        stage.settle()
        with suppress(ConnectionError, EOFError):
            client.say(
                b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 35\r\n\r\n" + LIKE_A_REQUEST
            )
            answer = client.answer()
            if answer.status == 200:
                assert answer.body == LIKE_A_REQUEST
            else:
                assert answer.error
        if first_answer.status == 200:
            assert first_answer.body == b"ok"
    assert [asked.path for asked in stage.asked] in (["/a"], ["/a", "/b"], [])


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for a Unix socket: its path has at most 107 bytes, and TMPDIR may be long."""
    with TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@pytest.mark.parametrize("is_unix", [False, True], ids=["TCP", "Unix socket"])
def test_scope_has_addresses_of_tcp_and_a_copy_of_the_state(
    short_folder: Path, is_unix: bool
) -> None:
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        scope["state"]["count"] += 1
        await say(send, b"ok")

    path = short_folder / "socket"
    family = socket.AF_UNIX if is_unix else socket.AF_INET
    with Stage(uds=path if is_unix else None) as stage, socket.socket(family) as connection:
        stage.app = app
        connection.settimeout(PATIENCE_S)
        connection.connect(str(path) if is_unix else (HOST, stage.port))
        client = Client(stage, connection)
        for _ in range(2):
            client.say(GET)
            assert client.answer().body == b"ok"
        here, there = connection.getsockname(), connection.getpeername()
    for scope in scopes:
        assert (scope["type"], scope["scheme"], scope["root_path"]) == ("http", "http", "")
        assert (scope["client"], scope["server"]) == ((None, None) if is_unix else (here, there))
        assert scope["state"]["count"] == 1


# Targets.


@pytest.mark.parametrize(
    ("method", "target", "path", "raw_path", "query"),
    [
        *(
            (method, "/", "/", b"/", b"")
            for method in ("GET", "HEAD", "PATCH", "OPTIONS", "DELETE", "PROPFIND")
        ),
        ("OPTIONS", "*", "*", b"*", b""),
        ("GET", "/a%20b%2Fc", "/a b/c", b"/a%20b%2Fc", b""),
        ("GET", "/%C3%A9", "/é", b"/%C3%A9", b""),
        ("GET", "/%ff", "/�", b"/%ff", b""),
        ("GET", "/100%", "/100%", b"/100%", b""),
        ("GET", "/%0d%0aX:y", "/\r\nX:y", b"/%0d%0aX:y", b""),
        ("GET", "/a?b%20c", "/a", b"/a", b"b%20c"),
        ("GET", "/a?", "/a", b"/a", b""),
        ("GET", "//a/../b", "//a/../b", b"//a/../b", b""),
        ("GET", "/a#b", "/a", b"/a", b""),
        ("GET", "http://h/a/b?c=d", "/a/b", b"/a/b", b"c=d"),
        ("GET", "http://h:81", "/", b"/", b""),
        ("GET", "http://h?c", "/", b"/", b"c"),
        ("GET", "https://[::1]:81/%61", "/a", b"/%61", b""),
    ],
)
def test_request_line_is_passed_as_method_path_and_query(
    stage: Stage, method: str, target: str, path: str, raw_path: bytes, query: bytes
) -> None:
    with stage.client() as client:
        client.say(f"{method} {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert client.answer(method).status == 200
        assert client.is_still_served()
    assert stage.asked[0] == Asked(method, path, raw_path, query)


# Answers on the wire.

OLD_GET = b"GET / HTTP/1.0\r\n\r\n"
OLD_GET_THAT_STAYS = b"GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n"  # as `ab -k` sends it
OK = b"HTTP/1.1 200 OK\r\n"


ANSWERS = {
    "a length": (GET, [start(length(5)), last(b"hello")], OK + b"content-length: 5\r\n\r\nhello"),
    "a length, in parts": (
        GET,
        [start(length(5)), part(b"he"), part(), part(b"llo"), last()],
        OK + b"content-length: 5\r\n\r\nhello",
    ),
    "a length of nothing": (GET, [start(length(0)), last()], OK + b"content-length: 0\r\n\r\n"),
    "no length": (
        GET,
        [start(), last(b"hello")],
        OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ),
    "no length, in parts": (
        GET,
        [start(), part(b"0123456789a"), part(), part(b"b"), last()],
        OK + b"transfer-encoding: chunked\r\n\r\nb\r\n0123456789a\r\n1\r\nb\r\n0\r\n\r\n",
    ),
    "no length, and nothing": (
        GET,
        [start(), last()],
        OK + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    "headers in their order": (
        GET,
        [start((b"x-a", b"b"), (b"x-a", b"\xe9"), (b"x-empty", b""), length(0)), last()],
        OK + b"x-a: b\r\nx-a: \xe9\r\nx-empty: \r\ncontent-length: 0\r\n\r\n",
    ),
    "HTTP/1.0 that stays": (
        OLD_GET_THAT_STAYS,
        [start(length(5)), last(b"hello")],
        OK + b"content-length: 5\r\nconnection: keep-alive\r\n\r\nhello",
    ),
    "HTTP/1.0 that stays, HEAD": (
        OLD_GET_THAT_STAYS.replace(b"GET", b"HEAD"),
        [start(length(5)), last()],
        OK + b"content-length: 5\r\nconnection: keep-alive\r\n\r\n",
    ),
    "HTTP/1.0 that stays, 304": (
        OLD_GET_THAT_STAYS,
        [start(status=304), last()],
        b"HTTP/1.1 304 Not Modified\r\nconnection: keep-alive\r\n\r\n",
    ),
    "HEAD": (HEAD, [start(length(5)), last(b"hello")], OK + b"content-length: 5\r\n\r\n"),
    "HEAD, knowing that it is": (
        HEAD,
        [start(length(5)), last()],
        OK + b"content-length: 5\r\n\r\n",
    ),
    "HEAD without a length": (HEAD, [start(), part(b"hello"), last(b"!")], OK + b"\r\n"),
    "204": (GET, [start(status=204), last()], b"HTTP/1.1 204 No Content\r\n\r\n"),
    "204 with a body": (
        GET,
        [start(status=204), part(b"he"), last(b"llo")],
        b"HTTP/1.1 204 No Content\r\n\r\n",
    ),
    "304": (
        GET,
        [start(length(5), status=304), last(b"hello")],
        b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n",
    ),
    "a status without a name": (
        GET,
        [start(length(2), status=599), last(b"ok")],
        b"HTTP/1.1 599 \r\ncontent-length: 2\r\n\r\nok",
    ),
}


LAST_ANSWERS = {
    "HTTP/1.0": (
        OLD_GET,
        [start(length(5)), last(b"hello")],
        OK + b"content-length: 5\r\nconnection: close\r\n\r\nhello",
    ),
    "HTTP/1.0 without a length": (
        OLD_GET,
        [start(), part(b"he"), part(), last(b"llo")],
        OK + b"connection: close\r\n\r\nhello",
    ),
    "HTTP/1.0 that would stay, without a length": (
        OLD_GET_THAT_STAYS,
        [start(), last(b"hello")],
        OK + b"connection: close\r\n\r\nhello",
    ),
    "HTTP/1.0, HEAD": (
        b"HEAD / HTTP/1.0\r\n\r\n",
        [start(length(5)), last()],
        OK + b"content-length: 5\r\nconnection: close\r\n\r\n",
    ),
    "HTTP/1.0 that would stay, and the application closes": (
        OLD_GET_THAT_STAYS,
        [start((b"connection", b"close"), length(5)), last(b"hello")],
        OK + b"connection: close\r\ncontent-length: 5\r\n\r\nhello",
    ),
    "the client closes": (
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        [start(length(5)), last(b"hello")],
        OK + b"content-length: 5\r\nconnection: close\r\n\r\nhello",
    ),
    "the client closes, without a length": (
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: x, Close\r\n\r\n",
        [start(), last(b"hello")],
        OK + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ),
    "the application closes": (
        GET,
        [start((b"connection", b"Close"), length(5)), last(b"hello")],
        OK + b"connection: Close\r\ncontent-length: 5\r\n\r\nhello",
    ),
    "both close": (
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        [start((b"connection", b"close"), length(0)), last()],
        OK + b"connection: close\r\ncontent-length: 0\r\n\r\n",
    ),
    "a version that there is not": (
        b"GET / HTTP/2.0\r\n\r\n",
        [start(length(2)), last(b"ok")],
        OK + b"content-length: 2\r\nconnection: close\r\n\r\nok",
    ),
}


@pytest.mark.parametrize(
    ("asked", "messages", "wire", "stays"),
    [
        *(pytest.param(*row, True, id=name) for name, row in ANSWERS.items()),
        *(pytest.param(*row, False, id=f"last: {name}") for name, row in LAST_ANSWERS.items()),
    ],
)
def test_response_is_written_and_connection_kept_or_closed(
    stage: Stage, asked: bytes, messages: list[Message], wire: bytes, stays: bool
) -> None:
    stage.app = sends(*messages)
    with stage.client() as client:
        if stays:
            client.say(asked)
            assert client.exactly(len(wire)) == wire
            stage.app = echo
            assert client.is_still_served()
        else:
            client.say(asked + GET)
            assert client.rest() == wire


@pytest.mark.parametrize("size", [0, 1, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 3 * MIB])
@pytest.mark.parametrize("announced", [True, False])
def test_response_body_of_any_size_is_complete(stage: Stage, size: int, announced: bool) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]
    stage.app = sends(start(*([length(3 * size)] if announced else [])), *[part(body)] * 3, last())
    with stage.client() as client:
        for _ in range(2):
            client.say(GET)
            assert client.answer().body == body * 3


@pytest.mark.parametrize("first", [b"hello", b""], ids=["body", "empty body"])
def test_response_header_is_sent_with_the_first_body_message(stage: Stage, first: bytes) -> None:
    work = Work()
    may_send = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start((b"x-a", b"b")))
        work.started.set()
        await may_send.wait()
        await send(part(first))
        await work.may_end.wait()
        await send(last(b"end"))

    stage.app = app
    with stage.client() as client:
        before = packets(client)
        client.say(GET)
        assert begins(work)
        assert client.receives_nothing()
        stage.let(may_send)
        assert client.head() == OK + b"x-a: b\r\ntransfer-encoding: chunked"
        assert not first or client.chunk() == first
        assert client.receives_nothing()
        stage.let(work.may_end)
        assert [*iter(client.chunk, b"")] == [b"end"]
        assert packets(client) - before == 2


def packets(client: Client) -> int:
    """Return the number of received data packets: `tcpi_data_segs_in` of Linux's `struct tcp_info`."""
    info = client.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 156)
    count: int = struct.unpack_from("I", info, 152)[0]
    return count


# Pipelining.


@pytest.mark.fault("more than 16 pipelined requests")
@pytest.mark.parametrize(("count", "refused_last"), [(17, False), (18, True), (500, True)])
def test_pipelined_requests_are_answered_in_order_up_to_a_limit(
    stage: Stage, count: int, refused_last: bool
) -> None:
    """17 are one that is answered and 16 that wait."""
    work = Work()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (work if scope["path"] == "/0" else echo)(scope, receive, send)

    stage.app = app
    post = b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n%03d"
    with stage.client() as client:
        client.say(b"".join(post % (number, number) for number in range(count)))
        assert begins(work)
        assert client.receives_nothing()  # one at a time
        stage.let(work.may_end)
        for number in range(17):
            answer = client.answer()
            assert (answer.header(b"x-target"), answer.body) == (b"/%d" % number, b"%03d" % number)
        assert answer.header(b"connection") == (b"close" if refused_last else b"")
        assert client.rest() == b"" if refused_last else client.is_still_served()


# Connections that stay, and those that do not.


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("more", [LIKE_A_REQUEST, b"\x00garbage\r\n\r\n", b"\r\n"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_data_after_the_last_request_is_ignored(
    stage: Stage, more: bytes, apart: bool, version: bytes
) -> None:
    work = Work()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (echo if scope["path"] == "/before" else work)(scope, receive, send)

    stage.app = app
    wire = b"GET /before HTTP/1.1\r\nHost: x\r\n\r\n" + (
        b"POST /a HTTP/%b\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok" % version
    )
    with stage.client() as client:
        client.say(*((wire, more) if apart else (wire + more,)))
        assert client.answer().header(b"x-target") == b"/before"
        assert begins(work)
        assert client.receives_nothing()
        stage.let(work.may_end)
        assert client.answer().body == b"ok"
        assert client.rest() == b""
    assert [asked.path for asked in stage.asked] == ["/before"]


def test_idle_connection_is_closed_and_busy_one_is_not() -> None:
    upload = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n" + ENOUGH
    with Stage(keep_alive_s=1) as stage, ExitStack() as stack:
        work = stage.app = Work()
        busy = stack.enter_context(stage.client_with(GET))
        assert begins(work)
        stage.app = answers_early
        began = time.monotonic()
        silent = stack.enter_context(stage.client())
        early = stack.enter_context(stage.client_with(upload))
        assert early.answer().status == 413
        assert silent.rest() == b""
        assert early.rest() == b""
        assert time.monotonic() - began > 0.98
        assert busy.receives_nothing()  # although its time would be over as well
        stage.let(work.may_end)
        assert busy.answer().status == 200


# Expect: 100-continue.

EXPECTING = b"POST /in HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nExpect: 100-Continue\r\n\r\n"


@dataclass
class Reader(Work):
    """An application that reads when it is let."""

    first: tuple[Message, ...] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for message in self.first:
            await send(dict(message))
        self.started.set()
        await self.may_end.wait()
        body = await read(receive)
        if self.first:
            await send(last(body))
        else:
            await say(send, body)


@pytest.mark.parametrize("first", [(), (start(),)], ids=["before the response", "before its body"])
def test_100_is_sent_when_the_body_is_read(stage: Stage, first: tuple[Message, ...]) -> None:
    reader = stage.app = Reader(first=first)
    with stage.client() as client:
        client.say(EXPECTING)
        assert begins(reader)
        assert client.receives_nothing()
        stage.let(reader.may_end)
        assert client.answer() == Answer(100, ())
        client.say(b"he", b"ll")
        assert client.answer().body == b"hell"
        stage.app = echo
        assert client.is_still_served()


# For each: the header, what the application sends before it reads, and two parts of the body.
AWAITING_NOTHING: dict[str, tuple[bytes, tuple[Message, ...], bytes, bytes]] = {
    "the body began": (EXPECTING, (), b"h", b"ell"),
    "the body is complete": (EXPECTING, (), b"hell", b""),
    "the response began": (EXPECTING, (start(), part(b"<")), b"", b"hell"),
    "no length": (POST + b"Content-Length: 0\r\nExpect: 100-continue\r\n\r\n", (), b"", b""),
    "no body": (START + b"Expect: 100-continue\r\n\r\n", (), b"", b""),
    "another expectation": (POST + b"Content-Length: 0\r\nExpect: more\r\n\r\n", (), b"", b""),
    "HTTP/1.0": (
        b"POST / HTTP/1.0\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n",
        (),
        b"",
        b"ok",
    ),
}


@pytest.mark.parametrize("name", AWAITING_NOTHING)
def test_100_is_not_sent_if_no_body_is_awaited(stage: Stage, name: str) -> None:
    head, first, body, later = AWAITING_NOTHING[name]
    reader = stage.app = Reader(first=first)
    with stage.client() as client:
        client.say(head + body)
        stage.let(reader.may_end)
        stage.settle()
        client.say(later)
        answer = client.answer()
        assert (answer.status, answer.body) == (200, (b"<" if first else b"") + body + later)


def test_100_is_not_sent_if_the_response_needs_no_body(stage: Stage) -> None:
    stage.app = answers_early
    with stage.client() as client:
        client.say(EXPECTING)
        assert client.answer().status == 413
        client.say(b"hell")
        stage.app = echo
        assert client.is_still_served()


def test_100_for_a_pipelined_request_follows_the_response_before(stage: Stage) -> None:
    with stage.client() as client:
        client.say(GET + EXPECTING)
        assert client.answer().status == 200
        assert client.answer() == Answer(100, ())
        client.say(b"hell" + b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n")
        assert client.answer().body == b"hell"
        assert client.receives_nothing()  # what is expected of one is not of the next
        client.say(b"ok")
        assert client.answer().body == b"ok"


# Answers that do not wait for the request's end.


async def answers_early(scope: Scope, receive: Receive, send: Send) -> None:
    await say(send, b"too much", status=413)


async def answers_early_after_a_part(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await answers_early(scope, receive, send)


@pytest.mark.parametrize("app", [answers_early, answers_early_after_a_part])
@pytest.mark.parametrize("size", [66 * KIB, 100 * KIB, 3 * MIB])
def test_early_response_keeps_the_connection_in_step(stage: Stage, app: ASGIApp, size: int) -> None:
    body = (LIKE_A_REQUEST * (size // len(LIKE_A_REQUEST) + 1))[:size]
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size
    stage.app = app
    with stage.client() as client:
        client.say(head + body[: len(ENOUGH)])
        assert client.answer().status == 413
        client.say(body[len(ENOUGH) :])
        client.say(BROKEN_CHUNKS)
        assert client.answer().status == 413
        client.say(b"%x\r\n%b\r\n0\r\nX: y\r\n\r\n" % (size, body))
        stage.app = echo
        assert client.is_still_served()
    assert len(stage.asked) == 1


def test_body_after_an_early_response_is_read_up_to_a_limit(stage: Stage) -> None:
    stage.app = answers_early
    with stage.client() as client:
        client.say(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1099511627776\r\n\r\n")
        assert client.answer().status == 413
        assert 60 < mebibytes_taken(client.socket, 200) < 100


def mebibytes_taken(connection: socket.socket, most: int) -> int:
    """Send data until the other end closes the connection; return how many mebibytes."""
    piece = bytes(1 << 20)
    for sent in range(most):
        try:
            connection.sendall(piece)
        except OSError:
            return sent
    return most


def test_next_request_waits_for_the_end_of_the_application(
    stage: Stage,
) -> None:
    work = Work()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answers_early(scope, receive, send)
        work.started.set()
        await work.may_end.wait()
        work.ended.set()

    stage.app = app
    with stage.client() as client:
        client.say(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n" + bytes(100_000))
        assert client.answer().status == 413
        assert begins(work)
        stage.app = echo
        client.say(bytes(100_000))
        client.say(GET)
        assert client.receives_nothing()
        stage.let(work.may_end)
        assert client.answer().status == 200
        assert client.is_still_served()
        assert work.ended.is_set()


# What is no request.

GARBAGE = {
    "noise": b"\x00\xff\x13garbage",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a method that there is not": b"FETCH / HTTP/1.1\r\nHost: x\r\n\r\n",
    "an answer": b"HTTP/1.1 200 OK\r\n\r\n",
    "a version of no kind": b"GET / HTTP/x\r\n\r\n",
    "no path": b"GET http:// HTTP/1.1\r\nHost: x\r\n\r\n",
    "no slash": b"GET foo HTTP/1.1\r\nHost: x\r\n\r\n",
    "a port too high": b"GET http://h:99999/ HTTP/1.1\r\nHost: x\r\n\r\n",
    "a path that is not ASCII": "GET /é HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
    "lines that end in LF": b"GET / HTTP/1.1\nHost: x\n\n",
    "a header over two lines": b"GET / HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\n\r\n",
    "a space in a header's name": b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length : 2\r\n\r\nok",
    "a NUL in a header": b"GET / HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n",
    "a lone CR in a header": b"GET / HTTP/1.1\r\nHost: x\r\nX: a\rb\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok",
    "a length and chunks": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and a length": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    b"Content-Length: 2\r\n\r\n0\r\n\r\n",
    "a length that is no number": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: +2\r\n\r\nok",
    "chunks inside of another encoding": b"POST / HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "an encoding without an end": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\nabc",
}
NOT_HTTP = "this is not an HTTP/1.1 request"
UPGRADES = {
    "h2c and another": b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c, x\r\n\r\n",
    "twice": b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nUpgrade: x\r\n\r\n",
    "h2c by CONNECT": b"CONNECT h:80 HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    "a WebSocket": b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    "with a body": b"POST / HTTP/1.1\r\nHost: x\r\nUpgrade: x\r\nConnection: upgrade\r\n"
    b"Content-Length: 35\r\n\r\n" + LIKE_A_REQUEST,
    "CONNECT": b"CONNECT h:80 HTTP/1.1\r\nHost: x\r\n\r\n" + LIKE_A_REQUEST,
}
NO_UPGRADE = "protocol upgrades are not supported; remove the Upgrade header"


@pytest.mark.fault("invalid or several lengths, or a length with chunks; no `Host` header, or two")
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
@pytest.mark.parametrize("name", [*GARBAGE, *UPGRADES])
def test_invalid_request_or_upgrade_is_rejected_and_closes_connection(
    stage: Stage, name: str, is_first: bool
) -> None:
    with stage.client() as client:
        assert is_first or client.is_still_served()
        client.say((GARBAGE | UPGRADES)[name] + LIKE_A_REQUEST)
        error = client.answer().error
        if name in UPGRADES:
            assert error == NO_UPGRADE
        elif name in ("a length and chunks", "chunks and a length"):
            assert error == f"{NOT_HTTP}: it has both Content-Length and Transfer-Encoding"
        else:
            assert error.startswith(NOT_HTTP)
        assert client.rest() == b""
    assert len(stage.asked) == (0 if is_first else 1)


BROKEN_CHUNKS = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (
    len(ENOUGH),
    ENOUGH,
)


@pytest.mark.fault("request smuggling through nginx, in upgrades, in trailers")
@pytest.mark.parametrize("apart", [False, True])
def test_invalid_body_is_rejected_and_cancels_the_application(stage: Stage, apart: bool) -> None:
    work = Work()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await work(scope, receive, send)
        finally:
            await say(send, b"too late")

    stage.app = app
    with stage.client() as client:
        client.say(*((BROKEN_CHUNKS, b"zz\r\n") if apart else (BROKEN_CHUNKS + b"zz\r\n",)))
        assert client.answer().error.startswith(NOT_HTTP)
        assert client.rest() == b""
        if apart:
            assert work.cancelled.wait(PATIENCE_S)
    assert not work.started.is_set()


@pytest.mark.parametrize(
    ("messages", "seen"),
    [
        (
            [start(), part(b"hello")],
            OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
        ),
        ([start(length(5)), last(b"hello")], OK + b"content-length: 5\r\n\r\nhello"),
    ],
    ids=["incomplete", "complete"],
)
def test_invalid_body_closes_the_connection_once_its_response_began(
    stage: Stage, messages: Sequence[Message], seen: bytes
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(dict(message))
        if messages[-1]["more_body"]:
            await read(receive)

    stage.app = app
    with stage.client() as client:
        client.say(BROKEN_CHUNKS)
        assert client.exactly(len(seen)) == seen
        client.say(b"zz\r\n" + LIKE_A_REQUEST)
        assert client.rest() == b""


OFFERS = (
    b"Host: x\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
)
OFFERED = {
    "nothing": (b"GET /in HTTP/1.1\r\n" + OFFERS + b"\r\n", b""),
    "a length": (b"POST /in HTTP/1.1\r\n" + OFFERS + b"Content-Length: 35\r\n\r\n", LIKE_A_REQUEST),
    "no length": (b"POST /in HTTP/1.1\r\n" + OFFERS + b"Content-Length: 0\r\n\r\n", b""),
    "chunks": (
        b"POST /in HTTP/1.1\r\n" + OFFERS + b"Transfer-Encoding: chunked\r\n\r\n",
        b"23\r\n" + LIKE_A_REQUEST + b"\r\n0\r\nX-Sum: 1\r\n\r\n",
    ),
}


@pytest.mark.parametrize("body", OFFERED)
def test_offer_of_http_2_is_declined_and_request_answered(stage: Stage, body: str) -> None:
    """Java's client offers it with every request to http://."""
    head, rest = OFFERED[body]
    wire = head + rest
    sent = LIKE_A_REQUEST if rest else b""
    with stage.client() as client:
        for cut in (0, 1, 20, len(head) - 1, len(head), len(head) + 1, len(wire) - 1):
            client.say(wire[:cut], wire[cut:])
            answer = client.answer()
            assert (answer.status, answer.body, answer.header(b"x-target")) == (200, sent, b"/in")
        client.say(wire + GET + wire + wire)
        answers = [client.answer() for _ in range(4)]
        assert [answer.header(b"x-target") for answer in answers] == [b"/in", b"/", b"/in", b"/in"]
        assert [answer.body for answer in answers] == [sent, b"", sent, sent]
        assert client.is_still_served()
        large = bytes(100 * KIB)
        client.say(
            b"PUT / HTTP/1.1\r\n" + OFFERS + b"Content-Length: %d\r\n\r\n" % len(large), large
        )
        assert client.answer().body == large
        client.say(wire.replace(b"Connection: ", b"Connection: close, ") + GET)
        assert client.answer().header(b"connection") == b"close"
        assert client.rest() == b""


def test_invalid_body_of_a_waiting_request_closes_connection_before_it(stage: Stage) -> None:
    work = stage.app = Work()
    with stage.client() as client:
        client.say(GET + GET + BROKEN_CHUNKS + b"zz\r\n")
        assert begins(work)
        stage.settle()
        stage.let(work.may_end)
        assert [client.answer().header(b"connection") for _ in range(2)] == [b"", b"close"]
        assert client.rest() == b""


INVALID_LATER = {
    "noise": GARBAGE["noise"],
    "a length and chunks": GARBAGE["a length and chunks"],
    "an encoding without an end": GARBAGE["an encoding without an end"],
    **UPGRADES,
}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("good", [1, 3])
@pytest.mark.parametrize("name", INVALID_LATER)
def test_invalid_request_behind_others_closes_connection_after_their_responses(
    stage: Stage, name: str, good: int, apart: bool
) -> None:
    works = [Work() for _ in range(good)]
    waiting = iter(works)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await next(waiting)(scope, receive, send)

    stage.app = app
    invalid = INVALID_LATER[name]
    with stage.client() as client:
        client.say(*((GET * good, invalid) if apart else (GET * good + invalid,)))
        for number, work in enumerate(works, 1):
            assert begins(work)
            stage.settle()
            stage.let(work.may_end)
            answer = client.answer()
            assert answer.status == 200
            assert answer.header(b"connection") == (b"close" if number == good else b"")
        assert client.rest() == b""


# Faults of the application.


def fails_with(*messages: Message) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(dict(message))
        raise ValueError("a fault")

    return app


@pytest.mark.parametrize("does_fail", [False, True], ids=["ends", "fails"])
@pytest.mark.parametrize(
    ("messages", "seen"),
    [
        pytest.param([], b"", id="before the start"),
        pytest.param([start(length(5))], b"", id="after the start"),
        pytest.param(
            [start(length(5)), part(b"he")], OK + b"content-length: 5\r\n\r\nhe", id="in the body"
        ),
        pytest.param(
            [start(length(5)), part(b"hello")],
            OK + b"content-length: 5\r\n\r\nhello",
            id="before the end",
        ),
        pytest.param(
            [start(), part(b"he")],
            OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n",
            id="in a body without a length",
        ),
    ],
)
def test_incomplete_response_of_application_is_cut_off(
    stage: Stage, messages: list[Message], seen: bytes, does_fail: bool
) -> None:
    stage.app = fails_with(*messages) if does_fail else sends(*messages)
    with stage.client() as client:
        client.say(GET + GET)
        assert client.rest() == seen
        if does_fail:
            assert "a fault" in stage.fault()


def stubborn(messages: Sequence[Message]) -> ASGIApp:
    """Goes on after its faults, as who closes in a `finally` does."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            with suppress(RuntimeError):
                await send(dict(message))

    return app


def injecting(name: bytes, value: bytes) -> list[Message]:
    return [start(length(2), (name, value)), last(b"ok")]


FAULTY = {
    "CR LF": injecting(b"x-a", b"b\r\nx-evil: 1"),
    "an answer": injecting(b"x-a", b"b\r\ncontent-length: 0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n"),
    "LF": injecting(b"x-a", b"b\nx-evil: 1"),
    "CR": injecting(b"x-a", b"b\rx-evil: 1"),
    "LF CR": injecting(b"x-a", b"b\n\rx-evil: 1"),
    "in a name": injecting(b"x-evil: 1\r\nx-a", b"b"),
    "at the end": injecting(b"x-a", b"b\r\n"),
    "too long": [start(length(4)), last(b"hello")],
    "too short": [start(length(6)), last(b"hello")],
    "none of what was announced": [start(length(6)), last()],
}
FAULTY_LATER = {
    "too long": [start(length(7)), part(b"hello"), last(b" world")],
    "too long by one": [start(length(5)), part(b"hello"), part(b"!"), last()],
    "too short": [start(length(7)), part(b"hello"), last(b"!"), last()],
    "too short at its end": [start(length(7)), part(b"hello"), last(), part(b" w"), last()],
}


@pytest.mark.parametrize(
    ("messages", "begun"),
    [
        *(pytest.param(messages, b"", id=name) for name, messages in FAULTY.items()),
        *(
            pytest.param(messages, b"hello", id=f"{name}, later")
            for name, messages in FAULTY_LATER.items()
        ),
    ],
)
def test_invalid_response_of_application_is_not_sent_or_cut_off(
    stage: Stage, messages: list[Message], begun: bytes
) -> None:
    announced = messages[0]["headers"][0][1]
    seen = OK + b"content-length: %b\r\n\r\n%b" % (announced, begun) if begun else b""
    stage.app = sends(*messages)
    with stage.client() as client:
        client.say(GET + GET)
        assert client.rest() == seen
        assert ("Content-Length" if begun else "RuntimeError") in stage.fault()
    stage.app = stubborn([*messages, start(length(2)), part(b"ok"), last()])
    with stage.client() as client:
        client.say(GET + GET)
        assert client.rest() == seen


BESIDE_A_RESPONSE = {
    "a body before the start": stubborn([last(b"!"), start(length(2)), last(b"ok")]),
    "two starts": stubborn([start(length(2)), start(), last(b"ok")]),
    "a body after the end": stubborn([start(length(2)), last(b"ok"), last(b"!")]),
    "two answers": stubborn([start(length(2)), last(b"ok"), start(), last()]),
    "an error after the end": fails_with(start(length(2)), last(b"ok")),
}


@pytest.mark.parametrize("name", BESIDE_A_RESPONSE)
def test_fault_beside_a_complete_response_changes_nothing(stage: Stage, name: str) -> None:
    stage.app = BESIDE_A_RESPONSE[name]
    with stage.client() as client:
        client.say(GET)
        assert client.answer().body == b"ok"
        if name == "an error after the end":
            assert "a fault" in stage.fault()
        stage.app = echo
        assert client.is_still_served()


# Clients that leave.


@pytest.mark.parametrize("size", [0, 10, 100 * KIB, 3 * MIB])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("how", ["closes", "resets"])
def test_request_is_cancelled_when_its_client_leaves(
    stage: Stage, size: int, how: str, version: bytes
) -> None:
    def leave(client: Client) -> None:
        if how == "closes":
            client.socket.close()
        else:
            client.reset()

    head = b"POST / HTTP/%b\r\nHost: x\r\n" % version
    work = stage.app = Work()
    with stage.client() as client:
        client.say(head + b"Content-Length: %d\r\n\r\n" % size + bytes(size))
        assert begins(work)
        leave(client)
        assert work.cancelled.wait(PATIENCE_S)
    work = stage.app = Work()
    with stage.client() as client:
        client.say(head + b"Content-Length: 100000\r\n\r\n" + ENOUGH)
        stage.settle()
        leave(client)
        assert work.cancelled.wait(PATIENCE_S)
    assert not work.started.is_set()


@pytest.mark.fault("a client closes its half of the connection after its request")
def test_client_that_closes_its_half_is_disconnected(stage: Stage) -> None:
    work = stage.app = Work()
    with stage.client() as client:
        client.say(GET)
        assert begins(work)
        client.socket.shutdown(socket.SHUT_WR)
        assert client.rest() == b""
    assert work.cancelled.wait(PATIENCE_S)


def test_stream_ends_when_its_client_left_before_it_began(stage: Stage) -> None:
    work = Work()
    may_begin = asyncio.Event()
    has_begun = threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        has_begun.set()
        await may_begin.wait()
        await send(start())
        await send(part(b"begun"))
        await work(scope, receive, send)

    stage.app = app
    with stage.paused():
        with stage.client() as client:
            client.say(GET)
        stage.let(may_begin)
    assert has_begun.wait(PATIENCE_S)
    assert work.cancelled.wait(PATIENCE_S)


def test_pipelined_requests_of_a_client_that_left_are_not_started(stage: Stage) -> None:
    work = Work()
    asked: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope["path"])
        await work(scope, receive, send)

    stage.app = app
    with stage.client() as client:
        client.say(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\nGET /b HTTP/1.1\r\nHost: x\r\n\r\n")
        assert begins(work)
        client.reset()
        stage.settle()
        stage.let(work.may_end)
    wait_until(stage.quiet)
    assert asked == ["/a"]


@pytest.mark.parametrize("leaves", [False, True], ids=["client stays", "client leaves"])
def test_receive_after_the_response_is_a_disconnect_and_nothing_is_cancelled(
    stage: Stage, leaves: bool
) -> None:
    seen: list[Message] = []
    work = Work()

    async def watch(receive: Receive) -> None:
        seen.append(await receive())

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read(receive)
        watching = asyncio.create_task(watch(receive))
        await turns(2)
        assert seen == []
        await say(send, b"ok")
        await watching
        work.started.set()
        await watch(receive)
        await work.may_end.wait()
        await turns(3)
        work.ended.set()

    stage.app = app
    with stage.client() as client:
        client.say(GET)
        assert client.answer().body == b"ok"
        assert begins(work)
        if leaves:
            client.socket.close()
            wait_until(lambda: not stage.server.server_state.connections)
        assert not work.ended.is_set()
        stage.let(work.may_end)
        assert work.ended.wait(PATIENCE_S)
        stage.app = echo
        assert leaves or client.is_still_served()
    assert seen == [{"type": "http.disconnect"}] * 2


def test_closed_connections_are_freed_without_the_garbage_collector(stage: Stage) -> None:
    work = Work()
    gc.collect()
    gc.disable()
    try:
        with stage.client() as client:
            assert client.is_still_served()
        with stage.client() as client:
            client.say(GARBAGE["noise"])
            assert client.rest()
        with stage.client() as client:  # leaves in a body
            client.say(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhello")
            stage.settle()
        with stage.client() as client:  # leaves during its request
            stage.app = work
            client.say(GET)
            assert begins(work)
        with stage.client() as client:
            stage.app = answers_early
            client.say(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n" + ENOUGH)
            assert client.answer().status == 413
        wait_until(stage.quiet)
        stage.settle()
        assert [each for each in gc.get_objects() if type(each) is HttpProtocol] == []
    finally:
        gc.enable()


# Those who are slower than the other side.


def test_send_waits_for_a_client_that_does_not_read(stage: Stage) -> None:
    sent = 0
    block = bytes(64 * KIB)
    count = 512

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        await send(start())
        for _ in range(count):
            await send(part(block))
            sent += 1
        await send(last())

    stage.app = app
    with stage.client(SO_RCVBUF=64 * KIB) as client:
        client.say(GET)
        waits_at = stage.settled(lambda: sent)
        assert 0 < waits_at < count / 2
        assert client.answer().body == block * count
        assert sent == count
        stage.app = echo
        assert client.is_still_served()


def test_send_after_a_cancelled_send_works(stage: Stage) -> None:
    gave_up = threading.Event()
    may_go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        with suppress(asyncio.TimeoutError):
            while True:
                await asyncio.wait_for(send(part(bytes(MIB))), 0.05)
        gave_up.set()
        await may_go_on.wait()
        await send(last(b"end"))

    stage.app = app
    with stage.client(SO_RCVBUF=64 * KIB) as client:
        client.say(GET)
        assert gave_up.wait(PATIENCE_S)
        stage.let(may_go_on)
        assert client.answer().body.endswith(b"\0end")
        stage.app = echo
        assert client.is_still_served()


@pytest.mark.parametrize("framing", [b"Content-Length: %d", b"Transfer-Encoding: chunked"])
def test_upload_waits_for_an_application_that_does_not_read(stage: Stage, framing: bytes) -> None:
    work = Work(reads=False)
    pieces: list[int] = []
    size = 48 * MIB

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        work.started.set()
        await work.may_end.wait()
        more = True
        while more:
            message = await receive()
            pieces.append(len(message["body"]))
            more = message["more_body"]
        await say(send, b"%d" % sum(pieces))

    stage.app = app
    is_chunked = b"%" not in framing
    head = framing if is_chunked else framing % size
    wire = b"POST / HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n"
    wire += (b"%x\r\n%b\r\n0\r\n\r\n" % (size, bytes(size))) if is_chunked else bytes(size)
    with stage.client(SO_SNDBUF=64 * KIB) as client:
        took = client.fill(wire)
        assert work.started.is_set()
        assert took < size / 2
        stage.let(work.may_end)
        client.say(wire[took:])
        assert client.answer().body == b"%d" % size
        assert max(pieces) < MIB
        stage.app = echo
        assert client.is_still_served()


# The server stops.


def refuses(stage: Stage, port: int) -> bool:
    """Return whether connections are refused; the server has then begun to stop the open ones."""
    try:
        socket.create_connection((HOST, port), PATIENCE_S).close()
    except ConnectionError:
        stage.settle()
        return True
    return False


@contextmanager
def stopping(app: ASGIApp, **given: Any) -> Iterator[tuple[Stage, Callable[[], None]]]:
    """Yield a server of its own, and a function that begins to stop it."""
    with Stage(**given) as stage:
        stage.app = app
        port = stage.port

        def stop() -> None:
            stage.stop()
            wait_until(lambda: refuses(stage, port))

        yield stage, stop
        stage.join()
        assert stage.quiet()
        assert stage.faults == []


def test_stopping_server_closes_idle_connections_and_reads_started_bodies() -> None:
    """A connection without a complete first request has a second to send it."""
    with (
        stopping(echo) as (stage, stop),
        stage.client() as silent,
        stage.client() as idle,
        stage.client() as incomplete,
        stage.client() as sending,
        stage.client() as invalid,
    ):
        assert idle.is_still_served()
        incomplete.say(b"GET / HT")
        sending.say(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhel")
        invalid.say(BROKEN_CHUNKS)
        stage.settle()
        stop()
        assert idle.rest() == b""
        assert refused(incomplete) == TOO_SLOW
        assert silent.rest() == b""
        sending.say(b"l", b"o")
        answer = sending.answer()
        assert (answer.body, answer.header(b"connection")) == (b"hello", b"close")
        assert sending.rest() == b""
        invalid.say(b"zz\r\n")
        assert invalid.answer().error.startswith(NOT_HTTP)
        assert invalid.rest() == b""


def test_request_on_its_way_is_answered_when_the_server_stops() -> None:
    def finish_requests(pace: Pace) -> None:
        with (
            stopping(echo) as (stage, stop),
            stage.client() as silent,
            stage.client() as incomplete,
        ):
            incomplete.say(GET[:5])
            pace.restart()
            stop()
            silent.say(GET)
            incomplete.say(GET[5:])
            pace.mark()
            for client in (silent, incomplete):
                answer = client.answer()
                assert (answer.status, answer.header(b"connection")) == (200, b"close")
                assert client.rest() == b""

    retry_when_late(finish_requests, LAST_REQUEST_S / 2)


def test_stopping_server_completes_the_request_of_each_connection() -> None:
    work = Work()
    streaming = Work(reads=False)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/":
            await work(scope, receive, send)
            return
        await send(start())
        await send(part(b"hel"))
        await streaming.may_end.wait()
        await send(last(b"lo"))

    with stopping(app) as (stage, stop), stage.client() as client, stage.client() as reader:
        client.say(GET + GET)
        assert begins(work)
        reader.say(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
        reader.head()
        stop()
        client.say(GET)
        assert client.receives_nothing()
        stage.let(work.may_end)
        assert client.answer().header(b"connection") == b"close"
        assert client.rest() == b""
        stage.let(streaming.may_end)
        assert b"".join(iter(reader.chunk, b"")) == b"hello"
        assert reader.rest() == b""


def test_stopping_server_cancels_requests_after_its_timeout() -> None:
    work = Work()
    with stopping(work, shutdown_s=1.0) as (stage, stop), stage.client() as client:
        client.say(GET)
        assert begins(work)
        stop()
        assert client.rest() == b""
        assert work.cancelled.is_set()
