"""Triton's datatypes, in one table; both directions are read from it.

The names are those of the Open Inference Protocol ("Tensor Data Types"); config.pbtxt spells them
`TYPE_FP32`, and strings as `TYPE_STRING`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import ml_dtypes
import numpy as np


class Kind(Enum):
    """How values of a datatype are checked and converted."""

    BOOLEAN = "true or false"
    INTEGER = "integers"
    FLOAT = "numbers"
    BYTES = "texts or bytes"


@dataclass(frozen=True)
class Datatype:
    """A datatype: its protocol name, the NumPy dtype of its elements, and a value as an example."""

    name: str
    numpy: np.dtype
    kind: Kind
    example: bool | float | str

    @property
    def range(self) -> tuple[int, int]:
        """The smallest and largest value of an integer datatype."""
        info = np.iinfo(self.numpy)
        return int(info.min), int(info.max)


def _integer(name: str) -> Datatype:
    return Datatype(name, np.dtype(name.lower()), Kind.INTEGER, 1)


def _float(name: str, numpy: type) -> Datatype:
    return Datatype(name, np.dtype(numpy), Kind.FLOAT, 0.5)


DATATYPES = {
    datatype.name: datatype
    for datatype in (
        Datatype("BOOL", np.dtype(bool), Kind.BOOLEAN, True),
        *(_integer(f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)),
        _float("FP16", np.float16),
        _float("BF16", ml_dtypes.bfloat16),
        _float("FP32", np.float32),
        _float("FP64", np.float64),
        Datatype("BYTES", np.dtype(object), Kind.BYTES, "text"),
    )
}
BF16 = DATATYPES["BF16"]
BYTES = DATATYPES["BYTES"]


def datatype(name: str) -> Datatype:
    """The datatype that a metadata's or a config's name means; raises `KeyError`."""
    name = name.removeprefix("TYPE_")
    return BYTES if name == "STRING" else DATATYPES[name]
