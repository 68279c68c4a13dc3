"""The gateway's HTTP server in a thread, and a client that reads exact bytes."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.config.settings import Settings
from gateway.listeners import open_listeners
from gateway.server.http import GatewayServer, create_uvicorn_config
from tests.support.wait import wait_until

KIB = 1 << 10


MIB = 1 << 20


ENOUGH = bytes(64 * KIB + 1)  # of a body, for its request to be answered before it is whole


PATIENCE_S = 60.0  # guards against a hang, and is no expectation


HOST = "127.0.0.1"


Pair = tuple[bytes, bytes]


HOST_X: Pair = (b"host", b"x")


@dataclass(frozen=True)
class Asked:
    """A request as an application gets it."""

    method: str = "GET"
    path: str = "/"
    raw_path: bytes = b"/"
    query: bytes = b""
    version: str = "1.1"
    headers: tuple[Pair, ...] = (HOST_X,)
    body: bytes = b""


class Stage:
    """A server in a thread, whose application is the test's."""

    def __init__(self, *, uds: Path | None = None, **given: Any) -> None:
        self.app: ASGIApp = echo
        self.asked: list[Asked] = []
        self.faults: list[str] = []  # of applications, and of the event loop
        self.loop: asyncio.AbstractEventLoop
        self._ready = threading.Event()
        config = create_uvicorn_config(self, Settings(**given), HOST, 0)
        config.uds = None if uds is None else str(uds)
        self.server = GatewayServer(config, self._ready.set)
        listeners = None if uds is not None else open_listeners(HOST, 0)
        self._thread = threading.Thread(target=self.server.run, args=(listeners,), daemon=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self.loop = asyncio.get_running_loop()
            self.loop.set_exception_handler(lambda _, context: self.faults.append(str(context)))
            scope["state"].update(stage=self, count=0)
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
        else:
            await self.app(scope, receive, send)

    def __enter__(self) -> Stage:
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.force_exit = not self.quiet()  # a test that failed left what is not waited for
        self.stop()
        self.join()

    @property
    def port(self) -> int:
        port: int = self.server.servers[0].sockets[0].getsockname()[1]
        return port

    def stop(self) -> None:
        self.server.should_exit = True

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    @contextmanager
    def client(self, **options: int) -> Iterator[Client]:
        with socket.socket() as connection:
            for name, value in options.items():
                connection.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
            connection.settimeout(PATIENCE_S)
            connection.connect((HOST, self.port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield Client(self, connection)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hold the server's event loop: what a client sends meanwhile is there when its deadlines begin."""
        holds = threading.Event()
        may_go_on = threading.Event()

        def hold() -> None:
            holds.set()
            may_go_on.wait(PATIENCE_S)

        self.loop.call_soon_threadsafe(hold)
        assert holds.wait(PATIENCE_S)
        try:
            yield
        finally:
            may_go_on.set()

    @contextmanager
    def client_with(self, request: bytes, **options: int) -> Iterator[Client]:
        """A client whose request, of up to 100 KiB, is there when the server accepts its connection."""
        with ExitStack() as stack:
            with self.paused():
                client = stack.enter_context(self.client(**options))
                client.say(request)
            yield client

    def settle(self) -> None:
        """Until the server has done what it can about all that was sent.

        What is sent on the loopback has arrived when `send` returns, and each turn of the loop looks.
        """
        asyncio.run_coroutine_threadsafe(turns(6), self.loop).result(PATIENCE_S)

    def let(self, event: asyncio.Event) -> None:
        """Set what an application waits for."""
        self.loop.call_soon_threadsafe(event.set)

    def settled(self, measure: Callable[[], int]) -> int:
        """Return the value of the measure when it no longer changes."""
        seen = 0
        last = -1
        while seen < 20:
            seen, last = (seen + 1 if measure() == last else 0), measure()
            self.settle()
        return last

    def quiet(self) -> bool:
        state = self.server.server_state
        return not state.connections and not state.tasks

    def fault(self) -> str:
        """The one fault there was, which was meant to be."""
        wait_until(lambda: self.faults)
        (fault,) = self.faults
        self.faults.clear()
        return fault


class Faults(logging.Handler):
    """Collects the log records of the protocol."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._faults = faults

    def emit(self, record: logging.LogRecord) -> None:
        self._faults.append(repr(record.exc_info[1]) if record.exc_info else record.getMessage())


@dataclass(frozen=True)
class Answer:
    status: int
    headers: tuple[Pair, ...]
    body: bytes = b""

    def header(self, name: bytes) -> bytes:
        return dict(self.headers).get(name, b"")

    @property
    def error(self) -> str:
        """The sentence of a refusal, whose form is that of every error."""
        document = json.loads(self.body)
        assert self.header(b"content-type") == b"application/json"
        assert list(document) == ["error", "code", "request_id"]
        assert document["request_id"].encode() == self.header(b"x-request-id")
        assert (self.status, document["code"]) == (400, "MALFORMED_REQUEST")
        assert self.header(b"connection") == b"close"
        sentence: str = document["error"]
        return sentence


class Client:
    """A connection that reads answers to the byte, and nothing that is not one."""

    def __init__(self, stage: Stage, connection: socket.socket) -> None:
        self._stage = stage
        self.socket = connection
        self._unread = b""

    def say(self, *parts: bytes) -> None:
        """Each part by itself: the server has read it before the next is sent."""
        for number, part in enumerate(parts):
            if number:
                self._stage.settle()
            self.socket.sendall(part)

    def answer(self, method: str = "GET") -> Answer:
        line, *lines = self._until(b"\r\n\r\n").split(b"\r\n")
        version, number, _ = line.split(b" ", 2)
        assert version == b"HTTP/1.1"
        status = int(number)
        headers = tuple((name, value) for name, value in (each.split(b": ", 1) for each in lines))
        names = [name for name, _ in headers]
        assert not {b"content-length", b"transfer-encoding"} <= {*names}
        assert len({*names}) == len(names)
        return Answer(status, headers, self._body(method, status, dict(headers)))

    def _body(self, method: str, status: int, headers: dict[bytes, bytes]) -> bytes:
        if method == "HEAD" or status in (100, 204, 304):
            return b""
        if headers.get(b"transfer-encoding") == b"chunked":
            return b"".join(iter(self.chunk, b""))
        if b"content-length" in headers:
            return self.exactly(int(headers[b"content-length"]))
        return self.rest()

    def head(self) -> bytes:
        return self._until(b"\r\n\r\n")

    def chunk(self) -> bytes:
        data = self.exactly(int(self._until(b"\r\n"), 16) + 2)
        assert data.endswith(b"\r\n")
        return data[:-2]

    def rest(self) -> bytes:
        """Return the bytes that arrive until the server closes or resets the connection."""
        with suppress(ConnectionResetError, EOFError):
            while True:
                self._more()
        rest, self._unread = self._unread, b""
        return rest

    def receives_nothing(self) -> bool:
        """Return whether the server, given time for all that it has to do, sent nothing."""
        self._stage.settle()
        self.socket.setblocking(False)
        try:
            return not self._unread and not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        finally:
            self.socket.settimeout(PATIENCE_S)

    def is_still_served(self) -> bool:
        """The connection is in step: the next request is the one that is answered."""
        self.say(b"PUT /next HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nnext")
        answer = self.answer()
        return (answer.status, answer.body, answer.header(b"x-target")) == (200, b"next", b"/next")

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def fill(self, data: bytes) -> int:
        """Send for as long as the server takes it; how much it took."""
        sent = 0
        self.socket.setblocking(False)
        misses = 0
        while misses < 20 and sent < len(data):
            try:
                sent += self.socket.send(data[sent : sent + MIB])
                misses = 0
            except BlockingIOError:
                misses += 1
                self._stage.settle()
        self.socket.settimeout(PATIENCE_S)
        return sent

    def _until(self, end: bytes) -> bytes:
        while end not in self._unread:
            self._more()
        found, _, self._unread = self._unread.partition(end)
        return found

    def exactly(self, count: int) -> bytes:
        while len(self._unread) < count:
            self._more()
        found, self._unread = self._unread[:count], self._unread[count:]
        return found

    def _more(self) -> None:
        data = self.socket.recv(MIB)
        if not data:
            raise EOFError("the server closed the connection")
        self._unread += data


async def turns(count: int) -> None:
    """Let everything else of the loop have its turn."""
    for _ in range(count):
        await asyncio.sleep(0)


def start(*headers: Pair, status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def part(body: bytes = b"", *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def last(body: bytes = b"") -> Message:
    return part(body, more=False)


def length(count: int) -> Pair:
    return (b"content-length", b"%d" % count)


async def read(receive: Receive) -> bytes:
    body: bytes = b""
    while True:
        message = await receive()
        assert message["type"] == "http.request", message
        body += message["body"]
        if not message["more_body"]:
            return body


async def say(send: Send, body: bytes, *headers: Pair, status: int = 200) -> None:
    await send(start(length(len(body)), *headers, status=status))
    await send(last(body))


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body that it was sent, and notes what it was asked."""
    body = await read(receive)
    asked = Asked(
        scope["method"],
        scope["path"],
        scope["raw_path"],
        scope["query_string"],
        scope["http_version"],
        tuple(scope["headers"]),
        body,
    )
    scope["state"]["stage"].asked.append(asked)
    await say(send, body, (b"x-target", scope["raw_path"]))


@dataclass
class Work:
    """An application that works until it is let, and tells how that went."""

    reads: bool = True
    started: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read(receive) if self.reads else b""
            self.started.set()
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        await say(send, body, (b"x-target", scope["raw_path"]))
        self.ended.set()


def begins(work: Work) -> bool:
    return work.started.wait(PATIENCE_S)


LIKE_A_REQUEST = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


HEAD = b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n"


START = b"GET / HTTP/1.1\r\nHost: x\r\n"


POST = b"POST / HTTP/1.1\r\nHost: x\r\n"


SHORT_S = 0.25  # of a deadline that is to pass


FAST: dict[str, Any] = {
    "header_timeout_s": SHORT_S,
    "body_stall_s": SHORT_S,
    "write_timeout_s": SHORT_S,
}


def refused(client: Client) -> tuple[int, str]:
    """The status and code of the refusal that comes, in the form of every error."""
    answer = client.answer()
    document = json.loads(answer.body)
    assert list(document) == ["error", "code", "request_id"]
    assert document["request_id"].encode() == answer.header(b"x-request-id")
    assert answer.header(b"connection") == b"close"
    assert client.rest() == b""
    return answer.status, document["code"]


TOO_SLOW = (408, "REQUEST_TOO_SLOW")


def tidy(stage: Stage) -> Iterator[Stage]:
    """A server that several tests share, for one of them, which leaves nothing in it."""
    stage.app = echo
    stage.asked.clear()
    yield stage
    wait_until(stage.quiet)
    assert stage.faults == []
