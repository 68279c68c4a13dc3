"""Inferences of many values, in batches, of which each value fails alone; and what they need of asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Sequence,
)
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from gateway.client.bodies import Body, encode_file, is_array, is_file
from gateway.client.calls import InferCall
from gateway.client.errors import INVALID_RESPONSE, GatewayError
from gateway.client.results import InferResult
from gateway.media_types import OCTET_STREAM, UTF8_TEXT

T = TypeVar("T")
R = TypeVar("R")
InferOutcome: TypeAlias = "InferResult | GatewayError"
Infer: TypeAlias = Callable[[InferCall], Awaitable[InferResult]]

# A single input of a batch may have caused these: every input is then sent alone.
BATCH_SPLIT_STATUSES: Final = (400, 413, 415, 422, 500)
# Results that may wait for an earlier one, per running task.
BACKLOG_FACTOR: Final = 16
END: Final = object()


@dataclass(frozen=True)
class InferMany:
    """Inferences of many values. `call` has what they share."""

    call: InferCall
    values: Iterable[Any] | AsyncIterable[Any]
    batch: int
    concurrency: int
    stream: bool

    def __post_init__(self) -> None:
        if self.batch < 1 or self.concurrency < 1:
            raise ValueError("batch and concurrency must be at least 1")
        if self.batch > 1 and self.stream:
            raise ValueError("a stream has the responses of one value: batch must be 1")


async def infer_many(infer: Infer, many: InferMany) -> AsyncGenerator[InferOutcome, None]:
    infer_group = partial(infer_batch, infer, many.call)
    groups = group_values(many.values, many.batch)
    async with aclosing(run_ordered(infer_group, groups, many.concurrency)) as batches:
        async for outcomes in batches:
            for outcome in outcomes:
                yield outcome


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


async def infer_batch(infer: Infer, call: InferCall, values: Sequence[Any]) -> list[InferOutcome]:
    """Send the values in one request, or one for each; return a result or an error for each, in order."""
    items = await call_blocking(read_items, values, is_slow=any(map(is_file, values)))
    readable = [item for item in items if not isinstance(item, GatewayError)]
    outcomes = iter(await infer_items(infer, call, readable))
    return [item if isinstance(item, GatewayError) else next(outcomes) for item in items]


def read_items(values: Iterable[Any]) -> list[Any]:
    return list(map(read_item, values))


def read_item(value: Any) -> Any:
    """Return a value; of a file its text or content, or the error that reading it is."""
    try:
        item = encode_file(value) if is_file(value) else value
    except GatewayError as exc:
        return exc
    if isinstance(item, Body) and item.content_type == UTF8_TEXT:
        with suppress(UnicodeDecodeError):  # the gateway reports the error
            return item.content.decode()
    return item


async def infer_items(
    infer: Infer, call: InferCall, items: Sequence[Any]
) -> Sequence[InferOutcome]:
    if can_combine(items):
        outcome = await infer_item(infer, call, items)
        if isinstance(outcome, InferResult):
            return split_result(outcome, len(items))
        if outcome.status not in BATCH_SPLIT_STATUSES:
            return [outcome] * len(items)
    return [await infer_item(infer, call, item) for item in items]


async def collect(
    stream: Callable[[InferCall], AsyncGenerator[InferResult, None]], call: InferCall
) -> InferResult:
    """Return each output's values in all responses of an inference, in order."""
    outputs: dict[str, list[Any]] = {}
    async for result in stream(call):
        for name, value in result.items():
            outputs.setdefault(name, []).append(value)
    return InferResult(outputs, call.model)


async def infer_item(infer: Infer, call: InferCall, value: Any) -> InferOutcome:
    try:
        return await infer(replace(call, value=value))
    except GatewayError as exc:
        return exc


def can_combine(items: Sequence[Any]) -> bool:
    kinds = set(map(find_batch_kind, items))
    return len(items) > 1 and len(kinds) == 1 and None not in kinds


def find_batch_kind(item: Any) -> object:
    """Return what the items of a batch have in common; None for an item that cannot be in one."""
    if isinstance(item, Body):
        is_content = item.content_type == OCTET_STREAM or item.content_type.startswith("image/")
        return Body if is_content else None
    if is_array(item):
        return item.shape
    return str if isinstance(item, str) else None


def split_result(result: InferResult, count: int) -> Sequence[InferOutcome]:
    if any(count_items(value) != count for value in result.values()):
        message = f"an output of {result.model} does not have {count} values, one for each input"
        return [GatewayError(message, INVALID_RESPONSE)] * count
    return [
        replace(result, outputs={name: value[number] for name, value in result.items()})
        for number in range(count)
    ]


def count_items(value: Any) -> int:
    is_list = isinstance(value, list) or (is_array(value) and value.ndim > 0)
    return len(value) if is_list else 0


async def call_blocking(function: Callable[..., R], *arguments: Any, is_slow: bool = True) -> R:
    """Call a function that may block; in a thread, if it is slow."""
    return await asyncio.to_thread(function, *arguments) if is_slow else function(*arguments)


async def iterate(values: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    """Yield the values of an iterable, which may block, as one that reads a queue does."""
    if isinstance(values, AsyncIterable):
        async for value in values:
            yield value
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield value
    else:
        iterator = iter(values)
        while (item := await call_in_daemon_thread(next, iterator, END)) is not END:
            yield item


async def call_in_daemon_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Do as `asyncio.to_thread`, but the end of the loop and of the process does not wait for the call."""
    outcome: Future[Any] = Future()

    def run() -> None:
        outcome.set_running_or_notify_cancel()
        try:
            outcome.set_result(function(*arguments))
        except Exception as exc:  # noqa: BLE001 - the caller gets it
            outcome.set_exception(exc)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(outcome)


async def run_ordered(
    run: Callable[[T], Coroutine[Any, Any, R]], items: AsyncIterable[T], concurrency: int
) -> AsyncGenerator[R, None]:
    """Run a task for each item, `concurrency` at a time, and yield the results in order.

    A slow reader holds the source of the items back. The first error of a task or of the source is raised.
    Closing the generator cancels the tasks that run.
    """
    task_slots = asyncio.Semaphore(concurrency)
    backlog_slots = asyncio.Semaphore(concurrency * (1 + BACKLOG_FACTOR))
    tasks: asyncio.Queue[asyncio.Task[R] | None] = asyncio.Queue()

    async def start_tasks() -> None:
        async for item in items:
            await backlog_slots.acquire()
            await task_slots.acquire()
            task = asyncio.create_task(run(item))
            task.add_done_callback(lambda _: task_slots.release())
            tasks.put_nowait(task)
            await asyncio.sleep(0)  # the task begins before the next item is taken from the source

    producer = asyncio.create_task(start_tasks())
    producer.add_done_callback(lambda _: tasks.put_nowait(None))
    try:
        while (task := await tasks.get()) is not None:
            yield await task
            backlog_slots.release()
        await producer
    finally:
        queued = [tasks.get_nowait() for _ in range(tasks.qsize())]
        running = [producer, *filter(None, queued)]
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
