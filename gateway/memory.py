"""The bytes that requests hold in memory, in one budget for the process."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from gateway.errors import Overloaded, TooLarge
from gateway.metrics import Metrics

CGROUP_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),  # version 2
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),  # version 1
)
MIN_BUDGET_BYTES: Final = 64 << 20
# What large requests hold together leaves a quarter of the budget to small ones.
SMALL_REQUEST_BYTES: Final = 1 << 20
LARGE_REQUEST_SHARE: Final = 0.75


def memory_limit_bytes() -> int:
    """Return the memory that this process may take, in bytes: its control group's limit or all there is."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # there is none, or it is "max"
            return min(total, int(path.read_text()))
    return total


def default_budget_bytes() -> int:
    """Return a quarter of the memory limit: the rest is for what requests do not hold."""
    return max(memory_limit_bytes() // 4, MIN_BUDGET_BYTES)


class MemoryBudgetExceeded(Overloaded):
    """The requests that are being served hold as much memory as they may."""

    def __init__(self) -> None:
        super().__init__(
            "the requests that are being served hold all the memory they may; try again shortly"
        )


class MemoryBudget:
    """Bytes that requests may hold together. A large request may take three quarters of them at most."""

    def __init__(self, total_bytes: int, metrics: Metrics) -> None:
        self._total_bytes = total_bytes
        self._large_bytes = int(total_bytes * LARGE_REQUEST_SHARE)
        self._metrics = metrics
        self.used_bytes = 0

    def reserve(self, held_bytes: int, more_bytes: int) -> None:
        """Take more for a request that holds some already. Raises `OutOfBudget` or `TooLarge`."""
        wanted = held_bytes + more_bytes
        limit = self._total_bytes if wanted <= SMALL_REQUEST_BYTES else self._large_bytes
        if wanted > limit:
            raise TooLarge(
                f"the request needs {wanted} bytes of memory; "
                f"the limit is {limit} (GATEWAY_MAX_BYTES_IN_FLIGHT)"
            )
        if self.used_bytes + more_bytes > limit:
            self._metrics.shed.labels("memory").inc()
            raise MemoryBudgetExceeded
        self.used_bytes += more_bytes

    def release(self, held_bytes: int) -> None:
        self.used_bytes -= held_bytes


class MemoryCharge:
    """What one request holds of the budget, from its first byte until its answer's last."""

    __slots__ = ("_budget", "held_bytes")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.held_bytes = 0

    def add(self, more_bytes: int) -> None:
        """Raises `OutOfBudget` or `TooLarge`."""
        self._budget.reserve(self.held_bytes, more_bytes)
        self.held_bytes += more_bytes

    def release(self) -> None:
        self._budget.release(self.held_bytes)
        self.held_bytes = 0
