"""Background tasks, and their cancellation."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from math import inf
from typing import Any, Final, NoReturn, TypeVar, cast

import anyio

log = logging.getLogger(__name__)

T = TypeVar("T")
CANCEL_RETRY_S: Final = 0.2
FAILURE_PAUSE_S: Final = 1.0
# Of each loop since the metrics were written last, by its label in `gateway_background_failures_total`.
background_failures: Counter[str] = Counter()


class TaskSet(set[asyncio.Task[Any]]):
    """Background tasks, which are referenced until they end: the event loop holds only weak references."""

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task


class ChangeSignal:
    """A count of changes, for which any number of tasks can wait."""

    def __init__(self) -> None:
        self.count = 0
        self._next_change = asyncio.Event()

    def notify(self) -> None:
        self.count += 1
        self._next_change.set()
        self._next_change = asyncio.Event()

    async def wait(self, seen: int, timeout_s: float = inf) -> int:
        """Wait until the count is not the one that the caller has seen, or for the time; return it."""
        with anyio.move_on_after(timeout_s):
            while self.count == seen:
                await self._next_change.wait()
        return self.count


def follow(task: asyncio.Task[T]) -> asyncio.Future[T]:
    """Return a future of a task's result. To cancel it, or to let it fail, leaves the task alone."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def finish(task: asyncio.Task[T]) -> None:
        failure = None if task.cancelled() else task.exception()
        if future.done():
            return
        if task.cancelled():
            future.cancel()
        elif failure is not None:
            future.set_exception(failure)
        else:
            future.set_result(task.result())

    task.add_done_callback(finish)
    return future


class TaskTimeout:
    """Cancels the work in its `with` block after a time, and raises `TimeoutError` then.

    The same as `asyncio.timeout`, which Python 3.10 lacks. A cancel scope of anyio costs ten times as much,
    a quarter of a probe.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._has_expired = False

    def __enter__(self) -> None:
        self._task = cast("asyncio.Task[Any]", asyncio.current_task(self._loop))
        self._expiry = self._loop.call_later(self._timeout_s, self._expire)
        if sys.version_info >= (3, 11):
            self._earlier_cancellations = self._task.cancelling()

    def _expire(self) -> None:
        self._has_expired = True
        self._task.cancel()

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        self._expiry.cancel()
        if not self._has_expired:
            return
        if sys.version_info >= (3, 11) and self._task.uncancel() > self._earlier_cancellations:
            return  # the task is cancelled for another reason as well
        if exc_type is asyncio.CancelledError:
            raise TimeoutError


async def repeat(loop: str, step: Callable[[], Awaitable[object]]) -> NoReturn:
    """Repeat a step of a background loop until cancelled, whatever the step raises."""
    while True:
        await run_step(loop, step)


async def run_step(loop: str, step: Callable[[], Awaitable[object]]) -> None:
    """Run a step of a background loop. An unexpected error is logged and counted, and followed by a pause."""
    # A series that exists from the start makes its first event visible to increase().
    background_failures[loop] += 0
    try:
        await step()
    except Exception:
        background_failures[loop] += 1
        log.exception("the background loop %s failed and goes on", loop)
        await asyncio.sleep(FAILURE_PAUSE_S)


async def run_together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of concurrent work, in its order. When one fails, the others are cancelled."""
    tasks = list(map(asyncio.create_task, work))
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_tasks([task for task in tasks if not task.done()])


async def cancel_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they end: before Python 3.12, `asyncio.wait_for` can lose a cancellation."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_RETRY_S)
