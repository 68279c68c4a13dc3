"""Requests that the protocol refuses, and their cost: sizes, framing, connections; not deadlines."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access.auth import name_caller
from gateway.callers import Caller
from gateway.server.protocol.connection import RESERVED_CONNECTIONS
from tests.support.framing import CL2, HOST_LINE, UNAMBIGUOUS, request
from tests.support.http_server import (
    FAST,
    GET,
    KIB,
    MIB,
    POST,
    START,
    TOO_SLOW,
    Client,
    Stage,
    echo,
    refused,
    tidy,
)
from tests.support.wait import wait_until

CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def module_stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


@pytest.fixture
def stage(module_stage: Stage) -> Iterator[Stage]:
    yield from tidy(module_stage)


TOO_LARGE = (431, "HEADER_TOO_LARGE")
TOO_LONG = (414, "URL_TOO_LONG")
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


@pytest.mark.fault("headers of 1 MB, 5,000 fields, a URL of 60 KB")
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("step", [MIB, 997], ids=["at once", "in small pieces"])
def test_too_large_request_is_rejected_before_its_end(stage: Stage, name: str, step: int) -> None:
    wire, code = LARGE[name]
    if step < MIB:
        wire = wire[:150_000]
    for is_first in (True, False):
        stage.asked.clear()
        with stage.client() as client:
            assert is_first or client.is_still_served()
            with suppress(ConnectionError):  # the server may have had enough
                client.say(*(wire[at : at + step] for at in range(0, len(wire), step)))
            assert refused(client) == code
        assert len(stage.asked) == (0 if is_first else 1)


FITTING = {
    "a large header": START + b"X: " + b"a" * 65_000 + b"\r\n\r\n",
    "as many fields as may be": START + b"X: y\r\n" * 99 + b"\r\n",
    "as long a URL as may be": b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 8191),
    "large trailers": CHUNKED + b"0\r\nX: " + b"y" * 65_000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("name", FITTING)
@pytest.mark.parametrize("step", [997, 2 * KIB, MIB])
def test_request_just_below_the_limits_is_served(stage: Stage, name: str, step: int) -> None:
    wire = FITTING[name]
    with stage.client() as client:
        for _ in range(2):
            client.say(*(wire[at : at + step] for at in range(0, len(wire), step)))
            assert client.answer().status == 200
        assert client.is_still_served()


@pytest.mark.fault("headers of 1 MB, 5,000 fields, a URL of 60 KB")
def test_endless_header_fills_no_memory(stage: Stage) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    with ExitStack() as stack:
        clients = [stack.enter_context(stage.client()) for _ in range(50)]
        for client in clients:
            client.say(START + b"X: " + b"a" * 60 * KIB)
        stage.settle()
        assert process.memory_info().rss - before < 30 * MIB


# How a request is read.


VALID = [*UNAMBIGUOUS.values(), GET, request(HOST_LINE, CL2, b"Expect: 100-continue", body=b"ok")]


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    wire = bytearray(b"".join(draw(st.lists(st.sampled_from(VALID), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(wire) - 1))
        until = min(at + draw(st.integers(0, 3)), len(wire) - 1)
        wire[at:until] = draw(st.one_of(st.binary(max_size=3), st.sampled_from([b"\r\n", b": "])))
    return bytes(wire)


@pytest.mark.fault("arbitrary bytes")
@given(mutations(), st.integers(1, 400))
def test_mutated_requests_are_answered_completely(
    module_stage: Stage, wire: bytes, step: int
) -> None:
    module_stage.app = echo
    module_stage.faults.clear()
    with module_stage.client() as client:
        with suppress(OSError):  # the server may have had enough
            client.say(*(wire[at : at + step] for at in range(0, len(wire), step)))
            client.socket.shutdown(socket.SHUT_WR)
        received = client.rest()
    for status in statuses_of(received):
        assert status in (100, 200, 400, 414, 431)
    assert module_stage.faults == []


def statuses_of(received: bytes) -> Iterator[int]:
    """Yield the statuses of complete responses; fail for any other bytes."""
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


# Crowds.


@pytest.mark.long
@pytest.mark.fault("slow headers, slow bodies, slow readers, 1,000 silent connections")
def test_thousand_silent_connections_are_closed() -> None:
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

        def only_the_good_one_is_left() -> bool:
            count = len(stage.server.server_state.connections)
            assert good.is_still_served()
            return count == 1

        wait_until(only_the_good_one_is_left)
        assert refused(first) == TOO_SLOW
        assert silent.rest() == b""


TOO_MANY = (503, "TOO_MANY_CONNECTIONS")


@contextmanager
def crowd(stage: Stage, count: int) -> Iterator[list[Client]]:
    with ExitStack() as stack:
        clients = [stack.enter_context(stage.client()) for _ in range(count)]
        assert all(client.is_still_served() for client in clients)
        yield clients


@pytest.mark.fault("more connections than allowed, from one client or many")
@pytest.mark.parametrize("setting", ["max_connections", "max_connections_per_client"])
def test_connection_above_the_limit_is_refused_except_for_health(setting: str) -> None:
    limits: dict[str, Any] = {setting: 8}
    with Stage(**limits) as stage, crowd(stage, 8) as clients:
        with stage.client() as client:
            client.say(GET)
            assert refused(client) == TOO_MANY
        with stage.client() as client:
            client.say(GET)
            assert client.answer().header(b"retry-after") == b"1"
        with stage.client_with(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n") as client:
            answer = client.answer()
            assert (answer.status, answer.header(b"connection")) == (200, b"close")
            assert client.rest() == b""
        with ExitStack() as stack:
            for _ in range(RESERVED_CONNECTIONS):
                stack.enter_context(stage.client())
            stage.settle()
            for _ in range(20):
                with stage.client() as client:
                    assert refused(client) == TOO_MANY  # at once
            assert all(client.is_still_served() for client in clients)
        clients.pop().socket.close()
        wait_until(lambda: len(stage.server.server_state.connections) == 7)
        with stage.client() as client:
            assert client.is_still_served()


@pytest.mark.parametrize(
    ("key", "client", "name"),
    [
        ("shop", ("10.0.0.1", 4711), "shop"),
        ("", ("10.0.0.1", 4711), "10.0.0.1"),
        ("", ("::1", 4711), "::"),
        ("", ("2001:db8:1:2:3:4:5:6", 4711), "2001:db8:1:2::"),
        ("", ("::ffff:10.0.0.1", 4711), "10.0.0.1"),
        ("", ("fe80::1%eth0", 4711), "fe80::"),
        ("", None, ""),  # a Unix socket
    ],
)
def test_caller_is_named_by_its_key_or_else_by_its_network(
    key: str, client: tuple[str, int] | None, name: str
) -> None:
    assert name_caller(Caller(key), client) == name
