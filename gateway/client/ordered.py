"""A concurrent executor that writes its results in the order of the jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Generic, TypeVar

J = TypeVar("J")
R = TypeVar("R")

# Results that may wait for an earlier one, per running job.
BACKLOG_FACTOR: Final = 16
# Results that arrive within this time share a write, which costs as much as a response.
WRITE_DELAY_S: Final = 0.01


class OrderedExecutor(Generic[J, R]):
    """Runs the jobs of a source, `concurrency` at a time, and writes their results in order.

    All results that are ready are written together; a slow writer holds the source back.
    """

    def __init__(
        self,
        run_job: Callable[[J], Awaitable[R]],
        write: Callable[[list[R]], Awaitable[None]],
        concurrency: int,
    ) -> None:
        self._run_job = run_job
        self._write = write
        self._job_slots = asyncio.Semaphore(concurrency)
        self._backlog_slots = asyncio.Semaphore(concurrency * (1 + BACKLOG_FACTOR))
        self._tasks: set[asyncio.Task[None]] = set()
        self._results: dict[int, R] = {}
        self._next_number = 0
        self._result_ready = asyncio.Event()
        self._producer: asyncio.Task[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._is_closing = False
        self._error: BaseException | None = None
        self._stop_count = 0

    def stop(self) -> None:
        """Start no more jobs; the second call cancels running jobs, the third the writer."""
        self._stop_count += 1
        tasks = {1: [self._producer], 2: self._tasks}.get(self._stop_count, [self._writer])
        for task in tasks:
            if task is not None:
                task.cancel()

    async def run(self, jobs: AsyncIterator[J]) -> None:
        """Run all jobs. Raises the first error of a job or the writer, after writing the results so far."""
        self._producer = asyncio.create_task(self._produce(jobs))
        self._writer = asyncio.create_task(self._write_results())
        for task in (self._producer, self._writer):
            task.add_done_callback(self._on_task_done)
        await asyncio.wait({self._producer})
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._is_closing = True
        self._result_ready.set()
        await asyncio.wait({self._writer})
        if self._error is not None:
            raise self._error

    async def _produce(self, jobs: AsyncIterator[J]) -> None:
        number = 0
        async for job in jobs:
            await self._backlog_slots.acquire()
            await self._job_slots.acquire()
            task = asyncio.create_task(self._execute_job(number, job))
            self._tasks.add(task)
            task.add_done_callback(self._on_task_done)
            number += 1

    async def _execute_job(self, number: int, job: J) -> None:
        try:
            self._results[number] = await self._run_job(job)
        finally:
            self._job_slots.release()
        if number == self._next_number:
            self._result_ready.set()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
            for other in (self._producer, *self._tasks):
                if other is not None:
                    other.cancel()

    async def _write_results(self) -> None:
        while not self._is_closing:
            await self._result_ready.wait()
            self._result_ready.clear()
            await asyncio.sleep(WRITE_DELAY_S)
            while chunk := self._take_ready_results():
                await self._write(chunk)
                for _ in chunk:
                    self._backlog_slots.release()
        # An earlier job was cancelled: complete results after it are written nevertheless.
        if self._results:
            await self._write([self._results[number] for number in sorted(self._results)])

    def _take_ready_results(self) -> list[R]:
        chunk = []
        while self._next_number in self._results:
            chunk.append(self._results.pop(self._next_number))
            self._next_number += 1
        return chunk
