"""A proxy that spoils a real server's answers while it runs: slow, cut, garbled, silent, gone.

It stands between the gateway and a Triton and knows just enough of HTTP/1.1 for that: whoever asks does
not send a second request before the first is answered, so what is sent after an answer began is the next
request, and what comes after a request is its answer.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from tests.support.servers import free_ports
from tests.support.wait import TIMEOUT_S

if TYPE_CHECKING:
    from typing_extensions import Self

HOST = "127.0.0.1"
READ_BYTES = 1 << 16
END_OF_HEAD = b"\r\n\r\n"
FOREVER_S = 1e6


class End(Enum):
    """The way in which a connection ends."""

    CLOSED = "closed"
    HALF = "half closed"  # nothing more comes, but what is sent is still read
    RESET = "reset"


@dataclass(frozen=True)
class Fault:
    """The fault of one response. The default is none."""

    delay_s: float = 0.0  # before its first byte; `math.inf`: it never comes
    edit: Callable[[bytes], bytes] | None = None  # its head, and what of the body came with it
    piece_bytes: int = READ_BYTES  # the most that leaves at a time
    bytes_per_s: float = math.inf
    ends_after: float = math.inf  # bytes of it
    idle_s: float = math.inf  # ends as well when nothing came for so long after its first byte
    end: End = End.CLOSED
    refuses_reuse: bool = (
        False  # the connection ends as the next request comes, and that goes no further
    )


NO_FAULT = Fault()
Script = Callable[[bytes], Fault]  # what becomes of the answer to a request that begins so


def always(fault: Fault, to: bytes = b"") -> Script:
    """This fault, for every request that contains these bytes."""
    return lambda request: fault if to in request else NO_FAULT


class Stream:
    """A connection whose end, however it comes, is an empty read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self) -> bytes:
        with suppress(ConnectionError):
            return await self._reader.read(READ_BYTES)
        return b""

    async def write(self, data: bytes | memoryview) -> None:
        with suppress(ConnectionError):
            self._writer.write(data)
            await self._writer.drain()

    async def closed(self) -> None:
        """Return when the socket is closed."""
        with suppress(OSError):
            await self._writer.wait_closed()

    def end(self, end: End = End.CLOSED) -> None:
        if end is End.HALF:
            with suppress(OSError):
                self._writer.write_eof()
            return
        if end is End.RESET:
            raw = self._writer.get_extra_info("socket")
            with suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._writer.transport.abort()
        self._writer.close()


class Line:
    """A connection of the gateway's, and the one to the server for it."""

    def __init__(self, near: Stream, far: Stream, script: Script) -> None:
        self._near = near
        self._far = far
        self._script = script
        self._asking = False  # a request is on its way, and nothing of its answer is here
        self._answered = 0  # bytes
        self.faults: list[Fault] = []  # of each request

    async def run(self) -> None:
        """Run until either side has closed the connection."""
        ways = [asyncio.create_task(way) for way in (self._requests(), self._answers())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if self.faults and self.faults[-1].end is End.HALF:
                await ways[0]
        finally:
            for way in ways:
                way.cancel()
            self._near.end()
            self._far.end()
            await asyncio.wait(ways)

    async def _requests(self) -> None:
        while data := await self._near.read():
            if not self._asking:
                if self.faults and self.faults[-1].refuses_reuse:
                    self._near.end(self.faults[-1].end)
                    self.faults.append(NO_FAULT)
                    return
                self._asking = True
                self.faults.append(self._script(data))
            await self._far.write(data)

    async def _answers(self) -> None:
        end = End.CLOSED
        while data := await self._next():
            fault = self.faults[-1]
            if self._asking:
                data = await self._begin_answer(data, fault)
            if not await self._pass_on(data, fault):
                break
        if self.faults:
            end = self.faults[-1].end
        self._near.end(end)

    async def _next(self) -> bytes:
        """Return the next bytes of the server; empty if it has ended or the wait is over."""
        idle_s = math.inf if self._asking or not self.faults else self.faults[-1].idle_s
        if idle_s == math.inf:
            return await self._far.read()
        with suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(self._far.read(), idle_s)
        return b""

    async def _begin_answer(self, data: bytes, fault: Fault) -> bytes:
        while END_OF_HEAD not in data and (more := await self._far.read()):
            data += more
        await asyncio.sleep(min(fault.delay_s, FOREVER_S))
        self._asking = False
        self._answered = 0
        return fault.edit(data) if fault.edit else data

    async def _pass_on(self, data: bytes, fault: Fault) -> bool:
        """Send data; return whether the response continues."""
        left = memoryview(data)
        while left and self._answered < fault.ends_after:
            size = int(min(len(left), fault.piece_bytes, fault.ends_after - self._answered))
            await self._near.write(left[:size])
            left = left[size:]
            self._answered += size
            await asyncio.sleep(size / fault.bytes_per_s)
        return self._answered < fault.ends_after


class Proxy:
    """Use it as a context manager: inside, it listens at `port` and passes on to the server at `target`."""

    def __init__(self, target: int) -> None:
        (self.port,) = free_ports(1)
        self.script: Script = always(NO_FAULT)
        self.lines: list[Line] = []
        self.requests: Counter[bytes] = Counter()  # by their paths
        self._target = target
        self._hangs_up = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._server: asyncio.Server | None = None
        self._running: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()

    # What a test asks for.

    @contextmanager
    def having(self, script: Script | Fault) -> Iterator[None]:
        """Answers fare by this, inside."""
        self.script = always(script) if isinstance(script, Fault) else script
        try:
            yield
        finally:
            self.script = always(NO_FAULT)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Within, connections are refused, and the existing ones closed."""
        self._do(self._shut())
        try:
            yield
        finally:
            self._do(self._open())

    @contextmanager
    def swallowing(self) -> Iterator[None]:
        """Within, connections are neither accepted nor refused: the queue of the listening socket is full."""
        with self.refusing(), ExitStack() as stack:
            listening = stack.enter_context(socket.socket())
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((HOST, self.port))
            listening.listen(0)
            for _ in range(4):
                queued = stack.enter_context(socket.socket())
                queued.setblocking(False)
                with suppress(BlockingIOError):
                    queued.connect((HOST, self.port))
            yield

    @contextmanager
    def hanging_up(self) -> Iterator[None]:
        """Connections are accepted, and reset at once."""
        self._do(self._shut())
        self._hangs_up = True
        self._do(self._open())
        try:
            yield
        finally:
            self._hangs_up = False

    def reused_after(self, fault: Fault) -> int:
        """Return the number of connections on which a request followed one with this fault."""
        return sum(fault in line.faults[:-1] for line in self.lines)

    # What it does.

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, self.port)

    async def _shut(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def _fault_of(self, request: bytes) -> Fault:
        self.requests[request.split(b" ", 2)[1]] += 1
        return self.script(request)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near = Stream(reader, writer)
        if self._hangs_up:
            near.end(End.RESET)
            return
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            far = Stream(*await asyncio.open_connection(HOST, self._target))
            line = Line(near, far, self._fault_of)
            self.lines.append(line)
            await line.run()
        except (OSError, asyncio.CancelledError):
            near.end(End.RESET)
        finally:
            await near.closed()
            self._running.discard(task)
