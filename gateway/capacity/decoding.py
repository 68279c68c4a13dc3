"""Execution of decoding work outside the event loop.

Work that is known to be fast runs in a thread. Work that may be slow, or that holds the GIL, runs in a
process that is killed at the request's deadline.
"""

from __future__ import annotations

import asyncio
import io
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, Final, TypeVar, cast

from gateway.capacity.admission import WeightedSemaphore
from gateway.capacity.decoding_worker import (
    FRAME_COUNT,
    FRAME_SIZE,
    MAX_READ_BYTES,
    WorkerCallError,
    WorkerOutOfMemory,
    pack_message,
    unpack_frame_sizes,
    unpack_message,
)
from gateway.errors import GatewayError, TooLarge
from gateway.memory import memory_limit_bytes
from gateway.tasks import TaskSet
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_info import current_request_info, measure_phase

T = TypeVar("T")

MAX_FRAMES: Final = 4096
MAX_INLINE_BYTES: Final = 64 << 10  # larger results are unpacked in a thread
# A process is replaced after this many calls, because the memory of a process never shrinks to what it was.
MAX_CALLS: Final = 1000
MAX_DECODE_WORKERS: Final = 4
MIN_WORKER_MEMORY_BYTES: Final = 256 << 20
MAX_WORKER_MEMORY_BYTES: Final = 1 << 30


class WorkerLost(Exception):
    """The worker exited or sent an invalid message."""


class DecodeProcess:
    """A worker process and its socket."""

    def __init__(self, process: Process, connection: socket.socket) -> None:
        self._process = process
        self._connection = connection
        self.call_count = 0

    @classmethod
    async def start(cls, max_memory_bytes: int) -> DecodeProcess:
        local, remote = socket.socketpair()
        local.setblocking(False)
        with ExitStack() as connection, remote:
            # The process exits if this is cancelled.
            connection.callback(local.close)
            process = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-c",
                    "from gateway.capacity.decoding_worker import main; main()",
                ),
                *(str(remote.fileno()), str(max_memory_bytes)),
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=DEVNULL,
                pass_fds=(remote.fileno(),),
                start_new_session=True,  # Ctrl-C must not interrupt decoding while the gateway drains
            )
            connection.pop_all()
        return cls(process, local)

    async def call(
        self, function: Callable[..., T], arguments: tuple[Any, ...], timeout_s: float
    ) -> T:
        """Return the function's result or raise its exception. Raises `WorkerLost` if the worker fails."""
        loop = asyncio.get_running_loop()
        self.call_count += 1
        try:
            # A list of 100,000 numbers takes 10 ms.
            for frame in await asyncio.to_thread(pack_message, (function, arguments, timeout_s)):
                await loop.sock_sendall(self._connection, frame)
            (count,) = FRAME_COUNT.unpack(await self._receive_exactly(FRAME_COUNT.size))
            if count > MAX_FRAMES:
                raise WorkerLost
            sizes = unpack_frame_sizes(await self._receive_exactly(count * FRAME_SIZE.size))
            frames = [await self._receive_exactly(size) for size in sizes]
            unpack = partial(unpack_message, frames)
            is_large = sum(sizes) > MAX_INLINE_BYTES
            succeeded, result = await asyncio.to_thread(unpack) if is_large else unpack()
        except OSError:
            raise WorkerLost from None
        if succeeded:
            return cast(T, result)
        raise result

    async def _receive_exactly(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        file = io.BytesIO()
        while (missing := size - file.tell()) > 0:
            data = await loop.sock_recv(self._connection, min(missing, MAX_READ_BYTES))
            if not data:
                raise WorkerLost
            file.write(data)
        return file.getvalue()

    def is_alive(self) -> bool:
        # An idle worker sends nothing, and its socket is closed when it exits.
        try:
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    async def kill(self) -> None:
        self._connection.close()
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class DecodePool:
    """A pool of at most `size` workers, started on demand, each with its own memory limit."""

    def __init__(self, size: int, max_memory_bytes: int) -> None:
        self._max_memory_bytes = max_memory_bytes
        self._slots = asyncio.Semaphore(size)
        self._idle: list[DecodeProcess] = []
        self._busy: set[DecodeProcess] = set()
        self._kills = TaskSet()

    async def run(
        self, function: Callable[..., T], arguments: tuple[Any, ...], timeout_s: float
    ) -> T:
        """Return the function's result or raise its exception. Cancellation kills the worker.

        `function` must be module-level, and its arguments and result picklable. Raises `TooLarge` if the
        call exceeds the worker's memory limit.
        """
        async with self._slots:
            worker = await self._take_worker()
            try:
                result = await worker.call(function, arguments, timeout_s)
            except (WorkerLost, WorkerOutOfMemory):
                self._kills.start(worker.kill())
                raise TooLarge(
                    "decoding the body requires more memory than one request may use; send smaller requests"
                ) from None
            except (GatewayError, WorkerCallError):
                self._release(worker)
                raise
            except BaseException:
                self._kills.start(worker.kill())
                raise
            finally:
                self._busy.discard(worker)
            self._release(worker)
            return result

    def _release(self, worker: DecodeProcess) -> None:
        if worker.call_count < MAX_CALLS:
            self._idle.append(worker)
        else:
            self._kills.start(worker.kill())

    async def _take_worker(self) -> DecodeProcess:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive():
                break
            self._kills.start(worker.kill())
        else:
            worker = await DecodeProcess.start(self._max_memory_bytes)
        self._busy.add(worker)
        return worker

    async def close(self) -> None:
        for worker in [*self._idle, *self._busy]:
            self._kills.start(worker.kill())
        self._idle.clear()
        await asyncio.gather(*self._kills)


def worker_memory_bytes(workers: int) -> int:
    # All processes together get a quarter of the memory limit.
    share_bytes = memory_limit_bytes() // 4 // workers
    return min(max(share_bytes, MIN_WORKER_MEMORY_BYTES), MAX_WORKER_MEMORY_BYTES)


def trace_span(name: str) -> AbstractContextManager[object]:
    info = current_request_info.get()
    return nullcontext() if info is None or info.trace is None else info.trace.start_span(name)


class DecodeExecutor:
    """The threads and processes that decode bodies, with a limit on their total number of pixels."""

    def __init__(self, max_pixels_in_flight: int, metrics: Metrics, workers: int = 0) -> None:
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
