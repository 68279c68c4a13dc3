"""Readers for .npy files (NEP 1) and for .npz files, NumPy's archives of arrays, from untrusted sources.

The header is a Python literal, which `numpy.lib.format` evaluates. This reader accepts only a dictionary with
the three standard keys, and allocates memory only if the header matches the size of the file. An archive is a
ZIP file; one limit bounds the inflated bytes of all entries.
"""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

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

NPY_MAGIC: Final = b"\x93NUMPY"
# The size of the header length by version. Version 3 differs from version 2 only by UTF-8.
LENGTH_FIELD_BYTES: Final = {(1, 0): 2, (2, 0): 4, (3, 0): 4}
MAX_NPY_HEADER_BYTES: Final = 10_000  # the limit of NumPy's own reader
# NumPy supports 64, and a batch of arrays has one dimension more.
MAX_DIMENSIONS: Final = 32
MAX_SIZE_DIGITS: Final = 19
# The shape of an empty array is bounded separately, because the file size does not bound it.
MAX_EMPTY_ARRAY_BYTES: Final = 1 << 31
# Adjacent parts of these patterns never match the same character, so the patterns do not backtrack.
HEADER_ENTRY: Final = re.compile(
    rb"""\s*(['"])(?P<key>descr|fortran_order|shape)\1\s*:\s*"""
    rb"""(?:(['"])(?P<descr>[^'"\\]*)\3|(?P<fortran_order>True|False)|\((?P<shape>[0-9L,\s]*)\))"""
    rb"""\s*(?P<comma>,?)"""
)
HEADER_END: Final = re.compile(rb"\s*\}\s*")
DIMENSION_SIZE: Final = re.compile(rb"\s*([0-9]{1,%d})L?\s*" % MAX_SIZE_DIGITS)  # Python 2 wrote 3L
SUPPORTED_DTYPE: Final = re.compile(
    r"[<>=|]?(?:b1|\?|[iu][1248]|f[248]|c8|c16|V2|[SU][1-9][0-9]{0,8})"
)


@dataclass(frozen=True)
class NpyHeader:
    """The header of a .npy file, and the start of its data."""

    dtype: np.dtype
    is_fortran_order: bool
    shape: tuple[int, ...]
    data_start: int


def read_npy(data: bytes | memoryview) -> np.ndarray:
    """Return the array of a complete file as a view of `data`. Raises `MalformedRequest`."""
    header = read_npy_header(data)
    count = math.prod(header.shape)
    width = header.dtype.itemsize
    size_bytes = len(data) - header.data_start
    if count * width != size_bytes:
        raise MalformedRequest(
            f"the .npy header declares {count} × {width} bytes of data; the file has {size_bytes}"
        )
    if count == 0:
        return make_empty_array(header)
    array = np.frombuffer(data, header.dtype, count, header.data_start)
    if header.dtype.kind == "U" and not is_valid_unicode(array):
        raise MalformedRequest("the .npy file contains invalid Unicode characters")
    return array.reshape(header.shape, order="F" if header.is_fortran_order else "C")


def read_npy_header(data: bytes | memoryview) -> NpyHeader:
    """Return the header; it is not checked against the data. Raises `MalformedRequest`."""
    start = bytes(data[:12])
    digits = LENGTH_FIELD_BYTES.get((start[6], start[7])) if len(start) == 12 else None
    if not start.startswith(NPY_MAGIC) or digits is None:
        raise MalformedRequest("the body is not a .npy file of version 1, 2 or 3")
    begin = 8 + digits
    length = int.from_bytes(start[8:begin], "little")
    if length > MAX_NPY_HEADER_BYTES or begin + length > len(data):
        raise MalformedRequest(
            f"the .npy header declares a length of {length} bytes; the header must lie within the file and "
            f"have at most {MAX_NPY_HEADER_BYTES} bytes"
        )
    return parse_npy_header(bytes(data[begin : begin + length]), begin + length)


@lru_cache(64)  # the files for an input of a model have the same header
def parse_npy_header(header: bytes, data_start: int) -> NpyHeader:
    entries = parse_npy_entries(header)
    return NpyHeader(
        parse_npy_dtype(entries["descr"].decode("latin-1")),
        entries["fortran_order"] == b"True",
        parse_npy_shape(entries["shape"]),
        data_start,
    )


def parse_npy_entries(header: bytes) -> dict[str, bytes]:
    entries: dict[str, bytes] = {}
    position = 1
    has_next = header.startswith(b"{")
    while has_next and (entry := HEADER_ENTRY.match(header, position)):
        key = entry["key"].decode()
        value: bytes | None = entry[key]
        if value is None or key in entries:
            break
        entries[key] = value
        position = entry.end()
        has_next = bool(entry["comma"])
    if len(entries) == 3 and HEADER_END.fullmatch(header, position):
        return entries
    raise MalformedRequest(
        "the .npy header is malformed; it must be a dictionary of 'descr', 'fortran_order' and 'shape', "
        "as written by numpy.save"
    )


def parse_npy_dtype(descr: str) -> np.dtype:
    if re.fullmatch(r"[<>=|]?O[0-9]*", descr):
        raise MalformedRequest("the .npy file contains pickled objects, which are not supported")
    if not SUPPORTED_DTYPE.fullmatch(descr):
        raise MalformedRequest(
            f"the .npy dtype {quote_text(descr)} is not supported; use booleans, numbers of at most 64 bits, "
            "bytes or strings"
        )
    return np.dtype(descr)


def parse_npy_shape(shape: bytes) -> tuple[int, ...]:
    *sizes, last = shape.split(b",", MAX_DIMENSIONS)
    if last.strip():
        sizes.append(last)
    matches = [DIMENSION_SIZE.fullmatch(size) for size in sizes]
    if len(sizes) > MAX_DIMENSIONS or (sizes and b"," not in shape) or not all(matches):
        raise MalformedRequest(
            "the .npy shape is malformed; it must be a tuple of at most "
            f"{MAX_DIMENSIONS} sizes, each of at most {MAX_SIZE_DIGITS} digits"
        )
    return tuple(int(match[1]) for match in matches if match)


def make_empty_array(header: NpyHeader) -> np.ndarray:
    # NumPy allocates one element even for an empty array, so strings get the smallest width.
    dtype = np.dtype(f"{header.dtype.kind}1") if header.dtype.kind in "SU" else header.dtype
    if math.prod(filter(None, header.shape)) * dtype.itemsize > MAX_EMPTY_ARRAY_BYTES:
        raise MalformedRequest("the array shape in the .npy header is too large")
    return np.zeros(header.shape, dtype)


def is_valid_unicode(array: np.ndarray) -> bool:
    points = array.view(np.dtype("u4").newbyteorder(array.dtype.byteorder))
    return not ((points > 0x10FFFF) | ((points >= 0xD800) & (points < 0xE000))).any()


# Archives

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
