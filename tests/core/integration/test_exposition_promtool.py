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


@pytest.mark.parametrize(("first", "second"), [(first, second) for first, second, _ in CLASHES])
def test_what_is_left_of_pages_that_differ_can_be_read(first: str, second: str) -> None:
    check_with_promtool(merged(first, second))


def test_what_is_left_of_a_page_that_speaks_for_the_gateway_can_be_read() -> None:
    check_with_promtool(merged(NOT_THE_GATEWAYS, own=OWN))


def test_two_families_of_one_name_can_be_read() -> None:
    check_with_promtool(merged(TWO_OF_A_NAME, TWO_OF_A_NAME))


def test_escaped_help_can_be_read() -> None:
    check_with_promtool(alone(ESCAPED_HELP))


def test_labels_with_anything_in_them_can_be_read() -> None:
    values = [chr(code) for code in range(1, 0x300)] + [
        "\u2028",
        "\\",
        '"} 1 # {',
        "\U0001f9ed",
        "",
    ]
    page = "# HELP a_bytes It.\n# TYPE a_bytes gauge\n" + "".join(
        line("a_bytes", {"x": value}, 1) for value in values
    )
    assert check_with_promtool(merged(page, page)) == []
    assert samples(merged(page)).total() == len(values)


def test_of_a_fleets_page_only_tritons_names_are_odd() -> None:
    names = {each.split()[2] for each in TRITON.splitlines() if each.startswith("# TYPE")}
    complaints = check_with_promtool(merged(TRITON, TRITON, TRITON))
    assert complaints == check_with_promtool(TRITON)
    assert {complaint.split()[0] for complaint in complaints} <= names
