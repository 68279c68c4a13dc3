"""A folder that has reached its budget of lines keeps it."""

from __future__ import annotations

import pytest

from tests.house import BUDGETS, count_lines


def test_folder_keeps_an_enforced_budget(subtests: pytest.Subtests) -> None:
    lines = count_lines()
    for room, budget in BUDGETS.items():
        if budget.is_enforced:
            with subtests.test(room):
                assert lines[room] <= budget.lines, "raise the budget, and say why in its reason"
