"""A pool of decoding processes, which are killed at the request's deadline."""

from __future__ import annotations

import asyncio
import io
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Final, TypeVar, cast

from gateway.capacity.decoding.messages import (
    FRAME_COUNT,
    FRAME_SIZE,
    pack_message,
    unpack_frame_sizes,
    unpack_message,
)
from gateway.capacity.decoding.worker import MAX_READ_BYTES, WorkerCallError, WorkerOutOfMemory
from gateway.errors import GatewayError, TooLarge
from gateway.tasks import TaskSet

T = TypeVar("T")

MAX_FRAMES: Final = 4096
MAX_INLINE_BYTES: Final = 64 << 10  # larger results are unpacked in a thread
# A process is replaced after this many calls, because the memory of a process never shrinks to what it was.
MAX_CALLS: Final = 1000


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
                    "from gateway.capacity.decoding.worker import main; main()",
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
