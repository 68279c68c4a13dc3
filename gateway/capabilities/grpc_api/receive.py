"""The messages of clients while they arrive: how long each may take, and how many arrive at a time.

gRPC tells the size of a message only when it is complete, and nothing before. So a message that takes long to
arrive counts as one of maximum size; and so does a stream, whose next message can arrive at any time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from gateway.errors import RequestTooSlow
from gateway.memory import MemoryBudgetExceeded
from gateway.tasks import TaskSet
from gateway.telemetry.metrics import Metrics

T = TypeVar("T")
# A message that takes longer to arrive is large or slow.
FAST_RECEIVE_S: Final = 0.1
# So many messages of one caller may arrive at a time until then; the others wait.
MAX_FAST_MESSAGES: Final = 16


class TooManyStreams(MemoryBudgetExceeded):
    message = (
        "too many gRPC streams are open; try again shortly, or lower GATEWAY_MAX_BODY_BYTES: "
        "GATEWAY_MAX_BYTES_IN_FLIGHT has room for a message of this size of each stream"
    )


class TooManyLargeMessages(MemoryBudgetExceeded):
    message = (
        "too many messages are arriving that are large or slow; try again shortly, or lower "
        "GATEWAY_MAX_BODY_BYTES: GATEWAY_MAX_BYTES_IN_FLIGHT has room for so many of this size"
    )


class MessagePlaces:
    """Room in the memory budget for a number of messages of maximum size."""

    def __init__(self, count: int, refusal: type[MemoryBudgetExceeded], metrics: Metrics) -> None:
        self._free = count
        self._refusal = refusal
        self._metrics = metrics

    @contextmanager
    def take(self) -> Iterator[None]:
        """Take a place until the end of the block. Raises the refusal if none is free."""
        if not self._free:
            self._metrics.shed.labels("memory").inc()
            raise self._refusal
        self._free -= 1
        try:
            yield
        finally:
            self._free += 1


# Reads and writes of messages. grpc.aio frees a message where the coroutine that reads or writes it ends:
# cancelled, it would leak the whole message (https://github.com/grpc/grpc/issues/43360). So nobody cancels
# one: whoever waits for it leaves it, and it ends by itself or with its call.
_operations: Final = TaskSet()


def start_operation(operation: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    task = _operations.start(operation)
    task.add_done_callback(ignore_failure)  # the call may have ended
    return task


def ignore_failure(task: asyncio.Task[Any]) -> None:
    # Otherwise asyncio reports that nobody has asked for the exception.
    if not task.cancelled():
        task.exception()


class MessageReceiver:
    """Receives the messages of calls. Those that take long to arrive need a place."""

    def __init__(self, places: MessagePlaces) -> None:
        self._places = places
        self._fast: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def read(self, context: Any, caller: str, timeout_s: float) -> Any:
        """Return the message of a call, or EOF. Raises `RequestTooSlow` or `TooManyLargeMessages`."""
        fast = self._fast.setdefault(caller, asyncio.Semaphore(MAX_FAST_MESSAGES))
        async with fast:
            reading = start_operation(context.read())
            # Twice: after the first time, an event loop that was busy has seen what arrived.
            for _ in range(2):
                await asyncio.wait([reading], timeout=min(FAST_RECEIVE_S, timeout_s) / 2)
        if not reading.done():
            with self._places.take():
                await asyncio.wait([reading], timeout=max(timeout_s - FAST_RECEIVE_S, 0))
        if not reading.done():
            raise RequestTooSlow
        return reading.result()
