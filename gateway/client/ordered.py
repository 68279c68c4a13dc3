"""Concurrent tasks whose results are read in the order of the jobs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, Generic, TypeVar

J = TypeVar("J")
R = TypeVar("R")

# Results that may wait for an earlier one, per running job.
BACKLOG_FACTOR: Final = 16


class OrderedTasks(Generic[J, R]):
    """An asynchronous iterator that runs jobs, `concurrency` at a time, and yields their results in order.

    A slow reader holds the source of the jobs back. The first error of a job or of the source is raised.
    """

    def __init__(
        self, run: Callable[[J], Coroutine[Any, Any, R]], jobs: AsyncIterator[J], concurrency: int
    ) -> None:
        self._run = run
        self._jobs = jobs
        self._job_slots = asyncio.Semaphore(concurrency)
        self._backlog_slots = asyncio.Semaphore(concurrency * (1 + BACKLOG_FACTOR))
        self._tasks: deque[asyncio.Task[R]] = deque()
        self._has_changed = asyncio.Event()
        self._producer: asyncio.Task[None] | None = None
        self._is_stopped = False

    def __aiter__(self) -> AsyncIterator[R]:
        return self

    async def __anext__(self) -> R:
        if self._producer is None:
            self._producer = asyncio.create_task(self._produce())
            self._producer.add_done_callback(lambda _: self._has_changed.set())
            if self._is_stopped:
                self._producer.cancel()
        while True:
            self._has_changed.clear()
            if self._tasks:
                task = self._tasks[0]
                await asyncio.wait({task})
                self._tasks.popleft()
                self._backlog_slots.release()
                if not task.cancelled():
                    return task.result()
            elif self._producer.done():
                if not self._producer.cancelled():
                    self._producer.result()
                raise StopAsyncIteration
            else:
                await self._has_changed.wait()

    async def _produce(self) -> None:
        async for job in self._jobs:
            await self._backlog_slots.acquire()
            await self._job_slots.acquire()
            task = asyncio.create_task(self._run(job))
            task.add_done_callback(lambda _: self._job_slots.release())
            self._tasks.append(task)
            self._has_changed.set()
            await asyncio.sleep(0)  # the job begins before the next one is taken from its source

    def stop(self) -> None:
        """Start no more jobs. The results of those that run can still be read."""
        self._is_stopped = True
        if self._producer is not None:
            self._producer.cancel()

    def cancel(self) -> None:
        """Cancel the jobs that run as well. Only the results of finished ones can still be read."""
        self.stop()
        for task in self._tasks:
            task.cancel()

    async def aclose(self) -> None:
        self.cancel()
        tasks = [task for task in (self._producer, *self._tasks) if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
