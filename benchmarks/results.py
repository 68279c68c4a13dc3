"""The file benchmarks/results.md: the tables of `make bench`, and the section of `make bench-count`."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).with_name("results.md")
COUNTS_TITLE = "## Instructions per request"
COUNTS_JSON = re.compile(r"```json\n(.*?)```", re.S)


class RecordedCounts(NamedTuple):
    """The machine-readable part of the section of `make bench-count`."""

    python: str
    instructions: Mapping[str, int]


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
