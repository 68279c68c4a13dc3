"""Background tasks, and their cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any, Final, TypeVar

from gateway import audit

T = TypeVar("T")
CANCEL_RETRY_S: Final = 0.2


class TaskSet(set[asyncio.Task[Any]]):
    """Background tasks, which are referenced until they end: the event loop holds only weak references."""

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task

    async def run_audited(self, action: str, model: str, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of work that goes on, and is logged, if the client disconnects."""
        task = self.start(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(partial(audit.log_result, action, model))
            raise


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
