"""Readers of archives, ZIP and tar, from untrusted sources, on `zipfile` and `tarfile`.

Nothing is extracted by them: only files and folders are accepted, by names that this module checks. One limit
bounds the inflated bytes of all entries, because the sizes that an archive declares are not trusted.
"""

from __future__ import annotations

import gzip
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, BinaryIO, Final, NamedTuple, cast

from gateway.errors import MalformedRequest, TooLarge
from gateway.messages import quote_text
from gateway.tensors.zip_files import (
    PIECE_BYTES,
    DamagedArchive,
    TooManyEntries,
    open_zip_file,
    read_zip_entry,
)

MAX_PATH_BYTES: Final = 1024
MAX_SEGMENT_BYTES: Final = 200
MAX_DEPTH: Final = 16
# The names of the gateway's temporary files, and of files that were moved aside, begin with this.
TEMPORARY_PREFIX: Final = ".triton-gateway-"
# Entries that archive programs add by themselves.
IGNORED_FOLDER: Final = "__MACOSX"
IGNORED_FILES: Final = (".DS_Store", "Thumbs.db")
# Of an entry's external attributes, the upper half of which is a Unix mode.
UNIX_MODE_SHIFT: Final = 16
# tarfile reads headers of any length into memory. Each entry may use this, and all of them together more.
HEADER_BYTES_PER_ENTRY: Final = 2 << 10
MORE_HEADER_BYTES: Final = 1 << 20
# tarfile and gzip raise all of these for damaged archives.
TAR_ERRORS: Final = (
    tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, OverflowError, LookupError,
    RecursionError,
)  # fmt: skip
DAMAGED: Final = "the archive is damaged or incomplete"

Pieces = Iterator[bytes]
Readable = BinaryIO | gzip.GzipFile


class InvalidArchive(MalformedRequest):
    """The archive is damaged, or contains what is not accepted."""


class ArchivedFile(NamedTuple):
    """A file of an archive, or a folder, whose path ends with /."""

    path: str
    pieces: Pieces


@dataclass
class ArchiveLimits:
    """The limits of an archive, which its entries use up."""

    max_bytes: int
    max_entries: int
    check_open: Callable[[], object] = lambda: None  # raises when the work is of no use any longer
    used_bytes: int = 0
    used_entries: int = 0

    def count_entry(self) -> None:
        self.check_open()
        self.used_entries += 1
        if self.used_entries > self.max_entries:
            raise TooLarge(f"the archive contains more than {self.max_entries} entries")

    def count_bytes(self, count: int) -> None:
        self.check_open()
        self.used_bytes += count
        if self.used_bytes > self.max_bytes:
            raise TooLarge(f"the archive inflates to more than {self.max_bytes} bytes")


def read_archive(file: BinaryIO, suffix: str, limits: ArchiveLimits) -> Iterator[ArchivedFile]:
    """Yield the files and folders. The content of each must be read before the next one.

    Raises `InvalidArchive` or `TooLarge`.
    """
    with translate_archive_errors(limits):
        file.seek(0)
        if suffix == ".zip":
            entries = read_zip(file, limits)
        elif suffix == ".tar.gz":
            entries = read_tar(
                gzip.GzipFile(fileobj=cast(BinaryIO, CheckedFile(file, limits))), limits
            )
        else:
            entries = read_tar(file, limits)
        for entry in entries:
            limits.count_entry()
            if path := clean_entry_name(entry.path):
                yield entry._replace(path=f"{path}/" if entry.path.endswith("/") else path)


@contextmanager
def translate_archive_errors(limits: ArchiveLimits) -> Iterator[None]:
    try:
        yield
    except DamagedArchive as exc:
        raise InvalidArchive(f"the archive is not valid: {exc}") from None
    except TAR_ERRORS:
        raise InvalidArchive(DAMAGED) from None
    except TooManyEntries:
        raise TooLarge(f"the archive contains more than {limits.max_entries} entries") from None


def count_pieces(pieces: Pieces, limits: ArchiveLimits) -> Pieces:
    with translate_archive_errors(limits):
        for piece in pieces:
            limits.count_bytes(len(piece))
            yield piece


def clean_entry_name(name: str) -> str:
    """Return the path of an entry; empty for an entry to ignore. Raises `InvalidArchive`."""
    name = name.removeprefix("./").removesuffix("/")
    segments = name.split("/")
    if name in ("", ".") or segments[0] == IGNORED_FOLDER or segments[-1] in IGNORED_FILES:
        return ""
    if len(segments) > MAX_DEPTH or len(name.encode(errors="replace")) > MAX_PATH_BYTES:
        raise InvalidArchive("the archive contains a path that is too long")
    if not all(map(is_safe_segment, segments)):
        raise InvalidArchive(
            f"the archive contains {quote_text(name)}; paths must be relative, without .., \\ and "
            "unprintable characters"
        )
    return name


def is_safe_segment(segment: str) -> bool:
    return (
        segment not in ("", ".", "..")
        and segment.isprintable()
        and "\\" not in segment
        and not segment.startswith(TEMPORARY_PREFIX)
        and len(segment.encode(errors="replace")) <= MAX_SEGMENT_BYTES
    )


def read_zip(file: BinaryIO, limits: ArchiveLimits) -> Iterator[ArchivedFile]:
    with open_zip_file(file, limits.max_entries) as archive:
        for entry in archive.infolist():
            mode = entry.external_attr >> UNIX_MODE_SHIFT
            # Programs of other systems write no mode.
            if stat.S_IFMT(mode) and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise InvalidArchive(describe_special_entry(entry.filename))
            pieces = read_zip_entry(archive, entry)
            yield ArchivedFile(entry.filename, count_pieces(pieces, limits))


def read_tar(file: Readable, limits: ArchiveLimits) -> Iterator[ArchivedFile]:
    """Read the formats ustar, GNU and PAX, as far as they describe files and folders."""
    stream = TarStream(file)
    archive = tarfile.TarFile(fileobj=cast(BinaryIO, stream))
    while (entry := archive.next()) is not None:
        stream.is_header = False
        if entry.isdir() and not entry.size:
            yield ArchivedFile(f"{entry.name}/", iter(()))
        elif entry.isreg() and not entry.issparse():
            pieces = count_pieces(read_tar_entry(archive, entry), limits)
            yield ArchivedFile(entry.name, pieces)
            for _ in pieces:  # nobody has read them if the entry is ignored
                pass
        else:
            raise InvalidArchive(describe_special_entry(entry.name))
        stream.allow_header()
    if not stream.has_end:  # tarfile ends silently at a damaged header
        raise InvalidArchive(DAMAGED)
    while stream.read(tarfile.BLOCKSIZE):  # gzip's checksum is at the end
        pass


def read_tar_entry(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> Pieces:
    content = cast(IO[bytes], archive.extractfile(entry))
    while piece := content.read(PIECE_BYTES):
        yield piece


class CheckedFile:
    """A file whose reading stops when the work is of no use any longer."""

    def __init__(self, file: BinaryIO, limits: ArchiveLimits) -> None:
        self._file = file
        self._check_open = limits.check_open

    def read(self, size: int = -1) -> bytes:
        self._check_open()
        return self._file.read(size)


class TarStream:
    """The bytes of a tar archive, which are read only once, and of headers only so many.

    To go backwards, as an archive with a negative size asks for, would inflate everything again.
    """

    def __init__(self, file: Readable) -> None:
        self._file = file
        self._position = 0
        self._header_bytes = MORE_HEADER_BYTES + HEADER_BYTES_PER_ENTRY
        self.is_header = True
        self.has_end = False  # the last block that was read has only zeros

    def allow_header(self) -> None:
        self.is_header = True
        self._header_bytes += HEADER_BYTES_PER_ENTRY

    def tell(self) -> int:
        return self._position

    def read(self, size: int) -> bytes:
        if self.is_header:
            if not 0 <= size <= self._header_bytes:
                raise DamagedArchive("its headers are too long")
            self._header_bytes -= size
        data = self._file.read(size)
        self._position += len(data)
        self.has_end = len(data) == tarfile.BLOCKSIZE and not data.strip(b"\0")
        return data

    def seek(self, position: int) -> None:
        if position < self._position:
            raise DamagedArchive("it has a negative size")
        while self._position < position and self.read(min(position - self._position, PIECE_BYTES)):
            pass


def describe_special_entry(name: str) -> str:
    return (
        f"the archive contains {quote_text(name)}, which is neither a file nor a folder; links and devices "
        "are not accepted"
    )
