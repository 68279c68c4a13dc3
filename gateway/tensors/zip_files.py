"""ZIP files from untrusted sources: `zipfile` reads them, within limits, in pieces."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final

PIECE_BYTES: Final = 256 << 10
MAX_ENTRY_NAME_BYTES: Final = 255
# zipfile reads the directory as a whole. Most of its entries are shorter.
DIRECTORY_BYTES_PER_ENTRY: Final = 512
ENCRYPTED_FLAG: Final = 1 << 0
METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# zipfile raises all of these for damaged files.
ZIP_ERRORS: Final = (
    zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, OverflowError, LookupError, RuntimeError,
)  # fmt: skip


class DamagedArchive(Exception):
    """The archive is inconsistent, or has what is not accepted; the message gives the reason."""


class TooManyEntries(Exception):
    """The archive has more entries than the limit."""


class ShortReads:
    """A file of which only so much can be read at once."""

    def __init__(self, file: BinaryIO, max_read_bytes: int) -> None:
        self._max_read_bytes = max_read_bytes
        self._file = file
        self.seek = file.seek
        self.tell = file.tell
        self.seekable = file.seekable

    def read(self, size: int = -1) -> bytes:
        if size > self._max_read_bytes:
            raise TooManyEntries
        return self._file.read(size)


@contextmanager
def open_zip_file(file: BinaryIO, max_entries: int) -> Iterator[zipfile.ZipFile]:
    """Open an archive of stored and deflated entries. Raises `DamagedArchive` or `TooManyEntries`."""
    max_read_bytes = max(DIRECTORY_BYTES_PER_ENTRY * max_entries, PIECE_BYTES)
    with translate_zip_errors():
        archive = zipfile.ZipFile(ShortReads(file, max_read_bytes))
    with archive:
        check_zip_entries(archive.infolist(), max_entries)
        yield archive


@contextmanager
def translate_zip_errors() -> Iterator[None]:
    try:
        yield
    except ZIP_ERRORS as exc:
        raise DamagedArchive(f"it is damaged: {exc}") from None


def check_zip_entries(entries: list[zipfile.ZipInfo], max_entries: int) -> None:
    if len(entries) > max_entries:
        raise TooManyEntries
    for entry in entries:
        if not 0 < len(entry.orig_filename.encode()) <= MAX_ENTRY_NAME_BYTES:
            raise DamagedArchive(
                f"an entry name is empty or longer than {MAX_ENTRY_NAME_BYTES} bytes"
            )
        if entry.flag_bits & ENCRYPTED_FLAG:
            raise DamagedArchive("it is encrypted")
        if entry.compress_type not in METHODS:
            raise DamagedArchive("its compression method is not supported; use deflate")


def read_zip_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Iterator[bytes]:
    """Yield the content of an entry in pieces. Raises `DamagedArchive`."""
    size = 0
    with translate_zip_errors(), archive.open(entry) as content:
        while piece := content.read(PIECE_BYTES):
            size += len(piece)
            yield piece
    if size != entry.file_size:
        raise DamagedArchive("an entry is shorter than its size")
