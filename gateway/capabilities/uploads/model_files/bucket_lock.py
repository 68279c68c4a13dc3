"""A lock on a model in a bucket, which also records the change that its owner makes.

The lock is an object that its owner creates, renews and deletes by conditional writes. If it was not renewed
for `LEASE_S` seconds, its owner has exited: another gateway takes it over, with the record of the change.
Only durations are compared, so clocks may differ.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from contextlib import suppress
from typing import Any, Final

import orjson

from gateway.capabilities.uploads.errors import RepositoryUnavailable
from gateway.capabilities.uploads.model_files.bucket import Bucket, ObjectChanged
from gateway.capacity.archives import TEMPORARY_PREFIX
from gateway.messages import quote_text
from gateway.tasks import repeat

log = logging.getLogger(__name__)

LEASE_S: Final = 15.0
RENEWAL_S: Final = LEASE_S / 5
LOCK_PREFIX: Final = f"{TEMPORARY_PREFIX}lock-"

ChangeRecord = dict[str, Any]


class BucketLock:
    """The lock of one model. The methods that are not `async` block; two threads may call them."""

    def __init__(self, bucket: Bucket, model: str) -> None:
        self.model = model
        self._bucket = bucket
        self._key = f"{LOCK_PREFIX}{model}"
        # Of another gateway's lock: its tag, and the time since which it has not changed.
        self._other_e_tag = ""
        self._other_since_s = 0.0
        self._writing = threading.Lock()
        self.nonce = secrets.token_hex(8)
        self._writes = 0
        self._e_tag = ""
        # The change that the owner, or the previous one, has not completed.
        self.record: ChangeRecord | None = None
        self._renewed_s = 0.0
        self._is_lost = False

    def try_acquire(self) -> bool:
        """Create the lock, or take over an abandoned one, with its record."""
        with suppress(ObjectChanged):
            self._write()
            return True
        try:
            other = self._bucket.read(self._key)
        except FileNotFoundError:
            return False  # it was released since the write
        if other.e_tag != self._other_e_tag:
            self._other_e_tag = other.e_tag
            self._other_since_s = time.monotonic()
        if time.monotonic() - self._other_since_s < LEASE_S:
            return False
        with suppress(ObjectChanged):
            self._e_tag = other.e_tag
            self.record = orjson.loads(other.content)["change"]
            self._write()
            log.warning("took over the lock of model %s", quote_text(self.model))
            return True
        self._e_tag = ""
        self.record = None
        return False

    def write_record(self, record: ChangeRecord | None) -> None:
        """Record a change before its first step; None after its last one. Raises `RepositoryUnavailable`."""
        with self._writing:
            self.record = record
            self._renew()

    def check(self) -> None:
        """Check that no other gateway can have taken over the lock. Raises `RepositoryUnavailable`."""
        if self._is_lost or time.monotonic() - self._renewed_s > LEASE_S:
            raise RepositoryUnavailable("the lock of the model could not be renewed in time")

    async def keep_renewed(self) -> None:
        async def renew() -> None:
            await asyncio.sleep(RENEWAL_S)
            with suppress(RepositoryUnavailable):  # `check` tells whether it matters
                await asyncio.to_thread(self.renew)

        await repeat("bucket_lock", renew)

    def renew(self) -> None:
        with self._writing:
            self._renew()

    def release(self) -> None:
        """Delete the lock; one that cannot be deleted, or has a record, is taken over later."""
        with self._writing, suppress(RepositoryUnavailable):
            self.check()
            if self.record is None:
                self._is_lost = True
                self._bucket.delete([self._key])

    def _renew(self) -> None:
        self.check()
        try:
            self._write()
        except ObjectChanged:
            self._is_lost = True
            self.check()

    def _write(self) -> None:
        self._writes += 1
        started_s = time.monotonic()
        # The tag of an object is a checksum of its content, so the content must differ each time.
        document = {"owner": self.nonce, "write": self._writes, "change": self.record}
        self._e_tag = self._bucket.write_if_unchanged(
            self._key, orjson.dumps(document), self._e_tag
        )
        self._renewed_s = started_s
