"""Processes that decode what could hold the GIL or a thread for long, killed at the request's deadline."""

from __future__ import annotations

import asyncio
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from gateway.decoding.worker import HEAD, SIZE, Failed, OutOfMemory, pack, sizes_of, unpack
from gateway.errors import GatewayError, TooLarge

T = TypeVar("T")

MAX_FRAMES: Final = 4096


class WorkerLost(Exception):
    """The worker ended, or said what no worker says."""


class DecodeProcess:
    """One worker and the socket to it."""

    def __init__(self, process: Process, connection: socket.socket) -> None:
        self._process = process
        self._connection = connection

    @classmethod
    async def start(cls, max_memory_bytes: int) -> DecodeProcess:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", "from gateway.decoding.worker import main; main()"),
                *(str(theirs.fileno()), str(max_memory_bytes)),
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the gateway, which finishes what it has begun
            )
        return cls(process, ours)

    async def call(
        self, function: Callable[..., T], arguments: tuple[Any, ...], timeout_s: float
    ) -> T:
        """Return what the function returns, or raise what it raises. Raises `WorkerLost`."""
        loop = asyncio.get_running_loop()
        try:
            for frame in pack((function, arguments, timeout_s)):
                await loop.sock_sendall(self._connection, frame)
            (count,) = HEAD.unpack(await self._receive(HEAD.size))
            if count > MAX_FRAMES:
                raise WorkerLost
            sizes = sizes_of(await self._receive(count * SIZE.size))
            succeeded, result = unpack([await self._receive(size) for size in sizes])
        except OSError:
            raise WorkerLost from None
        if succeeded:
            return result  # type: ignore[no-any-return]
        raise result

    async def _receive(self, size: int) -> bytearray:
        loop = asyncio.get_running_loop()
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = await loop.sock_recv_into(self._connection, view)
            if not count:
                raise WorkerLost
            view = view[count:]
        return data

    def is_alive(self) -> bool:
        """Return whether the worker waits for a call: it never speaks first, and closes when it dies."""
        try:
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    async def end(self) -> None:
        """Kill the worker, and return when it is gone."""
        self._connection.close()
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class DecodePool:
    """At most `size` workers, started when they are needed, each with its own limit of memory."""

    def __init__(self, size: int, max_memory_bytes: int) -> None:
        self._max_memory_bytes = max_memory_bytes
        self._places = asyncio.Semaphore(size)
        self._idle: list[DecodeProcess] = []
        self._busy: set[DecodeProcess] = set()
        self._ending: set[asyncio.Task[None]] = set()

    async def run(
        self, function: Callable[..., T], arguments: tuple[Any, ...], timeout_s: float
    ) -> T:
        """Return the function's result. Cancelling the call kills the worker that runs it.

        `function` is a module's, and its arguments and result can be pickled. Raises `TooLarge` when
        it needs more memory than a worker may take, and what the function raises.
        """
        async with self._places:
            worker = await self._take()
            try:
                result = await worker.call(function, arguments, timeout_s)
            except (WorkerLost, OutOfMemory):
                self._end(worker)
                raise TooLarge(
                    "decoding the body takes more memory than one request may use; send less at a time"
                ) from None
            except (GatewayError, Failed):
                self._idle.append(worker)
                raise
            except BaseException:
                self._end(worker)
                raise
            finally:
                self._busy.discard(worker)
            self._idle.append(worker)
            return result

    def _end(self, worker: DecodeProcess) -> None:
        """Begin to end a worker; nobody waits for it but `close`."""
        task = asyncio.create_task(worker.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _take(self) -> DecodeProcess:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive():
                break
            self._end(worker)
        else:
            worker = await DecodeProcess.start(self._max_memory_bytes)
        self._busy.add(worker)
        return worker

    async def close(self) -> None:
        """Kill every worker, and return when all are gone."""
        for worker in [*self._idle, *self._busy]:
            self._end(worker)
        self._idle.clear()
        await asyncio.gather(*self._ending)
