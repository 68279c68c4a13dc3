"""The files benchmarks/results.md and results.json.

The first has the tables of `make bench` and the section of `make bench-count`, the second what the page about
performance is made of.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.run import Run

RESULTS = Path(__file__).with_name("results.md")
MEASURED = Path(__file__).with_name("results.json")
COUNTS_TITLE = "## Instructions per request"
COUNTS_JSON = re.compile(r"```json\n(.*?)```", re.S)


class RecordedCounts(NamedTuple):
    """The machine-readable part of the section of `make bench-count`."""

    python: str
    instructions: Mapping[str, int]


@dataclass(frozen=True)
class MeasuredRun:
    """The machine-readable results of `make bench`. `benchmarks.run.Run` describes the last three."""

    date: str
    machine: str
    seconds: float
    count: int
    ratios: Mapping[str, Sequence[float]]
    tables: Mapping[str, Mapping[str, Mapping[str, float]]]
    values: Mapping[str, float]


def describe_run(run: Run) -> MeasuredRun:
    today = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    return MeasuredRun(
        today, describe_machine(), run.seconds, run.count, run.ratios, run.tables, run.values
    )


def write_measured(measured: MeasuredRun, path: Path = MEASURED) -> None:
    rounded = round_numbers(asdict(measured))
    path.write_text(json.dumps(rounded, indent=1, ensure_ascii=False) + "\n")


def round_numbers(value: Any) -> Any:
    """Return the value with its numbers rounded to four significant digits, for shorter differences."""
    match value:
        case float():
            return float(f"{value:.4g}")
        case dict():
            return {name: round_numbers(item) for name, item in value.items()}
        case list():
            return [round_numbers(item) for item in value]
    return value


def read_measured(path: Path = MEASURED) -> MeasuredRun:
    return MeasuredRun(**json.loads(path.read_text()))


def describe_machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = (names or [platform.machine()])[0]
    return f"{os.cpu_count()} cores ({model}), CPython {platform.python_version()}"


def split_counts(text: str) -> tuple[str, str]:
    """Return the tables of `make bench` and the section of `make bench-count`."""
    tables, title, section = text.partition(COUNTS_TITLE)
    return tables.rstrip() + "\n", title + section


def write_tables(tables: str, path: Path = RESULTS) -> None:
    _, counts = split_counts(path.read_text())
    path.write_text(join(tables, counts))


def write_counts(section: str, path: Path = RESULTS) -> None:
    tables, _ = split_counts(path.read_text())
    path.write_text(join(tables, section))


def join(tables: str, counts: str) -> str:
    return f"{tables.rstrip()}\n\n{counts}" if counts else tables


def read_counts(path: Path = RESULTS) -> RecordedCounts:
    """Return the instructions of each request that the file records; empty if it records none."""
    match = COUNTS_JSON.search(split_counts(path.read_text())[1])
    return RecordedCounts("", {}) if match is None else RecordedCounts(**json.loads(match[1]))
