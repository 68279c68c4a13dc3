"""The messages of clients while they arrive: how long each may take, and how many arrive at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

import anyio

from gateway.errors import RequestTooSlow
from gateway.memory import MemoryBudgetExceeded

# A message that takes longer to arrive is large or slow, and may use the memory budget.
FAST_RECEIVE_S: Final = 0.1


class StreamIdle(MemoryBudgetExceeded):
    message = "the stream was idle, and other calls need its share of the memory; open it again"


class ReceiveSlots:
    """Limits how many messages that are large or slow are received at the same time.

    gRPC tells the size of a message only when it is complete, so each of them counts as one of maximum size.
    If all slots are taken, a stream that has waited `idle_s` for its next message is ended for another call.
    """

    def __init__(self, budget_bytes: int, message_bytes: int, idle_s: float) -> None:
        self._free = max(budget_bytes // message_bytes, 1)
        self._idle_s = idle_s
        self._streams: dict[StreamReader, float] = {}  # those with a slot, and since when

    def try_acquire(self) -> bool:
        if not self._free:
            return False
        self._free -= 1
        return True

    def acquire(self) -> None:
        """Raises `MemoryBudgetExceeded`."""
        if not self._free:
            self._end_idle_stream()
        self._free -= 1

    def release(self) -> None:
        self._free += 1

    def add_stream(self, stream: StreamReader) -> None:
        """Remember which stream uses a slot that was acquired."""
        self._streams[stream] = asyncio.get_running_loop().time()

    def release_stream(self, stream: StreamReader) -> None:
        if self._streams.pop(stream, None) is not None:
            self._free += 1

    def _end_idle_stream(self) -> None:
        latest = asyncio.get_running_loop().time() - self._idle_s
        for stream, since in self._streams.items():  # in the order in which they began to wait
            if since > latest:
                break
            if stream.is_idle:
                self.release_stream(stream)
                stream.end(StreamIdle())
                return
        raise MemoryBudgetExceeded


class SlowTimer:
    """Calls a function if a message takes long to arrive.

    It lets one pass of the event loop go by first: if the loop was busy, the message may have arrived, but
    its reader did not run yet.
    """

    def __init__(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._handle: asyncio.Handle = asyncio.get_running_loop().call_later(delay_s, self._yield)

    def _yield(self) -> None:
        self._handle = asyncio.get_running_loop().call_soon(self._callback)

    def cancel(self) -> None:
        self._handle.cancel()


class MessageReader:
    """Receives one message. A cancel scope, and no task of its own, ends what takes too long."""

    def __init__(self, context: Any, slots: ReceiveSlots, timeout_s: float) -> None:
        self._context = context
        self._slots = slots
        self._timeout_s = timeout_s
        self._has_slot = False
        self._failure: Exception = RequestTooSlow()
        self._scope = anyio.CancelScope()

    async def read(self) -> Any:
        """Return the message or EOF. Raises `RequestTooSlow`, or `MemoryBudgetExceeded` without a slot."""
        timer = SlowTimer(min(FAST_RECEIVE_S, self._timeout_s), self._take_slot)
        try:
            with self._scope:
                return await self._context.read()
        finally:
            timer.cancel()
            if self._has_slot:
                self._slots.release()
        raise self._failure

    def _take_slot(self) -> None:
        try:
            self._slots.acquire()
        except MemoryBudgetExceeded as exc:
            self._failure = exc
            self._scope.cancel()
            return
        self._has_slot = True
        remaining_s = max(self._timeout_s - FAST_RECEIVE_S, 0)
        self._scope.deadline = asyncio.get_running_loop().time() + remaining_s


@dataclass(eq=False, repr=False)
class StreamReader:
    """Receives the messages of one stream.

    A stream may wait for its next message as long as nobody else needs its slot. While its requests are in
    progress, it reads ahead only if a slot is free, because it could not be ended then.
    """

    _context: Any
    _slots: ReceiveSlots
    _tasks: Collection[asyncio.Task[None]]  # the requests in progress
    end: Callable[[BaseException], None]

    @property
    def is_idle(self) -> bool:
        return not self._tasks

    async def read(self) -> Any:
        """Return the next message or EOF."""
        while self._tasks:
            if self._slots.try_acquire():
                self._slots.add_stream(self)
                return await self._read()
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        timer = SlowTimer(FAST_RECEIVE_S, self._take_slot)
        try:
            return await self._read()
        finally:
            timer.cancel()

    async def _read(self) -> Any:
        try:
            return await self._context.read()
        finally:
            self._slots.release_stream(self)

    def _take_slot(self) -> None:
        try:
            self._slots.acquire()
        except MemoryBudgetExceeded as exc:
            self.end(exc)
        else:
            self._slots.add_stream(self)
