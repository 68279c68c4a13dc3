"""The table of what is survived: each row is shown by tests that there are, and is what the document says."""

from __future__ import annotations

import ast
import re

from tests.support.fault_table import ROWS
from tests.support.servers import ROOT

ALL = [row for rows in ROWS.values() for row in rows]
NODE_IDS = {node_id for row in ALL for node_id in row.node_ids}


def functions_of(path: str) -> set[str]:
    """The node ids of the test functions in a file."""
    body = ast.parse((ROOT / path).read_text()).body
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = [node.name for node in body if isinstance(node, functions)]
    return {f"{path}::{name}" for name in names if name.startswith("test_")}


def test_every_row_is_shown_by_tests_that_there_are() -> None:
    known = {path: functions_of(path) for path in {each.partition("::")[0] for each in NODE_IDS}}
    assert [each for each in NODE_IDS if each not in known[each.partition("::")[0]]] == []
    assert [row.fault for row in ALL if not row.tests] == []
    assert len({row.fault for row in ALL}) == len(ALL)


def test_every_test_of_this_folder_has_its_row() -> None:
    files = [path.relative_to(ROOT) for path in (ROOT / "tests/faults").glob("test_*.py")]
    here = {
        each for path in files if path.name != "test_rows.py" for each in functions_of(str(path))
    }
    assert here - NODE_IDS == set()


def test_the_document_has_exactly_these_rows() -> None:
    text = (ROOT / "docs/faults.md").read_text()
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    documented = {
        heading: re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.M)
        for heading, section in sections.items()
    }
    header = [("fault", "outcome")]
    assert documented == {
        heading: header + [(row.fault, row.outcome) for row in rows]
        for heading, rows in ROWS.items()
    }
