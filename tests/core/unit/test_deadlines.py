"""Deadlines of clients that send or read slowly."""

from __future__ import annotations

import asyncio
import fcntl
import select
import socket
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.server.protocol.connection import (
    MIN_BYTES_PER_S,
    SWEEP_INTERVAL_S,
    HttpProtocol,
    Patience,
)
from tests.support.http_server import (
    ENOUGH,
    FAST,
    GET,
    KIB,
    MIB,
    PATIENCE_S,
    POST,
    SHORT_S,
    START,
    TOO_SLOW,
    Client,
    Stage,
    Work,
    begins,
    echo,
    part,
    refused,
    start,
    tidy,
)
from tests.support.wait import Pace, retry_when_late, wait_until

CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "moves",
    [
        "0:5 6:0 11:0!",  # nothing but the first part
        "0:0 8:4 16:0!",  # 4 KiB earn 4 s
        "0:0 9:1000 18:0 20:0!",  # haste is not saved up: no more than the limit is earned
        "0:0 1:1 2:1 3:1 20:16 36:6!",
        "0:0 skip:100 110:0 111:0!",  # reading was paused
    ],
)
def test_patience_of_ten_seconds_is_spent_below_an_average_rate(moves: str) -> None:
    """Each row has times, and the KiB that were moved until then; `!` says that none is left."""
    patience = Patience(10.0, now=0.0)
    for move in moves.split():
        time_s, _, moved = move.partition(":")
        if time_s == "skip":
            patience.skip(float(moved))
            continue
        is_spent = patience.spend(float(time_s), int(moved.rstrip("!")) * MIN_BYTES_PER_S)
        assert is_spent is moved.endswith("!"), move


@pytest.fixture(scope="module")
def hasty_house() -> Iterator[Stage]:
    """A server whose deadlines are short."""
    with Stage(**FAST) as stage:
        yield stage


@pytest.fixture
def hasty(hasty_house: Stage) -> Iterator[Stage]:
    yield from tidy(hasty_house)


def drip(client: Client, wire: bytes) -> bool:
    """Send byte by byte until the server has had enough; return whether it had."""
    for number in range(len(wire)):
        with suppress(ConnectionError):
            client.socket.sendall(wire[number : number + 1])
        if is_readable(client.socket, 0.02):
            return True
    return False


def is_readable(connection: socket.socket, timeout_s: float) -> bool:
    return bool(select.select([connection], [], [], timeout_s)[0])


@contextmanager
def takes_at_least(seconds: float) -> Iterator[None]:
    """No connection ends before its deadline, up to one tick of the clock."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start > seconds - 0.02


@pytest.mark.fault("slow headers, slow bodies, slow readers, 1,000 silent connections")
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
def test_slow_header_is_rejected(hasty: Stage, is_first: bool) -> None:
    slow = START + b"X-Slow: " + b"a" * 3000
    with takes_at_least(SHORT_S), hasty.client_with(slow[:1] if is_first else GET) as client:
        assert is_first or client.answer().status == 200
        drip(client, slow[1:] if is_first else slow)
        assert refused(client) == TOO_SLOW
    if is_first:  # and one that stops
        with takes_at_least(SHORT_S), hasty.client_with(START) as client:
            assert refused(client) == TOO_SLOW


def test_slow_header_behind_a_running_request_closes_the_connection(
    hasty: Stage,
) -> None:
    work = hasty.app = Work()
    with hasty.client_with(GET) as client:
        assert begins(work)
        client.say(START)
        hasty.settle()
        time.sleep(SHORT_S + SWEEP_INTERVAL_S)
        hasty.settle()  # the loop notices the deadline, however busy the machine is
        hasty.let(work.may_end)
        assert client.answer().header(b"connection") == b"close"
        assert client.rest() == b""


@pytest.mark.fault("slow headers, slow bodies, slow readers, 1,000 silent connections")
@pytest.mark.parametrize(
    "head",
    [
        POST + b"Content-Length: 100000\r\n\r\n",
        CHUNKED + b"186a0\r\n",
        POST + b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 100000\r\n\r\n",
    ],
    ids=["length", "chunks", "offering HTTP/2"],
)
def test_slow_body_is_rejected(hasty: Stage, head: bytes) -> None:
    """The application starts when the body is complete, or large; then it is cancelled."""
    for before, drips in ((b"a", True), (ENOUGH, False)):
        work = hasty.app = Work()
        with takes_at_least(SHORT_S), hasty.client_with(head + before) as client:
            if drips:
                drip(client, b"a" * 3000)
            assert refused(client) == TOO_SLOW
            if before == ENOUGH:
                assert work.cancelled.wait(PATIENCE_S)
            assert not work.started.is_set()


def test_body_above_the_minimum_rate_is_accepted(hasty: Stage) -> None:
    def send_slowly(pace: Pace) -> None:
        with hasty.client_with(POST + b"Content-Length: 6000\r\n\r\n") as client:
            pace.mark()
            for _ in range(20):  # 1 s, three times the grace
                client.say(b"a" * 300)
                pace.mark()
                time.sleep(SHORT_S / 6)
            assert client.answer().body == b"a" * 6000
            assert client.is_still_served()

    retry_when_late(send_slowly, SHORT_S / 2)


def echo_later(work: Work) -> ASGIApp:
    """Reads nothing until it may."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        work.started.set()
        await work.may_end.wait()
        await echo(scope, receive, send)

    return app


def test_body_that_the_application_does_not_read_is_not_slow(hasty: Stage) -> None:
    """The body exceeds what the server reads ahead, and fits into the buffers of the system."""
    work = Work()
    hasty.app = echo_later(work)
    body = bytes(256 * KIB)
    request = POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    with hasty.client_with(request, SO_SNDBUF=MIB) as client:
        assert begins(work)
        time.sleep(3 * SHORT_S)
        hasty.let(work.may_end)
        assert client.answer().body == body


@pytest.mark.parametrize("share", [0.9, 2.9])
def test_client_that_waits_for_100_is_not_slow(hasty: Stage, share: float) -> None:
    """Its time begins when it is told, even if that is just before the server looks again."""
    expecting = POST + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n"

    def wait_for_100(pace: Pace) -> None:
        work = Work()
        hasty.app = echo_later(work)
        with hasty.client_with(expecting) as client:
            assert begins(work)
            time.sleep(share * SHORT_S)
            pace.restart()
            hasty.let(work.may_end)
            assert client.answer().status == 100
            time.sleep(SHORT_S / 2)
            client.say(b"ok")
            answer = client.answer()
            pace.mark()
            assert answer.body == b"ok"

    retry_when_late(wait_for_100, SHORT_S * 0.8)


@pytest.mark.parametrize("size", [10, 100_000])
def test_slow_body_behind_another_request_is_rejected(hasty: Stage, size: int) -> None:
    requests = (
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nok"
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\nhal" % size
    )
    with hasty.client_with(requests) as client:
        assert client.answer().body == b"ok"
        assert client.answer().status == 408
        assert client.rest() == b""


def drain(connection: socket.socket) -> None:
    while connection.recv(MIB):
        pass


def answers(body: bytes, *headers: tuple[bytes, bytes]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start((b"content-length", b"%d" % len(body)), *headers))
        await send({"type": "http.response.body", "body": body})

    return app


@pytest.mark.fault("a client does not read its response")
def test_client_that_never_reads_is_disconnected(hasty: Stage) -> None:
    work = Work()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        try:
            while True:
                await send(part(bytes(MIB)))
        except asyncio.CancelledError:
            work.cancelled.set()
            raise

    hasty.app = app
    with takes_at_least(SHORT_S), hasty.client_with(GET, SO_RCVBUF=64 * KIB) as client:
        assert work.cancelled.wait(PATIENCE_S)
        # Reset: what was not taken is not kept by the kernel until it is.
        with pytest.raises(ConnectionResetError):
            drain(client.socket)
    # The application has ended its last response.
    hasty.app = answers(bytes(16 * MIB), (b"connection", b"close"))
    with hasty.client_with(GET, SO_RCVBUF=64 * KIB) as client:
        client.head()
        wait_until(lambda: not hasty.server.server_state.connections)


@pytest.mark.fault("a client does not read its response")
def test_kernel_buffers_little_of_an_unread_response() -> None:
    body = bytes(16 * MIB)
    with Stage() as stage, stage.client(SO_RCVBUF=64 * KIB) as client:
        stage.app = answers(body)
        client.say(GET)
        client.head()
        (connection,) = stage.server.server_state.connections
        assert isinstance(connection, HttpProtocol)
        descriptor = connection.transport.get_extra_info("socket").fileno()

        def unsent() -> int:
            size = fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4))
            return int.from_bytes(size, sys.byteorder)

        wait_until(unsent)
        kept = stage.settled(unsent)
        assert 0 < kept < MIB
        assert len(client.exactly(len(body))) == len(body)


def test_client_above_the_minimum_rate_is_served(hasty: Stage) -> None:
    body = bytes(2 * MIB)
    hasty.app = answers(body)

    def read_slowly(pace: Pace) -> None:
        with hasty.client_with(GET, SO_RCVBUF=64 * KIB) as client:
            client.head()
            left = len(body)
            while left:  # for 1 s, three times the grace
                left -= len(client.exactly(min(left, 64 * KIB)))
                pace.mark()
                time.sleep(0.03)

    retry_when_late(read_slowly, SHORT_S / 2)
