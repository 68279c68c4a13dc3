"""Triton's datatypes, in one table; both directions are read from it.

The names are those of the Open Inference Protocol ("Tensor Data Types"); config.pbtxt spells them
`TYPE_FP32`, and strings as `TYPE_STRING`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import ml_dtypes
import numpy as np


class DatatypeKind(Enum):
    """How values of a datatype are checked and converted."""

    BOOLEAN = "true or false"
    INTEGER = "integers"
    FLOAT = "numbers"
    BYTES = "texts or bytes"


@dataclass(frozen=True)
class Datatype:
    """A datatype: its protocol name, the NumPy dtype of its elements, and a value as an example."""

    name: str
    numpy_dtype: np.dtype
    kind: DatatypeKind
    example: bool | float | str

    @property
    def integer_range(self) -> tuple[int, int]:
        """The smallest and largest value of an integer datatype."""
        info = np.iinfo(self.numpy_dtype)
        return int(info.min), int(info.max)


def _integer_datatype(name: str) -> Datatype:
    return Datatype(name, np.dtype(name.lower()), DatatypeKind.INTEGER, 1)


def _float_datatype(name: str, numpy_dtype: type) -> Datatype:
    return Datatype(name, np.dtype(numpy_dtype), DatatypeKind.FLOAT, 0.5)


DATATYPES = {
    datatype.name: datatype
    for datatype in (
        Datatype("BOOL", np.dtype(bool), DatatypeKind.BOOLEAN, True),
        *(_integer_datatype(f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)),
        _float_datatype("FP16", np.float16),
        _float_datatype("BF16", ml_dtypes.bfloat16),
        _float_datatype("FP32", np.float32),
        _float_datatype("FP64", np.float64),
        Datatype("BYTES", np.dtype(object), DatatypeKind.BYTES, "text"),
    )
}
BF16 = DATATYPES["BF16"]
BYTES = DATATYPES["BYTES"]


def parse_datatype(name: str) -> Datatype:
    """The datatype that a metadata's or a config's name means; raises `KeyError`."""
    name = name.removeprefix("TYPE_")
    return BYTES if name == "STRING" else DATATYPES[name]
