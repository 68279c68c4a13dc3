"""The table of docs/operate/faults.md: each row is shown by tests, which name it in a mark."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.servers import ROOT

ROWS = [
    fault
    for fault in re.findall(
        r"^\| (.+?) \| .+? \|$", (ROOT / "docs/operate/faults.md").read_text(), re.M
    )
    if fault != "fault"
]


def list_marks(file: Path) -> Iterator[tuple[str, list[str]]]:
    """Return the name of each test of a file, and the rows that it says it shows."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            calls = [each for each in node.decorator_list if isinstance(each, ast.Call)]
            marks = [each for each in calls if ast.unparse(each.func) == "pytest.mark.fault"]
            yield node.name, [ast.literal_eval(value) for each in marks for value in each.args]


def test_each_row_has_tests_and_each_mark_a_row() -> None:
    marks = [
        beginning
        for file in (ROOT / "tests").rglob("test_*.py")
        for _, beginnings in list_marks(file)
        for beginning in beginnings
    ]
    rows = {each: [row for row in ROWS if row.startswith(each)] for each in marks}
    assert {each: found for each, found in rows.items() if len(found) != 1} == {}
    assert set(ROWS) - {row for found in rows.values() for row in found} == set()


def test_each_test_of_faults_has_a_row() -> None:
    files = [
        *(ROOT / "tests/core/faults").glob("test_*.py"),
        ROOT / "tests/project/test_attacks.py",
    ]
    without = [
        name
        for file in files
        for name, beginnings in list_marks(file)
        if name.startswith("test_") and not beginnings
    ]
    assert without == []
