"""A reader of NumPy's file of one array (.npy, NEP 1), for files that nobody vouches for.

The header is a Python literal, which `numpy.lib.format` evaluates. Its grammar is far smaller than Python's:
a dictionary of three keys. It is read as such, and nothing is allocated before it agrees with the size.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from gateway.errors import MalformedRequest
from gateway.messages import quote_text

NPY_MAGIC: Final = b"\x93NUMPY"
# By version: how many bytes hold the header's length. Version 3 is version 2 in UTF-8.
LENGTH_FIELD_BYTES: Final = {(1, 0): 2, (2, 0): 4, (3, 0): 4}
MAX_NPY_HEADER_BYTES: Final = 10_000  # as NumPy's own reader
# NumPy's limit is 64; a batch of arrays has one dimension more.
MAX_DIMENSIONS: Final = 32
MAX_SIZE_DIGITS: Final = 19
# Of the dimensions of an array without elements, which the file's size says nothing about.
MAX_EMPTY_ARRAY_BYTES: Final = 1 << 31
# No two neighbours of these patterns match the same character: nothing is tried twice.
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
    """What a .npy file declares, and where its data begins."""

    dtype: np.dtype
    is_fortran_order: bool
    shape: tuple[int, ...]
    data_start: int


def read_npy(data: bytes | memoryview) -> np.ndarray:
    """The array of a whole file, as a view of `data`. Raises `Malformed`."""
    header = read_npy_header(data)
    count, width = math.prod(header.shape), header.dtype.itemsize
    present = len(data) - header.data_start
    if count * width != present:
        raise MalformedRequest(
            f"the .npy file's header claims {count} × {width} bytes, and {present} came"
        )
    if count == 0:
        return make_empty_array(header)
    array = np.frombuffer(data, header.dtype, count, header.data_start)
    if header.dtype.kind == "U" and not is_valid_unicode(array):
        raise MalformedRequest("the .npy file holds characters that are not in Unicode")
    return array.reshape(header.shape, order="F" if header.is_fortran_order else "C")


def read_npy_header(data: bytes | memoryview) -> NpyHeader:
    """The header, which may claim anything about the data that follows. Raises `Malformed`."""
    start = bytes(data[:12])
    digits = LENGTH_FIELD_BYTES.get((start[6], start[7])) if len(start) == 12 else None
    if not start.startswith(NPY_MAGIC) or digits is None:
        raise MalformedRequest("the body is not a .npy file of version 1, 2 or 3")
    begin = 8 + digits
    length = int.from_bytes(start[8:begin], "little")
    if length > MAX_NPY_HEADER_BYTES or begin + length > len(data):
        raise MalformedRequest(
            f"the .npy file's header claims {length} bytes; it must lie within the file and have "
            f"at most {MAX_NPY_HEADER_BYTES}"
        )
    entries = parse_npy_entries(bytes(data[begin : begin + length]))
    return NpyHeader(
        parse_npy_dtype(entries["descr"].decode("latin-1")),
        entries["fortran_order"] == b"True",
        parse_npy_shape(entries["shape"]),
        begin + length,
    )


def parse_npy_entries(header: bytes) -> dict[str, bytes]:
    """The values by key, as they are written; each is of its key's type, and none is missing."""
    entries: dict[str, bytes] = {}
    position, has_next = 1, header.startswith(b"{")
    while has_next and (entry := HEADER_ENTRY.match(header, position)):
        key = entry["key"].decode()
        value: bytes | None = entry[key]
        if value is None or key in entries:
            break
        entries[key] = value
        position, has_next = entry.end(), bool(entry["comma"])
    if len(entries) == 3 and HEADER_END.fullmatch(header, position):
        return entries
    raise MalformedRequest(
        "the .npy file's header is malformed: it must be a dictionary of 'descr', 'fortran_order' and "
        "'shape', as numpy.save writes it"
    )


def parse_npy_dtype(descr: str) -> np.dtype:
    if re.fullmatch(r"[<>=|]?O[0-9]*", descr):
        raise MalformedRequest("the .npy file holds pickled objects, which are not taken")
    if not SUPPORTED_DTYPE.fullmatch(descr):
        raise MalformedRequest(
            f"the .npy file's dtype {quote_text(descr)} is not taken; save booleans, numbers of at most 64 "
            "bits, bytes or texts"
        )
    return np.dtype(descr)


def parse_npy_shape(shape: bytes) -> tuple[int, ...]:
    *sizes, last = shape.split(b",", MAX_DIMENSIONS)
    if last.strip():
        sizes.append(last)
    matches = [DIMENSION_SIZE.fullmatch(size) for size in sizes]
    if len(sizes) > MAX_DIMENSIONS or (sizes and b"," not in shape) or not all(matches):
        raise MalformedRequest(
            "the .npy file's shape is malformed: it must be a tuple of at most "
            f"{MAX_DIMENSIONS} sizes, each of at most {MAX_SIZE_DIGITS} digits"
        )
    return tuple(int(match[1]) for match in matches if match)


def make_empty_array(header: NpyHeader) -> np.ndarray:
    # NumPy allocates one element even so; its width is nobody's.
    dtype = np.dtype(f"{header.dtype.kind}1") if header.dtype.kind in "SU" else header.dtype
    if math.prod(filter(None, header.shape)) * dtype.itemsize > MAX_EMPTY_ARRAY_BYTES:
        raise MalformedRequest("the .npy file's shape is of an array that is too large")
    return np.zeros(header.shape, dtype)


def is_valid_unicode(array: np.ndarray) -> bool:
    """Whether every character of a `U` array can be encoded."""
    points = array.view(np.dtype("u4").newbyteorder(array.dtype.byteorder))
    return not ((points > 0x10FFFF) | ((points >= 0xD800) & (points < 0xE000))).any()
