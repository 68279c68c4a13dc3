"""The temporary files of an upload."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

from gateway.capabilities.uploads.errors import RepositoryFull, RepositoryUnavailable

FILE_MODE: Final = 0o600
MAX_LEFTOVER_AGE_S: Final = 24 * 3600.0  # of the temporary files that a killed gateway has left
FULL_ERRNOS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def translate_os_errors() -> Iterator[None]:
    """Translate errors of the file system. Raises `RepositoryFull` or `RepositoryUnavailable`."""
    try:
        yield
    except OSError as exc:
        reason = os.strerror(exc.errno).lower() if exc.errno else "input/output error"
        if exc.errno in FULL_ERRNOS:
            raise RepositoryFull(f"the model does not fit into the repository: {reason}") from None
        raise RepositoryUnavailable(reason) from None


@dataclass(frozen=True)
class StagedFile:
    """A complete temporary file."""

    path: Path
    size: int
    sha256: str

    def read_start(self, max_bytes: int) -> bytes:
        with self.path.open("rb") as file:
            return file.read(max_bytes)


class UploadAborted(Exception):
    """The upload was aborted while a thread worked on it."""


class StagedWriter:
    """Writes a temporary file and computes its checksum."""

    def __init__(self, staging: Staging, path: Path) -> None:
        self.path = path
        self._staging = staging
        self._size = 0
        self._hash = hashlib.sha256()
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        self._file = FileIO(os.open(path, flags, FILE_MODE), "wb")

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append data. Raises `UploadAborted`, `RepositoryFull` or `OSError`."""
        self._staging.check_open()
        view = memoryview(data)
        self._hash.update(view)
        self._size += len(view)
        while view:
            view = view[self._file.write(view) :]

    def finish(self) -> StagedFile:
        self._file.close()
        return StagedFile(self.path, self._size, self._hash.hexdigest())

    def close(self) -> None:
        self._file.close()


class Staging:
    """The temporary files of one upload. `discard` removes the ones that were not installed.

    A thread may still write when the upload is discarded: its next write raises `UploadAborted`.
    """

    def __init__(self, name_temporary: Callable[[], Path]) -> None:
        self._name_temporary = name_temporary
        self._lock = threading.Lock()
        self._writers: list[StagedWriter] = []
        self._is_open = True

    def check_open(self) -> None:
        if not self._is_open:
            raise UploadAborted

    def create_file(self) -> StagedWriter:
        with self._lock:
            self.check_open()
            writer = StagedWriter(self, self._name_temporary())
            self._writers.append(writer)
            return writer

    def write_file(self, content: bytes) -> StagedFile:
        writer = self.create_file()
        writer.write(content)
        return writer.finish()

    def stop(self) -> None:
        """End the work of a thread on this upload, without waiting for it."""
        self._is_open = False

    def discard(self) -> None:
        self.stop()
        with self._lock:
            for writer in self._writers:
                writer.close()
                with suppress(OSError):
                    writer.path.unlink(missing_ok=True)
            self._writers.clear()


def remove_leftovers(folder: Path, prefix: str, max_age_s: float = MAX_LEFTOVER_AGE_S) -> None:
    """Delete the temporary files that nobody has changed for a day."""
    for path in folder.glob(f"{prefix}*"):
        with suppress(OSError):  # another user's, or another gateway has just deleted it
            # The time of a file's content can be older: what is replaced is linked to a temporary name.
            if path.lstat().st_ctime < time.time() - max_age_s:
                path.unlink()
