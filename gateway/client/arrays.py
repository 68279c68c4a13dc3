"""Conversions to and from NumPy's arrays and files: the only module of the client that imports NumPy."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

# NumPy has no BF16, whose values FP32 has as well.
NUMPY_TYPES: Final = {
    "BOOL": "?", "FP16": "f2", "FP32": "f4", "FP64": "f8", "BF16": "f4",
    "UINT8": "u1", "UINT16": "u2", "UINT32": "u4", "UINT64": "u8",
    "INT8": "i1", "INT16": "i2", "INT32": "i4", "INT64": "i8",
}  # fmt: skip


def encode_npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, as_plain_array(array), allow_pickle=False)
    return file.getvalue()


def encode_npz(arrays: Mapping[str, Any]) -> bytes:
    # `numpy.savez` cannot store arrays with the names of its own parameters.
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            archive.writestr(f"{name}.npy", encode_npy(array))
    return file.getvalue()


def as_plain_array(value: Any) -> np.ndarray:
    """Return an array that a NumPy file can store: objects must be texts or bytes. Raises `TypeError`."""
    array = np.asarray(value)
    if array.dtype.kind != "O":
        return array
    kinds = {type(item) for item in array.flat}
    if kinds == {str}:
        return array.astype("U")
    if kinds == {bytes}:
        return array.astype("S")
    raise TypeError("an array of objects must contain texts, or bytes")


def stack_arrays(arrays: Sequence[Any]) -> np.ndarray:
    """Return a batch of arrays. Raises `ValueError` if their shapes differ."""
    return np.stack([as_plain_array(array) for array in arrays])


def to_array(value: Any, datatype: str) -> Any:
    """Return numbers as an array of the datatype, and anything else as it is, such as classifications."""
    dtype = NUMPY_TYPES.get(datatype)
    if dtype is None:
        return value
    try:
        return np.asarray(value, dtype)
    except (TypeError, ValueError):
        return value


def decode_npz(content: bytes, datatypes: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Return the arrays of an archive. Raises `ValueError` or `OSError` if it is none."""
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        # The gateway compresses none: others could take any amount of memory.
        if sum(entry.file_size for entry in archive.zip.infolist()) > len(content):
            raise ValueError("its arrays are larger than the response")
        arrays = {name: archive[name] for name in archive.files}
    return {
        name: widen_bf16(array) if datatypes.get(name) == "BF16" else array
        for name, array in arrays.items()
    }


def widen_bf16(array: np.ndarray) -> np.ndarray:
    """Return numbers whose two bytes NumPy has no type for as FP32: they are its upper half."""
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
