"""Readers for .npy files (NEP 1) and for .npz files, NumPy's archives of arrays, from untrusted sources.

`numpy.lib.format` reads the header, and an array is a view of the file whose size it matches. An archive is a
ZIP file; one limit bounds the inflated bytes of all entries.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final, Literal

import numpy as np
from numpy.lib import format as npy_format

from gateway.errors import MalformedRequest, TooLarge
from gateway.messages import join_names, quote_text
from gateway.tensors.zip_files import DamagedArchive, TooManyEntries, open_zip_file, read_zip_entry

NPY_MAGIC: Final = npy_format.MAGIC_PREFIX
HeaderReader = Callable[..., tuple[tuple[int, ...], bool, np.dtype]]
# By version: the size of the header's length, and what reads the header. Version 3 differs from version 2
# only by UTF-8, in the names of structures, which are not supported.
HEADERS: Final[Mapping[tuple[int, ...], tuple[int, HeaderReader]]] = {
    (1, 0): (2, npy_format.read_array_header_1_0),
    (2, 0): (4, npy_format.read_array_header_2_0),
    (3, 0): (4, npy_format.read_array_header_2_0),
}
# NumPy evaluates the header in Python. A file with 32 dimensions has a header of half this size.
MAX_NPY_HEADER_BYTES: Final = 1024
# NumPy supports 64, and a batch of arrays has one dimension more.
MAX_DIMENSIONS: Final = 32
# The shape of an empty array is bounded separately, because the file size does not bound it.
MAX_EMPTY_ARRAY_BYTES: Final = 1 << 31
MAX_NAMED_FIELDS: Final = 4
NUMBER_TYPES: Final = frozenset(
    ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "V2")
)

# A file that Python 2 wrote is read as well.
warnings.filterwarnings("ignore", "Reading `.npy` or `.npz` file required additional")


def read_npy(data: bytes | memoryview) -> np.ndarray:
    """Return the array of a complete file as a view of `data`. Raises `MalformedRequest`."""
    start = bytes(data[:12])
    version = tuple(start[6:8])
    if not start.startswith(NPY_MAGIC) or version not in HEADERS:
        raise MalformedRequest("the body is not a .npy file of version 1, 2 or 3")
    begin = npy_format.MAGIC_LEN + HEADERS[version][0]
    data_start = begin + int.from_bytes(start[npy_format.MAGIC_LEN : begin], "little")
    if data_start - begin > MAX_NPY_HEADER_BYTES or data_start > len(data):
        raise MalformedRequest(
            "the .npy header must lie within the file and have at most "
            f"{MAX_NPY_HEADER_BYTES} bytes"
        )
    header = bytes(data[npy_format.MAGIC_LEN : data_start])
    shape, is_fortran_order, dtype = parse_npy_header(header, version)
    count = math.prod(shape)
    size_bytes = len(data) - data_start
    if count * dtype.itemsize != size_bytes:
        raise MalformedRequest(
            f"the .npy header declares {count} × {dtype.itemsize} bytes of data; the file has {size_bytes}"
        )
    order: Literal["C", "F"] = "F" if is_fortran_order else "C"
    array: np.ndarray = np.ndarray(shape, dtype, data, data_start, order=order)
    if dtype.kind == "U" and not is_valid_unicode(array):
        raise MalformedRequest("the .npy file contains invalid Unicode characters")
    return array


@lru_cache(64)  # the files for an input of a model have the same header
def parse_npy_header(
    header: bytes, version: tuple[int, ...]
) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return shape, whether the order is Fortran's, and datatype. Raises `MalformedRequest`."""
    read = HEADERS[version][1]
    try:
        shape, is_fortran_order, dtype = read(io.BytesIO(header), MAX_NPY_HEADER_BYTES)
    # NumPy raises ValueError, and Python's parser and `np.dtype` other errors for what nobody writes.
    except Exception:  # noqa: BLE001 - the border to NumPy
        raise MalformedRequest(
            "the .npy header is malformed; it must be a dictionary of 'descr', 'fortran_order' and "
            "'shape', as written by numpy.save"
        ) from None
    check_npy_dtype(dtype)
    check_npy_shape(shape, dtype)
    return shape, is_fortran_order, dtype


def check_npy_dtype(dtype: np.dtype) -> None:
    if dtype.hasobject:
        raise MalformedRequest("the .npy file contains pickled objects, which are not supported")
    if dtype.names is not None:
        fields = join_names(map(quote_text, dtype.names[:MAX_NAMED_FIELDS]))
        raise MalformedRequest(
            f"the .npy file contains a structured array, with the fields {fields}; send an array of numbers "
            "or texts for each input"
        )
    is_text = dtype.kind in "SU" and dtype.itemsize > 0
    if dtype.subdtype is not None or not (is_text or dtype.str[1:] in NUMBER_TYPES):
        raise MalformedRequest(
            f"the .npy dtype {quote_text(str(dtype))} is not supported; use booleans, numbers of at most 64 "
            "bits, bytes or strings"
        )


def check_npy_shape(shape: tuple[int, ...], dtype: np.dtype) -> None:
    is_valid = len(shape) <= MAX_DIMENSIONS and all(
        type(size) is int and size >= 0 for size in shape
    )
    # An array without elements has no data whose size would bound the other dimensions.
    is_empty = 0 in shape
    if not is_valid or (
        is_empty and math.prod(filter(None, shape)) * dtype.itemsize > MAX_EMPTY_ARRAY_BYTES
    ):
        raise MalformedRequest(
            f"the .npy shape is malformed or too large; it can have at most {MAX_DIMENSIONS} sizes"
        )


def is_valid_unicode(array: np.ndarray) -> bool:
    points = np.ascontiguousarray(array).view(np.dtype("u4").newbyteorder(array.dtype.byteorder))
    return not ((points > 0x10FFFF) | ((points >= 0xD800) & (points < 0xE000))).any()


def read_npz(data: bytes, max_bytes: int, max_entries: int) -> dict[str, np.ndarray]:
    """Return the arrays by name. `max_bytes` limits the inflated size of all arrays together.

    Raises `TooLarge` for more bytes or arrays, and `MalformedRequest` for an invalid file.
    """
    arrays: dict[str, np.ndarray] = {}
    used_bytes = 0
    try:
        with open_zip_file(io.BytesIO(data), max_entries) as archive:
            for entry in archive.infolist():
                name = entry.filename.removesuffix(".npy")
                if name in arrays:
                    raise MalformedRequest(
                        f"the .npz file contains two arrays named {quote_text(name)}"
                    )
                content = io.BytesIO()
                for piece in read_zip_entry(archive, entry):
                    used_bytes += len(piece)
                    if used_bytes > max_bytes:
                        raise TooLarge(f"the .npz file inflates to more than {max_bytes} bytes")
                    content.write(piece)
                arrays[name] = read_npy(content.getvalue())
    except TooManyEntries:
        raise TooLarge(f"the .npz file contains more than {max_entries} arrays") from None
    except DamagedArchive as exc:
        raise MalformedRequest(f"the body is not a valid .npz file: {exc}") from None
    return arrays
