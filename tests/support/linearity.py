"""The growth of a cost with its input, on any machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

GROWTH = 8
LEAST_S = 0.001  # below which a measurement says little
Work = Callable[[], object]


def cpu_s(work: Work, rounds: int = 5, enough_s: float = 0.0) -> float:
    """CPU seconds of this thread in the fastest round; a round of at most `enough_s` is the last."""
    least_s = math.inf
    for _ in range(rounds):
        start = time.thread_time()
        work()
        least_s = min(least_s, time.thread_time() - start)
        if least_s <= enough_s:
            break
    return least_s


def assert_linear(work_on: Callable[[int], Work], size: int) -> None:
    """Eight times the input costs less than three times eight times the CPU; squared would be 64 times."""
    small = cpu_s(work_on(size))
    most_s = 3 * GROWTH * max(small, LEAST_S)
    large = cpu_s(work_on(GROWTH * size), enough_s=most_s / 2)
    assert large < most_s, f"{small:.5f} s of CPU for {size}, {large:.5f} s for {GROWTH * size}"
