"""A folder of models that the gateway writes and the Tritons read, GATEWAY_REPOSITORY=file:///FOLDER."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO, Final
from zlib import crc32

from gateway.capabilities.uploads.errors import RepositoryFull, RepositoryUnavailable
from gateway.capabilities.uploads.model_files.entry_names import CONFIG_FILE, is_version_name
from gateway.capabilities.uploads.model_files.folder_change import (
    FolderChange,
    is_temporary,
    make_durable,
    make_folders,
    recover_folder,
)
from gateway.capabilities.uploads.model_files.model_upload import Files, ModelUpload
from gateway.capabilities.uploads.model_files.staging import (
    FOLDER_MODE,
    Staging,
    file_stamp,
    translate_os_errors,
    try_lock_file,
)
from gateway.capabilities.uploads.model_files.store import (
    NO_FILE,
    NO_FILES,
    FileContent,
    FileEntry,
    LoadPause,
    ModelStore,
    hash_pieces,
    is_safe_path,
)
from gateway.capacity.archives import TEMPORARY_PREFIX
from gateway.errors import Conflict, NotFound
from gateway.messages import quote_text

log = logging.getLogger(__name__)

LOCK_SUFFIX: Final = "lock"
MODEL_LOCKS_FILE: Final = f"{TEMPORARY_PREFIX}models.{LOCK_SUFFIX}"
# The beginning of the names of a process's temporary files.
OWNER_PREFIX: Final = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}[0-9a-f]+-")
MODEL_LOCK_POLL_S: Final = 0.05
BYTECODE_FOLDER: Final = "__pycache__"
PIECE_BYTES: Final = 256 << 10


class FolderStore(ModelStore):
    """The models' folder. Several processes may use it, on a shared file system too.

    Each process has a file that it keeps locked, whose prefix all of its temporary files have. They are
    removed when nobody has that file locked; those in a model's folder, which may be a change to revert, only
    under the lock of the model.
    """

    def __init__(self, root: Path, *, can_write: bool, max_bytes: int = 0) -> None:
        super().__init__(can_write=can_write, max_bytes=max_bytes)
        self.root = root
        self._numbers = count(1)
        self._prefix = f"{TEMPORARY_PREFIX}{secrets.token_hex(6)}-"
        self._opening = threading.Lock()
        self._reserving = threading.Lock()
        self._free_bytes = 0
        self._unwritten_bytes = 0
        self._owner_lock: int | None = None  # descriptors of open files
        self._model_locks: int | None = None

    def open(self) -> None:
        if not self.can_write:
            return
        try:
            with translate_os_errors():
                self._remove_abandoned_uploads()
        except (RepositoryFull, RepositoryUnavailable) as exc:
            log.warning("models cannot be uploaded to %s: %s", self.root, exc.detail)

    def close(self) -> None:
        self._threads.shutdown()
        if self._owner_lock is not None:
            with suppress(OSError):
                for folder in list_stored_folders(self.root):
                    recover_folder(folder, self._prefix, self._name_temporary)
                self._remove_uploads(self._prefix)
                self._owner_lock_path(self._prefix).unlink(missing_ok=True)
            os.close(self._owner_lock)
        if self._model_locks is not None:
            os.close(self._model_locks)

    async def list_interrupted(self) -> list[str]:
        if not self.can_write:
            return []
        return await self.run(self._list_interrupted)

    def _list_interrupted(self) -> list[str]:
        folders = list_stored_folders(self.root)
        return [folder.name for folder in folders if any(self._list_abandoned_prefixes(folder))]

    def _owner_lock_path(self, prefix: str) -> Path:
        return self.root / f"{prefix}{LOCK_SUFFIX}"

    def _ensure_owner_lock(self) -> None:
        path = self._owner_lock_path(self._prefix)
        with self._opening:  # a second descriptor would never get the lock of the first one
            while self._owner_lock is None:  # another process has just looked whether it is locked
                self._owner_lock = try_lock_file(path)

    def _has_exited(self, prefix: str) -> bool:
        if prefix == self._prefix:
            return False
        try:
            with self._owner_lock_path(prefix).open("rb") as file:
                # Shared: another process may ask at the same time.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _list_abandoned_prefixes(self, folder: Path) -> list[str]:
        matches = (OWNER_PREFIX.match(entry.name) for entry in os.scandir(folder))
        return list(filter(self._has_exited, {match[0] for match in matches if match}))

    def _remove_abandoned_uploads(self) -> None:
        prefixes = self._list_abandoned_prefixes(self.root)
        for prefix in prefixes:
            log.warning("removing the leftovers of an interrupted upload in %s", self.root)
            self._remove_uploads(prefix)
        if prefixes and not self._list_interrupted():
            for prefix in prefixes:
                self._owner_lock_path(prefix).unlink(missing_ok=True)

    def _remove_uploads(self, prefix: str) -> None:
        for entry in list(os.scandir(self.root)):
            if entry.name.startswith(prefix) and entry.name != f"{prefix}{LOCK_SUFFIX}":
                path = Path(entry.path)
                FolderChange(path, self._name_temporary).remove_folder()

    def _has_abandoned_changes(self, model: str) -> bool:
        folder = self.root / model
        return folder.is_dir() and bool(self._list_abandoned_prefixes(folder))

    def _revert_abandoned_changes(self, model: str) -> bool:
        folder = self.root / model
        if not folder.is_dir():
            return False
        reverted = [
            recover_folder(folder, prefix, self._name_temporary)
            for prefix in self._list_abandoned_prefixes(folder)
        ]
        return any(reverted)

    def _name_temporary(self, folder: Path) -> Path:
        return folder / f"{self._prefix}{next(self._numbers)}"

    @asynccontextmanager
    async def _lock_processes(self, model: str, pause_loads: LoadPause) -> AsyncIterator[bool]:
        locks = await self.run(self._open_locks)
        # A byte of one file for each model; two models with the same byte only wait for each other.
        position = crc32(model.encode())
        while not try_lock_byte(locks, position):  # noqa: ASYNC110 - another process has the lock
            await asyncio.sleep(MODEL_LOCK_POLL_S)
        try:
            await self.run(self._check_folder, model)
            async with AsyncExitStack() as stack:
                if await self.run(self._has_abandoned_changes, model):
                    await stack.enter_async_context(pause_loads(model))
                is_reverted = await self.run(self._revert_abandoned_changes, model)
            yield is_reverted
        finally:
            fcntl.lockf(locks, fcntl.LOCK_UN, 1, position)

    def _open_locks(self) -> int:
        self._ensure_owner_lock()
        with self._opening:
            if self._model_locks is None:
                path = self.root / MODEL_LOCKS_FILE
                self._model_locks = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
            return self._model_locks

    def create_staging(self) -> Staging:
        self._ensure_owner_lock()
        return Staging(lambda: self._name_temporary(self.root), self._reserve_bytes)

    @contextmanager
    def _reserve_bytes(self, count: int) -> Iterator[None]:
        """Reserve bytes of an upload while they are written. Raises `RepositoryFull`.

        Uploads in progress share the bytes that were free when the folder was last measured.
        """
        with self._reserving:
            self._free_bytes -= count
            if self._free_bytes < 0:
                # The measured size of the folder does not include the unwritten bytes.
                needed_bytes = self._unwritten_bytes + count
                self._free_bytes = self.find_free_bytes(needed_bytes) - needed_bytes
            self._unwritten_bytes += count
        try:
            yield
        finally:
            with self._reserving:
                self._unwritten_bytes -= count

    def _measure(self) -> int:
        files = walk_model_files(self.root, with_temporary=True)
        return sum(path.lstat().st_size for path in files)

    def check_upload(self, upload: ModelUpload) -> None:
        self.check_quota()  # the staged files are in the folder, and so counted

    def read_config(self, model: str) -> bytes | None:
        try:
            return (self.root / model / CONFIG_FILE).read_bytes()
        except FileNotFoundError:
            return None

    def _check_folder(self, model: str) -> None:
        """Check that the folder is no link: its files would be elsewhere. Raises `Conflict`."""
        if (self.root / model).is_symlink():
            raise Conflict(
                f"the folder of model {quote_text(model)} is a symbolic link; the gateway changes only "
                "folders of its repository"
            )

    def list_versions(self, model: str) -> list[int]:
        folder = self.root / model
        names = (each.name for each in list_folders(folder)) if folder.is_dir() else ()
        return sorted(int(name) for name in names if is_version_name(name))

    def has_model(self, model: str) -> bool:
        return (self.root / model).is_dir()

    def install(self, model: str, upload: ModelUpload) -> FolderChange:
        folder = self.root / model
        change = FolderChange(folder, self._name_temporary)
        is_new = not folder.is_dir() or not any(folder.iterdir())
        built = self._name_temporary(self.root if is_new else folder)
        try:
            built.mkdir(FOLDER_MODE)
            for version, files in upload.versions.items():
                (built / str(version)).mkdir(FOLDER_MODE)
                move_files(files, built / str(version))
            if is_new:
                move_files(upload.shared_files, built)
                make_durable(list_tree(built))
                change.put_folder(built)
            else:
                sources = {path: file.path for path, file in upload.shared_files.items()}
                make_durable([*list_tree(built), *sources.values()])
                sources |= {str(version): built / str(version) for version in upload.versions}
                change.put(sources)
                built.rmdir()
        except BaseException:
            change.revert()
            FolderChange(built, self._name_temporary).remove_folder()
            raise
        for path, file in upload.shared_files.items():
            self._remember_checksum(file_stamp((folder / path).stat()), file.sha256)
        for version, files in upload.versions.items():
            for path, file in files.items():
                key = file_stamp((folder / str(version) / path).stat())
                self._remember_checksum(key, file.sha256)
        return change

    def remove_version(self, model: str, version: int) -> FolderChange:
        change = FolderChange(self.root / model, self._name_temporary)
        try:
            change.remove(str(version))
        except BaseException:
            change.revert()
            raise
        return change

    def remove_model(self, model: str) -> None:
        FolderChange(self.root / model, self._name_temporary).remove_folder()

    def list_files(self, model: str, version: str = "") -> list[FileEntry]:
        folder = self.root / model
        start = folder / version
        if not start.is_dir():
            raise NotFound(NO_FILES)
        return [
            FileEntry(str(path.relative_to(folder)), path.stat().st_size, self.hash_file(path))
            for path in sorted(walk_model_files(start))
        ]

    def open_file(self, model: str, path: str) -> FileContent:
        found = self.root / model
        is_safe = is_safe_path(path)
        for segment in path.split("/") if is_safe else ():
            found /= segment
            is_safe = is_safe and not found.is_symlink()
        if not is_safe or not found.is_file():
            raise NotFound(NO_FILE)
        checksum = self.hash_file(found)
        file = found.open("rb")
        return FileContent(os.fstat(file.fileno()).st_size, checksum, read_file_pieces(file))

    def hash_file(self, path: Path) -> str:
        """Return the SHA-256 checksum, which is kept until the file changes."""
        key = file_stamp(path.stat())
        if known := self._checksums.get(key):
            return known
        return self._remember_checksum(key, hash_pieces(read_file_pieces(path.open("rb"))))


def try_lock_byte(file: int, position: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, position)
    except OSError as exc:
        if exc.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise RepositoryUnavailable("it does not support locks") from None
    return True


def read_file_pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def list_folders(folder: Path) -> list[Path]:
    return [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]


def list_stored_folders(root: Path) -> list[Path]:
    return [folder for folder in list_folders(root) if not is_temporary(folder.name)]


def walk_model_files(folder: Path, *, with_temporary: bool = False) -> Iterator[Path]:
    """Yield the regular files below a folder, without links and Python's caches."""
    for place, folders, names in os.walk(folder):
        if not with_temporary:
            folders[:] = [
                name for name in folders if not is_temporary(name) and name != BYTECODE_FOLDER
            ]
        for name in names:
            if is_temporary(name) and not with_temporary:
                continue
            path = Path(place, name)
            with suppress(FileNotFoundError):
                if stat.S_ISREG(path.lstat().st_mode):
                    yield path


def move_files(files: Files, folder: Path) -> None:
    targets = {path: folder / path for path in files}
    make_folders(target.parent for target in targets.values())
    for path, target in targets.items():
        files[path].path.rename(target)


def list_tree(folder: Path) -> list[Path]:
    return [Path(place, name) for place, _, names in os.walk(folder) for name in ("", *names)]
