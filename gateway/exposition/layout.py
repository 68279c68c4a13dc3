"""A server's next page has the same names and labels, and other values: then only those are read. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from gateway.exposition.families import Families, Family
from gateway.exposition.reading import lines_of, reader_of, text_of

# Of the values that need no second look; others are part of the layout, until they change.
VALUE: Final = re.compile(r" (-?[0-9]{1,20}(?:\.[0-9]{1,20})?(?:e[+-][0-9]{2})?)\n")

Row = tuple[Family, list[tuple[str, str]], list[int]]


@dataclass(frozen=True)
class Known:
    """What stands between the values, and each family: its samples less the values, and where those are."""

    between: list[str]
    rows: list[Row]


class Layout:
    """Of the last page of one server that it can be told of."""

    def __init__(self) -> None:
        self._known: Known | None = None

    def read(
        self, page: bytes, server: str, lines: Callable[[list[str]], Iterable[str]] = iter
    ) -> Families:
        """As `reading.read`, which it asks if anything but the values is new. Raises `NotExposition`."""
        text = text_of(page)
        parts = VALUE.split(text)
        between, values = parts[::2], parts[1::2]
        known = self._known
        if known is None or known.between != between:
            reader = reader_of(lines(lines_of(text)), server)
            self._known = known_of(between, values, reader.families, reader.order)
            return reader.families
        return {
            family.name: replace(
                family,
                samples=[(*head, values[place]) for head, place in zip(heads, places, strict=True)],
            )
            for family, heads, places in known.rows
        }


def known_of(
    between: list[str], values: list[str], families: Families, order: list[Family]
) -> Known | None:
    """Nothing of a page that has a value elsewhere than at the end of a sample, or a sample without one."""
    samples = {name: iter(family.samples) for name, family in families.items()}
    if values != [next(samples[family.name])[2] for family in order]:
        return None
    places: dict[str, list[int]] = {name: [] for name in families}
    for place, family in enumerate(order):
        places[family.name].append(place)
    return Known(
        between,
        [
            (
                replace(family, samples=[]),
                [sample[:2] for sample in family.samples],
                places[family.name],
            )
            for family in families.values()
        ],
    )
