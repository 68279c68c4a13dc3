"""Many things at a time, and their outcomes in the order in which they were begun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Generic, TypeVar

J = TypeVar("J")
R = TypeVar("R")

# How many outcomes may wait for an earlier one, for each that is under way.
AHEAD: Final = 16
# Outcomes are written together with those that come this soon after: a write each costs as much as an answer.
GATHER_S: Final = 0.01


class InOrder(Generic[J, R]):
    """Does each job of a source, `concurrency` at a time, and writes what came of them in order.

    What can be written is written at once, as much as there is; a slow writer holds the source back.
    """

    def __init__(
        self,
        do: Callable[[J], Awaitable[R]],
        write: Callable[[list[R]], Awaitable[None]],
        concurrency: int,
    ) -> None:
        self._do = do
        self._write = write
        self._places = asyncio.Semaphore(concurrency)
        self._room = asyncio.Semaphore(concurrency * (1 + AHEAD))
        self._tasks: set[asyncio.Task[None]] = set()
        self._outcomes: dict[int, R] = {}
        self._written = 0
        self._ready = asyncio.Event()
        self._producer: asyncio.Task[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._closing = False
        self._error: BaseException | None = None
        self._stops = 0

    def stop(self) -> None:
        """Begin nothing more. The second time, wait for nothing; the third, do not even write."""
        self._stops += 1
        doomed = {1: [self._producer], 2: self._tasks}.get(self._stops, [self._writer])
        for task in doomed:
            if task is not None:
                task.cancel()

    async def run(self, jobs: AsyncIterator[J]) -> None:
        """Raises what a job or the writer raised first; what was done until then is written."""
        self._producer = asyncio.create_task(self._produce(jobs))
        self._writer = asyncio.create_task(self._keep_writing())
        for task in (self._producer, self._writer):
            task.add_done_callback(self._ended)
        await asyncio.wait({self._producer})
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._closing = True
        self._ready.set()
        await asyncio.wait({self._writer})
        if self._error is not None:
            raise self._error

    async def _produce(self, jobs: AsyncIterator[J]) -> None:
        number = 0
        async for job in jobs:
            await self._room.acquire()
            await self._places.acquire()
            task = asyncio.create_task(self._one(number, job))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
            number += 1

    async def _one(self, number: int, job: J) -> None:
        try:
            self._outcomes[number] = await self._do(job)
        finally:
            self._places.release()
        if number == self._written:
            self._ready.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
            for other in (self._producer, *self._tasks):
                if other is not None:
                    other.cancel()

    async def _keep_writing(self) -> None:
        while not self._closing:
            await self._ready.wait()
            self._ready.clear()
            await asyncio.sleep(GATHER_S)
            while chunk := self._following():
                await self._write(chunk)
                for _ in chunk:
                    self._room.release()
        # Something before these is missing for ever: they are written nevertheless, for they were done.
        if self._outcomes:
            await self._write([self._outcomes[number] for number in sorted(self._outcomes)])

    def _following(self) -> list[R]:
        chunk = []
        while self._written in self._outcomes:
            chunk.append(self._outcomes.pop(self._written))
            self._written += 1
        return chunk
