"""The comparison of the outputs of two versions of a model. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

EQUAL = "equal"
CLOSE = "close"
DIFFERENT = "different"
RESULT_RANKS: Final = (EQUAL, CLOSE, DIFFERENT)

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Comparison:
    """The result, and for different outputs the first difference."""

    result: str
    reason: str = ""


def compare_outputs(primary: Arrays, other: Arrays, tolerance: float) -> Comparison:
    """Compare outputs by name. Numbers are close if they differ by at most `tolerance` of the largest one."""
    if primary.keys() != other.keys():
        names = sorted(primary.keys() ^ other.keys())
        return Comparison(DIFFERENT, f"only one of them has the output {names[0]!r}")
    worst = Comparison(EQUAL)
    for name, array in primary.items():
        compared = compare_arrays(name, array, other[name], tolerance)
        worst = max(worst, compared, key=lambda each: RESULT_RANKS.index(each.result))
    return worst


def compare_arrays(
    name: str, primary: np.ndarray, other: np.ndarray, tolerance: float
) -> Comparison:
    if primary.shape != other.shape or primary.dtype != other.dtype:
        forms = (f"{each.dtype} {list(each.shape)}" for each in (primary, other))
        return Comparison(DIFFERENT, f"output {name!r} is {' and '.join(forms)}")
    if is_equal(primary, other):
        return Comparison(EQUAL)
    if primary.dtype.kind not in "iuf" and primary.dtype.name != "bfloat16":
        return Comparison(DIFFERENT, f"output {name!r} has other values")
    with np.errstate(all="ignore"):
        first = primary.astype(np.float64)
        second = other.astype(np.float64)
        difference = np.abs(first - second)
        difference[(first == second) | (np.isnan(first) & np.isnan(second))] = 0
        finite = np.abs(first[np.isfinite(first)])
        scale = float(finite.max()) if finite.size else 0.0
        largest = float(difference.max())
    if largest <= tolerance * scale:  # False for NaN
        return Comparison(CLOSE)
    return Comparison(
        DIFFERENT, f"output {name!r} differs by {largest:.4g}, its largest value is {scale:.4g}"
    )


def is_equal(primary: np.ndarray, other: np.ndarray) -> bool:
    if primary.dtype.kind == "O":
        return bool(np.array_equal(primary, other))
    return primary.tobytes() == other.tobytes()
