"""Merged metrics pages, as Prometheus' own tool reads them."""

from __future__ import annotations

import pytest

from tests.support.exposition_pages import (
    CLASHES,
    ESCAPED_HELP,
    NOT_THE_GATEWAYS,
    OWN,
    TWO_OF_A_NAME,
    alone,
    line,
    merged,
    samples,
)
from tests.support.tools import TRITON, check_with_promtool


def test_promtool_reads_merged_pages_that_clash(subtests: pytest.Subtests) -> None:
    pages = {f"clash {number}": merged(one, two) for number, (one, two, _) in enumerate(CLASHES)}
    pages["a replica that uses names of the gateway"] = merged(NOT_THE_GATEWAYS, own=OWN)
    pages["two families of one name"] = merged(TWO_OF_A_NAME, TWO_OF_A_NAME)
    pages["an escaped help text"] = alone(ESCAPED_HELP)
    for name, page in pages.items():
        with subtests.test(name):
            check_with_promtool(page)


def test_promtool_reads_labels_with_any_characters() -> None:
    values = [chr(code) for code in range(1, 0x300)]
    values += ["\u2028", "\\", '"} 1 # {', "\U0001f9ed", ""]
    page = "# HELP a_bytes It.\n# TYPE a_bytes gauge\n" + "".join(
        line("a_bytes", {"x": value}, 1) for value in values
    )
    assert check_with_promtool(merged(page, page)) == []
    assert samples(merged(page)).total() == len(values)


def test_promtool_objects_only_to_names_of_triton() -> None:
    names = {each.split()[2] for each in TRITON.splitlines() if each.startswith("# TYPE")}
    complaints = check_with_promtool(merged(TRITON, TRITON, TRITON))
    assert complaints == check_with_promtool(TRITON)
    assert {complaint.split()[0] for complaint in complaints} <= names
