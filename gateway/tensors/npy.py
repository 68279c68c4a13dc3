"""A reader for .npy files (NEP 1) from untrusted sources.

The header is a Python literal, which `numpy.lib.format` evaluates. This reader accepts only a dictionary with
the three standard keys, and allocates memory only if the header matches the size of the file.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from gateway.errors import MalformedRequest
from gateway.messages import quote_text

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
