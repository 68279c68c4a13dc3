"""A cache for metrics pages: if only values changed since the last page, only these are parsed."""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Final

from gateway.telemetry.exposition.families import Families, Family
from gateway.telemetry.exposition.parser import decode_page, parse_lines, split_page_lines

# Values that need no validation. Others are a part of the layout.
PLAIN_VALUE: Final = re.compile(r" (-?[0-9]{1,20}(?:\.[0-9]{1,20})?(?:e[+-][0-9]{2})?)\n")


@dataclass(frozen=True)
class FamilyLayout:
    """A family without its samples: the names and labels of these, and the indexes of their values.

    A fleet has many of these, so they are lists of shared strings, and an array.
    """

    family: Family
    names: Sequence[str]
    labels: Sequence[str]
    value_places: array[int]

    def fill(self, values: Sequence[str]) -> Family:
        heads = zip(self.names, self.labels, self.value_places, strict=True)
        samples = [(name, labels, values[place]) for name, labels, place in heads]
        return replace(self.family, samples=samples)


class PageCache:
    """The layout of the last page of one server: a hash of the text between the values, and the families."""

    def __init__(self) -> None:
        self._text_hash = b""
        self._layouts: Sequence[FamilyLayout] = ()

    def parse_page(
        self, page: bytes, replica: str, iterate_lines: Callable[[list[str]], Iterable[str]] = iter
    ) -> Families:
        """Parse a page like `parser.parse_families`. Raises `InvalidExposition`."""
        text = decode_page(page)
        parts = PLAIN_VALUE.split(text)
        values = parts[1::2]
        # `decode_page` accepts no NUL.
        text_hash = blake2b("\0".join(parts[::2]).encode()).digest()
        if text_hash == self._text_hash:
            return {each.family.name: each.fill(values) for each in self._layouts}
        parser = parse_lines(iterate_lines(split_page_lines(text)), replica)
        families = parser.families
        if has_plain_values(values, families, parser.sample_families):
            self._text_hash = text_hash
            self._layouts = build_layouts(families, parser.sample_families)
        return families


def has_plain_values(
    values: Sequence[str], families: Families, sample_families: Sequence[Family]
) -> bool:
    """Return whether each value in the text is that of a sample, in the same order."""
    samples = {name: iter(family.samples) for name, family in families.items()}
    return values == [next(samples[family.name])[2] for family in sample_families]


def build_layouts(families: Families, sample_families: Sequence[Family]) -> list[FamilyLayout]:
    value_places = {name: array("L") for name in families}
    for place, family in enumerate(sample_families):
        value_places[family.name].append(place)
    return [
        FamilyLayout(
            family=replace(family, samples=[]),
            names=[sys.intern(sample_name) for sample_name, _, _ in family.samples],
            labels=[labels for _, labels, _ in family.samples],
            value_places=value_places[name],
        )
        for name, family in families.items()
    ]
