"""One run of the benchmarks: how long it measures, its progress, and what it has measured."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.load import Measured
from benchmarks.tables import Rounds, Target, format_table, measure_rounds, take_medians


@dataclass
class Run:
    """The length of the measurements, and their results, of which the page and the verdicts are made.

    `ratios` has the values of each row of `verdicts.ROWS` by round; `tables` the medians of each server by
    the name of the table; `values` other numbers of the page.
    """

    seconds: float = 3.0
    count: int = 5
    is_quick: bool = False
    suite: str = ""
    ratios: dict[str, list[float]] = field(default_factory=dict)
    tables: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)

    def report(self, round_number: int, what: str) -> None:
        """Show the progress."""
        text = f"  {self.suite}, round {round_number + 1} of {self.count}: {what}"
        print(text, file=sys.stderr, flush=True)

    def record_ratios(
        self, row: str, measured: Sequence[float], reference: Sequence[float]
    ) -> None:
        """Record the ratio of two values of the same round, for each round."""
        pairs = zip(measured, reference, strict=True)
        self.ratios[row] = [one / other for one, other in pairs]

    def record_cpu(self, row: str, rounds: Rounds, server: str, reference: str) -> None:
        """Record the CPU time per request of a server as a ratio, unless the reference is not installed."""
        if reference in rounds:
            spent, reference_spent = (
                [each.cpu_us for each in rounds[name]] for name in (server, reference)
            )
            self.record_ratios(row, spent, reference_spent)

    def measure(self, targets: Sequence[Target], connections: int, factor: float = 1.0) -> Rounds:
        """Measure the targets in turns, each for `factor` times the seconds of the run."""
        return measure_rounds(
            targets, connections, factor * self.seconds, self.count, report=self.report
        )

    def record_table(self, name: str, rounds: Mapping[str, Sequence[Measured]]) -> None:
        self.tables[name] = {
            server: asdict(take_medians(measured)) for server, measured in rounds.items()
        }

    def tabulate(self, name: str, rounds: Rounds, base: str) -> Iterator[str]:
        """Record the medians of a table, and return its lines."""
        self.record_table(name, rounds)
        yield from format_table(name, rounds, base)
