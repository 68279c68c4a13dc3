"""A bucket of models that the gateway writes and the Tritons read, GATEWAY_REPOSITORY=s3://BUCKET/PREFIX.

S3 has neither renames nor transactions: each object appears at once, and the model file, without which Triton
cannot load a version, is written last. The errors of obstore become `RepositoryUnavailable` or
`FileNotFoundError` here.
"""

from __future__ import annotations

import re
import secrets
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from gateway.capabilities.uploads.errors import RepositoryUnavailable
from gateway.capabilities.uploads.model_files.staging import (
    MAX_LEFTOVER_AGE_S,
    StagedFile,
    remove_leftovers,
)
from gateway.capabilities.uploads.model_files.store import FileContent, StoredFile
from gateway.capabilities.uploads.settings import BucketLocation
from gateway.capacity.archives import TEMPORARY_PREFIX
from gateway.messages import CommandError

# Parts that are sent one after the other bound the memory of an upload. S3 accepts 10,000 parts of at least
# 5 MiB.
PART_BYTES: Final = 5 << 20
MAX_PARTS: Final = 9_000
PIECE_BYTES: Final = 256 << 10
STAGED_PREFIX: Final = (
    "triton-gateway-upload-"  # of files in the system's folder for temporary files
)
TOUCH_INTERVAL_S: Final = 0.5
MAX_TOUCHES: Final = 10
MAX_RETRIES: Final = 3
RETRY_TIMEOUT: Final = timedelta(seconds=20)
CONNECT_TIMEOUT: Final = timedelta(seconds=5)
# S3 may take minutes to assemble the parts of a large object, or to copy it.
LARGE_OBJECT_TIMEOUT: Final = timedelta(minutes=10)
MARKER_KEY: Final = f"{TEMPORARY_PREFIX}repository"
CHECKSUM_ATTRIBUTE: Final = "sha256"
ERROR_CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>")
ERROR_STATUS: Final = re.compile(r"status code: (\d{3})")
MISSING_BUCKET: Final = "NoSuchBucket"


class CannotUseBucket(CommandError):
    """The optional dependency is not installed."""


class Bucket:
    """A `ModelFiles` of the objects below a prefix. Uploads are received on the local disk (TMPDIR)."""

    def __init__(self, location: BucketLocation) -> None:
        try:
            import obstore  # noqa: PLC0415 - an optional dependency
        except ImportError:
            raise CannotUseBucket(
                "GATEWAY_REPOSITORY is a bucket, which requires: pip install 'triton-gateway[s3]'"
            ) from None
        self._api = obstore
        exceptions = obstore.exceptions
        self._failures = (exceptions.BaseError, OSError)
        self._name = location.bucket
        self._staged_prefix = f"{STAGED_PREFIX}{secrets.token_hex(8)}-"
        options: dict[str, Any] = {"endpoint": location.endpoint} if location.endpoint else {}

        def create_store(**timeouts: timedelta) -> Any:
            client: Any = {"allow_http": True, "connect_timeout": CONNECT_TIMEOUT, **timeouts}
            # Other credentials and the region come from the environment, by the names that AWS's tools use.
            return obstore.store.S3Store(
                location.bucket,
                prefix=location.prefix or None,
                client_options=client,
                retry_config={"max_retries": MAX_RETRIES, "retry_timeout": RETRY_TIMEOUT},
                **options,
            )

        self._store = create_store()
        self._patient_store = create_store(timeout=LARGE_OBJECT_TIMEOUT)

    @contextmanager
    def _translate(self) -> Iterator[None]:
        """Translate errors, but for a missing object, which is a `FileNotFoundError`."""
        try:
            yield
        except self._failures as exc:
            text = str(exc)
            code = ERROR_CODE.search(text)
            if isinstance(exc, FileNotFoundError) and not (code and code[1] == MISSING_BUCKET):
                raise FileNotFoundError from None
            raise RepositoryUnavailable(explain_bucket_error(text)) from None

    def __str__(self) -> str:
        return f"the bucket {self._name}"

    def open(self) -> None:
        """Delete leftovers, and write an object if there is none: without one, Triton does not start."""
        remove_leftovers(Path(tempfile.gettempdir()), STAGED_PREFIX)
        found = self.list_top_level()
        if not found["objects"] and not found["common_prefixes"]:
            with self._translate():
                self._api.put(self._store, MARKER_KEY, b"models\n", use_multipart=False)
        newest_s = time.time() - MAX_LEFTOVER_AGE_S
        self.delete(
            each["path"]
            for each in found["objects"]
            if each["path"].startswith(TEMPORARY_PREFIX) and each["path"] != MARKER_KEY
            if each["last_modified"].timestamp() < newest_s
        )

    def list_top_level(self) -> Any:
        with self._translate():
            return self._api.list_with_delimiter(self._store)

    def name_temporary(self) -> Path:
        return Path(tempfile.gettempdir(), f"{self._staged_prefix}{secrets.token_hex(8)}")

    def measure(self) -> int:
        staged = 0
        for path in Path(tempfile.gettempdir()).glob(f"{self._staged_prefix}*"):
            with suppress(FileNotFoundError):
                staged += path.stat().st_size
        return staged + sum(file.size for file in self._list_objects(None))

    def scan(self, folder: str) -> list[StoredFile]:
        return sorted(self._list_objects(f"{folder}/"), key=lambda file: file.path)

    def _list_objects(self, prefix: str | None) -> list[StoredFile]:
        with self._translate():
            pages = self._api.list(self._store, prefix=prefix)
            return [
                StoredFile(
                    each["path"],
                    each["size"],
                    (str(each["e_tag"]),),
                    modified_s=int(each["last_modified"].timestamp()),
                )
                for page in pages
                for each in page
            ]

    def read(self, path: str) -> bytes:
        with self._translate():
            return bytes(self._api.get(self._store, path).bytes())

    def open_file(self, path: str) -> FileContent:
        with self._translate():
            found = self._api.get(self._store, path)
        checksum = str(found.attributes.get(CHECKSUM_ATTRIBUTE, ""))
        return FileContent(found.meta["size"], checksum, self._read_pieces(found))

    def _read_pieces(self, found: Any) -> Iterator[bytes]:
        with self._translate():
            for piece in found.stream(min_chunk_size=PIECE_BYTES):
                yield bytes(piece)

    def find_checksum(self, path: str) -> str:
        with self._translate():
            found = self._api.get(self._store, path, options={"head": True})
            return str(found.attributes.get(CHECKSUM_ATTRIBUTE, ""))

    def prepare_change(self, added: Mapping[str, StagedFile], removed: Collection[str]) -> None:
        pass

    def put(self, path: str, file: StagedFile) -> None:
        """Send a file in parts; the object appears when it is complete."""
        with self._translate():
            self._api.put(
                self._patient_store,
                path,
                file.path,
                attributes={CHECKSUM_ATTRIBUTE: file.sha256},
                use_multipart=file.size > PART_BYTES,
                chunk_size=max(PART_BYTES, file.size // MAX_PARTS),
                max_concurrency=1,
            )

    def copy(self, source: str, target: str) -> None:
        with self._translate():
            self._api.copy(self._patient_store, source, target)

    def move(self, source: str, target: str) -> None:
        self.copy(source, target)
        self.delete([source])

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:  # one after the other: a request for all of them keeps no order
            with suppress(FileNotFoundError), self._translate():
                self._api.delete(self._store, path)

    def delete_folder(self, folder: str) -> None:
        self.delete(file.path for file in reversed(self.scan(folder)))

    def finish_change(self, before: Sequence[StoredFile], changed: Sequence[str]) -> None:
        """Make the model's newest object newer than all before, in whole seconds.

        Otherwise, a Triton that loaded those does not read the model again.
        """
        newest_s = max((file.modified_s for file in before), default=0)
        for _ in range(MAX_TOUCHES if before else 0):
            found = self.scan(changed[0].partition("/")[0])
            if not found or max(file.modified_s for file in found) > newest_s:
                return
            time.sleep(TOUCH_INTERVAL_S)
            smallest = min(found, key=lambda file: file.size).path
            copy = f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
            self.copy(smallest, copy)
            self.move(copy, smallest)


def explain_bucket_error(text: str) -> str:
    if code := ERROR_CODE.search(text):
        return f"S3 refused the request: {code[1]}"
    if status := ERROR_STATUS.search(text):
        return f"S3 answered with status {status[1]}"
    return "S3 cannot be reached, or credentials are missing"
