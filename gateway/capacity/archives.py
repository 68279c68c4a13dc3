"""Readers of archives, ZIP and tar, from untrusted sources.

Entries are inflated in small pieces, and one limit bounds the inflated bytes of all entries: the sizes that
the archive declares are not trusted. Only files and folders are accepted.
"""

from __future__ import annotations

import mmap
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Final, NamedTuple

from gateway.errors import MalformedRequest, TooLarge
from gateway.messages import quote_text
from gateway.tensors.zip_directory import (
    STORED,
    ZIP_ERRORS,
    ArchiveEntry,
    DamagedArchive,
    TooManyEntries,
    find_entry_data,
    read_archive_directory,
)

PIECE_BYTES: Final = 256 << 10
# zlib copies its unconsumed input at each step and member, so that larger chunks would cost more.
INPUT_BYTES: Final = 16 << 10
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
FILE_TYPE_MASK: Final = 0o170000
ACCEPTED_FILE_TYPES: Final = (0, 0o040000, 0o100000)  # unknown, a folder, a regular file
BLOCK_BYTES: Final = 512
MAX_EXTENDED_HEADER_BYTES: Final = 64 << 10
MAX_EXTENDED_HEADERS_BYTES: Final = 4 << 20  # all extended headers of an archive together
# Each gzip member costs as much as inflating this; programs that write many use 64 KiB (bgzip).
MIN_MEMBER_BYTES: Final = 16 << 10  # applies to the mean of all but `MAX_SMALL_MEMBERS` members
MAX_SMALL_MEMBERS: Final = 1000
PAX_RECORD_START: Final = re.compile(rb"([0-9]{1,7}) ([^=\n]{1,255})=")
PAX_SIZE: Final = re.compile(rb"[0-9]{1,18}")
LINE_FEED: Final = ord("\n")
GZIP_WBITS: Final = 16 + zlib.MAX_WBITS
REGULAR_FLAGS: Final = (b"0", b"\0", b"7")
FOLDER_FLAG = b"5"
LONG_NAME_FLAG = b"L"
PAX_FLAG = b"x"
GLOBAL_PAX_FLAG = b"g"
DAMAGED: Final = "the archive is damaged or incomplete"

Piece = bytes | memoryview
Pieces = Iterator[Piece]


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
    is_zip = suffix == ".zip"
    is_gzip = suffix == ".tar.gz"
    with translate_archive_errors(limits):
        entries = read_zip(file, limits) if is_zip else read_tar(file, limits, is_gzip=is_gzip)
        for name, pieces in entries:
            if path := clean_entry_name(name):
                path += "/" if name.endswith("/") else ""
                yield ArchivedFile(path, count_pieces(pieces, limits))


@contextmanager
def translate_archive_errors(limits: ArchiveLimits) -> Iterator[None]:
    try:
        yield
    except DamagedArchive as exc:
        raise InvalidArchive(f"the archive is not valid: {exc}") from None
    except (EOFError, *ZIP_ERRORS):
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


# ZIP


def read_zip(file: BinaryIO, limits: ArchiveLimits) -> Iterator[tuple[str, Pieces]]:
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        data = memoryview(mapped)
        try:
            entries = read_archive_directory(data, limits.max_entries)
            starts = [find_entry_data(data, entry) for entry in entries]
        finally:
            data.release()
    for entry, start in zip(entries, starts, strict=True):
        name = entry.decoded_name
        file_type = entry.attributes >> UNIX_MODE_SHIFT & FILE_TYPE_MASK
        if file_type not in ACCEPTED_FILE_TYPES:
            raise InvalidArchive(describe_special_entry(name))
        yield name, read_zip_entry(file, entry, start)


def read_zip_entry(file: BinaryIO, entry: ArchiveEntry, start: int) -> Pieces:
    size = checksum = 0
    compressed = read_range(file, start, entry.compressed_size)
    is_stored = entry.method == STORED
    for piece in compressed if is_stored else inflate_pieces(compressed, -zlib.MAX_WBITS):
        size += len(piece)
        checksum = zlib.crc32(piece, checksum)
        if size > entry.size:
            break
        yield piece
    if size != entry.size or checksum != entry.crc:
        raise DamagedArchive("the size or checksum of an entry is wrong")


def read_range(file: BinaryIO, start: int, size: int) -> Pieces:
    file.seek(start)
    while size:
        piece = file.read(min(size, INPUT_BYTES))
        if not piece:
            raise EOFError
        size -= len(piece)
        yield piece


def inflate_pieces(compressed: Pieces, wbits: int) -> Pieces:
    """Yield inflated pieces of bounded size; several gzip members are one content."""
    inflater = zlib.decompressobj(wbits)
    members = inflated_bytes = 0
    for chunk in compressed:
        pending = chunk
        while pending:
            if inflater.eof:
                if wbits < 0:
                    raise DamagedArchive("an entry has extra bytes after its compressed data")
                members += 1
                if members > MAX_SMALL_MEMBERS + inflated_bytes // MIN_MEMBER_BYTES:
                    raise DamagedArchive("it consists of too many small gzip members")
                inflater = zlib.decompressobj(wbits)
            if piece := inflater.decompress(pending, PIECE_BYTES):
                inflated_bytes += len(piece)
                yield piece
            pending = inflater.unconsumed_tail or inflater.unused_data
    while piece := inflater.decompress(b"", PIECE_BYTES) if not inflater.eof else b"":
        yield piece
    if not inflater.eof:
        raise EOFError


# tar


def read_tar(
    file: BinaryIO, limits: ArchiveLimits, *, is_gzip: bool
) -> Iterator[tuple[str, Pieces]]:
    """Read the formats ustar, GNU and PAX, as far as they describe files and folders."""
    file.seek(0)
    raw = iter(lambda: file.read(INPUT_BYTES), b"")
    reader = PieceReader(inflate_pieces(raw, GZIP_WBITS) if is_gzip else raw)
    extended: dict[str, bytes] = {}
    extended_bytes = 0
    while (header := reader.read(BLOCK_BYTES)).strip(b"\0"):
        limits.count_entry()
        check_tar_checksum(header)
        flag = header[156:157]
        size = parse_tar_number(header[124:136])
        if flag in (LONG_NAME_FLAG, PAX_FLAG, GLOBAL_PAX_FLAG):
            extended_bytes += size
            if extended_bytes > MAX_EXTENDED_HEADERS_BYTES:
                raise DamagedArchive("its extended headers are too long")
            if size > MAX_EXTENDED_HEADER_BYTES:
                raise DamagedArchive("an extended header is too long")
            content = reader.read(size)
            reader.skip_padding(size)
            if flag == LONG_NAME_FLAG:
                extended["path"] = content.rstrip(b"\0")
            elif flag == PAX_FLAG:
                extended |= parse_pax_records(content)
            continue
        name = (extended.get("path") or parse_tar_name(header)).decode()
        size = int(extended.get("size", size))
        extended = {}
        if flag == FOLDER_FLAG and not size:
            yield f"{name.removesuffix('/')}/", iter(())
        elif flag in REGULAR_FLAGS and not name.endswith("/"):
            pieces = reader.read_pieces(size)
            yield name, pieces
            for rest in pieces:  # nobody has read them if the entry is ignored
                limits.count_bytes(len(rest))
        else:
            raise InvalidArchive(describe_special_entry(name))
        reader.skip_padding(size)


class PieceReader:
    """Reads exact numbers of bytes from pieces. Raises `EOFError`."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._rest: Piece = b""

    def read_pieces(self, size: int) -> Pieces:
        while size:
            piece = memoryview(self._rest or next(self._pieces, b""))
            if not piece:
                raise EOFError
            self._rest = piece[size:]
            piece = piece[:size]
            size -= len(piece)
            yield piece

    def read(self, size: int) -> bytes:
        return b"".join(self.read_pieces(size))

    def skip_padding(self, size: int) -> None:
        self.read(-size % BLOCK_BYTES)


def check_tar_checksum(header: bytes) -> None:
    expected = parse_tar_number(header[148:156])
    if sum(header[:148]) + 8 * ord(" ") + sum(header[156:]) != expected:
        raise DamagedArchive("the checksum of a header is wrong")


def parse_tar_number(field: bytes) -> int:
    """Return an octal number, or a binary one of GNU tar. Raises `DamagedArchive`."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if digits and not (digits.isdigit() and not set(digits) & set(b"89")):
        raise DamagedArchive("a number in a header is invalid")
    return int(digits or b"0", 8)


def parse_tar_name(header: bytes) -> bytes:
    name, prefix = (field.partition(b"\0")[0] for field in (header[:100], header[345:500]))
    is_ustar = header[257:263] == b"ustar\0"  # GNU's format has other fields there
    return prefix + b"/" + name if is_ustar and prefix else name


def parse_pax_records(content: bytes) -> dict[str, bytes]:
    """Return the records `LENGTH KEY=VALUE` that describe a file. Raises `DamagedArchive`."""
    records = {}
    position = 0
    while position < len(content):
        match = PAX_RECORD_START.match(content, position)
        end = position + int(match[1]) if match is not None else 0
        if match is None or not match.end() < end <= len(content) or content[end - 1] != LINE_FEED:
            raise DamagedArchive("an extended header is malformed")
        key = match[2]
        value = content[match.end() : end - 1]
        if key.startswith(b"GNU.sparse"):
            raise DamagedArchive("sparse files are not supported")
        if key == b"size" and not PAX_SIZE.fullmatch(value):
            raise DamagedArchive("an extended header is malformed")
        if key in (b"path", b"size"):
            records[key.decode()] = value
        position = end
    return records


def describe_special_entry(name: str) -> str:
    return (
        f"the archive contains {quote_text(name)}, which is neither a file nor a folder; links and devices "
        "are not accepted"
    )
