"""The amount of work as a number that is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

RUNS = 3


def count_calls(work: Callable[[], object]) -> int:
    """How many functions, of Python and of C, `work` calls; the fewest of some runs, as the garbage
    collector may call some in between."""
    return min(_count_once(work) for _ in range(RUNS))


def _count_once(work: Callable[[], object]) -> int:
    count = 0

    def note(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
