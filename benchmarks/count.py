"""The instructions that the gateway executes for one request, counted by valgrind.

Unlike times, they do not depend on the load of the machine: two runs differ by less than 1 %. The client
and the replica are functions in the same process and included, the kernel's work is not. Each request is
sent some times before the counted ones, so that caches are filled.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path

import typer

from benchmarks import results
from benchmarks.in_process import KEY_REQUEST, MARK_FUNCTION, TOKEN_REQUEST, build_requests
from tests.support.servers import ROOT

CHANGE = 0.05
TOTAL = re.compile(r"^totals: (\d+)$", re.M)


def find_valgrind() -> str:
    return shutil.which("valgrind") or sys.exit(
        "make bench-count requires valgrind: apt-get install valgrind"
    )


def count_instructions(warm_up: int, count: int) -> Mapping[str, int]:
    """Return the instructions of one request of each kind."""
    names = list_names()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "counts"
        command = [find_valgrind(), "--quiet", "--tool=callgrind"]
        command += [f"--dump-before={MARK_FUNCTION}", f"--callgrind-out-file={output}"]
        command += [sys.executable, "-m", "benchmarks.in_process"]
        command += ["--warm-up", str(warm_up), "--count", str(count)]
        subprocess.run(command, cwd=ROOT, env=build_environment(), check=True)
        # Each mark ends a file; every second file has the counted requests of one kind.
        files = [Path(f"{output}.{2 * number}") for number in range(1, len(names) + 1)]
        totals = [int(TOTAL.findall(file.read_text())[-1]) for file in files]
    return {name: round(total / count) for name, total in zip(names, totals, strict=True)}


def list_names() -> list[str]:
    return [*build_requests(), KEY_REQUEST, TOKEN_REQUEST]


def build_environment() -> dict[str, str]:
    # The settings and the order of sets must not differ between runs.
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return environment | {"PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)}


def format_section(counts: Mapping[str, int]) -> Iterator[str]:
    yield results.COUNTS_TITLE
    yield f"\n{datetime.now(timezone.utc):%Y-%m-%d}, CPython {platform.python_version()}."
    yield f"\n{str(__doc__).partition(chr(10))[2].strip()}"
    yield "\n| request | instructions |"
    yield "|---|---|"
    yield from (f"| {name} | {count:,} |" for name, count in counts.items())
    document = results.RecordedCounts(platform.python_version(), counts)
    yield f"\n```json\n{json.dumps(document._asdict(), indent=1)}\n```"


def list_changes(previous: Mapping[str, int], current: Mapping[str, int]) -> Iterator[str]:
    """Return a line for each request whose instructions changed by more than 5 %."""
    for name in previous.keys() | current.keys():
        before, now = previous.get(name), current.get(name)
        if before is None or now is None:
            yield f"{name}: only in {'this run' if before is None else 'results.md'}"
        elif abs(now / before - 1) > CHANGE:
            yield f"{name}: {before:,} → {now:,} instructions ({now / before - 1:+.1%})"


def main(warm_up: int = 20, count: int = 100, compare: bool = False) -> None:
    """Print the counts and write them to benchmarks/results.md, or compare them with it."""
    counts = count_instructions(warm_up, count)
    print("\n".join(format_section(counts)))
    if not compare:
        results.write_counts("\n".join(format_section(counts)) + "\n")
        return
    recorded = results.read_counts()
    if recorded.python != platform.python_version():
        print(f"results.md has the counts of CPython {recorded.python or '(none)'}")
    changes = list(list_changes(recorded.instructions, counts))
    print("\n".join(sorted(changes)) or f"no change of more than {CHANGE:.0%}")


if __name__ == "__main__":
    typer.run(main)
