"""Standard input and output without blocking the event loop, whatever is at their other end.

uvloop makes a descriptor that it watches non-blocking, and with it the terminal of the parent shell.
So operations that may block run in a daemon thread, which the interpreter does not wait for at exit.
"""

from __future__ import annotations

import asyncio
import os
import select
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

T = TypeVar("T")

PIPE_READ_BYTES: Final = 256 * 1024
# A pipe that is ready for writing accepts this many bytes without blocking.
ATOMIC_WRITE_BYTES: Final = select.PIPE_BUF


async def read_available(descriptor: int) -> bytes:
    if is_regular_file(descriptor) or is_descriptor_ready(descriptor, select.POLLIN):
        return os.read(descriptor, PIPE_READ_BYTES)
    return await run_in_daemon_thread(lambda: os.read(descriptor, PIPE_READ_BYTES))


async def write_descriptor(descriptor: int, data: bytes) -> None:
    """Write all data. Raises `OSError`; it is a `BrokenPipeError` when the reader has closed the pipe."""
    at_once = len(data) <= ATOMIC_WRITE_BYTES and is_descriptor_ready(descriptor, select.POLLOUT)
    if is_regular_file(descriptor) or at_once:
        write_blocking(descriptor, data)
    else:
        await run_in_daemon_thread(lambda: write_blocking(descriptor, data))


def write_blocking(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def is_descriptor_ready(descriptor: int, event: int) -> bool:
    poll = select.poll()  # select.select() does not support descriptors above 1023
    poll.register(descriptor, event)
    return bool(poll.poll(0))


def is_regular_file(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


async def run_in_daemon_thread(function: Callable[[], T]) -> T:
    """Like `asyncio.to_thread`, but the interpreter does not wait for the thread at exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(outcome: T | OSError) -> None:
        if done.done():
            return
        if isinstance(outcome, OSError):
            done.set_exception(outcome)
        else:
            done.set_result(outcome)

    def run() -> None:
        try:
            outcome: T | OSError = function()
        except OSError as exc:
            outcome = exc
        with suppress(RuntimeError):  # the loop is closed: nobody awaits the result
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, daemon=True).start()
    return await done
