"""Load at a steady rate, measured from a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import multiprocessing
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from multiprocessing.synchronize import Event
from typing import NamedTuple, cast

import uvloop

SPAWN = multiprocessing.get_context("spawn")


QUIET = {"log_level": "warning"}  # a line for each of thousands of requests is nobody's to read


class Answer(NamedTuple):
    status: int
    fields: dict[str, str]
    body: bytes


class Connection:
    """One that is kept alive. Raw, so that whoever measures costs little."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._kept = True
        self.used_at = time.monotonic()

    @classmethod
    async def to(cls, port: int, own_host: str = "127.0.0.1") -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port, local_addr=(own_host, 0)))

    @property
    def is_open(self) -> bool:
        """As far as is known: the server has not said that it closes it, and has not done so."""
        return self._kept and not self._reader.at_eof()

    def say(self, wire: bytes) -> None:
        self._writer.write(wire)

    async def answer(self) -> Answer:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        first, *lines = head.strip().split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines)
        body = await self._reader.readexactly(int(fields["content-length"]))
        self._kept = fields.get("connection") != "close"
        self.used_at = time.monotonic()
        return Answer(int(first.split()[1]), fields, body)

    async def ask(self, wire: bytes) -> Answer:
        self.say(wire)
        return await self.answer()

    def leave(self) -> None:
        self._writer.transport.abort()


class Pool:
    """The connections to one gateway: for each request an idle one, or a new one.

    Whoever knows for how long the server keeps them does not use one that has been idle for longer.
    """

    def __init__(self, port: int, idle_s: float = math.inf, own_host: str = "127.0.0.1") -> None:
        self.port = port
        self._idle_s = idle_s
        self._own_host = own_host
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()

    def __enter__(self) -> Pool:
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


def by_v1(model: str, *values: float) -> bytes:
    return post(f"/v1/models/{model}/infer", json.dumps({"inputs": {"X": values}}).encode())


def by_v2(model: str, *values: float) -> bytes:
    tensor = {"name": "X", "datatype": "FP32", "shape": [len(values)], "data": values}
    return post(f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}).encode())


ECHO = by_v1("echo", 1, 2)


@dataclass(frozen=True)
class Asked:
    """A request, when it was sent, by how much that was too late, and what came of it."""

    at: float
    late_s: float
    took_s: float
    status: int
    retry_after: str


async def asked(pool: Pool, wire: bytes, due: float) -> Asked:
    began = time.monotonic()
    answer = await pool.ask(wire)
    took_s = time.monotonic() - began
    return Asked(began, began - due, took_s, answer.status, answer.fields.get("retry-after", ""))


async def offered(
    pool: Pool, wires: Sequence[bytes], rate: float, most_s: float, ended: Event
) -> list[Asked]:
    """An open loop: requests at random moments, whatever became of those before them."""
    drawn, turn = random.Random(7), itertools.cycle(wires)
    due = time.monotonic()
    last = due + most_s
    tasks: list[asyncio.Task[Asked]] = []
    while due < last and not ended.is_set():
        await asyncio.sleep(due - time.monotonic())
        tasks.append(asyncio.create_task(asked(pool, next(turn), due)))
        due += drawn.expovariate(rate)
    return await asyncio.gather(*tasks)


def offer(
    told: Pipe, ended: Event, pool: Pool, wires: Sequence[bytes], rate: float, most_s: float
) -> None:
    async def all_of_it() -> list[Asked]:
        with pool:
            return await offered(pool, wires, rate, most_s, ended)

    told.send(uvloop.run(all_of_it()))


class Offering:
    """Somebody asks, in a process of its own: what the tests do and hold would be a pause in what is
    measured."""

    def __init__(self, pool: Pool, wires: Sequence[bytes], rate: float, most_s: float) -> None:
        self._most_s = most_s
        self._ended, (self._hears, tells) = SPAWN.Event(), SPAWN.Pipe(duplex=False)
        arguments = tells, self._ended, pool, wires, rate, most_s
        self._asking = SPAWN.Process(target=offer, args=arguments)

    def __enter__(self) -> Offering:
        self._asking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._asking.kill()
        self._asking.join()

    def all(self) -> list[Asked]:
        """What came of each request, when it is over."""
        assert self._hears.poll(self._most_s + 20)
        return cast("list[Asked]", self._hears.recv())

    def end(self) -> list[Asked]:
        self._ended.set()
        return self.all()


def in_turns(port: int, wires: Sequence[bytes], clients: int, seconds: float) -> list[Asked]:
    """A closed loop: each client asks again when it has its answer."""

    async def all_of_them() -> list[Asked]:
        seen, turn = list[Asked](), itertools.cycle(wires)
        ends = time.monotonic() + seconds

        async def client(pool: Pool) -> None:
            while (now := time.monotonic()) < ends:
                seen.append(await asked(pool, next(turn), now))

        with Pool(port) as pool:
            await asyncio.gather(*(client(pool) for _ in range(clients)))
        return seen

    return uvloop.run(all_of_them())


def quantile_ms(seen: Sequence[Asked], part: float) -> float:
    took = sorted(each.took_s for each in seen)
    return took[int(len(took) * part)] * 1000


def median_ms(seen: Sequence[Asked]) -> float:
    return quantile_ms(seen, 0.5)


def p99_ms(seen: Sequence[Asked]) -> float:
    return quantile_ms(seen, 0.99)
