"""Standard input and output without ever stopping the loop, whatever stands at their other end.

uvloop's own watching of a descriptor makes it non-blocking, and with it the terminal of the shell that
started us. So what would block is done in a thread, and one that nobody waits for at the end.
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
# What a pipe that says it takes something takes at once.
ATOMIC_WRITE_BYTES: Final = select.PIPE_BUF


async def read_available(descriptor: int) -> bytes:
    """What has come; empty at the end."""
    if is_regular_file(descriptor) or is_descriptor_ready(descriptor, select.POLLIN):
        return os.read(descriptor, PIPE_READ_BYTES)
    return await run_in_daemon_thread(lambda: os.read(descriptor, PIPE_READ_BYTES))


async def write_descriptor(descriptor: int, data: bytes) -> None:
    """Raises `OSError`, a `BrokenPipeError` when nobody reads any more."""
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
    """By poll: select knows no descriptor above 1023."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(0))


def is_regular_file(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


async def run_in_daemon_thread(function: Callable[[], T]) -> T:
    """Like `asyncio.to_thread`, but the interpreter does not wait for its end."""
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
        with suppress(RuntimeError):  # the loop is gone, and so is whoever asked
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, daemon=True).start()
    return await done
