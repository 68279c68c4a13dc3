"""How much at a time: decoding is bounded in threads and in pixels, and kept off the event loop."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


class Budget:
    """A semaphore of weights, in turn: who asks for more than there is gets all of it, alone."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._free = total
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, weight: int) -> AsyncIterator[None]:
        weight = min(weight, self._total)
        if self._queue or weight > self._free:
            turn = asyncio.get_running_loop().create_future()
            self._queue.append((weight, turn))
            try:
                await turn
            except BaseException:
                if turn.done() and not turn.cancelled():
                    self._give(weight)
                raise
        else:
            self._free -= weight
        try:
            yield
        finally:
            self._give(weight)

    def _give(self, weight: int) -> None:
        self._free += weight
        while self._queue and (self._queue[0][1].cancelled() or self._queue[0][0] <= self._free):
            weight, turn = self._queue.popleft()
            if not turn.cancelled():
                self._free -= weight
                turn.set_result(None)


class Decoders:
    """The threads that turn payloads into tensors, and the pixels they may hold."""

    def __init__(self, threads: int, max_pixels_in_flight: int) -> None:
        self._threads = ThreadPoolExecutor(threads or min(4, os.cpu_count() or 1), "decode")
        self._pixels = Budget(max_pixels_in_flight)

    async def run(self, pixels: int, work: Callable[[], T]) -> T:
        async with self._pixels.take(pixels):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
