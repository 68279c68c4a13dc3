"""A server's next page has the same names and labels, and other values: then only those are read. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from gateway.exposition.families import Families, Family
from gateway.exposition.parser import decode_page, parse_lines, split_page_lines

# Of the values that need no second look; others are part of the layout, until they change.
PLAIN_VALUE: Final = re.compile(r" (-?[0-9]{1,20}(?:\.[0-9]{1,20})?(?:e[+-][0-9]{2})?)\n")

CachedFamily = tuple[Family, list[tuple[str, str]], list[int]]


@dataclass(frozen=True)
class PageLayout:
    """What stands between the values, and each family: its samples less the values, and where those are."""

    separators: list[str]
    families: list[CachedFamily]


class PageCache:
    """Of the last page of one server that it can be told of."""

    def __init__(self) -> None:
        self._layout: PageLayout | None = None

    def parse_page(
        self, page: bytes, replica: str, iterate_lines: Callable[[list[str]], Iterable[str]] = iter
    ) -> Families:
        """As `reading.read`, which it asks if anything but the values is new. Raises `NotExposition`."""
        text = decode_page(page)
        parts = PLAIN_VALUE.split(text)
        between, values = parts[::2], parts[1::2]
        known = self._layout
        if known is None or known.separators != between:
            reader = parse_lines(iterate_lines(split_page_lines(text)), replica)
            self._layout = build_page_layout(
                between, values, reader.families, reader.sample_families
            )
            return reader.families
        return {
            family.name: replace(
                family,
                samples=[(*head, values[place]) for head, place in zip(heads, places, strict=True)],
            )
            for family, heads, places in known.families
        }


def build_page_layout(
    separators: list[str], values: list[str], families: Families, sample_families: list[Family]
) -> PageLayout | None:
    """Nothing of a page that has a value elsewhere than at the end of a sample, or a sample without one."""
    samples = {name: iter(family.samples) for name, family in families.items()}
    if values != [next(samples[family.name])[2] for family in sample_families]:
        return None
    places: dict[str, list[int]] = {name: [] for name in families}
    for place, family in enumerate(sample_families):
        places[family.name].append(place)
    return PageLayout(
        separators,
        [
            (
                replace(family, samples=[]),
                [sample[:2] for sample in family.samples],
                places[family.name],
            )
            for family in families.values()
        ],
    )
