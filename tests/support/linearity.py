"""What work costs as its input grows, whatever machine it runs on."""

from __future__ import annotations

import time
from collections.abc import Callable

GROWTH = 8
LEAST_S = 0.001  # below which a measurement says little
Work = Callable[[], object]


def cpu_s(work: Work, rounds: int = 5) -> float:
    """CPU seconds of this thread, in the round that was disturbed least."""
    spent_s = []
    for _ in range(rounds):
        start = time.thread_time()
        work()
        spent_s.append(time.thread_time() - start)
    return min(spent_s)


def assert_linear(work_on: Callable[[int], Work], size: int) -> None:
    """Eight times the input costs less than three times eight times the CPU; squared would be 64 times."""
    small, large = (cpu_s(work_on(each)) for each in (size, GROWTH * size))
    print(f"{small * 1000:.2f} ms of CPU for {size}, {large * 1000:.2f} ms for {GROWTH * size}")
    assert large < 3 * GROWTH * max(small, LEAST_S)
