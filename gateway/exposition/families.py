"""What a page is made of, and how several become one. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

# What the samples of a family are called: its name and one of these.
SAMPLE_SUFFIXES: Final = {
    "counter": ("",),
    "gauge": ("",),
    "untyped": ("",),
    "summary": ("", "_sum", "_count"),
    "histogram": ("", "_bucket", "_sum", "_count"),
}

LABEL_NAME: Final = r"([a-zA-Z_][a-zA-Z0-9_]*)"
LABEL_VALUE: Final = r'"([^"\\]*(?:\\["\\n][^"\\]*)*)"'
LABEL_PAIR: Final = re.compile(rf"(?<![a-zA-Z0-9_]){LABEL_NAME}={LABEL_VALUE}")


class InvalidExposition(ValueError):
    """A page that Prometheus would not read, in a sentence."""


LabelPair = tuple[str, str]
# Name, labels as they are written, and the rest of the line: value, perhaps a time, perhaps « # » and an
# exemplar. Strings alone, which cost the garbage collector nothing.
Sample = tuple[str, str, str]


@dataclass
class Family:
    name: str
    type: str = "untyped"
    help: str = ""
    unit: str = ""
    sample_names: set[str] = field(default_factory=set)  # that its samples may have
    samples: list[Sample] = field(default_factory=list)


Families = dict[str, Family]


def escape_label_value(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def join_labels(pairs: Iterable[LabelPair]) -> str:
    return ",".join([f'{name}="{value}"' for name, value in pairs])


def merge_families(
    gateway_families: Families, pages: Mapping[str, Families]
) -> tuple[Families, dict[str, list[str]]]:
    """All families, and by page the names of those that had to be left out of it.

    The first page that has a family says what it is. Where a later one gives it another TYPE, or another
    family's samples have its names, two meanings would have one name: what the later page has of it is
    left out. So is what a replica would say in a family of `own`.
    """
    merged = {name: replace(family) for name, family in gateway_families.items()}
    owners = {name: family for family in merged.values() for name in family.sample_names}
    left_out: dict[str, list[str]] = {}
    for page, families in pages.items():
        for family in families.values():
            twin = merged.get(family.name)
            meant = twin is None or (
                twin.type == family.type and family.name not in gateway_families
            )
            if not meant or any(owners.get(name, twin) is not twin for name in family.sample_names):
                left_out.setdefault(page, []).append(family.name)
                continue
            if twin is None:
                twin = merged[family.name] = replace(family, sample_names=set(), samples=[])
            twin.samples += family.samples
            twin.sample_names |= family.sample_names
            owners.update(dict.fromkeys(family.sample_names, twin))
    return merged, left_out
