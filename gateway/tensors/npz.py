"""A reader for .npz files, NumPy's archives of arrays, from untrusted sources.

An archive is a ZIP file. One limit bounds the inflated bytes of all entries.
"""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np

from gateway.errors import MalformedRequest, TooLarge
from gateway.messages import quote_text
from gateway.tensors.npy import read_npy
from gateway.tensors.zip_directory import (
    STORED,
    ZIP_ERRORS,
    ArchiveEntry,
    DamagedArchive,
    TooManyEntries,
    find_entry_data,
    read_archive_directory,
)

INFLATE_CHUNK_BYTES: Final = 64 << 10


class ArchiveTooLarge(Exception):
    """The archive inflates to more bytes than the limit."""


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
    except TooManyEntries:
        raise TooLarge(f"the .npz file contains more than {max_entries} arrays") from None
    except ArchiveTooLarge:
        raise TooLarge(f"the .npz file inflates to more than {max_bytes} bytes") from None
    except DamagedArchive as exc:
        raise MalformedRequest(f"the body is not a valid .npz file: {exc}") from None
    except ZIP_ERRORS:
        raise MalformedRequest("the body is not a valid .npz file: it is damaged") from None
    return arrays


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
