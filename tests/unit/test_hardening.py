"""What the protocol refuses, when, and what that costs: limits, deadlines, crowds, smuggling, TLS."""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import shutil
import socket
import ssl
import subprocess
import tempfile
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
)
from tests.support.servers import Command, free_ports
from tests.support.wait import wait_until

START = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
FAST: dict[str, Any] = {"header_timeout_s": 0.5, "body_stall_s": 0.5, "write_timeout_s": 0.5}


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


def headed(*lines: bytes, first: bytes = b"POST / HTTP/1.1", body: bytes = b"") -> bytes:
    return b"\r\n".join((first, *lines, b"", body))


HOST = b"Host: x"
CL2, CL3 = b"Content-Length: 2", b"Content-Length: 3"
TE = b"Transfer-Encoding: chunked"
END = b"0\r\n\r\n"
OLD = b"POST / HTTP/1.0"
BAD = {
    "no Host": headed(CL2, body=b"ok"),
    "two Hosts": headed(HOST, HOST),
    "two Hosts on 1.0": headed(HOST, b"host: y", first=OLD),
    "a Host with a path": headed(b"Host: x/y"),
    "a Host with a space": headed(b"Host: x y"),
    "a Host with a user": headed(b"Host: a@b"),
    "two lengths": headed(HOST, CL2, CL3, body=b"okk"),
    "one length twice": headed(HOST, CL2, CL2, body=b"ok"),
    "a list of lengths": headed(HOST, b"Content-Length: 2, 2", body=b"ok"),
    "a length with a sign": headed(HOST, b"Content-Length: +2", body=b"ok"),
    "a negative length": headed(HOST, b"Content-Length: -2", body=b"ok"),
    "a length in base 16": headed(HOST, b"Content-Length: 0x2", body=b"ok"),
    "a length with a gap": headed(HOST, b"Content-Length: 1 2", body=b"ok"),
    "an empty length": headed(HOST, b"Content-Length:", body=b"ok"),
    "an absurd length": headed(HOST, b"Content-Length: " + b"9" * 30),
    "a length and chunks": headed(HOST, CL2, TE, body=END),
    "chunks and a length": headed(HOST, TE, CL2, body=END),
    "chunks twice": headed(HOST, TE, TE, body=END),
    "chunks of chunks": headed(HOST, b"Transfer-Encoding: chunked, chunked", body=END),
    "chunks and identity": headed(HOST, TE, b"Transfer-Encoding: identity", body=END),
    "identity and chunks": headed(HOST, b"Transfer-Encoding: identity", TE, body=END),
    "identity": headed(HOST, b"Transfer-Encoding: identity", body=b"ok"),
    "another coding": headed(HOST, b"Transfer-Encoding: gzip", body=b"ok"),
    "another coding before": headed(HOST, b"Transfer-Encoding: gzip, chunked", body=END),
    "another coding after": headed(HOST, b"Transfer-Encoding: chunked, gzip", body=END),
    "a coding of a kind": headed(HOST, b"Transfer-Encoding: xchunked", body=END),
    "a coding with a tab": headed(HOST, b"Transfer-Encoding: \x0bchunked", body=END),
    "a quoted coding": headed(HOST, b'Transfer-Encoding: "chunked"', body=END),
    "a coding with parameters": headed(HOST, b"Transfer-Encoding: chunked;a=b", body=END),
    "an empty coding": headed(HOST, b"Transfer-Encoding:", body=END),
    "a comma after the coding": headed(HOST, b"Transfer-Encoding: chunked,", body=END),
    "a space after the name": headed(HOST, b"Transfer-Encoding : chunked", body=END),
    "a NUL after the name": headed(HOST, b"Transfer-Encoding\x00: chunked", body=END),
    "a coding over two lines": headed(HOST, b"Transfer-Encoding:\r\n chunked", body=END),
    "a coding behind a folded line": headed(HOST, b"X: y\r\n Transfer-Encoding: chunked"),
    "a coding behind a bare LF": headed(HOST, b"X: y\nTransfer-Encoding: chunked", body=END),
    "a coding behind a bare CR": headed(HOST, b"X: y\rTransfer-Encoding: chunked", body=END),
    "lines that end in LF": b"POST / HTTP/1.1\nHost: x\n\n",
    "a header that ends in LF": b"POST / HTTP/1.1\r\nHost: x\r\n\n",
    "a line that begins with a space": b"POST / HTTP/1.1\r\n Host: x\r\n\r\n",
    "a line without a colon": headed(HOST, b"X"),
    "a line without a name": headed(HOST, b": x"),
    "a NUL in a value": headed(HOST, b"X: a\x00b"),
    "a NUL in the target": headed(HOST, first=b"GET /\x00 HTTP/1.1"),
    "a control in the target": headed(HOST, first=b"GET /\x01 HTTP/1.1"),
    "a space in the target": headed(HOST, first=b"GET /a b HTTP/1.1"),
    "chunks on 1.0": headed(HOST, TE, first=OLD, body=END),
    "chunks and a length on 1.0": headed(HOST, TE, CL2, first=OLD, body=END),
    "a chunk's size with a sign": headed(HOST, TE, body=b"+2\r\nok\r\n" + END),
    "a chunk's size in C": headed(HOST, TE, body=b"0x2\r\nok\r\n" + END),
    "a negative chunk": headed(HOST, TE, body=b"-2\r\nok\r\n" + END),
    "a chunk without a size": headed(HOST, TE, body=b"\r\nok\r\n" + END),
    "a chunk of 2⁶⁴ and two": headed(HOST, TE, body=b"10000000000000002\r\nok\r\n" + END),
    "a space before a chunk's size": headed(HOST, TE, body=b" 2\r\nok\r\n" + END),
    "a chunk's size that ends in LF": headed(HOST, TE, body=b"2\nok\r\n" + END),
    "a chunk that ends in LF": headed(HOST, TE, body=b"2\r\nok\n" + END),
    "a chunk without an end": headed(HOST, TE, body=b"2\r\nok" + END),
    "a chunk that is longer": headed(HOST, TE, body=b"2\r\nokk\r\n" + END),
    "a bare LF in an extension": headed(HOST, TE, body=b"2;a\nb\r\nok\r\n" + END),
    "the last chunk ends in LF": headed(HOST, TE, body=b"0\r\n\n"),
    "a trailer over two lines": headed(HOST, TE, body=b"0\r\nX: y\r\n z\r\n\r\n"),
}
ONE_WAY = {
    "a length with spaces": headed(HOST, b"Content-Length:   2 ", body=b"ok"),
    "a length with zeros": headed(HOST, b"Content-Length: 0002", body=b"ok"),
    "capitals": headed(b"HOST: x", b"TRANSFER-ENCODING: CHUNKED", body=b"2\r\nok\r\n" + END),
    "chunks": headed(HOST, TE, body=b"2\r\nok\r\n" + END),
    "an extension": headed(HOST, TE, body=b'2;a="b;c"\r\nok\r\n0;d\r\n\r\n'),
    "zeros before a chunk's size": headed(HOST, TE, body=b"0000002\r\nok\r\n000\r\n\r\n"),
    "a trailing length": headed(HOST, TE, body=b"2\r\nok\r\n0\r\nX-Length: 40\r\n\r\n"),
    "a body on GET": headed(HOST, CL2, first=b"GET / HTTP/1.1", body=b"ok"),
    "a length that only looks like one": headed(HOST, CL2, b"Content_Length: 40", body=b"ok"),
    "a coding that only looks like one": headed(HOST, CL2, b"Transfer_Encoding: x", body=b"ok"),
}


@pytest.mark.parametrize("step", [1, MIB])
@pytest.mark.parametrize("name", BAD)
def test_what_could_be_read_in_two_ways_is_refused(stage: Stage, name: str, step: int) -> None:
    wire = BAD[name]
    with stage.client() as client:
        with suppress(ConnectionError):
            client.say(*(wire[at : at + step] for at in range(0, len(wire), step)), LIKE_A_REQUEST)
        assert refused(client) == MALFORMED
    assert stage.asked == []


@pytest.mark.parametrize("name", ONE_WAY)
def test_what_can_be_read_in_one_way_is_served(stage: Stage, name: str) -> None:
    with stage.client() as client:
        client.say(ONE_WAY[name] + ONE_WAY[name])
        assert [client.answer().body for _ in range(2)] == [b"ok"] * 2
        assert client.is_still_served()
    assert len(stage.asked) == 3


NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log {folder}/access.log combined buffer=1 flush=1s; client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u;
    scgi_temp_path {folder}/s; proxy_request_buffering off; underscores_in_headers on;
    upstream gateway {{ server 127.0.0.1:{upstream}; keepalive 4; }}
    log_format asked "$upstream_status";
    access_log {folder}/asked.log asked;
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://gateway; proxy_http_version 1.1;
            proxy_set_header Connection ""; proxy_set_header Host $http_host; }}
    }}
}}
"""


@pytest.fixture(scope="module")
def proxied() -> Iterator[tuple[Stage, int, Path]]:
    """A real nginx before a server: its port, and the log of what it passed on."""
    binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if binary is None:
        pytest.skip("there is no nginx here")
    (port,) = free_ports(1)
    with Stage() as stage, tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "nginx.conf"
        config.write_text(NGINX.format(folder=folder, port=port, upstream=stage.port))
        log = (Path(folder) / "start.log").open("wb")
        with subprocess.Popen([binary, "-p", folder, "-c", config], stderr=log) as running:
            try:
                wait_until(lambda: connects(port))
                yield stage, port, Path(folder) / "asked.log"
            finally:
                running.terminate()
                log.close()


def connects(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@pytest.mark.parametrize("name", [*BAD, *ONE_WAY])
def test_nginx_and_the_server_count_the_same_requests(
    proxied: tuple[Stage, int, Path], name: str
) -> None:
    """Whatever nginx makes of it: what it passed on and had answered is what was asked, no more."""
    stage, port, log = proxied
    stage.asked.clear()
    passed = len(log.read_text().split())
    wire = {**BAD, **ONE_WAY}[name]
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.settimeout(0.3)
        with suppress(ConnectionError, TimeoutError):
            connection.sendall(
                wire + b"GET /second HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            )
            while connection.recv(MIB):
                pass
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        # Whatever was left on a connection to the server would be the answer to this.
        connection.sendall(b"GET /third HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        connection.settimeout(5)
        answer = b"".join(iter(lambda: connection.recv(MIB), b""))
        assert b"x-target: /third\r\n" in answer
    asked = [each.path for each in stage.asked]
    statuses = [line for line in log.read_text().split()[passed:] if line == "200"]
    assert len(asked) == len(statuses)
    assert asked.count("/third") == 1
    assert set(asked) <= {"/", "/second", "/third"}
    assert "/smuggled" not in asked


VALID = [*ONE_WAY.values(), GET, headed(HOST, CL2, b"Expect: 100-continue", body=b"ok")]


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


def dripped(client: Client, wire: bytes, every_s: float, most_s: float) -> float:
    """Send byte by byte until the server has had enough; how long that was."""
    began = time.monotonic()
    client.socket.settimeout(0.001)
    for number in range(len(wire)):
        try:
            client.socket.sendall(wire[number : number + 1])
            time.sleep(every_s)
            client.socket.recv(1, socket.MSG_PEEK)
            break
        except (TimeoutError, BlockingIOError):
            assert time.monotonic() - began < most_s
        except ConnectionError:
            break
    client.socket.settimeout(5)
    return time.monotonic() - began


@pytest.mark.parametrize("before", [False, True])
def test_a_header_that_comes_byte_by_byte_is_given_up(hasty: Stage, before: bool) -> None:
    with hasty.client() as client:
        assert not before or client.is_still_served()
        took = dripped(client, START + b"X-Slow: " + b"a" * 1000, 0.02, 3)
        assert refused(client) == TOO_SLOW
    assert 0.4 < took < 2


def test_a_header_that_stops_is_given_up(hasty: Stage) -> None:
    with hasty.client() as client:
        client.say(START)
        assert refused(client) == TOO_SLOW


def test_a_header_behind_a_request_that_is_worked_for_has_to_come_in_time_too(
    hasty: Stage,
) -> None:
    work = hasty.app = Work()
    with hasty.client() as client:
        client.say(GET, START)
        assert begins(work)
        time.sleep(1)
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
    with hasty.client() as client:
        began = time.monotonic()
        client.say(head, before)
        if drips:
            dripped(client, b"a" * 1000, 0.02, 3)
        assert refused(client) == TOO_SLOW
        assert 0.4 < time.monotonic() - began < 2
        assert work.cancelled.wait(1) if before == ENOUGH else not work.begun.is_set()


def test_a_body_that_is_slow_but_not_too_slow_is_taken(hasty: Stage) -> None:
    with hasty.client() as client:
        client.say(POST + b"Content-Length: 6000\r\n\r\n")
        for _ in range(20):  # 2 s, four times the grace
            client.say(b"a" * 300)
            time.sleep(0.1)
        assert client.answer().body == b"a" * 6000
        assert client.is_still_served()


def test_a_client_is_not_slow_whose_body_is_not_read(hasty: Stage) -> None:
    work = hasty.app = Work(reads=False)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        work.begun.set()
        await work.may_end.wait()
        await echo(scope, receive, send)

    hasty.app = app
    body = bytes(4 * MIB)
    with hasty.client(SO_SNDBUF=64 * KIB) as client:
        took = client.fill(POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        assert begins(work)
        time.sleep(1.5)
        hasty.let(work.may_end)
        client.say((POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))[took:])
        assert client.answer().body == body


def test_a_client_is_not_slow_that_waits_to_be_told_to_go_on(hasty: Stage) -> None:
    work = Work(reads=False)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        work.begun.set()
        await work.may_end.wait()
        await echo(scope, receive, send)

    hasty.app = app
    with hasty.client() as client:
        client.say(POST + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert begins(work)
        time.sleep(1.2)
        hasty.let(work.may_end)
        assert client.answer().status == 100
        client.say(b"ok")
        assert client.answer().body == b"ok"


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_body_that_began_behind_another_request_and_stops_is_refused(
    hasty: Stage, size: int
) -> None:
    with hasty.client() as client:
        client.say(
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nok"
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\nhal" % size
        )
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
    with hasty.client() as client:
        client.say(POST + b"Content-Length: 100000\r\n\r\n", ENOUGH)
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
        await asyncio.sleep(0.01)

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
    with hasty.client(SO_RCVBUF=64 * KIB) as client:
        client.say(GET)
        began = time.monotonic()
        assert work.cancelled.wait(5)
        assert 0.4 < time.monotonic() - began < 2
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
        time.sleep(0.3)
        (line,) = [each for each in Path("/proc/net/tcp").read_text().splitlines() if ends in each]
        unsent = int(line.split()[4].split(":")[0], 16)
        print(f"{unsent >> 10} KiB")
        assert 0 < unsent < MIB
        assert len(client.exactly(len(body))) == len(body)


def test_a_client_that_never_reads_its_last_answer_is_cut_off(hasty: Stage) -> None:
    body = bytes(16 * MIB)
    hasty.app = answers(body, (b"connection", b"close"))
    with hasty.client(SO_RCVBUF=64 * KIB) as client:
        client.say(GET)
        client.head()
        wait_until(lambda: not hasty.server.server_state.connections)


def test_a_client_that_reads_slowly_is_waited_for(hasty: Stage) -> None:
    body = bytes(2 * MIB)
    hasty.app = answers(body)
    with hasty.client(SO_RCVBUF=64 * KIB) as client:
        client.say(GET)
        client.head()
        left = len(body)
        while left:
            left -= len(client.exactly(min(left, 64 * KIB)))
            time.sleep(0.05)


# Crowds.


def test_a_thousand_silent_connections_are_closed_and_others_served_meanwhile() -> None:
    with Stage(**FAST, max_connections_per_client=0) as stage, ExitStack() as stack:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
        good = stack.enter_context(stage.client())
        assert good.is_still_served()
        began = time.monotonic()
        silent = []
        for number in range(1000):
            silent.append(stack.enter_context(stage.client()))
            if number < 500:  # at once: the first ones' time is over before the last ones are there
                silent[-1].say(b"GET / HT")
        slowest = 0.0
        while len(stage.server.server_state.connections) > 1:
            asked = time.monotonic()
            assert good.is_still_served()
            slowest = max(slowest, time.monotonic() - asked)
            assert time.monotonic() - began < 10
        assert refused(silent[0]) == TOO_SLOW
        assert silent[-1].rest() == b""
        assert slowest < 1


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
        with stage.client() as client:
            client.say(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
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


def test_it_sheds_and_recovers_when_there_are_no_descriptors(tmp_path: Path) -> None:
    """A real gateway that may open 256 files, and 400 who want a connection."""
    (port,) = free_ports(1)
    environment = {"GATEWAY_TRITON_URLS": "http://127.0.0.1:9", "GATEWAY_DRAIN_S": "0"}
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        command = Command("serve", "--port", str(port), environment=environment, guarded=False)
        resource.prlimit(command.pid, resource.RLIMIT_NOFILE, (256, 256))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with command:
        try:
            command.wait_for("serving")
            command.wait_for("open files are allowed", 5)
            flood(command, port)
        finally:
            command.process.terminate()


def flood(command: Command, port: int) -> None:
    with ExitStack() as stack:
        for _ in range(400):
            connection = stack.enter_context(socket.socket())
            connection.settimeout(5)
            connection.connect(("127.0.0.1", port))
        process = psutil.Process(command.pid)
        before, began = sum(process.cpu_times()[:2]), time.monotonic()
        time.sleep(1.5)
        spent = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)
        assert spent < 0.5  # of a core: it does not spin
        assert process.num_fds() < 256
        assert httpx.get(f"http://127.0.0.1:{port}/livez", timeout=5).status_code == 200
    wait_until(lambda: httpx.get(f"http://127.0.0.1:{port}/docs").status_code == 200)


# TLS.


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


def write_pair(authority: trustme.CA, folder: Path, name: str = "127.0.0.1") -> None:
    pair = authority.issue_cert(name, "127.0.0.1")
    for path, blob in (
        (folder / "key.pem", pair.private_key_pem.bytes()),
        (folder / "cert.pem", b"".join(each.bytes() for each in pair.cert_chain_pems)),
    ):
        path.with_suffix(".new").write_bytes(blob)
        path.with_suffix(".new").replace(path)


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def shown(authority: trustme.CA, port: int) -> set[str]:
    """The names in the certificate that the server shows."""
    with (
        socket.create_connection(("127.0.0.1", port), 5) as plain,
        trusting(authority).wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        certificate = connection.getpeercert()
        assert certificate
        return {str(each[1]) for each in certificate["subjectAltName"]}


@pytest.fixture
def https(tmp_path: Path, authority: trustme.CA) -> Iterator[Stage]:
    write_pair(authority, tmp_path, "one.test")
    with Stage(
        tls_cert_file=tmp_path / "cert.pem", tls_key_file=tmp_path / "key.pem", **FAST
    ) as stage:
        yield stage


def test_https_is_spoken_and_nothing_else(https: Stage, authority: trustme.CA) -> None:
    schemes: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        schemes.append(scope["scheme"])
        await echo(scope, receive, send)

    https.app = app
    body = bytes(3 * MIB)
    with httpx.Client(verify=trusting(authority)) as client:
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
        socket.create_connection(("127.0.0.1", https.port), 5) as plain,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(plain, server_hostname="127.0.0.1")


def test_refusals_reach_clients_over_tls_too(https: Stage, authority: trustme.CA) -> None:
    for wire, told in ((LARGE["many fields"][0], TOO_LARGE), (START, TOO_SLOW)):
        with (
            https.client() as plain,
            trusting(authority).wrap_socket(
                plain.socket, server_hostname="127.0.0.1"
            ) as connection,
        ):
            client = Client(https, connection)
            connection.sendall(wire)
            assert refused(client) == told


def test_a_new_certificate_is_shown_to_new_connections_and_a_broken_one_is_not(
    https: Stage, authority: trustme.CA, tmp_path: Path
) -> None:
    def shows(name: str) -> Callable[[], bool]:
        return lambda: name in shown(authority, https.port)

    assert shows("one.test")()
    with httpx.Client(verify=trusting(authority)) as client:
        url = f"https://127.0.0.1:{https.port}/"
        assert client.get(url).status_code == 200
        write_pair(authority, tmp_path, "two.test")
        wait_until(shows("two.test"))
        (tmp_path / "cert.pem").write_text("nonsense")
        time.sleep(1.5)
        assert shows("two.test")()
        (tmp_path / "key.pem").unlink()
        time.sleep(1.2)
        assert shows("two.test")()
        write_pair(authority, tmp_path, "three.test")
        wait_until(shows("three.test"))
        assert client.get(url).status_code == 200


def test_a_pair_that_does_not_fit_keeps_the_gateway_from_starting(
    tmp_path: Path, authority: trustme.CA
) -> None:
    write_pair(authority, tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    write_pair(authority, other)
    environment = {
        "GATEWAY_TLS_CERT_FILE": str(tmp_path / "cert.pem"),
        "GATEWAY_TLS_KEY_FILE": str(other / "key.pem"),
    }
    with Command("serve", "--port", str(free_ports(1)[0]), environment=environment) as command:
        command.wait_for("GATEWAY_TLS_KEY_FILE cannot be", 20)
        assert "Traceback" not in command.output


def test_workers_speak_https(tmp_path: Path, authority: trustme.CA) -> None:
    write_pair(authority, tmp_path)
    (port,) = free_ports(1)
    environment = {
        "GATEWAY_TLS_CERT_FILE": str(tmp_path / "cert.pem"),
        "GATEWAY_TLS_KEY_FILE": str(tmp_path / "key.pem"),
        "GATEWAY_TRITON_URLS": "http://127.0.0.1:9",
        "GATEWAY_DRAIN_S": "0",
    }
    arguments = ("serve", "--port", str(port), "--workers", "2")
    with Command(*arguments, environment=environment) as command:
        command.wait_for("serving")
        with httpx.Client(verify=trusting(authority), timeout=15) as client:
            assert client.get(f"https://127.0.0.1:{port}/livez").status_code == 200
