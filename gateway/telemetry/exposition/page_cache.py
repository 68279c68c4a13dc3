"""A cache for metrics pages: if only values changed since the last page, only these are parsed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from gateway.telemetry.exposition.families import Families, Family
from gateway.telemetry.exposition.parser import decode_page, parse_lines, split_page_lines

# Values that need no validation. Others are a part of the layout.
PLAIN_VALUE: Final = re.compile(r" (-?[0-9]{1,20}(?:\.[0-9]{1,20})?(?:e[+-][0-9]{2})?)\n")

CachedFamily = tuple[Family, list[tuple[str, str]], list[int]]


@dataclass(frozen=True)
class PageLayout:
    """The text between the values, and for each family its samples and the indexes of their values."""

    separators: list[str]
    families: list[CachedFamily]


class PageCache:
    """The layout of the last page of one server."""

    def __init__(self) -> None:
        self._layout: PageLayout | None = None

    def parse_page(
        self, page: bytes, replica: str, iterate_lines: Callable[[list[str]], Iterable[str]] = iter
    ) -> Families:
        """Parse a page like `parser.parse_families`. Raises `InvalidExposition`."""
        text = decode_page(page)
        parts = PLAIN_VALUE.split(text)
        separators, values = parts[::2], parts[1::2]
        layout = self._layout
        if layout is None or layout.separators != separators:
            parser = parse_lines(iterate_lines(split_page_lines(text)), replica)
            families = parser.families
            self._layout = build_page_layout(separators, values, families, parser.sample_families)
            return families
        return {
            family.name: replace(
                family,
                samples=[(*head, values[place]) for head, place in zip(heads, places, strict=True)],
            )
            for family, heads, places in layout.families
        }


def build_page_layout(
    separators: list[str], values: list[str], families: Families, sample_families: list[Family]
) -> PageLayout | None:
    """Return the layout of a page; None unless each value in the text is that of a sample."""
    samples = {name: iter(family.samples) for name, family in families.items()}
    if values != [next(samples[family.name])[2] for family in sample_families]:
        return None
    places: dict[str, list[int]] = {name: [] for name in families}
    for place, family in enumerate(sample_families):
        places[family.name].append(place)
    cached: list[CachedFamily] = []
    for name, family in families.items():
        heads = [sample[:2] for sample in family.samples]
        cached.append((replace(family, samples=[]), heads, places[name]))
    return PageLayout(separators, cached)
