"""Many inferences: batches of inputs, of which each fails alone."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeAlias, TypeVar

from gateway.client.bodies import Body, encode_file, is_array, is_file
from gateway.client.calls import InferCall, split_document
from gateway.client.errors import INVALID_RESPONSE, GatewayError
from gateway.client.results import InferResult
from gateway.media_types import OCTET_STREAM

T = TypeVar("T")
R = TypeVar("R")

# Results that may wait for an earlier one, per running task.
BACKLOG_FACTOR: Final = 16


class OrderedTasks(Generic[T, R]):
    """An asynchronous iterator that runs a task for each item, and yields the results in order.

    `concurrency` tasks run at a time. A slow reader holds the source of the items back. The first error of a
    task or of the source is raised.
    """

    def __init__(
        self, run: Callable[[T], Coroutine[Any, Any, R]], items: AsyncIterator[T], concurrency: int
    ) -> None:
        self._run = run
        self._items = items
        self._task_slots = asyncio.Semaphore(concurrency)
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
        async for item in self._items:
            await self._backlog_slots.acquire()
            await self._task_slots.acquire()
            task = asyncio.create_task(self._run(item))
            task.add_done_callback(lambda _: self._task_slots.release())
            self._tasks.append(task)
            self._has_changed.set()
            await asyncio.sleep(0)  # the task begins before the next item is taken from the source

    def stop(self) -> None:
        """Start no more tasks. The results of those that run can still be read."""
        self._is_stopped = True
        if self._producer is not None:
            self._producer.cancel()

    def cancel(self) -> None:
        """Cancel the tasks that run as well. Only the results of finished ones can still be read."""
        self.stop()
        for task in self._tasks:
            task.cancel()

    async def aclose(self) -> None:
        self.cancel()
        tasks = [task for task in (self._producer, *self._tasks) if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()


@dataclass(frozen=True)
class InferMany:
    """Inferences of many values. `call` has what they share."""

    call: InferCall
    values: Iterable[Any] | AsyncIterable[Any]
    batch: int
    concurrency: int
    timeout_s: float | None

    def __post_init__(self) -> None:
        if self.batch < 1 or self.concurrency < 1:
            raise ValueError("batch and concurrency must be at least 1")


InferOutcome: TypeAlias = "InferResult | GatewayError"
Infer: TypeAlias = Callable[[InferCall], Awaitable[InferResult]]

END: Final = object()
# A single input of a batch may have caused these: every input is then sent alone.
BATCH_SPLIT_STATUSES: Final = (400, 413, 415, 422, 500)


async def group_values(
    values: Iterable[Any] | AsyncIterable[Any], size: int
) -> AsyncIterator[list[Any]]:
    group: list[Any] = []
    async for value in iterate(values):
        group.append(value)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


async def iterate(values: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(values, AsyncIterable):
        async for value in values:
            yield value
        return
    if isinstance(values, (list, tuple)):
        for value in values:
            yield value
        return
    # Another iterable may block, as one that reads a queue does.
    iterator = iter(values)
    while (value := await asyncio.to_thread(next, iterator, END)) is not END:
        yield value


async def infer_batch(infer: Infer, call: InferCall, values: Sequence[Any]) -> list[InferOutcome]:
    """Send the values in one request, or one for each; return a result or an error for each, in order."""
    items = await asyncio.to_thread(read_items, values)
    outcomes: dict[int, InferOutcome] = {
        number: item for number, item in enumerate(items) if isinstance(item, GatewayError)
    }
    batchable = [number for number, item in enumerate(items) if is_batchable(item)]
    batch = [items[number] for number in batchable]
    if can_combine(batch):
        parts = await infer_items(infer, call.with_value(batch), len(batch))
        outcomes |= zip(batchable, parts, strict=False)
    for number, item in enumerate(items):
        if number not in outcomes:
            outcomes[number] = await infer_item(infer, call.with_value(item))
    return [outcomes[number] for number in range(len(items))]


def read_items(values: Sequence[Any]) -> list[Any]:
    """Return the values, with the contents of files, or the error that reading one is."""

    def read(value: Any) -> Any:
        try:
            return encode_file(value) if is_file(value) else value
        except GatewayError as exc:
            return exc

    return [read(value) for value in values]


def is_batchable(item: Any) -> bool:
    if isinstance(item, Body):
        return item.content_type == OCTET_STREAM or item.content_type.startswith("image/")
    return isinstance(item, str) or is_array(item)


def can_combine(items: Sequence[Any]) -> bool:
    shapes = {item.shape for item in items if is_array(item)}
    kinds = {Body if isinstance(item, Body) else type(item) for item in items}
    return len(items) > 1 and len(kinds) == 1 and len(shapes) <= 1


async def infer_item(infer: Infer, call: InferCall) -> InferOutcome:
    try:
        return await infer(call)
    except GatewayError as exc:
        return exc


async def infer_items(infer: Infer, call: InferCall, count: int) -> Sequence[InferOutcome]:
    """Return no outcomes if each input must be sent alone, to find the one that failed."""
    outcome = await infer_item(infer, call)
    if isinstance(outcome, GatewayError):
        return [] if outcome.status in BATCH_SPLIT_STATUSES else [outcome] * count
    parts = split_document(outcome, count)
    if parts is None:
        message = f"an output of {call.model} does not have {count} values, one for each input"
        return [GatewayError(message, INVALID_RESPONSE)] * count
    return parts


class InferOutcomes(AsyncIterator[InferOutcome]):
    """The outcomes of many inferences, in the order of their values, from batches that run concurrently."""

    def __init__(self, batches: OrderedTasks[list[Any], list[InferOutcome]]) -> None:
        self._batches = batches
        self._outcomes: deque[InferOutcome] = deque()

    async def __anext__(self) -> InferOutcome:
        while not self._outcomes:
            self._outcomes += await anext(self._batches)
        return self._outcomes.popleft()

    async def aclose(self) -> None:
        await self._batches.aclose()
