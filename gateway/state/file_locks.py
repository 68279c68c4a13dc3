"""Locks on files, which end with the process that holds them."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

LOCK_TIMEOUT_S: Final = 3.0  # a write takes milliseconds, so a longer wait means a stopped process


def is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def try_lock_file(path: Path) -> int | None:
    """Return the descriptor of a lock that ends with this process; None if another process holds it."""
    with ExitStack() as stack:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        stack.callback(os.close, descriptor)
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_same_file(path, descriptor):
                stack.pop_all()
                return descriptor
    return None


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold a lock. Raises `TimeoutError`; it polls because a blocking `flock` has no timeout."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while (descriptor := try_lock_file(path)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, "another process holds its lock")
        time.sleep(0.005)
    try:
        yield
    finally:
        os.close(descriptor)
