"""The bodies and results of jobs, as files in a folder; and calls that block, in threads."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from gateway.capabilities.jobs.errors import JobsFull, JobsUnavailable
from gateway.capabilities.jobs.job import BODY_SUFFIX, find_job_id

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
# A disk makes the files of many jobs durable in the time of one.
FILE_THREADS: Final = 8
# Left free on the disk, so that the results of accepted jobs can still be written.
MIN_FREE_BYTES: Final = 64 << 20
MIN_FREE_SHARE: Final = 0.1
FILE_NAME: Final = re.compile(r"[0-9a-f]{32}\.(body|[0-9]+\.result)")  # others are not ours
# A file without a job is the body of one that is being accepted, or it is left over.
LEFT_OVER_AFTER_S: Final = 3600.0


@contextmanager
def describe_failures() -> Iterator[None]:
    """Translate failures of the disk and of SQLite. Raises `JobsFull` or `JobsUnavailable`."""
    try:
        yield
    except sqlite3.Error as exc:
        if "full" in str(exc):  # "database or disk is full"
            raise JobsFull("the disk is full") from None
        raise JobsUnavailable(str(exc)) from None
    except OSError as exc:
        if exc.errno in NO_ROOM:
            raise JobsFull("the disk is full") from None
        raise JobsUnavailable(exc.strerror or type(exc).__name__) from None


class BlockingCalls:
    """The methods of an object as coroutines, which raise `JobsFull` and `JobsUnavailable`.

    They run in threads, those for one job in the order of their calls.
    """

    def __init__(self, target: object, threads: int = 1) -> None:
        self._target = target
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="jobs") for _ in range(threads)]

    renewal_s = 0.0  # a disk has no outages

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._target, name)

        def run(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
            with describe_failures():
                return method(*arguments, **options)

        async def call(*arguments: Any, **options: Any) -> Any:
            number = 0
            if len(self._threads) > 1 and arguments:
                number = hash(find_job_id(arguments[0])) % len(self._threads)
            thread = self._threads[number]
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(thread, run, arguments, options)

        return call

    async def close(self) -> None:
        """End the threads, after what was called before."""
        await self.__getattr__("close")()
        for thread in self._threads:
            thread.shutdown(wait=False)


class FolderFiles:
    """`JobFiles` in a folder, whose methods block: `BlockingCalls` runs them in threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self) -> None:
        self.folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)

    def close(self) -> None:
        """No file is open."""

    def check_room(self) -> None:
        """Check that the results of accepted jobs have room besides a new body. Raises `JobsFull`."""
        disk = os.statvfs(self.folder)
        total_bytes = disk.f_blocks * disk.f_frsize
        if disk.f_bavail * disk.f_frsize < min(MIN_FREE_BYTES, MIN_FREE_SHARE * total_bytes):
            raise JobsFull("the disk is nearly full")

    def append(self, name: str, data: bytes) -> None:
        if name.endswith(BODY_SUFFIX):
            self.check_room()
        self._write(name, data, os.O_APPEND)

    def write(self, name: str, data: bytes) -> None:
        self._write(name, data, os.O_TRUNC)
        self.flush(name)

    def _write(self, name: str, data: bytes, flag: int) -> None:
        file = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | flag, FILE_MODE)
        size_bytes = os.fstat(file).st_size
        try:
            remaining = memoryview(data)
            while remaining:
                remaining = remaining[os.write(file, remaining) :]
        except OSError:
            os.ftruncate(file, size_bytes)  # the database needs the rest of a disk that is full
            raise
        finally:
            os.close(file)

    def flush(self, name: str) -> None:
        for path in (self.folder / name, self.folder):
            file = os.open(path, os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def read(self, name: str, start: int, length: int) -> bytes:
        with suppress(FileNotFoundError), (self.folder / name).open("rb") as file:
            file.seek(start)
            return file.read(length)
        return b""

    def delete(self, *names: str) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def list_old(self) -> Sequence[str]:
        old = []
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):
                is_old = entry.stat().st_mtime < time.time() - LEFT_OVER_AFTER_S
                if is_old and FILE_NAME.fullmatch(entry.name):
                    old.append(entry.name)
        return old
