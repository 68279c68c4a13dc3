"""Triton's datatypes and their NumPy dtypes.

The names are those of the Open Inference Protocol ("Tensor Data Types"). config.pbtxt has the prefix `TYPE_`,
and `TYPE_STRING` for BYTES.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import ml_dtypes
import numpy as np


class DatatypeKind(Enum):
    """A group of datatypes that are checked and converted alike; the value is the word for messages."""

    BOOLEAN = "true or false"
    INTEGER = "integers"
    FLOAT = "numbers"
    BYTES = "strings or bytes"


@dataclass(frozen=True)
class Datatype:
    """A datatype of the protocol, with an example value for messages and documents."""

    name: str
    numpy_dtype: np.dtype
    kind: DatatypeKind
    example: bool | float | str

    @property
    def integer_range(self) -> tuple[int, int]:
        info = np.iinfo(self.numpy_dtype)
        return int(info.min), int(info.max)


INTEGERS = [f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)]
FLOATS = {"FP16": np.float16, "BF16": ml_dtypes.bfloat16, "FP32": np.float32, "FP64": np.float64}
DATATYPES = {
    datatype.name: datatype
    for datatype in (
        Datatype("BOOL", np.dtype(bool), DatatypeKind.BOOLEAN, True),
        *(Datatype(name, np.dtype(name.lower()), DatatypeKind.INTEGER, 1) for name in INTEGERS),
        *(Datatype(name, np.dtype(each), DatatypeKind.FLOAT, 0.5) for name, each in FLOATS.items()),
        Datatype("BYTES", np.dtype(object), DatatypeKind.BYTES, "text"),
    )
}
BF16 = DATATYPES["BF16"]
BYTES = DATATYPES["BYTES"]


def parse_datatype(name: str) -> Datatype:
    """Return the datatype for its name in a model's metadata or config. Raises `KeyError`."""
    name = name.removeprefix("TYPE_")
    return BYTES if name == "STRING" else DATATYPES[name]


def build_bytes_array(values: list[bytes]) -> np.ndarray:
    """Return a flat array of BYTES. NumPy itself would read texts as characters."""
    array = np.empty(len(values), object)
    array[:] = values
    return array
