"""Changes of a model's objects in a bucket that can be reverted until they are committed.

S3 has neither renames nor transactions. Each object appears at once, and the model file, without which Triton
cannot load a version, is written last. What is replaced is copied before, and the lock of the model records
what to restore, so that any gateway can revert the change of one that was killed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from gateway.capabilities.uploads.model_files.bucket import Bucket, ObjectEntry
from gateway.capabilities.uploads.model_files.bucket_lock import BucketLock
from gateway.capabilities.uploads.model_files.staging import StagedFile
from gateway.capacity.archives import TEMPORARY_PREFIX

# Not a folder, because Triton takes each folder of a repository for a model. No model's name contains =.
COPY_PREFIX: Final = f"{TEMPORARY_PREFIX}copy-"
COPY_MARK: Final = "="
TOUCH_INTERVAL_S: Final = 0.5
MAX_TOUCHES: Final = 10


class BucketChange:
    """Writes and deletes objects under the lock of their model."""

    def __init__(self, bucket: Bucket, lock: BucketLock) -> None:
        self._bucket = bucket
        self._lock = lock

    def apply(
        self,
        existing: Sequence[ObjectEntry],
        files: dict[str, StagedFile],
        removed: Sequence[str] = (),
    ) -> None:
        """Delete `removed`, and write `files` in their order; `existing` are the objects of the model.

        An error reverts what was done.
        """
        existing_keys = {entry.key for entry in existing}
        # In the order in which they are restored.
        touched = dict.fromkeys((*reversed(removed), *files))
        replaced = [key for key in touched if key in existing_keys]
        copies = {key: self._name_copy(number) for number, key in enumerate(replaced)}
        created = [key for key in reversed(files) if key not in existing_keys]
        self._lock.write_record({"copies": copies, "created": created})
        try:
            for key, copy in copies.items():
                self._bucket.copy(key, copy)
            for key in removed:
                self._lock.check()
                self._bucket.delete([key])
            for key, file in files.items():
                self._lock.check()
                self._bucket.write_file(key, file)
            self._make_newer(existing)
        except BaseException:
            self.revert()
            raise

    def delete_all(self, keys: Sequence[str]) -> None:
        """Delete objects; a gateway that takes over the lock deletes the rest of them."""
        self._lock.write_record({"copies": {}, "created": list(keys)})
        self.revert()

    def revert(self) -> None:
        """Restore the objects by the record of the lock. Can be repeated."""
        record = self._lock.record
        if record is None:
            return
        self._lock.check()
        changed = self._bucket.list_objects(self._lock.model)
        self._bucket.delete(record["created"])
        for key, copy in record["copies"].items():
            self._lock.check()
            try:
                self._bucket.copy(copy, key)
            except FileNotFoundError:
                break  # the copies were not complete, and nothing was changed
        self._make_newer(changed)
        self.commit()

    def _make_newer(self, than: Sequence[ObjectEntry]) -> None:
        """Make the model's newest object newer than all objects of `than`, in whole seconds.

        Otherwise, a Triton that loaded those does not read the model again.
        """
        newest_s = max((entry.modified_s for entry in than), default=0)
        for _ in range(MAX_TOUCHES):
            found = self._bucket.list_objects(self._lock.model)
            if not found or max(entry.modified_s for entry in found) > newest_s:
                return
            time.sleep(TOUCH_INTERVAL_S)
            self._touch(min(found, key=lambda entry: entry.size).key)

    def _touch(self, key: str) -> None:
        copy = self._name_copy("touch")
        self._lock.check()
        self._bucket.copy(key, copy)
        self._bucket.copy(copy, key)
        self._bucket.delete([copy])

    def _name_copy(self, name: int | str) -> str:
        return f"{COPY_PREFIX}{self._lock.model}{COPY_MARK}{self._lock.nonce}-{name}"

    def commit(self) -> None:
        record = self._lock.record
        if record is not None:
            self._lock.write_record(None)
            self._bucket.delete(record["copies"].values())


def parse_copy_name(key: str) -> str:
    return key.removeprefix(COPY_PREFIX).rpartition(COPY_MARK)[0]
