"""How much at a time: decoding is bounded in threads and in pixels, and kept off the event loop."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TypeVar

from gateway.context import current
from gateway.metrics import Metrics

T = TypeVar("T")


class Budget:
    """A semaphore of weights, in turn: who asks for more than there is gets all of it, alone."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._free = total
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, weight: int) -> int:
        """Wait for one's turn; give back what this returns."""
        weight = min(weight, self._total)
        if not self._queue and weight <= self._free:
            self._free -= weight
            return weight
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((weight, turn))
        try:
            await turn
        except BaseException:
            # Whoever leaves the queue may have had the turn, or stood before one who can go.
            self.give(weight if turn.done() and not turn.cancelled() else 0)
            raise
        return weight

    def give(self, weight: int) -> None:
        self._free += weight
        while self._queue and (self._queue[0][1].cancelled() or self._queue[0][0] <= self._free):
            weight, turn = self._queue.popleft()
            if not turn.cancelled():
                self._free -= weight
                turn.set_result(None)


def step(name: str) -> AbstractContextManager[object]:
    """A span of the request that is being served, if it is traced."""
    notes = current.get()
    return nullcontext() if notes is None or notes.trace is None else notes.trace.step(name)


class Decoders:
    """The threads that turn payloads into tensors, and the pixels they may hold."""

    def __init__(self, threads: int, max_pixels_in_flight: int, metrics: Metrics) -> None:
        self._threads = ThreadPoolExecutor(threads or min(4, os.cpu_count() or 1), "decode")
        self._pixels = Budget(max_pixels_in_flight)
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()

    async def run(self, pixels: int, work: Callable[[], T]) -> T:
        """The result of `work`. Who leaves does not stop the thread: its pixels count until it ends."""
        self._metrics.decodes_waiting.inc()
        try:
            with step("queue"):
                taken = await self._pixels.take(pixels)
            future = self._threads.submit(self._timed, work)
            future.add_done_callback(lambda _: self._ended(taken))
        finally:
            self._metrics.decodes_waiting.dec()
        with step("decode"):
            return await asyncio.wrap_future(future)

    def _timed(self, work: Callable[[], T]) -> T:
        with self._metrics.decode.time():
            return work()

    def _ended(self, pixels: int) -> None:
        with suppress(RuntimeError):  # the loop is gone: nobody waits any more
            self._loop.call_soon_threadsafe(self._pixels.give, pixels)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
