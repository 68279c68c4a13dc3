"""Run the failed tests of the last run once more: `python -m tests.rerun_failed`.

A test that passes now is flaky. Each is printed; more than `MAX_FLAKY` of them fail the run, so that
flaky tests are mended and not tolerated.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MAX_FLAKY = 2
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
# One worker, and not none: the names of the last run have their groups in them.
RERUN = ("-n", "1", "--dist", "loadgroup", "--last-failed", "--last-failed-no-failures", "none")


def read_failed() -> set[str]:
    return set(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else set()


def main(arguments: list[str]) -> int:
    """Return 0 if every test passes now and few are flaky, else 1."""
    before = read_failed()
    if not before:
        print("the test run ended without a failed test: it was interrupted, or a worker crashed")
        return 1
    command = [sys.executable, "-m", "pytest", *RERUN, *arguments]
    status = subprocess.run(command, check=False).returncode
    failed = read_failed() if status else set()
    flaky = sorted(before - failed)
    for name in flaky:
        print(f"flaky: {name.rpartition('@')[0] or name}")
    if len(flaky) > MAX_FLAKY:
        print(f"{len(flaky)} tests are flaky; at most {MAX_FLAKY} are tolerated")
    return int(status != 0 or len(flaky) > MAX_FLAKY)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
