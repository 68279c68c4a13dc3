"""Operations on lists that a client made long, in pieces.

A C call over the whole list would keep every other thread waiting as long as it runs, the event loop's too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, Final

import numpy as np

PIECE: Final = 1 << 17  # values, which take the slowest of these some 5 ms


def pieces(values: list[Any]) -> Iterator[list[Any]]:
    if len(values) <= PIECE:
        yield values
        return
    for start in range(0, len(values), PIECE):
        yield values[start : start + PIECE]


def types_in(values: list[Any]) -> set[type]:
    if len(values) <= PIECE:
        return set(map(type, values))
    found: set[type] = set()
    for piece in pieces(values):
        found.update(map(type, piece))
    return found


def lengths_in(values: Sequence[list[Any]]) -> set[int]:
    found: set[int] = set()
    remaining = iter(values)
    for _ in range(0, len(values), PIECE):
        found.update(map(len, islice(remaining, PIECE)))
    return found


def concatenated(values: Sequence[list[Any]]) -> list[Any]:
    """The elements of all lists, one after the other."""
    joined: list[Any] = []
    remaining = chain.from_iterable(values)
    while piece := list(islice(remaining, PIECE)):
        joined += piece
    return joined


def extremes(values: list[Any]) -> tuple[Any, Any]:
    """The smallest and the largest of at least one value."""
    bounds = [(min(piece), max(piece)) for piece in pieces(values)]
    return min(low for low, _ in bounds), max(high for _, high in bounds)


def to_array(values: list[Any], dtype: np.dtype | type) -> np.ndarray:
    """`np.array(values, dtype)`, of numbers or of objects that are no sequences to NumPy."""
    array = np.empty(len(values), dtype)
    for start in range(0, len(values), PIECE):
        array[start : start + PIECE] = np.array(values[start : start + PIECE], dtype)
    return array


def values_of(array: np.ndarray) -> Iterator[Any]:
    """The elements of an array of one dimension, as Python's numbers."""
    for start in range(0, len(array), PIECE):
        yield from array[start : start + PIECE].tolist()
