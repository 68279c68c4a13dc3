"""A reader of NumPy's archive of arrays (.npz), for files that nobody vouches for.

An archive is a ZIP file (PKWARE's APPNOTE), which has many ways to say little and mean much. What NumPy
writes is taken: entries that are stored or deflated, side by side, and a directory at the end. What they
inflate to is counted as it comes, against one budget; no size that the archive declares is relied upon.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

import numpy as np

from gateway.errors import Malformed, TooLarge
from gateway.tensors.npy import read_npy
from gateway.words import quoted

MAX_NAME: Final = 255  # bytes
PIECE: Final = 64 << 10  # bytes that are inflated at a time
STORED, DEFLATED = 0, 8
ENCRYPTED, UTF8 = 1 << 0, 1 << 11
END: Final = struct.Struct("<4s4H2LH")
END_SIGNATURE: Final = b"PK\x05\x06"
MAX_COMMENT: Final = (1 << 16) - 1
DIRECTORY_ENTRY: Final = struct.Struct("<4s6H3L5H2L")
LOCAL_HEADER: Final = struct.Struct("<4s5H3L2H")


class DamagedArchive(Exception):
    """The archive contradicts itself; the message is the reason."""


class BudgetExceeded(Exception):
    """The archive inflates to more than it may."""


@dataclass(frozen=True)
class Entry:
    """A file of the archive, as the directory declares it."""

    name: bytes
    flags: int
    method: int
    crc: int
    compressed_size: int
    size: int
    offset: int

    @property
    def text(self) -> str:
        return self.name.decode("utf-8" if self.flags & UTF8 else "cp437")


def read_npz(data: bytes, max_bytes: int, max_entries: int) -> dict[str, np.ndarray]:
    """The arrays by name. `max_bytes` bounds what all of them inflate to together.

    Raises `TooLarge` for more bytes or arrays than that, and `Malformed` for what is not a .npz file.
    """
    arrays: dict[str, np.ndarray] = {}
    left = max_bytes
    try:
        for entry in read_directory(memoryview(data), max_entries):
            name = entry.text.removesuffix(".npy")
            if name in arrays:
                raise Malformed(f"the .npz file holds two arrays of the name {quoted(name)}")
            content = read_content(memoryview(data), entry, left)
            left -= len(content)
            arrays[name] = read_npy(content)
    except BudgetExceeded:
        raise TooLarge(f"the .npz file inflates to more than {max_bytes} bytes") from None
    except DamagedArchive as exc:
        raise Malformed(f"the body is not a whole .npz file: {exc}") from None
    except (struct.error, zlib.error, UnicodeDecodeError):
        raise Malformed("the body is not a whole .npz file: it is damaged") from None
    return arrays


def read_directory(data: memoryview, max_entries: int) -> list[Entry]:
    """The entries, in the order of their data, of which no two overlap."""
    start, end, count = find_directory(data)
    if count > max_entries:
        raise TooLarge(f"the .npz file holds more than {max_entries} arrays")
    entries = []
    position = start
    for _ in range(count):
        signature, _, _, flags, method, _, _, crc, compressed, size, *lengths, _, _, _, offset = (
            DIRECTORY_ENTRY.unpack_from(data, position)
        )
        name_length, extra_length, comment_length = lengths
        position += DIRECTORY_ENTRY.size
        name = bytes(data[position : position + name_length])
        position += name_length + extra_length + comment_length
        if signature != b"PK\x01\x02" or position > end:
            raise DamagedArchive("its directory is damaged")
        if not 0 < name_length <= MAX_NAME:
            raise DamagedArchive(f"a name in it is empty or has more than {MAX_NAME} bytes")
        entries.append(Entry(name, flags, method, crc, compressed, size, offset))
    if position != end:
        raise DamagedArchive("its directory is damaged")
    return check_layout(data, sorted(entries, key=lambda entry: entry.offset), start)


def find_directory(data: memoryview) -> tuple[int, int, int]:
    """Where the directory begins and ends, and how many entries it has."""
    tail_start = max(0, len(data) - END.size - MAX_COMMENT)
    tail = bytes(data[tail_start:])
    found = tail.rfind(END_SIGNATURE)
    if found < 0:
        raise DamagedArchive("it has no directory")
    end = tail_start + found
    _, disk, start_disk, here, count, size, start, comment = END.unpack_from(data, end)
    if disk or start_disk or here != count or end + END.size + comment != len(data):
        raise DamagedArchive("its directory is damaged")
    if start + size != end:  # with ZIP64, all of them are the largest number
        raise DamagedArchive("its directory is not where it says, or it is a ZIP64 archive")
    return start, end, count


def check_layout(data: memoryview, entries: list[Entry], directory: int) -> list[Entry]:
    """The same entries, when the data of each ends before the next begins."""
    offsets = [*(entry.offset for entry in entries), directory]
    for entry, end in zip(entries, offsets[1:], strict=True):
        if data_start(data, entry) + entry.compressed_size > end:
            raise DamagedArchive("its entries overlap")
    return entries


def data_start(data: memoryview, entry: Entry) -> int:
    """Where an entry's data begins: behind a header of its own, whose sizes nobody needs."""
    signature, _, flags, method, *_, name_length, extra_length = LOCAL_HEADER.unpack_from(
        data, entry.offset
    )
    name_start: int = entry.offset + LOCAL_HEADER.size
    name = bytes(data[name_start : name_start + name_length])
    if signature != b"PK\x03\x04" or (method, name) != (entry.method, entry.name):
        raise DamagedArchive("an entry contradicts the directory")
    if (flags | entry.flags) & ENCRYPTED:
        raise DamagedArchive("it is encrypted")
    if method not in (STORED, DEFLATED):
        raise DamagedArchive("its compression is not taken; use numpy.savez or savez_compressed")
    return name_start + int(name_length) + int(extra_length)


def read_content(data: memoryview, entry: Entry, max_bytes: int) -> memoryview:
    """An entry's content, of at most `max_bytes`, with its declared size and checksum."""
    if entry.size > max_bytes:
        raise BudgetExceeded
    start = data_start(data, entry)
    compressed = data[start : start + entry.compressed_size]
    # One byte more than is declared tells whether there is more.
    content = compressed if entry.method == STORED else inflate(compressed, entry.size + 1)
    if len(content) != entry.size or zlib.crc32(content) != entry.crc:
        raise DamagedArchive("the size or checksum of an entry is wrong")
    return content


def inflate(compressed: memoryview, max_bytes: int) -> memoryview:
    """The content of a deflated entry, or no less than the first `max_bytes` of it.

    Fed and taken in pieces: zlib copies the input that it has no room for at every call.
    """
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    content = bytearray()
    for start in range(0, len(compressed), PIECE):
        pending: bytes | memoryview = compressed[start : start + PIECE]
        has_more = True
        while has_more and len(content) < max_bytes:
            piece = inflater.decompress(pending, PIECE)
            content += piece
            pending = inflater.unconsumed_tail
            has_more = bool(pending) or (len(piece) == PIECE and not inflater.eof)
        if inflater.eof or len(content) >= max_bytes:
            break
    if inflater.eof and (inflater.unused_data or start + PIECE < len(compressed)):
        raise DamagedArchive("an entry ends before its data does")
    return memoryview(content)
