"""The store of uploaded models: changes of files that can be reverted, in a folder or in a bucket.

A change of a model holds the lease of its files in the state: gateways that share a repository share a state.
What is replaced is copied to hidden files before. A gateway that is killed leaves the files as they are;
hidden files are deleted after a day.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, ParamSpec, Protocol, TypeVar

from gateway.capabilities.uploads.errors import RepositoryFull, RepositoryUnavailable
from gateway.capabilities.uploads.model_files.entry_names import CONFIG_FILE, is_version_name
from gateway.capabilities.uploads.model_files.kinds import FILE_KINDS, find_suffix
from gateway.capabilities.uploads.model_files.model_upload import ModelUpload
from gateway.capabilities.uploads.model_files.staging import (
    StagedFile,
    Staging,
    translate_os_errors,
)
from gateway.capacity.archives import TEMPORARY_PREFIX, is_safe_segment
from gateway.errors import NotFound, Overloaded

log = logging.getLogger(__name__)
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
class StoredFile:
    """A file of the repository, by its path there; `stamp` changes with its content."""

    path: str
    size: int
    stamp: tuple[int | str, ...]  # empty for a link, which is replaced and deleted but not read
    modified_s: int = 0


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
    sha256: str  # empty if it is not known
    pieces: Iterator[bytes]


class ModelFiles(Protocol):
    """Files by their paths. All methods block, and raise `OSError` or `RepositoryUnavailable`.

    The names of hidden files, which Tritons do not read, begin with `TEMPORARY_PREFIX` and have no folder.
    """

    def open(self) -> None:
        """Prepare the repository, and delete what killed gateways have left."""

    def name_temporary(self) -> Path:
        """Return the place of a new file on a local disk, which an upload is received to."""

    def measure(self) -> int:
        """Return the size of all files, those of uploads in progress included."""

    def scan(self, folder: str) -> list[StoredFile]:
        """Return the files of a model or of a version, in the order of their paths."""

    def read(self, path: str) -> bytes: ...

    def open_file(self, path: str) -> FileContent:
        """Open a file that no link leads to. Raises `FileNotFoundError`."""

    def find_checksum(self, path: str) -> str:
        """Return the checksum that is stored with a file; empty without one."""

    def prepare_change(self, added: Mapping[str, StagedFile], removed: Collection[str]) -> None:
        """Check the paths, and make the files durable. Raises `Conflict` for what must not be changed."""

    def put(self, path: str, file: StagedFile) -> None:
        """Put a file to its place, where it appears at once."""

    def copy(self, source: str, target: str) -> None: ...

    def move(self, source: str, target: str) -> None: ...

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files, in this order, and folders that become empty."""

    def delete_folder(self, folder: str) -> None: ...

    def finish_change(self, before: Sequence[StoredFile], changed: Sequence[str]) -> None:
        """Make a change of a model durable, and such that Tritons notice it."""


class ModelChange:
    """A change of a model's files, which Tritons see; it can be reverted until it is committed."""

    def __init__(
        self,
        files: ModelFiles,
        existing: Sequence[StoredFile],
        added: Mapping[str, StagedFile],
        removed: Collection[str] = (),
    ) -> None:
        self._files = files
        self._existing = existing
        self._added = added
        self._removed = removed
        paths = {file.path for file in existing}
        changed = dict.fromkeys((*removed, *added))
        self._copies = {
            path: f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}" for path in changed if path in paths
        }
        self._created = [path for path in reversed([*added]) if path not in paths]

    def apply(self, check_open: Callable[[], None]) -> None:
        """Delete and put the files in their order; an error changes nothing."""
        self._files.prepare_change(self._added, self._removed)
        try:
            for path, copy in self._copies.items():
                self._files.copy(path, copy)
        except BaseException:
            self.commit()
            raise
        try:
            self._files.delete(self._removed)
            for path, file in self._added.items():
                check_open()
                self._files.put(path, file)
            self._files.finish_change(self._existing, [*self._removed, *self._added])
            check_open()
        except BaseException:
            self.revert()
            raise

    def revert(self) -> None:
        changed = [*self._created, *self._copies]
        before = self._files.scan(changed[0].partition("/")[0]) if changed else []
        self._files.delete(self._created)
        for path, copy in reversed(self._copies.items()):
            self._files.move(copy, path)
        self._files.finish_change(before, changed)

    def commit(self) -> None:
        self._files.delete(self._copies.values())


class ModelStore:
    """The models that the gateway writes and the Tritons read.

    The methods block, but for `stop`, `run` and `hold_upload_slot`: `run` runs them in a few threads.
    """

    def __init__(self, files: ModelFiles, max_bytes: int = 0) -> None:
        self._files = files
        self._max_bytes = max_bytes
        self._threads = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="model-files")
        self._upload_slots = MAX_UPLOADS
        self._checksums: dict[tuple[int | str, ...], str] = {}
        self._is_stopped = False

    def open(self) -> None:
        """Prepare the repository; log a warning if it cannot be used."""
        try:
            with translate_os_errors():
                self._files.open()
        except (RepositoryFull, RepositoryUnavailable) as exc:
            log.warning("models cannot be uploaded to %s: %s", self._files, exc.detail)

    def stop(self) -> None:
        """Let the changes that threads are making be reverted: the tasks that wait for them are cancelled."""
        self._is_stopped = True

    def close(self) -> None:
        self._threads.shutdown()

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking call in one of the threads. Raises `RepositoryFull` or `RepositoryUnavailable`."""

        def run_translated() -> T:
            with translate_os_errors():
                return call(*args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._threads, run_translated)

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

    def create_staging(self) -> Staging:
        self._files.open()
        return Staging(self._files.name_temporary)

    def check_quota(self, needed_bytes: int = 0) -> None:
        """Check that a number of bytes fits. Raises `RepositoryFull`."""
        if self._max_bytes and self._files.measure() + needed_bytes > self._max_bytes:
            raise RepositoryFull(
                f"the model does not fit into the repository, whose limit is {self._max_bytes} bytes; "
                "remove models or versions first"
            )

    def read_config(self, model: str) -> bytes | None:
        try:
            return self._files.read(f"{model}/{CONFIG_FILE}")
        except FileNotFoundError:
            return None

    def list_versions(self, model: str) -> list[int]:
        names = {file.path.split("/")[1] for file in self._files.scan(model)}
        return sorted(int(name) for name in names if is_version_name(name))

    def has_model(self, model: str) -> bool:
        return bool(self._files.scan(model))

    def install(self, model: str, upload: ModelUpload) -> ModelChange:
        """Put the files of an upload, whose versions have numbers, to their places. An error changes nothing.

        Raises `RepositoryFull`, or `Conflict` for a folder that the gateway must not change.
        """
        self.check_quota()  # the staged files are counted
        existing = self._files.scan(model)
        # The config first and the model file last: before it, the version cannot be loaded.
        added = {f"{model}/{path}": file for path, file in upload.shared_files.items()}
        removed: list[str] = []
        for version, files in sorted(upload.versions.items()):
            folder = f"{model}/{version}/"
            for path in sorted(files, key=lambda name: find_suffix(name) in FILE_KINDS):
                added[folder + path] = files[path]
            replaced = [file.path for file in existing if file.path.startswith(folder)]
            # A single file is replaced at once. Of several, no old one may be there with a new one.
            if len(replaced) != 1 or replaced[0] not in added:
                removed += replaced
        return self._change(existing, added, removed)

    def remove_version(self, model: str, version: int) -> ModelChange:
        existing = self._files.scan(model)
        folder = f"{model}/{version}/"
        return self._change(
            existing, {}, [file.path for file in existing if file.path.startswith(folder)]
        )

    def _change(
        self,
        existing: Sequence[StoredFile],
        added: Mapping[str, StagedFile],
        removed: Collection[str],
    ) -> ModelChange:
        change = ModelChange(self._files, existing, added, removed)
        change.apply(self._check_open)
        return change

    def _check_open(self) -> None:
        if self._is_stopped:
            raise RepositoryUnavailable("the gateway is shutting down")

    def remove_model(self, model: str) -> None:
        self._files.prepare_change({}, [file.path for file in self._files.scan(model)])
        self._files.delete_folder(model)

    def list_files(self, model: str, version: str = "") -> list[FileEntry]:
        """Return the files of a model or a version. Raises `NotFound`."""
        found = self._files.scan(f"{model}/{version}" if version else model)
        if not found:
            raise NotFound(NO_FILES)
        return [
            FileEntry(file.path.partition("/")[2], file.size, self._find_checksum(file))
            for file in found
            if file.stamp
        ]

    def open_file(self, model: str, path: str) -> FileContent:
        """Open a file of a model. Raises `NotFound`."""
        if all(map(is_safe_segment, path.split("/"))):
            for file in self._files.scan(model):
                if file.path == f"{model}/{path}" and file.stamp:
                    content = self._files.open_file(file.path)
                    return replace(content, sha256=content.sha256 or self._find_checksum(file))
        raise NotFound(NO_FILE)

    def _find_checksum(self, file: StoredFile) -> str:
        """Return the SHA-256 checksum, which is remembered until the file changes."""
        key = (file.path, *file.stamp)
        if key not in self._checksums:
            if len(self._checksums) >= MAX_CACHED_CHECKSUMS:
                self._checksums.clear()
            checksum = self._files.find_checksum(file.path)
            self._checksums[key] = checksum or hash_pieces(self._files.open_file(file.path).pieces)
        return self._checksums[key]


def hash_pieces(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
