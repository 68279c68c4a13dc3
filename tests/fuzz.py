"""`make fuzz`: mutate bytes for every parser, for ten minutes (MINUTES=10), and print a table.

Another SEED gives other mutations. Fails on an error that is not a refusal, on more CPU time than the
bytes may take, and on memory that grows.
"""

from __future__ import annotations

import os
import resource
import sys
import time

from tests.support.fuzz_targets import targets
from tests.support.fuzzing import fuzz

MIB = 1 << 20
MAX_GROWTH_BYTES = 256 * MIB


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(minutes: float, seed: int) -> int:
    found = targets()
    share_s = minutes * 60 / len(found)
    failures: list[str] = []
    first = 0
    for target in found:
        findings = fuzz(target, seed, until=time.monotonic() + share_s)
        first = first or peak_bytes()
        failures += [f"{target.name}: {failure}" for failure in findings.failures]
        print(
            f"{target.name:40} {findings.calls:8} calls {findings.refused:8} refused, "
            f"slowest {findings.slowest_s * 1000:5.1f} ms for 64 KiB, {peak_bytes() / MIB:.0f} MiB",
            flush=True,
        )
    for failure in failures:
        print(failure)
    grown = peak_bytes() - first
    print(f"{len(failures)} failures; memory grew by {grown / MIB:.0f} MiB")
    return int(bool(failures) or grown > MAX_GROWTH_BYTES)


if __name__ == "__main__":
    sys.exit(main(float(os.environ.get("MINUTES", "10")), int(os.environ.get("SEED", "1"))))
