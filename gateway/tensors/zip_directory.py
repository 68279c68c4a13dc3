"""The central directory of ZIP files (PKWARE's APPNOTE) from untrusted sources.

The reader supports stored and deflated entries that do not overlap, and a directory at the end. The sizes
that the file declares are not trusted.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

MAX_ENTRY_NAME_BYTES: Final = 255
STORED: Final = 0
DEFLATED: Final = 8
ENCRYPTED_FLAG: Final = 1 << 0
UTF8_FLAG: Final = 1 << 11
END_RECORD: Final = struct.Struct("<4s4H2LH")
END_SIGNATURE: Final = b"PK\x05\x06"
MAX_COMMENT_BYTES: Final = (1 << 16) - 1
DIRECTORY_ENTRY: Final = struct.Struct("<4s6H3L5H2L")
LOCAL_HEADER: Final = struct.Struct("<4s5H3L2H")
# What a damaged file raises besides `DamagedArchive`.
ZIP_ERRORS: Final = (struct.error, zlib.error, UnicodeDecodeError)


class DamagedArchive(Exception):
    """The archive is inconsistent; the message gives the reason."""


class TooManyEntries(Exception):
    """The archive has more entries than the limit."""


@dataclass(frozen=True)
class ArchiveEntry:
    name: bytes
    flags: int
    method: int
    crc: int
    compressed_size: int
    size: int
    attributes: int  # external; the upper half is a Unix mode
    offset: int

    @property
    def decoded_name(self) -> str:
        return self.name.decode("utf-8" if self.flags & UTF8_FLAG else "cp437")


def read_archive_directory(data: memoryview, max_entries: int) -> list[ArchiveEntry]:
    """Return the entries, which do not overlap, in the order of their data.

    Raises `DamagedArchive`, `TooManyEntries` or one of `ZIP_ERRORS`.
    """
    start, end, count = find_archive_directory(data)
    if count > max_entries:
        raise TooManyEntries
    entries = []
    position = start
    for _ in range(count):
        fields = DIRECTORY_ENTRY.unpack_from(data, position)
        signature, _, _, flags, method, _, _, crc, compressed, size, *rest = fields
        name_length, extra_length, comment_length, _, _, attributes, offset = rest
        position += DIRECTORY_ENTRY.size
        name = bytes(data[position : position + name_length])
        position += name_length + extra_length + comment_length
        if signature != b"PK\x01\x02" or position > end:
            raise DamagedArchive("its central directory is damaged")
        if not 0 < name_length <= MAX_ENTRY_NAME_BYTES:
            raise DamagedArchive(
                f"an entry name is empty or longer than {MAX_ENTRY_NAME_BYTES} bytes"
            )
        entry = ArchiveEntry(name, flags, method, crc, compressed, size, attributes, offset)
        entries.append(entry)
    if position != end:
        raise DamagedArchive("its central directory is damaged")
    return check_entry_overlap(data, sorted(entries, key=lambda entry: entry.offset), start)


def find_archive_directory(data: memoryview) -> tuple[int, int, int]:
    """Return the start and end of the central directory, and its number of entries."""
    tail_start = max(0, len(data) - END_RECORD.size - MAX_COMMENT_BYTES)
    tail = bytes(data[tail_start:])
    tail_position = tail.rfind(END_SIGNATURE)
    if tail_position < 0:
        raise DamagedArchive("it has no central directory")
    end = tail_start + tail_position
    _, disk, start_disk, disk_count, count, size, start, comment = END_RECORD.unpack_from(data, end)
    if disk or start_disk or disk_count != count or end + END_RECORD.size + comment != len(data):
        raise DamagedArchive("its central directory is damaged")
    if start + size != end:  # ZIP64 sets both fields to the greatest value
        raise DamagedArchive("its central directory has a wrong offset, or it is a ZIP64 archive")
    return start, end, count


def check_entry_overlap(
    data: memoryview, entries: list[ArchiveEntry], directory_start: int
) -> list[ArchiveEntry]:
    offsets = [*(entry.offset for entry in entries), directory_start]
    for entry, end in zip(entries, offsets[1:], strict=True):
        if find_entry_data(data, entry) + entry.compressed_size > end:
            raise DamagedArchive("its entries overlap")
    return entries


def find_entry_data(data: memoryview, entry: ArchiveEntry) -> int:
    # The data follows a local header; the sizes in it are redundant.
    header = LOCAL_HEADER.unpack_from(data, entry.offset)
    signature, _, flags, method, *_, name_length, extra_length = header
    name_start: int = entry.offset + LOCAL_HEADER.size
    name = bytes(data[name_start : name_start + name_length])
    if signature != b"PK\x03\x04" or (method, name) != (entry.method, entry.name):
        raise DamagedArchive("an entry does not match the central directory")
    if (flags | entry.flags) & ENCRYPTED_FLAG:
        raise DamagedArchive("it is encrypted")
    if method not in (STORED, DEFLATED):
        raise DamagedArchive("its compression method is not supported; use deflate")
    return name_start + int(name_length) + int(extra_length)
