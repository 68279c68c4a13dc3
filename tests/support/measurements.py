"""Numbers that tests measure: printed by `make soak`, which alone compares them with their limits."""

from __future__ import annotations

import math
import os
import re
from contextlib import suppress
from pathlib import Path

COMPARE = "TRITON_GATEWAY_COMPARE_NUMBERS"


def process_tree(pid: int) -> list[int]:
    """The ids of a process and its children: the gateway decodes large bodies and images in some."""
    found = [pid]
    for each in found:
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            with suppress(OSError):  # the thread has just ended
                found += map(int, children.read_text().split())
    return found


def memory_bytes(pid: int) -> int:
    """The resident memory of a process, and what its children do not share with it."""
    resident_kib = 0
    for each in process_tree(pid):
        counted = "Rss" if each == pid else "Private_Clean|Private_Dirty"
        with suppress(OSError):  # it has just ended
            rollup = Path(f"/proc/{each}/smaps_rollup").read_text()
            sizes = re.findall(rf"^(?:{counted}): +(\d+) kB", rollup, re.MULTILINE)
            resident_kib += sum(map(int, sizes))
    return resident_kib * 1024


def forget_peaks(pid: int) -> None:
    """Let the peaks of a gateway's memory begin at what it has now (proc_pid_clear_refs(5))."""
    for each in process_tree(pid):
        Path(f"/proc/{each}/clear_refs").write_text("5")


def peak_bytes(pid: int) -> int:
    """The most memory that a gateway's processes had, each at its own time."""
    statuses = [Path(f"/proc/{each}/status").read_text() for each in process_tree(pid)]
    return sum(int(re.findall(r"VmHWM:\s*(\d+) kB", each)[0]) * 1024 for each in statuses)


def compares_numbers() -> bool:
    return bool(os.environ.get(COMPARE))


def assert_number(
    name: str,
    value: float,
    unit: str = "",
    *,
    at_most: float = math.inf,
    at_least: float = -math.inf,
) -> None:
    """Print the number and its limit; fail beyond the limit where the environment sets `COMPARE`.

    A busy machine can make any time or rate worse, so no other assertion may depend on one.
    """
    limits = [f"at most {at_most:g}"] if at_most < math.inf else []
    limits += [f"at least {at_least:g}"] if at_least > -math.inf else []
    line = f"{name}: {value:.4g} {unit}".rstrip() + f" ({', '.join(limits)})"
    print(line)
    if compares_numbers():
        assert at_least <= value <= at_most, line
