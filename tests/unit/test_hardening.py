"""What the protocol refuses, when, and what that costs: limits, deadlines, crowds, smuggling, TLS."""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import select
import socket
import ssl
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.protocol import connection as protocol
from gateway.protocol.limits import LOOKS_AT_A_TIME, Credit, Crowd, network_of
from tests.support.certificates import trusting, write_pair
from tests.support.framing import AMBIGUOUS, CL2, HOST_LINE, UNAMBIGUOUS, request
from tests.support.http_server import (
    ENOUGH,
    GET,
    KIB,
    LIKE_A_REQUEST,
    MIB,
    PATIENCE_S,
    Client,
    Stage,
    Work,
    begins,
    echo,
    part,
    start,
    turns,
)
from tests.support.wait import Pace, retry_when_late, wait_until

START = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
SHORT_S = 0.3
FAST: dict[str, Any] = {
    "header_timeout_s": SHORT_S,
    "body_stall_s": SHORT_S,
    "write_timeout_s": SHORT_S,
}


@pytest.fixture(scope="module")
def house() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


@pytest.fixture(scope="module")
def hasty_house() -> Iterator[Stage]:
    """Whose deadlines are short."""
    with Stage(**FAST) as stage:
        yield stage


@pytest.fixture
def stage(house: Stage) -> Iterator[Stage]:
    yield from tidy(house)


@pytest.fixture
def hasty(hasty_house: Stage) -> Iterator[Stage]:
    yield from tidy(hasty_house)


def tidy(stage: Stage) -> Iterator[Stage]:
    stage.app = echo
    stage.asked.clear()
    yield stage
    wait_until(stage.quiet)
    assert stage.faults == []


def refused(client: Client) -> tuple[int, str]:
    """The status and code of the refusal that comes, whose form is that of every error."""
    answer = client.answer()
    told = json.loads(answer.body)
    assert list(told) == ["error", "code", "request_id"]
    assert told["request_id"].encode() == answer.header(b"x-request-id")
    assert answer.header(b"connection") == b"close"
    assert client.rest() == b""
    return answer.status, told["code"]


TOO_LARGE = (431, "HEADER_TOO_LARGE")
TOO_LONG = (414, "URL_TOO_LONG")
TOO_SLOW = (408, "REQUEST_TOO_SLOW")
MALFORMED = (400, "MALFORMED_REQUEST")


# Sizes.

LARGE = {
    "a header line without an end": (START + b"X: " + b"a" * MIB, TOO_LARGE),
    "a header name without an end": (START + b"a" * MIB, TOO_LARGE),
    "a header a little too large": (START + b"X: " + b"a" * 65_530 + b"\r\n\r\n", TOO_LARGE),
    "many fields": (START + b"X: y\r\n" * 100 + b"\r\n", TOO_LARGE),
    "fields without an end": (START + b"X: y\r\n" * 5_000, TOO_LARGE),
    "a URL without an end": (b"GET /" + b"a" * MIB, TOO_LONG),
    "a URL a little too long": (b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 8192), TOO_LONG),
    "a long query": (b"GET /?%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 60_000), TOO_LONG),
    "trailers without an end": (CHUNKED + b"0\r\nX: " + b"a" * MIB, TOO_LARGE),
    "many trailers": (CHUNKED + b"0\r\n" + b"X: y\r\n" * 101 + b"\r\n", TOO_LARGE),
    "large trailers": (CHUNKED + b"0\r\nX: " + b"y" * 70_000 + b"\r\n\r\n", TOO_LARGE),
    "a chunk's extension without an end": (CHUNKED + b"1;" + b"a" * MIB, TOO_LARGE),
    "empty lines without an end": (b"\r\n" * MIB, TOO_LARGE),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("before", [False, True])
def test_what_is_too_large_is_refused_while_it_comes(stage: Stage, name: str, before: bool) -> None:
    wire, told = LARGE[name]
    with stage.client() as client:
        assert not before or client.is_still_served()
        with suppress(ConnectionError):  # the server may have had enough
            client.say(wire)
        assert refused(client) == told
    assert len(stage.asked) == before


@pytest.mark.parametrize("name", LARGE)
def test_what_is_too_large_is_refused_in_small_pieces(stage: Stage, name: str) -> None:
    wire, told = LARGE[name]
    with stage.client() as client:
        with suppress(ConnectionError):
            client.say(*(wire[at : at + 997] for at in range(0, min(len(wire), 150_000), 997)))
        assert refused(client) == told


FITTING = {
    "a large header": START + b"X: " + b"a" * 65_000 + b"\r\n\r\n",
    "as many fields as may be": START + b"X: y\r\n" * 99 + b"\r\n",
    "as long a URL as may be": b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 8191),
    "large trailers": CHUNKED + b"0\r\nX: " + b"y" * 65_000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("name", FITTING)
@pytest.mark.parametrize("step", [997, 2 * KIB, MIB])
def test_what_is_just_not_too_large_is_served(stage: Stage, name: str, step: int) -> None:
    wire = FITTING[name]
    with stage.client() as client:
        for _ in range(2):
            client.say(*(wire[at : at + step] for at in range(0, len(wire), step)))
            assert client.answer().status == 200
        assert client.is_still_served()


def test_requests_in_two_pieces_never_add_up(stage: Stage) -> None:
    with stage.client() as client:
        for _ in range(400):
            client.say(POST + b"X: " + b"a" * 300 + b"\r\nContent-Length: 5\r\n\r\n", b"hello")
            assert client.answer().body == b"hello"


def test_a_header_without_an_end_fills_no_memory(stage: Stage) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    with ExitStack() as stack:
        clients = [stack.enter_context(stage.client()) for _ in range(50)]
        for client in clients:
            client.say(START + b"X: " + b"a" * 60 * KIB)
        stage.settle()
        assert process.memory_info().rss - before < 30 * MIB


# How a request is read.


@pytest.mark.parametrize("step", [1, MIB])
@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_could_be_read_in_two_ways_is_refused(stage: Stage, name: str, step: int) -> None:
    wire = AMBIGUOUS[name]
    with stage.client() as client:
        with suppress(ConnectionError):
            client.say(*(wire[at : at + step] for at in range(0, len(wire), step)), LIKE_A_REQUEST)
        assert refused(client) == MALFORMED
    assert stage.asked == []


@pytest.mark.parametrize("name", UNAMBIGUOUS)
def test_what_can_be_read_in_one_way_is_served(stage: Stage, name: str) -> None:
    with stage.client() as client:
        client.say(UNAMBIGUOUS[name] + UNAMBIGUOUS[name])
        assert [client.answer().body for _ in range(2)] == [b"ok"] * 2
        assert client.is_still_served()
    assert len(stage.asked) == 3


VALID = [*UNAMBIGUOUS.values(), GET, request(HOST_LINE, CL2, b"Expect: 100-continue", body=b"ok")]


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    wire = bytearray(b"".join(draw(st.lists(st.sampled_from(VALID), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(wire) - 1))
        until = min(at + draw(st.integers(0, 3)), len(wire) - 1)
        wire[at:until] = draw(st.one_of(st.binary(max_size=3), st.sampled_from([b"\r\n", b": "])))
    return bytes(wire)


@settings(deadline=None, max_examples=300)
@given(mutations(), st.integers(1, 400))
def test_no_bytes_make_it_hang_or_fail_or_tear_an_answer(
    house: Stage, wire: bytes, step: int
) -> None:
    house.app = echo
    house.faults.clear()
    with house.client() as client:
        with suppress(OSError):  # the server may have had enough
            client.say(*(wire[at : at + step] for at in range(0, len(wire), step)))
            client.socket.shutdown(socket.SHUT_WR)
        received = client.rest()
    for status in statuses_of(received):
        assert status in (100, 200, 400, 414, 431)
    assert house.faults == []


def statuses_of(received: bytes) -> Iterator[int]:
    """Of answers that are whole: whatever is not, fails."""
    while received:
        head, found, received = received.partition(b"\r\n\r\n")
        assert found, head
        assert head.startswith(b"HTTP/1.1 ")
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b": ")
            length = int(value) if name == b"content-length" else length
        assert len(received) >= length or head.startswith(b"HTTP/1.1 200")
        received = received[length:]
        yield int(head.split(b" ")[1])


def test_nothing_follows_a_refusal_whatever_the_application_does(stage: Stage) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await receive()
            await asyncio.Event().wait()
        finally:
            await send(start((b"content-length", b"0")))
            await send({"type": "http.response.body"})

    stage.app = app
    with stage.client() as client:
        client.say(CHUNKED + b"1\r\na\r\n", b"zz\r\n")
        assert refused(client) == MALFORMED


# Deadlines.


def drip(client: Client, wire: bytes) -> None:
    """Send byte by byte until the server has had enough."""
    for number in range(len(wire)):
        with suppress(ConnectionError):
            client.socket.sendall(wire[number : number + 1])
        if is_readable(client.socket, 0.02):
            return


def is_readable(connection: socket.socket, timeout_s: float) -> bool:
    return bool(select.select([connection], [], [], timeout_s)[0])


@contextmanager
def takes_at_least(seconds: float) -> Iterator[None]:
    """Nobody is cut off before the deadline; one tick of a clock apart."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start > seconds - 0.02


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
        assert work.cancelled.wait(PATIENCE_S) if before == ENOUGH else not work.begun.is_set()


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


def echo_later(work: Work) -> ASGIApp:
    """Reads nothing until it may."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        work.begun.set()
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


def test_pace_is_an_average_with_a_grace() -> None:
    pace = Credit(10.0, 0.0)
    assert pace.after(10.0, 0, 1024, 10.0).left_s == 0
    assert pace.after(10.0, 10 * 1024, 1024, 10.0).left_s == 10
    assert pace.after(5.0, 1 << 30, 1024, 10.0).left_s == 10  # haste is not saved up
    assert pace.after(8.0, 4 * 1024, 1024, 10.0).left_s == 6


def test_hundreds_that_are_overdue_together_hold_nobody_up() -> None:
    seen: list[str] = []

    def fails() -> None:
        seen.append("overdue")
        raise RuntimeError("one of them")

    async def all_of_it() -> None:
        loop, crowd = asyncio.get_running_loop(), Crowd()
        loop.set_exception_handler(lambda *_: None)
        for _ in range(200):
            crowd.look(loop, fails)
        while seen.count("overdue") < 200:
            seen.append("somebody else")
            await asyncio.sleep(0)
        seen.append("somebody else")
        crowd.look(loop, fails)
        await turns(4)

    asyncio.run(asyncio.wait_for(all_of_it(), PATIENCE_S))
    runs = [len(list(run)) for what, run in itertools.groupby(seen) if what == "overdue"]
    assert max(runs) <= LOOKS_AT_A_TIME
    assert sum(runs) == 201


def drain(connection: socket.socket) -> None:
    while connection.recv(MIB):
        pass


def answers(body: bytes, *headers: tuple[bytes, bytes]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start((b"content-length", b"%d" % len(body)), *headers))
        await send({"type": "http.response.body", "body": body})

    return app


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


def test_the_system_keeps_little_of_what_a_client_does_not_read(stage: Stage) -> None:
    body = bytes(16 * MIB)
    stage.app = answers(body)
    with stage.client(SO_RCVBUF=64 * KIB) as client:
        client.say(GET)
        client.head()
        ends = f":{stage.port:04X} 0100007F:{client.socket.getsockname()[1]:04X} "

        def unsent() -> int:
            lines = Path("/proc/net/tcp").read_text().splitlines()
            (line,) = [each for each in lines if ends in each]
            return int(line.split()[4].split(":")[0], 16)

        kept = stage.settled(unsent)
        print(f"{kept >> 10} KiB")
        assert 0 < kept < MIB
        assert len(client.exactly(len(body))) == len(body)


def test_a_client_that_never_reads_its_last_answer_is_cut_off(hasty: Stage) -> None:
    body = bytes(16 * MIB)
    hasty.app = answers(body, (b"connection", b"close"))
    with hasty.client_with(GET, SO_RCVBUF=64 * KIB) as client:
        client.head()
        wait_until(lambda: not hasty.server.server_state.connections)


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


# Crowds.


def test_a_thousand_silent_connections_are_closed_and_others_served_meanwhile() -> None:
    with Stage(**FAST, max_connections_per_client=0) as stage, ExitStack() as stack:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
        good = stack.enter_context(stage.client_with(GET))
        assert good.answer().status == 200
        first = stack.enter_context(stage.client_with(b"GET / HT"))
        for number in range(1, 1000):
            silent = stack.enter_context(stage.client())
            if number < 500:  # at once: the first ones' time is over before the last ones are there
                with suppress(ConnectionError):  # its own may be over, too
                    silent.say(b"GET / HT")
        waits_s = []

        def only_the_good_one_is_left() -> bool:
            count = len(stage.server.server_state.connections)
            began = time.monotonic()
            assert good.is_still_served()
            waits_s.append(time.monotonic() - began)
            return count == 1

        wait_until(only_the_good_one_is_left)
        print(f"the slowest answer meanwhile took {max(waits_s) * 1000:.0f} ms")
        assert refused(first) == TOO_SLOW
        assert silent.rest() == b""


TOO_MANY = (503, "TOO_MANY_CONNECTIONS")


@contextmanager
def crowd(stage: Stage, count: int) -> Iterator[list[Client]]:
    with ExitStack() as stack:
        clients = [stack.enter_context(stage.client()) for _ in range(count)]
        assert all(client.is_still_served() for client in clients)
        yield clients


@pytest.mark.parametrize("setting", ["max_connections", "max_connections_per_client"])
def test_one_connection_too_many_is_refused_and_health_can_still_be_asked(setting: str) -> None:
    limits: dict[str, Any] = {setting: 8}
    with Stage(**limits) as stage, crowd(stage, 8) as clients:
        with stage.client() as client:
            client.say(GET)
            assert refused(client) == TOO_MANY
        with stage.client_with(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n") as client:
            answer = client.answer()
            assert (answer.status, answer.header(b"connection")) == (200, b"close")
            assert client.rest() == b""
        clients.pop().socket.close()
        wait_until(lambda: len(stage.server.server_state.connections) == 7)
        with stage.client() as client:
            assert client.is_still_served()


@pytest.mark.parametrize("setting", ["max_connections", "max_connections_per_client"])
def test_far_too_many_connections_are_refused_at_once(setting: str) -> None:
    limits: dict[str, Any] = {setting: 2}
    with (
        Stage(**limits) as stage,
        crowd(stage, 2) as clients,
        ExitStack() as stack,
    ):
        for _ in range(protocol.RESERVED):
            stack.enter_context(stage.client())
        stage.settle()
        for _ in range(20):
            with stage.client() as client:
                assert refused(client) == TOO_MANY
        assert all(client.is_still_served() for client in clients)


def test_who_is_refused_is_told_when_to_come_again() -> None:
    with Stage(max_connections=1) as stage, crowd(stage, 1), stage.client() as client:
        client.say(GET)
        assert client.answer().header(b"retry-after") == b"1"


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::1", "::"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fe80::1%eth0", "fe80::"),
    ],
)
def test_a_client_is_counted_by_its_network(host: str, network: str) -> None:
    assert network_of(host) == network


@pytest.mark.parametrize("apart", [False, True])
def test_no_more_requests_wait_on_a_connection_than_may(stage: Stage, apart: bool) -> None:
    work = stage.app = Work()
    count = 5000
    with stage.client() as client:
        client.say(*((GET, GET * (count - 1)) if apart else (GET * count,)))
        assert begins(work)
        stage.settle()
        (connection,) = stage.server.server_state.connections
        assert isinstance(connection, protocol.Protocol)
        assert 16 <= len(connection._waiting) <= 18
        stage.let(work.may_end)
        for _ in range(count):
            assert client.answer().status == 200
        assert client.is_still_served()


def test_a_small_read_of_requests_is_bounded_too(stage: Stage) -> None:
    work = stage.app = Work()
    count = protocol.WHOLE_BYTES // len(GET)
    with stage.client() as client:
        client.say(GET * count)
        assert begins(work)
        stage.let(work.may_end)
        for _ in range(count):
            assert client.answer().status == 200


# TLS.


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


def shown(authority: trustme.CA, port: int) -> set[str]:
    """The names in the certificate that the server shows."""
    with (
        socket.create_connection(("127.0.0.1", port), PATIENCE_S) as plain,
        trusting(authority).wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        certificate = connection.getpeercert()
        assert certificate
        return {str(each[1]) for each in certificate["subjectAltName"]}


@pytest.fixture
def tls(tmp_path: Path, authority: trustme.CA) -> dict[str, Any]:
    """The settings of a certificate and its key."""
    write_pair(authority, tmp_path, "one.test")
    return {"tls_cert_file": tmp_path / "cert.pem", "tls_key_file": tmp_path / "key.pem"}


@pytest.fixture
def https(tls: dict[str, Any]) -> Iterator[Stage]:
    with Stage(**tls) as stage:
        yield stage


def test_https_is_spoken_and_nothing_else(https: Stage, authority: trustme.CA) -> None:
    schemes: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        schemes.append(scope["scheme"])
        await echo(scope, receive, send)

    https.app = app
    body = bytes(3 * MIB)
    with httpx.Client(verify=trusting(authority), timeout=PATIENCE_S) as client:
        for _ in range(3):
            answer = client.post(f"https://127.0.0.1:{https.port}/in", content=body)
            assert answer.content == body
    assert schemes == ["https"] * 3
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{https.port}/")


def test_old_versions_of_tls_are_refused(https: Stage, authority: trustme.CA) -> None:
    context = trusting(authority)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with (
        socket.create_connection(("127.0.0.1", https.port), PATIENCE_S) as plain,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(plain, server_hostname="127.0.0.1")


@contextmanager
def tls_client(stage: Stage, authority: trustme.CA) -> Iterator[Client]:
    context = trusting(authority)
    with (
        stage.client() as plain,
        context.wrap_socket(plain.socket, server_hostname="127.0.0.1") as connection,
    ):
        yield Client(stage, connection)


def test_refusals_reach_clients_over_tls_too(tls: dict[str, Any], authority: trustme.CA) -> None:
    with Stage(**tls, **FAST) as hasty:

        def stop_in_the_header(pace: Pace) -> None:
            with tls_client(hasty, authority) as client:
                client.say(START)
                pace.mark()
                assert refused(client) == TOO_SLOW

        retry_when_late(stop_in_the_header, SHORT_S / 2)
    with Stage(**tls) as stage, tls_client(stage, authority) as client:
        client.say(LARGE["many fields"][0])
        assert refused(client) == TOO_LARGE


def warnings_of(caplog: pytest.LogCaptureFixture) -> int:
    return caplog.text.count("the new certificate cannot be used")


def test_a_new_certificate_is_shown_to_new_connections_and_a_broken_one_is_not(
    https: Stage, authority: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def shows(name: str) -> Callable[[], bool]:
        return lambda: name in shown(authority, https.port)

    assert shows("one.test")()
    with httpx.Client(verify=trusting(authority), timeout=PATIENCE_S) as client:
        url = f"https://127.0.0.1:{https.port}/"
        assert client.get(url).status_code == 200
        write_pair(authority, tmp_path, "two.test")
        wait_until(shows("two.test"))
        (tmp_path / "nonsense").write_text("nonsense")
        (tmp_path / "nonsense").replace(tmp_path / "cert.pem")
        wait_until(lambda: warnings_of(caplog) == 1)
        assert shows("two.test")()
        (tmp_path / "key.pem").unlink()
        wait_until(lambda: warnings_of(caplog) == 2)
        assert shows("two.test")()
        write_pair(authority, tmp_path, "three.test")
        wait_until(shows("three.test"))
        assert client.get(url).status_code == 200
