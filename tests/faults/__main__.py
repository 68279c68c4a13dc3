"""`make faults`: run every test of the table, compare the numbers, and print the outcome of each row."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from typing import Final

import pytest

from tests.support.fault_table import ROWS, Row
from tests.support.measurements import COMPARE

WORST_FIRST: Final = ("failed", "not run", "skipped", "passed")
MARKS: Final = {"failed": "✗", "not run": "·", "skipped": "–", "passed": "✓"}


class Results:
    """A plugin of pytest's: what became of each test, and what it printed."""

    def __init__(self) -> None:
        self._outcomes: dict[str, set[str]] = defaultdict(set)
        self._printed: dict[str, list[str]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        function = report.nodeid.partition("[")[0]
        if report.when == "call" or not report.passed:
            self._outcomes[function].add(report.outcome)
        if report.when == "call":
            self._printed[function] += report.capstdout.splitlines()

    def outcome(self, row: Row) -> str:
        """The worst of its tests'."""
        found = {each for test in row.node_ids for each in self._outcomes.get(test, {"not run"})}
        return next(outcome for outcome in WORST_FIRST if outcome in found)

    def numbers(self, row: Row) -> list[str]:
        return [line for test in row.node_ids for line in self._printed[test] if line.strip()]

    def show(self) -> None:
        for heading, rows in ROWS.items():
            print(f"\n{heading}")
            for row in rows:
                outcome = self.outcome(row)
                print(f"  {MARKS[outcome]} {row.fault}: {outcome}")
                for line in self.numbers(row):
                    print(f"      {line}")


def main(arguments: list[str]) -> int:
    """pytest's exit status. An interrupt ends the tests, and the table has what there was until then."""
    os.environ[COMPARE] = "1"
    results = Results()
    node_ids = {node_id for rows in ROWS.values() for row in rows for node_id in row.node_ids}
    # The plugin of schemathesis, which none of these needs, turns an interrupt into a failure.
    options = ["-q", "-p", "no:schemathesis", *arguments]
    status = pytest.main([*sorted(node_ids), *options], plugins=[results])
    results.show()
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
