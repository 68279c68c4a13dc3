"""The upstream client against a replica that is scripted byte by byte."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import re
import socket
import struct
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import uvloop

from gateway.errors import BadUpstream, DeadlinePassed, GatewayError
from gateway.http_client.client import CompleteResponse, HttpClient, UpstreamResponse
from gateway.http_client.connection import RequestNotSent, UpstreamConnection
from gateway.http_client.response import Headers
from tests.support.servers import blackhole, free_ports
from tests.support.wait import no_task_left, retry_when_late, takes_at_least, wait_until_async

MIB = 1 << 20
PATIENCE_S = 60.0  # guards against a hang, and is no expectation
EMPTY = (b"content-length", b"0")
CHUNKED = (b"transfer-encoding", b"chunked")


# The replica.


@dataclass(frozen=True)
class Asked:
    """A request as it was received."""

    head: bytes
    body: bytes

    @property
    def target(self) -> bytes:
        return self.head.split(b" ", 2)[1]


class Peer:
    """The replica's side of a connection."""

    def __init__(
        self, replica: Replica, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._replica = replica
        self.reader = reader
        self.writer = writer
        self.closed = False  # by the client

    async def asked(self) -> Asked:
        head = await self.reader.readuntil(b"\r\n\r\n")
        self._replica.served_by.append(self)
        if length := re.search(rb"\r\ncontent-length: (\d+)\r\n", head):
            return Asked(head, await self.reader.readexactly(int(length[1])))
        body = b""
        if b"\r\ntransfer-encoding: chunked\r\n" in head:
            while size := int(await self.reader.readline(), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            assert await self.reader.readexactly(2) == b"\r\n"
        return Asked(head, body)

    async def say(self, *parts: bytes) -> None:
        """Each part by itself: the client has read it before the next is written."""
        for part in parts:
            if self.writer.is_closing():  # uvloop's would raise a RuntimeError
                raise ConnectionResetError
            self.writer.write(part)
            await self.writer.drain()
            await turns(3)

    def reset(self) -> None:
        with socket.socket(fileno=os.dup(self.writer.get_extra_info("socket").fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def packets(self) -> int:
        """Return the number of received data packets: `tcpi_data_segs_in` of Linux's `struct tcp_info`."""
        info = self.writer.get_extra_info("socket").getsockopt(
            socket.IPPROTO_TCP, socket.TCP_INFO, 156
        )
        count: int = struct.unpack_from("I", info, 152)[0]
        return count

    async def gone(self) -> None:
        """Wait until the client has closed the connection."""
        with suppress(ConnectionError):
            while await self.reader.read(MIB):
                pass
        self.closed = True


Script = Callable[[Peer], Awaitable[None]]


class Replica:
    """Serves each connection by a script, and closes it when the script ends."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._tasks_before = asyncio.all_tasks()
        self.tasks: set[asyncio.Task[None]] = set()
        self.peers: list[Peer] = []
        self.served_by: list[Peer] = []  # in the order of the requests

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        peer = Peer(self, reader, writer)
        self.peers.append(peer)
        try:
            await self._script(peer)
        except (ConnectionError, EOFError):
            peer.closed = True
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            self.tasks.remove(task)
            writer.close()

    def has_all_tasks(self) -> bool:
        """Return whether every new task is the replica's, and none the client's."""
        return asyncio.all_tasks() - self.tasks <= self._tasks_before

    @asynccontextmanager
    async def listening(self, host: str) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._serve, host, 0, limit=MIB, backlog=1000)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in [*self.tasks]:
                task.cancel()
            for peer in self.peers:
                peer.writer.transport.abort()
            await server.wait_closed()


@asynccontextmanager
async def before(
    script: Script,
    *,
    host: str = "127.0.0.1",
    connect_timeout_s: float = PATIENCE_S,
    idle_s: float = PATIENCE_S,
    work_s: float = PATIENCE_S,
) -> AsyncIterator[tuple[HttpClient, Replica]]:
    """The client before such a replica; what it leaves behind fails the test."""
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    replica = Replica(script)
    async with no_task_left(), replica.listening(host) as port:
        upstream = HttpClient(
            host,
            port,
            connect_timeout_s=connect_timeout_s,
            idle_timeout_s=idle_s,
            max_work_s=work_s,
        )
        try:
            yield upstream, replica
        finally:
            upstream.close()
    assert faults == []


# Words of the tests.


async def turns(count: int) -> None:
    """Let everything else of the loop have its turn."""
    for _ in range(count):
        await asyncio.sleep(0)


async def settled(measure: Callable[[], int]) -> int:
    """Return the value of the measure when it no longer changes, although both sides could run."""
    seen, last = 0, -1
    while seen < 5:
        seen, last = (seen + 1 if measure() == last else 0), measure()
        await turns(20)
    return last


@asynccontextmanager
async def unconnected_client(
    port: int, connect_timeout_s: float = PATIENCE_S
) -> AsyncIterator[HttpClient]:
    """A client of a port at which no replica serves; it leaves no task."""
    async with no_task_left():
        with closing(
            HttpClient("127.0.0.1", port, connect_timeout_s=connect_timeout_s)
        ) as upstream:
            yield upstream


def plain(body: bytes, *more: bytes) -> bytes:
    head = b"\r\n".join((b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *more))
    return head + b"\r\n\r\n" + body


async def orderly(peer: Peer) -> None:
    """Answers every request with its target."""
    while True:
        await peer.say(plain((await peer.asked()).target))


def first(script: Script) -> Script:
    """The replica whose first connection follows the script; the others are orderly."""
    waiting = [script]

    async def serve(peer: Peer) -> None:
        await (waiting.pop() if waiting else orderly)(peer)

    return serve


def get(upstream: HttpClient, target: bytes = b"/", timeout_s: float = PATIENCE_S) -> Any:
    return upstream.request(b"GET", target, timeout_s=timeout_s)


async def outcome(request: Awaitable[CompleteResponse]) -> CompleteResponse | type[GatewayError]:
    try:
        return await request
    except GatewayError as error:
        return type(error)


async def still_serves(upstream: HttpClient, replica: Replica, *, on_connection: int) -> None:
    """The next request is answered properly, on that connection, counted from 1."""
    reply = await get(upstream, b"/next")
    assert (reply.status, reply.body) == (200, b"/next")
    assert reply.headers == [(b"content-length", b"5")]
    assert len(replica.peers) == on_connection


# An answer is the same however it is cut.


def of_length(body: bytes) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"content-length", b"%d" % len(body)),)


HEAD = b"HTTP/1.1 200 OK\r\n"
HEAD_CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


# What the replica is sent.


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("size", [0, 1, 5, 20_000, 64 * 1024 - 1, 64 * 1024, 5 * MIB])
async def test_request_is_sent_completely_and_a_small_one_in_one_packet(
    size: int, host: str
) -> None:
    body = random.Random(size).randbytes(size)
    received: list[bytes] = []
    packets: list[int] = []

    async def serve(peer: Peer) -> None:
        while True:
            asked = await peer.asked()
            received.append(asked.head + asked.body)
            packets.append(peer.packets())
            await peer.say(plain(b"ok"))

    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
    async with before(serve, host=host) as (upstream, replica):
        for headers in ([], [(b"x-a", b"b"), (b"X-Caf\xe9", b"\xff")]):
            reply = await upstream.request(
                b"POST", b"/v2/a%20b?c=%00", body=body, headers=headers, timeout_s=PATIENCE_S
            )
            assert reply.body == b"ok"
        (peer,) = replica.peers
        port = peer.writer.get_extra_info("sockname")[1]
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        head = b"POST /v2/a%%20b?c=%%00 HTTP/1.1\r\nhost: %b\r\n" % shown.encode()
        head += b"content-length: %d\r\n" % size
        first, second = received
        assert first == head + b"\r\n" + body
        assert second == head + b"x-a: b\r\nX-Caf\xe9: \xff\r\n\r\n" + body
        assert size > 20_000 or packets == [1, 2]


async def each(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        await asyncio.sleep(0)
        yield piece


STREAMS = {
    "one piece": (b"hello",),
    "several": (b"hel", b"l", b"o, world"),
    "empty ones between": (b"", b"hel", b"", b"lo", b""),
    "nothing": (),
    "only empty ones": (b"", b""),
    "large ones": (b"a" * 300_000, b"b", b"c" * 70_000),
}


@pytest.mark.parametrize("pieces", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_streamed_body_is_framed_as_its_headers_say(
    framing: str, pieces: tuple[bytes, ...]
) -> None:
    body = b"".join(pieces)
    given_pieces = [piece for piece in pieces if piece]
    in_chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in given_pieces)
    expected = body if framing == "length" else in_chunks + b"0\r\n\r\n"
    header = (b"content-length", b"%d" % len(body)) if framing == "length" else CHUNKED

    async def serve(peer: Peer) -> None:
        while True:
            head = await peer.reader.readuntil(b"\r\n\r\n")
            assert head.endswith(b"\r\n%b: %b\r\nx-a: b\r\n\r\n" % header)
            assert head.startswith(b"POST /infer HTTP/1.1\r\nhost: 127.0.0.1:")
            received = b""
            while len(received) < len(expected):
                received += await peer.reader.read(MIB)
            await turns(10)  # the answer to nothing must not overtake it
            await peer.say(plain(b"yes" if received == expected else b"no"))

    async with before(serve) as (upstream, replica):
        for _ in range(3):
            answer = await upstream.send(
                b"POST",
                b"/infer",
                headers=[header, (b"x-a", b"b")],
                body=each(*pieces),
                timeout_s=PATIENCE_S,
            )
            assert await answer.read() == b"yes"
            answer.close()
        assert len(replica.peers) == 1


# The pool.


async def test_pool_keeps_connections_and_uses_latest_first() -> None:
    async with before(orderly) as (upstream, replica):
        for _ in range(3):
            replies = await asyncio.gather(*(get(upstream, b"/%d" % i) for i in range(8)))
            assert [reply.body for reply in replies] == [b"/%d" % i for i in range(8)]
            assert len(replica.peers) == 8
        last = replica.served_by[-1]
        for _ in range(5):
            await still_serves(upstream, replica, on_connection=8)
            assert replica.served_by[-1] is last
        for number in range(5):
            reply = await upstream.request(b"GET", b"/", timeout_s=PATIENCE_S, fresh=True)
            assert reply.body == b"/"
            assert len(replica.peers) == 9 + number
        # A fresh connection was asked for to see that one comes about; it is not kept.
        await still_serves(upstream, replica, on_connection=13)
        assert replica.served_by[-1] is last
        assert not any(peer.closed for peer in replica.peers[:8])


# Answers that come before the request is complete.


@pytest.mark.parametrize("then", ["reads on", "stops reading", "closes its side"])
@pytest.mark.parametrize("framing", ["length", "chunks"])
@pytest.mark.parametrize("status", [413, 200])
async def test_early_response_ends_request_and_connection(
    status: int, framing: str, then: str
) -> None:
    given_back = asyncio.Event()
    given_out = 0

    async def serve(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.reader.readexactly(10)
        await peer.say(b"HTTP/1.1 %d X\r\nContent-Length: 5\r\n\r\nearly" % status)
        if then == "closes its side":
            peer.writer.write_eof()
        if then == "stops reading":
            await given_back.wait()
        await peer.gone()

    async def body() -> AsyncIterator[bytes]:
        nonlocal given_out
        yield b"0123456789"
        while True:
            given_out += 1
            yield b"x" * 65_536
            await asyncio.sleep(0)

    async with before(first(serve)) as (upstream, replica):
        header = (b"content-length", b"%d" % (1 << 40)) if framing == "length" else CHUNKED
        answer = await upstream.send(
            b"POST", b"/", headers=[header], body=body(), timeout_s=PATIENCE_S
        )
        assert answer.status == status
        await wait_until_async(lambda: answer.is_complete)
        await turns(20)
        assert await answer.read() == b"early"
        assert answer.is_complete
        answer.close()
        answer.close()
        assert await answer.next_chunk() == b""
        await wait_until_async(replica.has_all_tasks)
        given_out_at_the_end = given_out
        await turns(20)
        assert given_out == given_out_at_the_end > 0
        given_back.set()
        await wait_until_async(lambda: replica.peers[0].closed)
        await still_serves(upstream, replica, on_connection=2)


async def test_connection_with_unsent_body_is_not_reused() -> None:
    async def serve(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.say(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await asyncio.sleep(PATIENCE_S)  # reads no more

    async with before(first(serve)) as (upstream, replica):
        reply = await upstream.request(b"POST", b"/", body=bytes(64 * MIB), timeout_s=PATIENCE_S)
        assert (reply.status, reply.body) == (413, b"no")
        await still_serves(upstream, replica, on_connection=2)


class ClientLeft(Exception):
    pass


@pytest.mark.parametrize("when", ["before the answer", "in the middle of the answer"])
async def test_error_of_request_body_is_raised_and_ends_request(when: str) -> None:
    answered = asyncio.Event()
    received: list[bytes] = []

    async def serve(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        if when == "in the middle of the answer":
            await peer.say(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello")
        with suppress(ConnectionError):
            while data := await peer.reader.read(MIB):
                received.append(data)
        peer.closed = True

    async def body() -> AsyncIterator[bytes]:
        yield b"hello"
        await (answered.wait() if when == "in the middle of the answer" else turns(20))
        raise ClientLeft

    async with before(first(serve)) as (upstream, replica):
        sending = upstream.send(b"POST", b"/", headers=[CHUNKED], body=body(), timeout_s=PATIENCE_S)
        if when == "before the answer":
            with pytest.raises(ClientLeft):
                await sending
        else:
            answer = await sending
            assert await answer.next_chunk() == b"hello"
            answered.set()
            with pytest.raises(ClientLeft):
                await answer.next_chunk()
            answer.close()
        await wait_until_async(lambda: replica.peers[0].closed)
        # Without its last chunk the request is visibly incomplete, and is not executed.
        assert b"".join(received) == b"5\r\nhello\r\n"
        await still_serves(upstream, replica, on_connection=2)


# What a replica does wrong.


@pytest.mark.parametrize(
    ("wire", "end"),
    [
        (HEAD + b"Content-Length: 5\r\n\r\nhell", "closing"),
        (HEAD + b"Content-Length: 5\r\n\r\nhell", "a reset"),
        (HEAD + b"\r\nhello", "a reset"),
        (b"HTTP/1.1 OK\r\n\r\n", "waiting"),
    ],
)
async def test_truncated_or_invalid_response_is_bad_upstream(wire: bytes, end: str) -> None:
    received: list[Asked] = []

    async def serve(peer: Peer) -> None:
        received.append(await peer.asked())
        await peer.say(wire)
        if end == "a reset":
            peer.reset()
        if end == "waiting":
            await peer.gone()

    reason = r"not HTTP/1\.1" if end == "waiting" else "closed the connection before"
    async with before(first(serve)) as (upstream, replica):
        with pytest.raises(BadUpstream, match=reason):
            await upstream.request(b"POST", b"/", body=b"body", timeout_s=PATIENCE_S)
        await wait_until_async(lambda: end != "waiting" or replica.peers[0].closed)
        await still_serves(upstream, replica, on_connection=2)
        assert [asked.body for asked in received] == [b"body"]


# For each: the pieces of one response, its headers, and its body.


@pytest.mark.parametrize("start", [HEAD, HEAD_CHUNKED + b"0\r\n"], ids=["head", "trailers"])
async def test_endless_response_header_is_bad_upstream_before_memory_fills(start: bytes) -> None:
    sent_bytes = 0

    async def serve(peer: Peer) -> None:
        nonlocal sent_bytes
        await peer.asked()
        await peer.say(start + b"X-A: ")
        while True:
            await peer.say(b"a" * 65_536)
            sent_bytes += 65_536

    async with before(first(serve)) as (upstream, replica):
        with pytest.raises(BadUpstream):
            await get(upstream)
        assert sent_bytes < 8 * MIB
        await still_serves(upstream, replica, on_connection=2)


# Unsolicited data.

SPARE = {
    "a second answer": plain(b"stolen"),
    "half of a second answer": plain(b"stolen")[:25],
    "an interim answer": b"HTTP/1.1 100 Continue\r\n\r\n",
    "an answer with a body until close": HEAD + b"\r\nstolen",
    "garbage": b"\0\xffgarbage",
    "one byte": b"x",
    "two answers": plain(b"stolen") * 2,
}


@pytest.mark.parametrize("spare", SPARE.values(), ids=SPARE)
@pytest.mark.parametrize("when", ["with the answer", "before it is read", "when it is idle"])
async def test_unsolicited_data_is_never_read_as_a_response(when: str, spare: bytes) -> None:
    idle = asyncio.Event()
    has_sent = asyncio.Event()

    async def serve(peer: Peer) -> None:
        await peer.asked()
        answer = plain(b"mine")
        if when == "with the answer":
            await peer.say(answer + spare)
        elif when == "before it is read":
            await peer.say(answer, spare)
        else:
            await peer.say(answer)
            await idle.wait()
            await peer.say(spare)
        has_sent.set()
        await peer.gone()

    async with before(first(serve)) as (upstream, replica):
        answer = await upstream.send(b"GET", b"/", headers=[EMPTY], timeout_s=PATIENCE_S)
        if when == "before it is read":
            await has_sent.wait()
            await turns(20)
        assert await answer.read() == b"mine"
        assert answer.headers == list(of_length(b"mine"))
        answer.close()
        if when == "when it is idle":
            await turns(20)
            assert not replica.peers[0].closed
            idle.set()
            await wait_until_async(lambda: replica.peers[0].closed)
        await still_serves(upstream, replica, on_connection=2)
        await wait_until_async(lambda: replica.peers[0].closed)


# Giving an answer back.


@pytest.mark.parametrize("size", [0, 5, 200_000, 300_000, 400_000], ids="{} bytes".format)
async def test_response_closed_unread_does_not_affect_the_next(size: int) -> None:
    async def serve(peer: Peer) -> None:
        await peer.asked()
        await peer.say(plain(b"x" * size))
        await orderly(peer)

    async with before(serve) as (upstream, replica):
        answer = await upstream.send(b"GET", b"/", headers=[EMPTY], timeout_s=PATIENCE_S)
        await turns(50)
        # Whole or not, it may be left; only a whole one may leave its connection to others.
        whole = answer.is_complete
        answer.close()
        await wait_until_async(lambda: whole or replica.peers[0].closed)
        for _ in range(3):
            reply = await outcome(get(upstream, b"/a"))
            assert isinstance(reply, CompleteResponse)
            assert reply.body in (b"/a", b"x" * size)
        assert len(replica.peers) <= 2


@pytest.mark.parametrize("is_reset", [False, True], ids=["by the client", "by a reset"])
async def test_response_closed_in_its_middle_closes_connection(is_reset: bool) -> None:
    async def serve(peer: Peer) -> None:
        await peer.asked()
        await peer.say(HEAD + (b"" if is_reset else b"Content-Length: 10\r\n") + b"\r\nhello")
        if is_reset:
            peer.reset()
        await peer.gone()

    async with before(first(serve)) as (upstream, replica):
        answer = await upstream.send(b"GET", b"/", headers=[EMPTY], timeout_s=PATIENCE_S)
        assert await answer.next_chunk() == b"hello"
        if is_reset:
            with pytest.raises(BadUpstream):
                await answer.next_chunk()
        assert not answer.is_complete
        answer.close()
        await wait_until_async(lambda: replica.peers[0].closed)
        await still_serves(upstream, replica, on_connection=2)


# Connections that close.


@pytest.mark.fault("Triton closes an idle connection while it is being reused")
@pytest.mark.parametrize("by", ["closing", "a reset"])
async def test_request_on_connection_that_closes_runs_at_most_once(
    by: str,
) -> None:
    """Every order of the two that a few turns of the loop can make."""
    seen: Counter[bytes] = Counter()
    outcomes: Counter[str] = Counter()

    async def serve(peer: Peer) -> None:
        asked = await peer.asked()
        seen[asked.target] += 1
        await peer.say(plain(asked.target))
        await turns(int(asked.target.split(b"-")[1]))
        if by == "a reset":
            peer.reset()

    async with before(serve) as (upstream, _):
        for server_turns in range(8):
            for client_turns in range(8):
                one = b"/one-%d-%d" % (server_turns, client_turns)
                two = b"/two-0-%d-%d" % (server_turns, client_turns)
                reply = await upstream.request(b"POST", one, timeout_s=PATIENCE_S, fresh=True)
                assert reply.body == one
                await turns(client_turns)
                second = await outcome(
                    upstream.request(b"POST", two, body=b"body", timeout_s=PATIENCE_S)
                )
                if isinstance(second, CompleteResponse):
                    assert (second.status, second.body, seen[two]) == (200, two, 1)
                    outcomes["answered"] += 1
                else:
                    assert second in (BadUpstream, RequestNotSent)
                    assert seen[two] == 0 if second is RequestNotSent else seen[two] <= 1
                    outcomes["failed"] += 1
        assert set(seen.values()) == {1}
        assert outcomes.total() == 64
        assert outcomes["answered"], outcomes


@contextmanager
def crowd(treatment: str) -> Iterator[int]:
    """A port whose connections are accepted and ended at once, by another thread: as early as can be."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=100)
    kept: list[socket.socket] = []

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            if treatment == "resets":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if treatment == "talks first":
                connection.sendall(b"220 mail.example ESMTP\r\n")
                kept.append(connection)
            else:
                connection.close()

    thread = threading.Thread(target=accepting, args=(serve,))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()
        for connection in kept:
            connection.close()


def accepting(serve: Callable[[], None]) -> None:
    with suppress(OSError):  # the listener is closed
        serve()


@pytest.mark.parametrize("treatment", ["closes", "resets", "talks first"])
async def test_request_fails_if_replica_closes_every_connection(treatment: str) -> None:
    with crowd(treatment) as port:
        async with unconnected_client(port) as upstream:
            for number in range(40):
                failure = await outcome(get(upstream))
                assert failure in (RequestNotSent, BadUpstream), number


# Deadlines.


async def silent(peer: Peer) -> None:
    await peer.asked()
    await peer.gone()


async def trickling(peer: Peer) -> None:
    await peer.asked()
    for byte in (HEAD + b"X-A: b\r\n" * 100)[:-1]:
        await peer.say(bytes([byte]))
        await asyncio.sleep(0.02)


async def only_interim(peer: Peer) -> None:
    await peer.asked()
    while True:
        await peer.say(b"HTTP/1.1 100 Continue\r\n\r\n")
        await asyncio.sleep(0.02)


async def stops_in_the_body(peer: Peer) -> None:
    await peer.asked()
    await peer.say(plain(b"hello")[:-1])
    await peer.gone()


async def stops_in_the_chunks(peer: Peer) -> None:
    await peer.asked()
    await peer.say(HEAD_CHUNKED + b"5\r\nhello\r\n")
    await peer.gone()


async def stops_before_it_closes(peer: Peer) -> None:
    await peer.asked()
    await peer.say(HEAD + b"\r\nhello")
    await peer.gone()


STOPS: dict[str, Script] = {
    "no answer": silent,
    "a head byte by byte": trickling,
    "interim answers only": only_interim,
    "a body that stops": stops_in_the_body,
    "chunks that stop": stops_in_the_chunks,
    "a body until close that stops": stops_before_it_closes,
}


async def reads_later(peer: Peer) -> None:
    await asyncio.sleep(0.5)
    await peer.gone()


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b"x" * 65_536


async def stalled() -> AsyncIterator[bytes]:
    yield b"x"
    await asyncio.sleep(60)


UNSENT = {"a request body without end": endless, "a request body that stops": stalled}


@pytest.mark.parametrize("name", [*STOPS, *UNSENT])
def test_incomplete_request_or_response_raises_at_its_deadline(name: str) -> None:
    async def scenario() -> None:
        async with before(first(STOPS.get(name, reads_later))) as (upstream, replica):
            if name in UNSENT:
                body = UNSENT[name]()
                request = upstream.send(b"POST", b"/", headers=[CHUNKED], body=body, timeout_s=0.15)
            else:
                request = get(upstream, timeout_s=0.15)
            with takes_at_least(0.15), pytest.raises(DeadlinePassed, match=r"0\.15 s"):
                await request
            await wait_until_async(replica.has_all_tasks)
            await still_serves(upstream, replica, on_connection=2)
            await wait_until_async(lambda: replica.peers[0].closed)

    retry_when_late(lambda pace: uvloop.run(pace.watch(scenario())), 0.05)


@pytest.mark.parametrize("end", ["answer", "close", "ejection", "time"])
def test_work_on_a_request_whose_deadline_has_passed_ends_with_the_answer(end: str) -> None:
    proceed = asyncio.Event()

    async def serve(peer: Peer) -> None:
        await peer.asked()
        await proceed.wait()
        if end == "answer":
            await peer.say(plain(b"late"))
        if end != "close":
            await peer.gone()

    async def scenario() -> None:
        async with before(serve, work_s=0.5 if end == "time" else PATIENCE_S) as (
            upstream,
            replica,
        ):
            with pytest.raises(DeadlinePassed) as passed:
                await upstream.send(
                    b"POST", b"/", headers=[EMPTY], timeout_s=0.05, outlives_client=True
                )
            ended = passed.value.work_ended
            assert ended is not None
            assert not ended.done()
            assert upstream.outstanding == 1
            if end == "ejection":
                upstream.drop_pending_work()
            if end != "time":
                proceed.set()
            await ended
            proceed.set()
            assert upstream.outstanding == 0
            assert len(replica.peers) == 1

    uvloop.run(scenario())


@pytest.mark.parametrize("outlives_client", [False, True], ids=["not wanted", "GET"])
def test_connection_of_other_requests_is_closed_at_their_deadline(*, outlives_client: bool) -> None:
    async def serve(peer: Peer) -> None:
        await peer.asked()
        await peer.gone()

    async def scenario() -> None:
        async with before(serve) as (upstream, replica):
            method = b"GET" if outlives_client else b"POST"
            with pytest.raises(DeadlinePassed) as passed:
                await upstream.send(
                    method, b"/", headers=[EMPTY], timeout_s=0.05, outlives_client=outlives_client
                )
            assert passed.value.work_ended is None
            assert upstream.outstanding == 0
            await wait_until_async(lambda: replica.peers[0].closed)

    uvloop.run(scenario())


def test_each_request_of_a_connection_has_its_own_deadline() -> None:
    async def serve(peer: Peer) -> None:
        while True:
            asked = await peer.asked()
            await asyncio.sleep(float(asked.target[1:]))
            await peer.say(plain(asked.target))

    async def scenario() -> None:
        async with before(serve) as (upstream, replica):
            long_s, short_s = PATIENCE_S, 0.15
            # The deadline of a complete response, which is not read yet, has no effect.
            answer = await upstream.send(b"GET", b"/0", headers=[EMPTY], timeout_s=short_s)
            await asyncio.sleep(0.25)
            assert answer.is_complete
            assert await answer.read() == b"/0"
            answer.close()
            for wait, timeout_s, idle_s in (
                ("0", long_s, 0),
                ("0", short_s, 0),
                ("0.25", long_s, 0),
                ("0", short_s, 0.25),
                ("0", long_s, 0),
            ):
                assert (await get(upstream, b"/" + wait.encode(), timeout_s)).status == 200
                assert len(replica.peers) == 1
                await asyncio.sleep(idle_s)
            with takes_at_least(short_s), pytest.raises(DeadlinePassed):
                await get(upstream, b"/60", short_s)
            assert len(replica.peers) == 1
            assert (await get(upstream, b"/0.2", long_s)).body == b"/0.2"
            assert len(replica.peers) == 2

    retry_when_late(lambda pace: uvloop.run(pace.watch(scenario())), 0.05)


def test_set_timeout_moves_the_deadline() -> None:
    async def serve(peer: Peer) -> None:
        await peer.asked()
        await peer.say(HEAD + b"Content-Length: 10\r\n\r\n1")
        await asyncio.sleep(0.25)
        await peer.say(b"2")
        await peer.gone()

    async def scenario() -> None:
        async with before(first(serve)) as (upstream, replica):
            answer = await upstream.send(b"GET", b"/", headers=[EMPTY], timeout_s=0.15)
            assert await answer.next_chunk() == b"1"
            answer.set_timeout(PATIENCE_S)
            assert await answer.next_chunk() == b"2"
            answer.set_timeout(0.1)
            with takes_at_least(0.1), pytest.raises(DeadlinePassed, match=r"0\.1 s"):
                await answer.next_chunk()
            answer.close()
            answer.set_timeout(PATIENCE_S)
            await wait_until_async(lambda: replica.peers[0].closed)
            await still_serves(upstream, replica, on_connection=2)

    retry_when_late(lambda pace: uvloop.run(pace.watch(scenario())), 0.05)


async def test_request_to_closed_port_fails_at_once_as_not_sent() -> None:
    async with unconnected_client(free_ports(1)[0]) as upstream:
        with pytest.raises(
            RequestNotSent, match=r": the replica cannot be reached \(connection refused\)$"
        ) as refusal:
            await get(upstream)
        assert refusal.value.is_refused


@pytest.mark.parametrize(
    ("connect_timeout_s", "timeout_s", "error"),
    [(0.2, PATIENCE_S, RequestNotSent), (PATIENCE_S, 0.2, DeadlinePassed)],
)
async def test_connecting_ends_at_the_earlier_of_its_limits(
    connect_timeout_s: float, timeout_s: float, error: type[GatewayError]
) -> None:
    with blackhole() as port:
        async with unconnected_client(port, connect_timeout_s) as upstream:
            with takes_at_least(0.2), pytest.raises(error):
                await get(upstream, timeout_s=timeout_s)


# Back-pressure.


@contextmanager
def memory_below(limit: int) -> Iterator[Callable[[], int]]:
    """No more than this is held at any time beyond what was; gives what is held now."""
    tracemalloc.start()
    try:
        base, _ = tracemalloc.get_traced_memory()
        yield lambda: tracemalloc.get_traced_memory()[0] - base
        _, peak = tracemalloc.get_traced_memory()
        assert peak - base < limit, f"{(peak - base) / MIB:.1f} MiB"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_unread_response_is_not_buffered(
    framing: str,
) -> None:
    piece, count, sent = bytes(range(256)) * 256, 1024, 0
    chunk = piece if framing == "length" else b"%x\r\n%b\r\n" % (len(piece), piece)

    async def serve(peer: Peer) -> None:
        nonlocal sent
        await peer.asked()
        length = b"Content-Length: %d\r\n\r\n" % (len(piece) * count)
        await peer.say(HEAD + length if framing == "length" else HEAD_CHUNKED)
        for _ in range(count):
            peer.writer.write(chunk)
            await peer.writer.drain()
            sent += 1
        if framing == "chunks":
            await peer.say(b"0\r\n\r\n")
        await orderly(peer)

    async with before(serve) as (upstream, replica):
        with memory_below(2 * MIB) as held:
            answer = await upstream.send(b"GET", b"/", headers=[EMPTY], timeout_s=PATIENCE_S)
            stopped_at = await settled(lambda: sent)
            assert 0 < stopped_at < count
            assert held() < 2 * MIB
            read = 0
            while data := await answer.next_chunk():
                start = read % 256
                assert data == (piece * (len(data) // len(piece) + 2))[start:][: len(data)]
                read += len(data)
            assert read == len(piece) * count
        answer.close()
        await still_serves(upstream, replica, on_connection=1)


@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_request_body_that_replica_does_not_read_is_not_buffered(
    framing: str,
) -> None:
    piece, count, given_out = bytes(65_536), 1024, 0
    reads = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        nonlocal given_out
        for _ in range(count):
            given_out += 1
            yield piece

    async def serve(peer: Peer) -> None:
        await reads.wait()
        head = await peer.reader.readuntil(b"\r\n\r\n")
        left = len(piece) * count if framing == "length" else 0
        while framing == "chunks" and (size := int(await peer.reader.readline(), 16)):
            assert len(await peer.reader.readexactly(size + 2)) == size + 2
        while left:
            left -= len(await peer.reader.read(min(left, MIB)))
        if framing == "chunks":
            await peer.reader.readexactly(2)
        await peer.say(plain(head[:6]))
        await orderly(peer)

    async with before(serve) as (upstream, replica):
        header = of_length(piece * count)[0] if framing == "length" else CHUNKED
        request = upstream.send(b"POST", b"/", headers=[header], body=body(), timeout_s=PATIENCE_S)
        with memory_below(8 * MIB) as held:
            sending = asyncio.create_task(request)
            stopped_at = await settled(lambda: given_out)
            assert 0 < stopped_at < count * 3 // 4
            # The replica's reader is in this process too, and holds up to twice its own limit.
            assert held() < 2 * MIB + 2 * MIB
            reads.set()
            answer = await sending
        assert given_out == count
        assert await answer.read() == b"POST /"
        answer.close()
        await still_serves(upstream, replica, on_connection=1)


# Idle connections, closing, cancelling.


def test_idle_connections_are_closed_after_their_timeout() -> None:
    async def scenario() -> None:
        async with before(orderly, idle_s=0.2) as (upstream, replica):
            await asyncio.gather(*(get(upstream) for _ in range(8)))
            while sum(not peer.closed for peer in replica.peers) > 1:  # the one that is used stays
                await asyncio.sleep(0.05)
                await still_serves(upstream, replica, on_connection=8)
            with takes_at_least(0.1):
                await wait_until_async(lambda: all(peer.closed for peer in replica.peers))
            await still_serves(upstream, replica, on_connection=9)

    retry_when_late(lambda pace: uvloop.run(pace.watch(scenario())), 0.05)


async def test_expired_connection_is_not_reused_by_a_busy_loop() -> None:
    async with before(orderly, idle_s=0.1) as (upstream, replica):
        await get(upstream)
        time.sleep(0.15)  # noqa: ASYNC251 - the loop is busy: no timer of it can fire
        await still_serves(upstream, replica, on_connection=2)
        await wait_until_async(lambda: replica.peers[0].closed)


@pytest.mark.long
async def test_closed_connections_are_freed_before_their_deadlines() -> None:
    there_were = connections_in_memory()

    async def serve(peer: Peer) -> None:
        asked = await peer.asked()
        if asked.target == b"/whole":
            await peer.say(plain(b"ok"))
        else:
            await peer.say(plain(b"ok", b"Connection: close")[: int(asked.target[1:])])

    async with before(serve, idle_s=0.2) as (upstream, _):
        whole = len(plain(b"ok", b"Connection: close"))
        targets = [b"/whole", b"/%d" % whole, b"/%d" % (whole - 1), b"/0"] * 5
        outcomes = [await outcome(get(upstream, target, 300.0)) for target in targets]
        assert sum(isinstance(reply, CompleteResponse) for reply in outcomes) >= 5
        assert sum(reply is BadUpstream for reply in outcomes) >= 10
        del outcomes
        await asyncio.sleep(0.25)  # the idle are closed
        await wait_until_async(lambda: connections_in_memory() == there_were)


def connections_in_memory() -> int:
    gc.collect()
    return sum(type(thing) is UpstreamConnection for thing in gc.get_objects())


async def test_close_closes_idle_connections_at_once_and_busy_ones_later() -> None:
    go_on = asyncio.Event()

    async def serve(peer: Peer) -> None:
        while (asked := await peer.asked()).target != b"/slow":
            await peer.say(plain(asked.target))
        await peer.say(plain(b"slow")[:-2])
        await go_on.wait()
        await peer.say(b"ow")
        await peer.gone()

    async with before(serve) as (upstream, replica):
        await asyncio.gather(*(get(upstream) for _ in range(4)))
        answer = await upstream.send(b"GET", b"/slow", headers=[EMPTY], timeout_s=PATIENCE_S)
        upstream.close()
        await wait_until_async(lambda: sum(peer.closed for peer in replica.peers) == 3)
        go_on.set()
        assert await answer.read() == b"slow"
        assert sum(peer.closed for peer in replica.peers) == 3
        answer.close()
        await wait_until_async(lambda: all(peer.closed for peer in replica.peers))
        upstream.close()


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("waiting_for", ["the head", "the body", "the replica to read", "its body"])
async def test_cancelled_request_closes_its_connection(
    waiting_for: str,
) -> None:
    cancelled = asyncio.Event()
    given_out = 0

    async def serve(peer: Peer) -> None:
        if waiting_for == "the body":
            await peer.asked()
            await peer.say(plain(b"hello")[:-1])
        if waiting_for == "the replica to read":
            await cancelled.wait()
        await peer.gone()

    async def body() -> AsyncIterator[bytes]:
        nonlocal given_out
        async for piece in stalled() if waiting_for == "its body" else endless():
            given_out += 1
            yield piece

    async with before(first(serve)) as (upstream, replica):
        request: Coroutine[Any, Any, UpstreamResponse | CompleteResponse] = get(upstream)
        if waiting_for in ("the replica to read", "its body"):
            request.close()
            request = upstream.send(
                b"POST", b"/", headers=[CHUNKED], body=body(), timeout_s=PATIENCE_S
            )
        task = asyncio.create_task(request)
        await wait_until_async(lambda: replica.peers)
        await settled(lambda: given_out)
        assert not task.done()
        assert len(replica.peers) == 1
        await cancel(task)
        cancelled.set()
        await wait_until_async(replica.has_all_tasks)
        await wait_until_async(lambda: replica.peers[0].closed)
        await still_serves(upstream, replica, on_connection=2)


async def test_request_cancelled_while_connecting_leaves_no_task() -> None:
    with blackhole() as port:
        async with unconnected_client(port) as upstream:
            task = asyncio.create_task(get(upstream))
            await turns(20)
            await cancel(task)


# All of it at once.


@dataclass
class Rush:
    """Ten thousand numbered requests, and a replica that is careless with its connections."""

    count: int = 10_000
    at_a_time: int = 64

    def __post_init__(self) -> None:
        self.random = random.Random(20_11)
        self.seen: Counter[bytes] = Counter()
        self.outcomes: Counter[str] = Counter()

    def wire(self, number: bytes) -> bytes:
        body = number * self.random.choice([1, 1, 1, 10, 500])
        head = b"HTTP/1.1 200 OK\r\nX-Number: %b\r\n" % number
        if self.random.random() < 0.5:
            return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        cut = self.random.randint(1, len(body))
        pieces = [piece for piece in (body[:cut], body[cut:]) if piece]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"

    async def serve(self, peer: Peer) -> None:
        while True:
            asked = await peer.asked()
            number = asked.target[1:]
            assert asked.body in (b"", number * 3)
            self.seen[number] += 1
            wire, fate = self.wire(number), self.random.random()
            if fate < 0.02:
                wire = wire[: self.random.randrange(1, len(wire))]
            cuts = sorted(self.random.choices(range(len(wire)), k=2))
            if 0.02 < fate < 0.04:
                # With the end of the answer: what comes later than that, while the next request is
                # on its way, no HTTP/1.1 client can tell from its answer.
                wire += self.wire(b"stolen")
            await peer.say(*(wire[a:b] for a, b in pairwise([0, *cuts, len(wire)]) if b > a))
            if fate < 0.02 or fate > 0.95:
                if self.random.random() < 0.5:
                    peer.reset()
                return

    async def client(self, upstream: HttpClient, numbers: Iterator[int]) -> None:
        for i in numbers:
            number = b"%05d," % i
            try:
                self.outcomes[await self.request(upstream, i, number)] += 1
            except BadUpstream:
                self.outcomes["failed"] += 1
            assert self.seen[number] <= 1

    async def request(self, upstream: HttpClient, i: int, number: bytes) -> str:
        body: bytes | AsyncIterator[bytes] = b"" if i % 3 else number * 3
        headers: Headers = list(of_length(body if isinstance(body, bytes) else b""))
        if i % 3 == 1:
            body, headers = each(number, number * 2), [CHUNKED]
        answer = await upstream.send(
            b"POST", b"/" + number, headers=headers, body=body, timeout_s=PATIENCE_S
        )
        try:
            assert answer.status == 200
            assert answer.header(b"x-number") == number
            if i % 20 == 0:
                return "left unread"
            received = await answer.read()
            assert received == number * (len(received) // len(number)) != b""
            return "answered"
        finally:
            answer.close()


@pytest.mark.long
@pytest.mark.fault(
    "a response is garbage, truncated, of the wrong length, or followed by another one"
)
def test_ten_thousand_requests_get_their_own_responses() -> None:
    rush = Rush()

    async def scenario() -> None:
        async with before(rush.serve) as (upstream, replica):
            numbers = iter(range(rush.count))
            clients = [rush.client(upstream, numbers) for _ in range(rush.at_a_time)]
            await asyncio.gather(*clients)
            assert len(replica.peers) < rush.count / 5  # connections are reused all the same

    uvloop.run(scenario())
    assert rush.outcomes.total() == rush.count
    assert rush.outcomes["answered"] > 0.85 * rush.count
    assert 0 < rush.outcomes["failed"] < 0.1 * rush.count
    assert set(rush.seen.values()) == {1}
