"""Locks on files, which end with the process that holds them; and the leases and reports of processes."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import orjson

LOCK_TIMEOUT_S: Final = 3.0  # a write takes milliseconds, so a longer wait means a stopped process
REPORT_TTL_S: Final = 5.0


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


class FileLeases:
    """Leases as locks that end with their process. The methods block, and raise `OSError`."""

    def __init__(self, folder: Path, owner: str) -> None:
        self._folder = folder
        self._owner = owner
        self._locks: dict[str, int] = {}  # name → descriptor

    def acquire(self, name: str) -> bool:
        self._folder.mkdir(0o700, exist_ok=True)
        path = self._folder / f"{blake2b(name.encode(), digest_size=16).hexdigest()}.lease"
        if name in self._locks and not is_same_file(path, self._locks[name]):
            self.release(name)  # the file was removed, so the lock excludes nobody
        if name not in self._locks:
            descriptor = try_lock_file(path)
            if descriptor is None:
                return False
            self._locks[name] = descriptor
        return True

    def release(self, name: str) -> None:
        descriptor = self._locks.pop(name, None)
        if descriptor is not None:
            os.close(descriptor)

    def exchange_reports(self, report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        self._folder.mkdir(0o700, exist_ok=True)
        new = self._folder / f"{self._owner}.new"
        new.write_bytes(orjson.dumps(report))
        new.replace(self._folder / f"{self._owner}.report")
        found = []
        for path in self._folder.glob("*.report"):
            with suppress(FileNotFoundError, orjson.JSONDecodeError):  # its process has exited
                if time.time() - path.stat().st_mtime > REPORT_TTL_S:
                    path.unlink()
                elif path.stem != self._owner:
                    found.append(orjson.loads(path.read_bytes()))
        return [document for document in found if isinstance(document, dict)]

    def close(self) -> None:
        for name in list(self._locks):
            self.release(name)
        (self._folder / f"{self._owner}.report").unlink(missing_ok=True)
