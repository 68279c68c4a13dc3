"""Execution of decoding work outside the event loop.

Work that is known to be fast runs in a thread. Work that may be slow, or that holds the GIL, runs in a
process that is killed at the request's deadline.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Final, TypeVar

from gateway.capacity.admission import WeightedSemaphore
from gateway.capacity.decoding.pool import DecodePool
from gateway.memory import memory_limit_bytes
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_info import current_request_info, measure_phase

T = TypeVar("T")

MAX_DECODE_WORKERS: Final = 4
MIN_WORKER_MEMORY_BYTES: Final = 256 << 20
MAX_WORKER_MEMORY_BYTES: Final = 1 << 30


def worker_memory_bytes(workers: int) -> int:
    # All processes together get a quarter of the memory limit.
    share_bytes = memory_limit_bytes() // 4 // workers
    return min(max(share_bytes, MIN_WORKER_MEMORY_BYTES), MAX_WORKER_MEMORY_BYTES)


def trace_span(name: str) -> AbstractContextManager[object]:
    info = current_request_info.get()
    return nullcontext() if info is None or info.trace is None else info.trace.start_span(name)


class DecodeExecutor:
    """The threads and processes that decode bodies, with a limit on their total number of pixels."""

    def __init__(self, workers: int, max_pixels_in_flight: int, metrics: Metrics) -> None:
        workers = workers or min(MAX_DECODE_WORKERS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(workers, "decode")
        self.max_process_bytes = worker_memory_bytes(workers)
        self._processes = DecodePool(workers, self.max_process_bytes)
        self._pixel_budget = WeightedSemaphore(max_pixels_in_flight)
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()

    async def run_in_thread(self, pixels: int, work: Callable[[], T], phase: str = "decode") -> T:
        """Return the result of fast work that runs in a thread.

        Cancellation does not stop the thread. Its pixels count against the limit until it ends.
        """
        acquired = await self._take_pixels(pixels, phase)
        submitted = self._threads.submit(work)
        waiter: asyncio.Future[T] = self._loop.create_future()
        submitted.add_done_callback(partial(self._wake_loop, waiter, acquired))
        try:
            with trace_span("decode"), measure_phase(phase):
                return await waiter
        except asyncio.CancelledError:
            submitted.cancel()
            raise

    async def run_in_process(
        self, pixels: int, timeout_s: float, function: Callable[..., T], *arguments: Any
    ) -> T:
        """Return the result of a module-level function that runs in a process.

        Cancellation kills the process. Raises `TooLarge` if it exceeds its memory limit.
        """
        acquired = await self._take_pixels(pixels, "decode")
        try:
            with trace_span("decode"), measure_phase("decode"):
                return await self._processes.run(function, arguments, timeout_s)
        finally:
            self._pixel_budget.release(acquired)

    async def _take_pixels(self, pixels: int, phase: str) -> int:
        self._metrics.decodes_waiting.inc()
        try:
            with trace_span("queue"), measure_phase(phase):
                return await self._pixel_budget.acquire(pixels)
        finally:
            self._metrics.decodes_waiting.dec()

    def _wake_loop(self, waiter: asyncio.Future[T], pixels: int, submitted: Future[T]) -> None:
        # `asyncio.wrap_future` would wake the loop again, to release the pixels.
        with suppress(RuntimeError):  # the loop is closed, so that nothing waits for the outcome
            self._loop.call_soon_threadsafe(self._finish, waiter, pixels, submitted)

    def _finish(self, waiter: asyncio.Future[T], pixels: int, submitted: Future[T]) -> None:
        self._pixel_budget.release(pixels)
        if waiter.done():
            return
        if submitted.cancelled():
            waiter.cancel()
        elif (error := submitted.exception()) is not None:
            waiter.set_exception(error)
        else:
            waiter.set_result(submitted.result())

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._processes.close()
