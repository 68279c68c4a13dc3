"""Load at a steady rate, measured from a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from multiprocessing.synchronize import Event
from typing import TYPE_CHECKING, NamedTuple, cast

import uvloop

from tests.support.wait import TIMEOUT_S

if TYPE_CHECKING:
    from typing_extensions import Self

SPAWN = multiprocessing.get_context("spawn")


LOG_WARNINGS = {"log_level": "warning"}  # and not a line for each of thousands of requests


class Answer(NamedTuple):
    status: int
    fields: dict[str, str]
    body: bytes


class Connection:
    """A connection that is kept alive, with little overhead for the measurement."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._kept = True
        self.used_at = time.monotonic()

    @classmethod
    async def to(cls, port: int, own_host: str = "127.0.0.1") -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", port, local_addr=(own_host, 0)))

    @property
    def is_open(self) -> bool:
        """Return whether the server has neither announced that it closes the connection, nor closed it."""
        return self._kept and not self._reader.at_eof()

    def say(self, wire: bytes) -> None:
        self._writer.write(wire)

    async def answer(self) -> Answer:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        first, *lines = head.strip().split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines)
        length = fields.get("content-length")
        body = await (self._chunks() if length is None else self._reader.readexactly(int(length)))
        self._kept = fields.get("connection") != "close"
        self.used_at = time.monotonic()
        return Answer(int(first.split()[1]), fields, body)

    async def _chunks(self) -> bytes:
        body = b""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            body += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readuntil(b"\r\n")
        return body

    async def ask(self, wire: bytes) -> Answer:
        self.say(wire)
        return await self.answer()

    def leave(self) -> None:
        self._writer.transport.abort()


class Pool:
    """The connections to one gateway: for each request an idle one, or a new one.

    One that has been idle for `idle_s` is not used again: the server may be about to close it.
    """

    def __init__(self, port: int, idle_s: float = math.inf, own_host: str = "127.0.0.1") -> None:
        self.port = port
        self._idle_s = idle_s
        self._own_host = own_host
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in list(self._open):
            self._drop(connection)

    async def ask(self, wire: bytes) -> Answer:
        connection = self._fit() or await self._new()
        answer = await connection.ask(wire)
        if connection.is_open:
            self._idle.append(connection)
        else:
            self._drop(connection)
        return answer

    def _fit(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and time.monotonic() - connection.used_at < self._idle_s:
                return connection
            self._drop(connection)
        return None

    async def _new(self) -> Connection:
        connection = await Connection.to(self.port, self._own_host)
        self._open.add(connection)
        return connection

    def _drop(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.leave()


def post(path: str, body: bytes, content_type: str = "application/json", *more: str) -> bytes:
    fields = ["Host: x", f"Content-Type: {content_type}", f"Content-Length: {len(body)}", *more]
    return "\r\n".join((f"POST {path} HTTP/1.1", *fields, "", "")).encode() + body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def infer_v1(model: str, *values: float) -> bytes:
    return post(f"/v1/models/{model}/infer", json.dumps({"inputs": {"X": values}}).encode())


def infer_v2(model: str, *values: float) -> bytes:
    tensor = {"name": "X", "datatype": "FP32", "shape": [len(values)], "data": values}
    return post(f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}).encode())


ECHO_V1 = infer_v1("echo", 1, 2)
ECHO_V2 = infer_v2("echo", 1, 2)


@dataclass(frozen=True)
class Sample:
    """A request: when it was sent, by how much that was too late, how long it took, and its answer."""

    at: float
    late_s: float
    took_s: float
    status: int
    retry_after: str
    refusal: bytes  # the body, if it is not 200


async def sample(pool: Pool, wire: bytes, due: float) -> Sample:
    began = time.monotonic()
    answer = await pool.ask(wire)
    took_s = time.monotonic() - began
    retry_after = answer.fields.get("retry-after", "")
    refusal = b"" if answer.status == 200 else answer.body
    return Sample(began, began - due, took_s, answer.status, retry_after, refusal)


async def open_loop(
    pool: Pool, wires: Sequence[bytes], rate: float, most_s: float, stop: Event
) -> list[Sample]:
    """Send requests at random moments, whatever became of those before them."""
    random_ = random.Random(7)
    turn = itertools.cycle(wires)
    due = time.monotonic()
    last = due + most_s
    tasks: list[asyncio.Task[Sample]] = []
    while due < last and not stop.is_set():
        await asyncio.sleep(due - time.monotonic())
        tasks.append(asyncio.create_task(sample(pool, next(turn), due)))
        due += random_.expovariate(rate)
    return await asyncio.gather(*tasks)


def send_samples(
    pipe: Pipe, stop: Event, pool: Pool, wires: Sequence[bytes], rate: float, most_s: float
) -> None:
    async def run() -> list[Sample]:
        with pool:
            return await open_loop(pool, wires, rate, most_s, stop)

    pipe.send(uvloop.run(run()))


class OpenLoop:
    """`open_loop` in a process of its own: what the tests do and hold would be a pause in what is
    measured."""

    def __init__(self, pool: Pool, wires: Sequence[bytes], rate: float, most_s: float) -> None:
        self._most_s = most_s
        self._stop = SPAWN.Event()
        self._samples, pipe = SPAWN.Pipe(duplex=False)
        arguments = pipe, self._stop, pool, wires, rate, most_s
        self._process = SPAWN.Process(target=send_samples, args=arguments)

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def samples(self) -> list[Sample]:
        """Return a sample of each request, when all are answered."""
        assert self._samples.poll(self._most_s + 2 * TIMEOUT_S)
        return cast("list[Sample]", self._samples.recv())

    def stop(self) -> list[Sample]:
        self._stop.set()
        return self.samples()


def closed_loop(port: int, wires: Sequence[bytes], clients: int, count: int) -> list[Sample]:
    """Send so many requests: each client the next one when it has its answer."""

    async def run() -> list[Sample]:
        samples = list[Sample]()
        turn = itertools.cycle(wires)
        left = iter(range(count))

        async def client(pool: Pool) -> None:
            for _ in left:
                samples.append(await sample(pool, next(turn), time.monotonic()))

        with Pool(port) as pool:
            await asyncio.gather(*(client(pool) for _ in range(clients)))
        return samples

    return uvloop.run(run())


def statuses_of(samples: Sequence[Sample]) -> Counter[int]:
    return Counter(each.status for each in samples)


def quantile_ms(samples: Sequence[Sample], part: float) -> float:
    took_s = sorted(each.took_s for each in samples)
    return took_s[int(len(took_s) * part)] * 1000


def median_ms(samples: Sequence[Sample]) -> float:
    return quantile_ms(samples, 0.5)


def p99_ms(samples: Sequence[Sample]) -> float:
    return quantile_ms(samples, 0.99)


def slowest_ms(samples: Sequence[Sample]) -> float:
    return max(each.took_s for each in samples) * 1000
