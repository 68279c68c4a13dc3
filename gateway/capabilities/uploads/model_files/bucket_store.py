"""A bucket of models that the gateway writes and the Tritons read, GATEWAY_REPOSITORY=s3://BUCKET/PREFIX."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Final

from gateway.capabilities.uploads.errors import RepositoryUnavailable
from gateway.capabilities.uploads.model_files.bucket import Bucket, ObjectEntry
from gateway.capabilities.uploads.model_files.bucket_change import (
    COPY_PREFIX,
    BucketChange,
    parse_copy_name,
)
from gateway.capabilities.uploads.model_files.bucket_lock import LOCK_PREFIX, BucketLock
from gateway.capabilities.uploads.model_files.entry_names import CONFIG_FILE, is_version_name
from gateway.capabilities.uploads.model_files.kinds import FILE_KINDS, find_suffix
from gateway.capabilities.uploads.model_files.model_upload import Files, ModelUpload
from gateway.capabilities.uploads.model_files.staging import StagedFile, Staging, try_lock_file
from gateway.capabilities.uploads.model_files.store import (
    NO_FILE,
    NO_FILES,
    FileContent,
    FileEntry,
    LoadPause,
    ModelChange,
    ModelStore,
    hash_pieces,
    is_safe_path,
)
from gateway.capabilities.uploads.settings import BucketLocation
from gateway.errors import NotFound

log = logging.getLogger(__name__)

LOCK_POLL_S: Final = 0.5
FOLDER_PREFIX: Final = "triton-gateway-uploads-"
LOCK_FILE: Final = "lock"


class ScratchFolder:
    """Creates a folder in the system's folder for temporary files (TMPDIR), and locks it while it is used.

    The folders of exited processes of the same user are removed.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._lock: int | None = None
        self._creating = threading.Lock()
        self._numbers = count(1)

    def name_file(self) -> Path:
        with self._creating:
            while self._folder is None:
                folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
                self._lock = try_lock_file(folder / LOCK_FILE)
                if self._lock is not None:  # otherwise another process that starts found it first
                    self._folder = folder
        return self._folder / str(next(self._numbers))

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


def remove_abandoned_folders() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid != os.getuid() or folder.is_symlink():
                continue
            with (folder / LOCK_FILE).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


class BucketStore(ModelStore):
    """Models in an S3 bucket. Several gateways may use the same bucket.

    Uploads are received and checked in a folder on the local disk; only then objects are written.
    """

    def __init__(self, location: BucketLocation, *, can_write: bool, max_bytes: int = 0) -> None:
        super().__init__(can_write=can_write, max_bytes=max_bytes)
        self._bucket = Bucket(location)
        self._name = location.bucket
        self._scratch = ScratchFolder()
        self._held_locks: dict[str, BucketLock] = {}
        self._unreleased_locks: list[BucketLock] = []

    def open(self) -> None:
        if not self.can_write:
            return
        remove_abandoned_folders()
        try:
            if not self._bucket.list_objects():
                self._bucket.write_marker()
        except RepositoryUnavailable as exc:
            log.warning("models cannot be uploaded to the bucket %s: %s", self._name, exc.detail)

    async def list_interrupted(self) -> list[str]:
        if not self.can_write:
            return []
        keys = await self.run(self._bucket.list_top_level)
        locked = {key.removeprefix(LOCK_PREFIX) for key in keys if key.startswith(LOCK_PREFIX)}
        copied = {parse_copy_name(key) for key in keys if key.startswith(COPY_PREFIX)}
        return sorted(locked | copied)

    def close(self) -> None:
        self._threads.shutdown()
        for lock in self._unreleased_locks:
            with suppress(RepositoryUnavailable):  # another gateway reverts the change
                BucketChange(self._bucket, lock).revert()
                lock.release()
        self._scratch.close()

    @asynccontextmanager
    async def _lock_processes(self, model: str, pause_loads: LoadPause) -> AsyncIterator[bool]:
        lock = BucketLock(self._bucket, model)
        while not await self.run(lock.try_acquire):  # noqa: ASYNC110 - another process has the lock
            await asyncio.sleep(LOCK_POLL_S)
        renewal = asyncio.create_task(lock.keep_renewed())
        try:
            is_reverted = lock.record is not None
            async with pause_loads(model) if is_reverted else nullcontext():
                await self.run(self._clean, lock)
            self._held_locks[model] = lock
            yield is_reverted
        finally:
            renewal.cancel()
            self._held_locks.pop(model, None)
            await self.run(lock.release)
            if lock.record is not None:  # a thread still works on the change of a cancelled task
                self._unreleased_locks.append(lock)

    def _clean(self, lock: BucketLock) -> None:
        BucketChange(self._bucket, lock).revert()
        keys = self._bucket.list_top_level()
        copies = (key for key in keys if key.startswith(COPY_PREFIX))
        self._bucket.delete(key for key in copies if parse_copy_name(key) == lock.model)

    def create_staging(self) -> Staging:
        return Staging(self._scratch.name_file)

    def _measure(self) -> int:
        return sum(entry.size for entry in self._bucket.list_objects())

    def check_upload(self, upload: ModelUpload) -> None:
        self.check_quota(sum(file.size for _, file in upload.all_files))

    def read_config(self, model: str) -> bytes | None:
        try:
            return self._bucket.read(f"{model}/{CONFIG_FILE}").content
        except FileNotFoundError:
            return None

    def list_versions(self, model: str) -> list[int]:
        names = {key.split("/")[1] for key in self._list_keys(model) if key.count("/") > 1}
        return sorted(int(name) for name in names if is_version_name(name))

    def has_model(self, model: str) -> bool:
        return bool(self._list_keys(model))

    def _list_keys(self, folder: str) -> list[str]:
        return [entry.key for entry in self._bucket.list_objects(folder)]

    def install(self, model: str, upload: ModelUpload) -> ModelChange:
        existing = self._bucket.list_objects(model)
        # The config first and the model file last: before it, the version cannot be loaded.
        files = prefix_keys(f"{model}/", upload.shared_files)
        removed: list[str] = []
        for version, version_files in sorted(upload.versions.items()):
            folder = f"{model}/{version}/"
            files |= prefix_keys(folder, put_model_file_last(version_files))
            replaced = [entry.key for entry in existing if entry.key.startswith(folder)]
            # A single file is replaced at once. Of several, no old one may be there with a new one.
            is_single = len(replaced) == 1 and set(replaced) <= set(files)
            removed += [] if is_single else replaced
        change = BucketChange(self._bucket, self._held_locks[model])
        change.apply(existing, files, removed)
        return change

    def remove_version(self, model: str, version: int) -> ModelChange:
        existing = self._bucket.list_objects(model)
        keys = [entry.key for entry in existing if entry.key.startswith(f"{model}/{version}/")]
        change = BucketChange(self._bucket, self._held_locks[model])
        change.apply(existing, {}, keys)
        return change

    def remove_model(self, model: str) -> None:
        BucketChange(self._bucket, self._held_locks[model]).delete_all(self._list_keys(model))

    def list_files(self, model: str, version: str = "") -> list[FileEntry]:
        folder = f"{model}/{version}" if version else model
        found = self._bucket.list_objects(folder)
        if not found:
            raise NotFound(NO_FILES)
        prefix = f"{model}/"
        return [
            FileEntry(entry.key.removeprefix(prefix), entry.size, self._find_checksum(entry))
            for entry in found
        ]

    def open_file(self, model: str, path: str) -> FileContent:
        key = f"{model}/{path}"
        if is_safe_path(path):
            with suppress(FileNotFoundError):
                found = self._bucket.open(key)
                return replace(found, sha256=found.sha256 or self._hash_object(key))
        raise NotFound(NO_FILE)

    def _find_checksum(self, entry: ObjectEntry) -> str:
        key = (entry.key, entry.e_tag)
        if known := self._checksums.get(key):
            return known
        checksum = self._bucket.read_checksum(entry.key)
        return self._remember_checksum(key, checksum or self._hash_object(entry.key))

    def _hash_object(self, key: str) -> str:
        return hash_pieces(self._bucket.open(key).pieces)


def put_model_file_last(files: Files) -> Files:
    return dict(sorted(files.items(), key=lambda item: find_suffix(item[0]) in FILE_KINDS))


def prefix_keys(prefix: str, files: Files) -> dict[str, StagedFile]:
    return {f"{prefix}{path}": file for path, file in files.items()}
