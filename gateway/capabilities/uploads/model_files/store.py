"""The interface of a store of uploaded models, with the threads and the lock per model of all stores."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final, ParamSpec, Protocol, TypeVar
from weakref import WeakValueDictionary

from gateway.capabilities.uploads.errors import RepositoryFull
from gateway.capabilities.uploads.model_files.model_upload import ModelUpload
from gateway.capabilities.uploads.model_files.staging import Staging, translate_os_errors
from gateway.capacity.archives import is_safe_segment
from gateway.errors import Overloaded

P = ParamSpec("P")
T = TypeVar("T")

STORE_THREADS: Final = 4
MAX_UPLOADS: Final = 16  # uploads in progress at the same time
MAX_CACHED_CHECKSUMS: Final = 10_000
NO_FILES: Final = "the repository of the gateway has no files of this model and version"
NO_FILE: Final = "the model has no such file; GET /v1/models/NAME/files lists them"


class TooManyUploads(Overloaded):
    message = f"{MAX_UPLOADS} uploads are in progress; try again when one of them has ended"


@dataclass(frozen=True)
class FileEntry:
    """A file of a model, by its path in the model's folder."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class FileContent:
    """A file that is open for reading; its pieces are read in the threads of its store."""

    size: int
    sha256: str
    pieces: Iterator[bytes]


class ModelChange(Protocol):
    """A change of a model's files, which Tritons see; it can be reverted until it is committed."""

    def revert(self) -> None: ...

    def commit(self) -> None: ...


# Waits until no replica loads a model, and lets none start in its block.
LoadPause = Callable[[str], AbstractAsyncContextManager[None]]


class ModelStore(ABC):
    """The models that the gateway writes and the Tritons read.

    All methods but `lock_model` and `hold_upload_slot` block: `run` runs them in a few threads.
    """

    def __init__(self, *, can_write: bool, max_bytes: int = 0) -> None:
        self.can_write = can_write
        self._max_bytes = max_bytes
        self._threads = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="model-files")
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._upload_slots = MAX_UPLOADS
        self._checksums: dict[tuple[int | str, ...], str] = {}

    @abstractmethod
    def open(self) -> None:
        """Prepare the store; log a warning if it cannot be used."""

    @abstractmethod
    async def list_interrupted(self) -> list[str]:
        """Return the models that may have changes which exited processes left uncommitted."""

    @abstractmethod
    def close(self) -> None: ...

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking call in one of the threads. Raises `RepositoryFull` or `RepositoryUnavailable`."""

        def run_translated() -> T:
            with translate_os_errors():
                return call(*args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._threads, run_translated)

    @asynccontextmanager
    async def lock_model(self, model: str, pause_loads: LoadPause) -> AsyncIterator[bool]:
        """Wait until no other process and no other task changes this model.

        Reverts the uncommitted change of an exited process, before anything else is changed and while no
        replica loads the model, and yields whether there was one. Raises `Conflict` for a model that the
        gateway must not change.
        """
        lock = self._locks.setdefault(model, asyncio.Lock())
        async with lock, self._lock_processes(model, pause_loads) as is_reverted:
            yield is_reverted

    @abstractmethod
    def _lock_processes(
        self, model: str, pause_loads: LoadPause
    ) -> AbstractAsyncContextManager[bool]:
        """Do the same as `lock_model` for other processes."""

    @contextmanager
    def hold_upload_slot(self) -> Iterator[None]:
        """Count an upload. Raises `TooManyUploads`: the files of each take space until it ends."""
        if not self._upload_slots:
            raise TooManyUploads
        self._upload_slots -= 1
        try:
            yield
        finally:
            self._upload_slots += 1

    @abstractmethod
    def create_staging(self) -> Staging: ...

    def check_quota(self, needed_bytes: int = 0) -> None:
        self.find_free_bytes(needed_bytes)

    def find_free_bytes(self, needed_bytes: int) -> int:
        """Return the bytes that the limit leaves. Raises `RepositoryFull` if more are needed."""
        free_bytes = self._max_bytes - self._measure() if self._max_bytes else sys.maxsize
        if needed_bytes > free_bytes:
            raise RepositoryFull(
                f"the model does not fit into the repository, whose limit is {self._max_bytes} bytes; "
                "remove models or versions first"
            )
        return free_bytes

    @abstractmethod
    def _measure(self) -> int: ...

    @abstractmethod
    def check_upload(self, upload: ModelUpload) -> None:
        """Check that the staged files fit. Raises `RepositoryFull`."""

    @abstractmethod
    def read_config(self, model: str) -> bytes | None: ...

    @abstractmethod
    def list_versions(self, model: str) -> list[int]: ...

    @abstractmethod
    def has_model(self, model: str) -> bool: ...

    @abstractmethod
    def install(self, model: str, upload: ModelUpload) -> ModelChange:
        """Move the files of an upload to their places, which can be reverted. An error changes nothing.

        Its versions have numbers.
        """

    @abstractmethod
    def remove_version(self, model: str, version: int) -> ModelChange: ...

    @abstractmethod
    def remove_model(self, model: str) -> None: ...

    @abstractmethod
    def list_files(self, model: str, version: str = "") -> list[FileEntry]:
        """Return the files of a model or a version. Raises `NotFound`."""

    @abstractmethod
    def open_file(self, model: str, path: str) -> FileContent:
        """Open a file of a model. Raises `NotFound`."""

    def _remember_checksum(self, key: tuple[int | str, ...], checksum: str) -> str:
        if len(self._checksums) >= MAX_CACHED_CHECKSUMS:
            self._checksums.clear()
        self._checksums[key] = checksum
        return checksum


def hash_pieces(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def is_safe_path(path: str) -> bool:
    return all(map(is_safe_segment, path.split("/")))
