"""Execution of decoding work outside the event loop.

Work that is known to be fast runs in a thread. Work that may be slow, or that holds the GIL, runs in a
process that is killed at the request's deadline.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any, Final, TypeVar

from anyio import BrokenWorkerProcess, CapacityLimiter, to_process

from gateway.capacity.decoding_worker import (
    TOO_MUCH_MEMORY,
    DecodingFault,
    import_decoders,
    run_call,
)
from gateway.errors import GatewayError, TooLarge
from gateway.memory import memory_limit_bytes
from gateway.tasks import TaskSet
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_info import current_request_info, measure_phase

T = TypeVar("T")

MAX_DECODE_WORKERS: Final = 4
MIN_WORKER_MEMORY_BYTES: Final = 256 << 20
MAX_WORKER_MEMORY_BYTES: Final = 1 << 30


class DecodeExecutor:
    """The threads and processes that decode bodies."""

    def __init__(self, metrics: Metrics, workers: int = 0) -> None:
        self._workers = workers or min(MAX_DECODE_WORKERS, os.cpu_count() or 1)
        self.max_process_bytes = worker_memory_bytes(self._workers)
        self._threads = ThreadPoolExecutor(self._workers, "decode")
        self._thread_slots = asyncio.Semaphore(self._workers)
        self._process_slots = asyncio.Semaphore(self._workers)
        # anyio forgets a process whose start is cancelled. Therefore processes are started by tasks of their
        # own, and a call waits until one is idle.
        self._idle_processes = asyncio.Semaphore(0)
        self._process_count = 0
        self._starts = TaskSet()
        # The slots limit how many there are.
        self._limiter = CapacityLimiter(math.inf)
        self._metrics = metrics

    async def start_process(self) -> None:
        """Start a process, which then waits for calls."""
        self._process_count += 1
        try:
            await self._call(import_decoders)
        except BaseException:
            self._process_count -= 1
            raise
        self._idle_processes.release()

    async def run_in_thread(self, work: Callable[[], T], phase: str = "decode") -> T:
        """Return the result of fast work that runs in a thread. Cancellation does not stop the thread."""
        async with self._take(self._thread_slots, phase):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def run_in_process(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a module-level function that runs in a process.

        Cancellation kills the process. Raises `TooLarge` if it exceeds its memory limit, and the function's
        `GatewayError`; any other error becomes a `DecodingFault`.
        """
        async with self._take(self._process_slots, "decode"):
            if self._idle_processes.locked() and self._process_count < self._workers:
                self._starts.start(self.start_process())
            await self._idle_processes.acquire()
            try:
                result = await self._call(function, *arguments)
            except (GatewayError, DecodingFault):
                self._idle_processes.release()
                raise
            except BrokenWorkerProcess:
                self._replace_process()
                raise TooLarge(TOO_MUCH_MEMORY) from None
            except BaseException:
                self._replace_process()
                raise
            self._idle_processes.release()
            return result

    def _call(self, function: Callable[..., T], *arguments: Any) -> Awaitable[T]:
        limits = self.max_process_bytes, function
        return to_process.run_sync(
            run_call, *limits, *arguments, cancellable=True, limiter=self._limiter
        )

    def _replace_process(self) -> None:
        self._process_count -= 1
        self._starts.start(self.start_process())

    @asynccontextmanager
    async def _take(self, slots: asyncio.Semaphore, phase: str) -> AsyncIterator[None]:
        self._metrics.decodes_waiting.inc()
        try:
            with trace_span("queue"), measure_phase(phase):
                await slots.acquire()
        finally:
            self._metrics.decodes_waiting.dec()
        try:
            with trace_span("decode"), measure_phase(phase):
                yield
        finally:
            slots.release()

    async def close(self) -> None:
        """Cancel what has not begun. anyio ends the processes with the event loop."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*self._starts, return_exceptions=True)


def worker_memory_bytes(workers: int) -> int:
    # All processes together get a quarter of the memory limit.
    share_bytes = memory_limit_bytes() // 4 // workers
    return min(max(share_bytes, MIN_WORKER_MEMORY_BYTES), MAX_WORKER_MEMORY_BYTES)


def trace_span(name: str) -> AbstractContextManager[object]:
    info = current_request_info.get()
    return nullcontext() if info is None or info.trace is None else info.trace.start_span(name)
