"""A reader for .npz files, NumPy's archives of arrays, from untrusted sources.

An archive is a ZIP file (PKWARE's APPNOTE). The reader supports only what NumPy writes: stored or deflated
entries that do not overlap, and a central directory at the end. One limit bounds the inflated bytes of all
entries; the sizes that the archive declares are not trusted.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

import numpy as np

from gateway.errors import MalformedRequest, TooLarge
from gateway.messages import quote_text
from gateway.tensors.npy import read_npy

MAX_ENTRY_NAME_BYTES: Final = 255
INFLATE_CHUNK_BYTES: Final = 64 << 10
STORED, DEFLATED = 0, 8
ENCRYPTED_FLAG, UTF8_FLAG = 1 << 0, 1 << 11
END_RECORD: Final = struct.Struct("<4s4H2LH")
END_SIGNATURE: Final = b"PK\x05\x06"
MAX_COMMENT_BYTES: Final = (1 << 16) - 1
DIRECTORY_ENTRY: Final = struct.Struct("<4s6H3L5H2L")
LOCAL_HEADER: Final = struct.Struct("<4s5H3L2H")


class DamagedArchive(Exception):
    """The archive is inconsistent; the message gives the reason."""


class ArchiveTooLarge(Exception):
    """The archive inflates to more bytes than the limit."""


@dataclass(frozen=True)
class ArchiveEntry:
    """An entry of the central directory."""

    name: bytes
    flags: int
    method: int
    crc: int
    compressed_size: int
    size: int
    offset: int

    @property
    def decoded_name(self) -> str:
        return self.name.decode("utf-8" if self.flags & UTF8_FLAG else "cp437")


def read_npz(data: bytes, max_bytes: int, max_entries: int) -> dict[str, np.ndarray]:
    """Return the arrays by name. `max_bytes` limits the inflated size of all arrays together.

    Raises `TooLarge` for more bytes or arrays, and `MalformedRequest` for an invalid file.
    """
    arrays: dict[str, np.ndarray] = {}
    remaining_bytes = max_bytes
    try:
        for entry in read_archive_directory(memoryview(data), max_entries):
            name = entry.decoded_name.removesuffix(".npy")
            if name in arrays:
                raise MalformedRequest(
                    f"the .npz file contains two arrays named {quote_text(name)}"
                )
            content = read_entry_content(memoryview(data), entry, remaining_bytes)
            remaining_bytes -= len(content)
            arrays[name] = read_npy(content)
    except ArchiveTooLarge:
        raise TooLarge(f"the .npz file inflates to more than {max_bytes} bytes") from None
    except DamagedArchive as exc:
        raise MalformedRequest(f"the body is not a valid .npz file: {exc}") from None
    except (struct.error, zlib.error, UnicodeDecodeError):
        raise MalformedRequest("the body is not a valid .npz file: it is damaged") from None
    return arrays


def read_archive_directory(data: memoryview, max_entries: int) -> list[ArchiveEntry]:
    """Return the entries, which do not overlap, in the order of their data."""
    start, end, count = find_archive_directory(data)
    if count > max_entries:
        raise TooLarge(f"the .npz file contains more than {max_entries} arrays")
    entries = []
    position = start
    for _ in range(count):
        fields = DIRECTORY_ENTRY.unpack_from(data, position)
        signature, _, _, flags, method, _, _, crc, compressed, size, *lengths, _, _, _, offset = (
            fields
        )
        name_length, extra_length, comment_length = lengths
        position += DIRECTORY_ENTRY.size
        name = bytes(data[position : position + name_length])
        position += name_length + extra_length + comment_length
        if signature != b"PK\x01\x02" or position > end:
            raise DamagedArchive("its central directory is damaged")
        if not 0 < name_length <= MAX_ENTRY_NAME_BYTES:
            raise DamagedArchive(
                f"an entry name is empty or longer than {MAX_ENTRY_NAME_BYTES} bytes"
            )
        entries.append(ArchiveEntry(name, flags, method, crc, compressed, size, offset))
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
        raise DamagedArchive(
            "its compression method is not supported; use numpy.savez or savez_compressed"
        )
    return name_start + int(name_length) + int(extra_length)


def read_entry_content(data: memoryview, entry: ArchiveEntry, max_bytes: int) -> memoryview:
    """Return an entry's content. Raises if it exceeds `max_bytes` or its size or checksum is wrong."""
    if entry.size > max_bytes:
        raise ArchiveTooLarge
    start = find_entry_data(data, entry)
    compressed = data[start : start + entry.compressed_size]
    # One byte more than the declared size is requested, to detect content that is too long.
    content = compressed if entry.method == STORED else inflate(compressed, entry.size + 1)
    if len(content) != entry.size or zlib.crc32(content) != entry.crc:
        raise DamagedArchive("the size or checksum of an entry is wrong")
    return content


def inflate(compressed: memoryview, max_bytes: int) -> memoryview:
    # Inflating stops after `max_bytes`, at the end of a chunk. Input and output are chunked, because zlib
    # copies all unconsumed input at every call.
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    content = bytearray()
    for start in range(0, len(compressed), INFLATE_CHUNK_BYTES):
        pending: bytes | memoryview = compressed[start : start + INFLATE_CHUNK_BYTES]
        has_more = True
        while has_more and len(content) < max_bytes:
            piece = inflater.decompress(pending, INFLATE_CHUNK_BYTES)
            content += piece
            pending = inflater.unconsumed_tail
            has_more = bool(pending) or (len(piece) == INFLATE_CHUNK_BYTES and not inflater.eof)
        if inflater.eof or len(content) >= max_bytes:
            break
    if inflater.eof and (inflater.unused_data or start + INFLATE_CHUNK_BYTES < len(compressed)):
        raise DamagedArchive("an entry has extra bytes after its compressed data")
    return memoryview(content)
