"""How long clients are waited for, while they send and while they read."""

from __future__ import annotations

import asyncio
import itertools
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.protocol.clients import PacedCalls
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
    last,
    length,
    part,
    refused,
    start,
    tidy,
    turns,
)
from tests.support.wait import Pace, retry_when_late, wait_until

CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


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
    """Nobody is cut off before the deadline; one tick of a clock apart."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start > seconds - 0.02


@pytest.mark.fault("slow headers, slow bodies, slow readers, 1,000 silent connections")
@pytest.mark.parametrize("before", [False, True])
def test_a_header_that_comes_byte_by_byte_is_given_up(hasty: Stage, before: bool) -> None:
    slow = START + b"X-Slow: " + b"a" * 3000
    sent = GET if before else slow[:1]
    with takes_at_least(SHORT_S), hasty.client_with(sent) as client:
        assert not before or client.answer().status == 200
        drip(client, slow if before else slow[1:])
        assert refused(client) == TOO_SLOW


def test_a_header_that_stops_is_given_up(hasty: Stage) -> None:
    with takes_at_least(SHORT_S), hasty.client_with(START) as client:
        assert refused(client) == TOO_SLOW


def test_a_header_behind_a_request_that_is_worked_for_has_to_come_in_time_too(
    hasty: Stage,
) -> None:
    work = hasty.app = Work()
    with hasty.client_with(GET) as client:
        assert begins(work)
        client.say(START)
        hasty.settle()
        time.sleep(2 * SHORT_S)  # past the deadline, however long it takes
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
@pytest.mark.parametrize("drips", [False, True])
@pytest.mark.parametrize("before", [b"a", ENOUGH], ids=["little", "much"])
def test_a_body_that_comes_too_slowly_is_given_up(
    hasty: Stage, head: bytes, drips: bool, before: bytes
) -> None:
    """Who sends little of it is not even worked for; who sent much, no longer."""
    work = hasty.app = Work()
    with takes_at_least(SHORT_S), hasty.client_with(head + before) as client:
        if drips:
            drip(client, b"a" * 3000)
        assert refused(client) == TOO_SLOW
        assert work.cancelled.wait(PATIENCE_S) if before == ENOUGH else not work.started.is_set()


def test_a_body_that_is_slow_but_not_too_slow_is_taken(hasty: Stage) -> None:
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


def test_the_rest_of_a_body_that_was_answered_may_not_trickle(hasty: Stage) -> None:
    async def answer_early(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start(length(2)))
        await send(last(b"no"))

    hasty.app = answer_early
    head = POST + b"Content-Length: 100000\r\n\r\n"
    with takes_at_least(SHORT_S), hasty.client_with(head + ENOUGH) as client:
        assert client.answer().body == b"no"
        assert drip(client, b"a" * 3000)
        assert client.rest() == b""


def echo_later(work: Work) -> ASGIApp:
    """Reads nothing until it may."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        work.started.set()
        await work.may_end.wait()
        await echo(scope, receive, send)

    return app


def test_a_client_is_not_slow_whose_body_is_not_read(hasty: Stage) -> None:
    """More than the server reads ahead, and less than the system holds while nobody reads it."""
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
def test_a_client_is_not_slow_that_waits_to_be_told_to_go_on(hasty: Stage, share: float) -> None:
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
            pace.mark()
            assert client.answer().body == b"ok"

    retry_when_late(wait_for_100, SHORT_S * 0.8)


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_body_that_began_behind_another_request_and_stops_is_refused(
    hasty: Stage, size: int
) -> None:
    requests = (
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nok"
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\nhal" % size
    )
    with hasty.client_with(requests) as client:
        assert client.answer().body == b"ok"
        assert client.answer().status == 408
        assert client.rest() == b""


def test_a_body_that_stops_in_an_answer_that_began_cuts_it(hasty: Stage) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        await send(part(b"hello"))
        await receive()
        await receive()

    hasty.app = app
    with hasty.client_with(POST + b"Content-Length: 100000\r\n\r\n" + ENOUGH) as client:
        client.head()
        assert client.chunk() == b"hello"
        assert client.rest() == b""


def test_hundreds_that_are_overdue_together_hold_nobody_up() -> None:
    seen: list[str] = []

    def fails() -> None:
        seen.append("overdue")
        raise RuntimeError("one of them")

    async def all_of_it() -> None:
        loop, crowd = asyncio.get_running_loop(), PacedCalls(4)
        loop.set_exception_handler(lambda *_: None)
        for _ in range(200):
            crowd.add(loop, fails)
        while seen.count("overdue") < 200:
            seen.append("somebody else")
            await asyncio.sleep(0)
        seen.append("somebody else")
        crowd.add(loop, fails)
        await turns(4)

    asyncio.run(asyncio.wait_for(all_of_it(), PATIENCE_S))
    runs = [len(list(run)) for what, run in itertools.groupby(seen) if what == "overdue"]
    assert max(runs) <= 4
    assert sum(runs) == 201


def drain(connection: socket.socket) -> None:
    while connection.recv(MIB):
        pass


def answers(body: bytes, *headers: tuple[bytes, bytes]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start((b"content-length", b"%d" % len(body)), *headers))
        await send({"type": "http.response.body", "body": body})

    return app


@pytest.mark.fault("a client does not read its response")
def test_a_client_that_never_reads_is_cut_off(hasty: Stage) -> None:
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


@pytest.mark.fault("a client does not read its response")
def test_the_system_keeps_little_of_what_a_client_does_not_read() -> None:
    body = bytes(16 * MIB)
    with Stage() as stage, stage.client(SO_RCVBUF=64 * KIB) as client:
        stage.app = answers(body)
        client.say(GET)
        client.head()
        ends = f":{stage.port:04X} 0100007F:{client.socket.getsockname()[1]:04X} "

        def unsent() -> int:
            lines = Path("/proc/net/tcp").read_text().splitlines()
            (line,) = [each for each in lines if ends in each]
            return int(line.split()[4].split(":")[0], 16)

        wait_until(unsent)
        kept = stage.settled(unsent)
        print(f"{kept >> 10} KiB")
        assert 0 < kept < MIB
        assert len(client.exactly(len(body))) == len(body)


@pytest.mark.fault("a client does not read its response")
def test_a_client_that_never_reads_its_last_answer_is_cut_off(hasty: Stage) -> None:
    body = bytes(16 * MIB)
    hasty.app = answers(body, (b"connection", b"close"))
    with hasty.client_with(GET, SO_RCVBUF=64 * KIB) as client:
        client.head()
        wait_until(lambda: not hasty.server.server_state.connections)


def test_a_client_that_never_reads_is_cut_off_after_an_idle_connection_is_closed() -> None:
    body = bytes(16 * MIB)
    with Stage(keep_alive_s=1, write_timeout_s=1.25) as stage:
        stage.app = answers(body)
        with takes_at_least(2.25), stage.client_with(GET, SO_RCVBUF=64 * KIB) as client:
            client.head()
            wait_until(lambda: not stage.server.server_state.connections)


def test_a_client_that_reads_slowly_is_waited_for(hasty: Stage) -> None:
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
