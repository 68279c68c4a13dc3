"""The seconds that each group of tests took, so that the longest start first."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest

RECORDED: Final = Path(__file__).parents[1] / "data" / "durations.json"


def read_durations() -> dict[str, float]:
    """Return the recorded seconds by group."""
    durations_s: dict[str, float] = json.loads(RECORDED.read_text())
    return durations_s


def record_durations(reports: Iterable[pytest.TestReport]) -> None:
    """Replace the seconds of the groups that were run; xdist appends a group to each node id."""
    durations_s: dict[str, float] = defaultdict(float)
    for report in reports:
        durations_s[report.nodeid.rpartition("@")[2]] += report.duration
    rounded = {group: round(seconds, 1) for group, seconds in durations_s.items()}
    merged = dict(sorted({**read_durations(), **rounded}.items()))
    RECORDED.write_text(json.dumps(merged, indent=1) + "\n")


def group_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    return str(marker.args[0]) if marker else ""
