"""Objects of an S3 bucket, through obstore.

Its errors become `RepositoryUnavailable`, `ObjectChanged` or `FileNotFoundError` here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from gateway.capabilities.uploads.errors import RepositoryUnavailable
from gateway.capabilities.uploads.model_files.staging import StagedFile
from gateway.capabilities.uploads.model_files.store import FileContent
from gateway.capabilities.uploads.settings import BucketLocation
from gateway.capacity.archives import TEMPORARY_PREFIX
from gateway.messages import CommandError

# Parts that are sent one after the other bound the memory of an upload. S3 accepts 10,000 parts of at least
# 5 MiB.
PART_BYTES: Final = 5 << 20
MAX_PARTS: Final = 9_000
PIECE_BYTES: Final = 256 << 10
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


class ObjectChanged(Exception):
    """A conditional write found another object than expected."""


@dataclass(frozen=True)
class ObjectEntry:
    """An object of the bucket, by its key below the prefix."""

    key: str
    size: int
    e_tag: str
    modified_s: int


@dataclass(frozen=True)
class ObjectContent:
    """A small object, and the tag that changes with its content."""

    content: bytes
    e_tag: str


class Bucket:
    """The objects below a prefix. All methods block, and raise `RepositoryUnavailable`."""

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
        self._conflicts = (exceptions.AlreadyExistsError, exceptions.PreconditionError)
        options: dict[str, Any] = {"endpoint": location.endpoint} if location.endpoint else {}
        if location.secret_access_key is not None:
            options["secret_access_key"] = location.secret_access_key.get_secret_value()

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
        except self._conflicts:
            raise ObjectChanged from None
        except self._failures as exc:
            text = str(exc)
            code = ERROR_CODE.search(text)
            if isinstance(exc, FileNotFoundError) and not (code and code[1] == MISSING_BUCKET):
                raise FileNotFoundError from None
            raise RepositoryUnavailable(explain_bucket_error(text)) from None

    def write_file(self, key: str, file: StagedFile) -> None:
        """Send a file in parts; the object appears when it is complete."""
        with self._translate():
            self._api.put(
                self._patient_store,
                key,
                file.path,
                attributes={CHECKSUM_ATTRIBUTE: file.sha256},
                use_multipart=file.size > PART_BYTES,
                chunk_size=max(PART_BYTES, file.size // MAX_PARTS),
                max_concurrency=1,
            )

    def write_if_unchanged(self, key: str, content: bytes, e_tag: str) -> str:
        """Replace an object with this tag, or for an empty tag create it. Raises `ObjectChanged`."""
        mode: Any = {"e_tag": e_tag} if e_tag else "create"
        with self._translate():
            result = self._api.put(self._store, key, content, mode=mode, use_multipart=False)
        return str(result["e_tag"])

    def write_marker(self) -> None:
        """Write an object below a prefix that has none, because Triton does not start without one."""
        with self._translate():
            self._api.put(self._store, MARKER_KEY, b"models\n", use_multipart=False)

    def read(self, key: str) -> ObjectContent:
        with self._translate():
            found = self._api.get(self._store, key)
            return ObjectContent(bytes(found.bytes()), str(found.meta["e_tag"]))

    def open(self, key: str) -> FileContent:
        """Open an object; the checksum is empty if it was not uploaded by a gateway."""
        with self._translate():
            found = self._api.get(self._store, key)
        checksum = str(found.attributes.get(CHECKSUM_ATTRIBUTE, ""))
        return FileContent(found.meta["size"], checksum, self._read_pieces(found))

    def _read_pieces(self, found: Any) -> Iterator[bytes]:
        with self._translate():
            for piece in found.stream(min_chunk_size=PIECE_BYTES):
                yield bytes(piece)

    def read_checksum(self, key: str) -> str:
        """Return the checksum with which an object was uploaded; empty if there is none."""
        with self._translate():
            found = self._api.get(self._store, key, options={"head": True})
            return str(found.attributes.get(CHECKSUM_ATTRIBUTE, ""))

    def list_objects(self, folder: str = "") -> list[ObjectEntry]:
        prefix = f"{folder.rstrip('/')}/" if folder else None
        with self._translate():
            pages = self._api.list(self._store, prefix=prefix)
            found = [
                ObjectEntry(
                    each["path"],
                    each["size"],
                    str(each["e_tag"]),
                    modified_s=int(each["last_modified"].timestamp()),
                )
                for page in pages
                for each in page
            ]
        return sorted(found, key=lambda entry: entry.key)

    def list_top_level(self) -> list[str]:
        with self._translate():
            found = self._api.list_with_delimiter(self._store)
            return sorted(each["path"] for each in found["objects"])

    def copy(self, source: str, target: str) -> None:
        with self._translate():
            self._api.copy(self._patient_store, source, target)

    def delete(self, keys: Iterable[str]) -> None:
        with self._translate():
            for key in keys:  # one after the other: a request for all of them keeps no order
                self._api.delete(self._store, key)


def explain_bucket_error(text: str) -> str:
    if code := ERROR_CODE.search(text):
        return f"S3 refused the request: {code[1]}"
    if status := ERROR_STATUS.search(text):
        return f"S3 answered with status {status[1]}"
    return "S3 cannot be reached, or credentials are missing"
