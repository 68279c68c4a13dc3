"""The memory budget that all requests of the process share."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal, get_args

from prometheus_client import Counter

from gateway.errors import Overloaded, TooLarge

CGROUP_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),  # version 2
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),  # version 1
)
# What holds memory: a body over HTTP, a message over gRPC, either of them while it waits for its model, and a
# response until the client has taken it, over HTTP with the body.
MemoryKind = Literal["body", "message", "held", "response"]
MEMORY_KINDS: Final[tuple[MemoryKind, ...]] = get_args(MemoryKind)
MIN_BUDGET_BYTES: Final = 64 << 20
# Large requests together leave a quarter of the budget to small ones.
SMALL_REQUEST_BYTES: Final = 1 << 20
LARGE_REQUEST_SHARE: Final = 0.75
# Parameters of mallopt(3).
M_ARENA_MAX = -8
M_MMAP_THRESHOLD = -3
M_TRIM_THRESHOLD = -1
LIBC: Final = ctypes.CDLL(None)
STATM: Final = Path("/proc/self/statm")
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
MAX_HEAPS: Final = 2
MIN_MAPPED_BYTES: Final = 1 << 20  # a buffer from this size on gets pages of its own
# Free memory that each heap keeps for the next request: new pages cost more than decoding a NumPy file.
MAX_FREE_HEAP_BYTES: Final = 8 << 20
# The process may grow by this, or this share of the budget, beyond what requests are charged for, before
# large requests get less.
ALLOWED_EXCESS_BYTES: Final = 32 << 20
ALLOWED_EXCESS_SHARE: Final = 0.125
# Free memory has returned to the system when requests have held nothing for so long.
IDLE_S: Final = 10.0


def memory_limit_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # no such file, or its value is "max"
            return min(total, int(path.read_text()))
    return total


def default_budget_bytes() -> int:
    # The rest of the memory is for everything but request and response bodies.
    return max(memory_limit_bytes() // 4, MIN_BUDGET_BYTES)


def limit_heap_growth() -> None:
    """Let freed buffers of requests return to the system instead of staying in many heaps (mallopt(3)).

    By default, glibc has a heap for each thread, and keeps ever larger buffers in them.
    """
    if hasattr(LIBC, "mallopt"):  # other C libraries lack it
        LIBC.mallopt(M_ARENA_MAX, MAX_HEAPS)
        LIBC.mallopt(M_MMAP_THRESHOLD, MIN_MAPPED_BYTES)
        LIBC.mallopt(M_TRIM_THRESHOLD, MAX_FREE_HEAP_BYTES)


def resident_bytes() -> int:
    """Return how much memory of the process is in RAM (proc(5), statm)."""
    return int(STATM.read_bytes().split()[1]) * PAGE_BYTES


def return_free_memory() -> None:
    """Return the free pages of all heaps to the system (malloc_trim(3)).

    glibc does so only at the end of a heap, where a small buffer that is in use may be.
    """
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)


class MemoryBudgetExceeded(Overloaded):
    message = "the requests in progress use the whole memory budget; try again shortly"


class MemoryBudget:
    """The bytes that requests may hold together; large requests may use three quarters of them.

    What the process has grown by beyond that, such as messages that have not arrived completely, leaves less
    to large requests.
    """

    def __init__(self, total_bytes: int, shed_counter: Counter) -> None:
        self._total_bytes = total_bytes
        self._large_bytes = int(total_bytes * LARGE_REQUEST_SHARE)
        self._allowed_excess_bytes = max(
            ALLOWED_EXCESS_BYTES, int(total_bytes * ALLOWED_EXCESS_SHARE)
        )
        self._shed_counter = shed_counter
        self._peak_bytes = 0
        # The size of the process while requests held nothing, and since when they do.
        self._idle_bytes = sys.maxsize
        self._idle_since = time.monotonic()
        self.used_bytes = 0
        self.excess_bytes = 0
        self.bytes_by_kind = dict.fromkeys(MEMORY_KINDS, 0)

    @property
    def used_ratio(self) -> float:
        return self.used_bytes / self._total_bytes

    def has_room(self, needed_bytes: int) -> bool:
        if needed_bytes <= SMALL_REQUEST_BYTES:
            return self.used_bytes + needed_bytes <= self._total_bytes
        return self.used_bytes + needed_bytes <= self._large_bytes - self.excess_bytes

    def reserve(self, kind: MemoryKind, held_bytes: int, more_bytes: int) -> None:
        """Reserve `more_bytes` for a request. Raises `MemoryBudgetExceeded` or `TooLarge`."""
        used_bytes = self.used_bytes + more_bytes
        needed_bytes = held_bytes + more_bytes
        limit = self._total_bytes if needed_bytes <= SMALL_REQUEST_BYTES else self._large_bytes
        if needed_bytes > limit:
            raise TooLarge(
                f"the request needs {needed_bytes} bytes of memory; "
                f"the limit is {limit} (GATEWAY_MAX_BYTES_IN_FLIGHT)"
            )
        if needed_bytes > SMALL_REQUEST_BYTES:
            limit -= self.excess_bytes
        if used_bytes > limit:
            self._shed_counter.labels("memory").inc()
            raise MemoryBudgetExceeded
        self.used_bytes = used_bytes
        self.bytes_by_kind[kind] += more_bytes
        if used_bytes > self._peak_bytes:
            self._peak_bytes = used_bytes

    def release(self, kind: MemoryKind, held_bytes: int) -> None:
        self.used_bytes -= held_bytes
        self.bytes_by_kind[kind] -= held_bytes

    def update_excess(self, resident_bytes: int) -> None:
        """Compare what requests hold with how much larger the process is than while they held nothing."""
        now = time.monotonic()
        if self.used_bytes > SMALL_REQUEST_BYTES:
            self._idle_since = now
        elif resident_bytes < self._idle_bytes or now - self._idle_since > IDLE_S:
            self._idle_bytes = resident_bytes
        other_bytes = resident_bytes - self._idle_bytes - self.used_bytes
        excess_bytes = max(other_bytes - self._allowed_excess_bytes, 0)
        self.excess_bytes = min(excess_bytes, self._large_bytes // 2)

    def has_shrunk(self, by_bytes: int) -> bool:
        """Return whether requests used so much more since the last call that returned True."""
        has_shrunk = self._peak_bytes - self.used_bytes > by_bytes
        if has_shrunk:
            self._peak_bytes = self.used_bytes
        return has_shrunk


class MemoryCharge:
    """The share of one request in the memory budget, until its response is sent."""

    __slots__ = ("_budget", "held_bytes", "is_released", "kind")

    def __init__(self, budget: MemoryBudget, kind: MemoryKind = "body") -> None:
        self._budget = budget
        self.kind = kind
        self.held_bytes = 0
        self.is_released = False  # nothing would release bytes that are added later

    def add(self, more_bytes: int) -> None:
        if self.is_released:
            return
        self._budget.reserve(self.kind, self.held_bytes, more_bytes)
        self.held_bytes += more_bytes

    def change_kind(self, kind: MemoryKind) -> None:
        by_kind = self._budget.bytes_by_kind
        by_kind[self.kind] -= self.held_bytes
        by_kind[kind] += self.held_bytes
        self.kind = kind

    @contextmanager
    def hold(self) -> Iterator[None]:
        kind = self.kind
        self.change_kind("held")
        try:
            yield
        finally:
            # Another of several inferences in one request can have a response already.
            if self.kind == "held":
                self.change_kind(kind)

    def resize(self, held_bytes: int) -> None:
        """Hold this much from now on. Raises as `MemoryBudget.reserve`."""
        if held_bytes > self.held_bytes:
            self.add(held_bytes - self.held_bytes)
        else:
            self._budget.release(self.kind, self.held_bytes - held_bytes)
            self.held_bytes = held_bytes

    def release(self) -> None:
        self.is_released = True
        self._budget.release(self.kind, self.held_bytes)
        self.held_bytes = 0
