"""The gateway stays a house that one person can survey."""

from __future__ import annotations

import pytest

from tests.house import Limits, measure_house


def test_rooms_keep_their_limits(subtests: pytest.Subtests) -> None:
    house, limits = measure_house(), Limits()
    sizes = {
        "folders": (house.folders, limits.folders),
        "modules at the top": (house.modules, limits.modules),
        "largest folder": (house.largest_folder[0], limits.files_in_folder),
        "files of the core": (house.count_core(house.files), limits.core_files),
        "lines of the core": (house.count_core(house.lines), limits.core_lines),
        "lines of a capability": (house.largest_capability[0], limits.capability_lines),
        "lines": (sum(house.lines.values()), limits.lines),
    }
    for name, (size, limit) in sizes.items():
        with subtests.test(name):
            assert size <= limit
