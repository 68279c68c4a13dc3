"""The metric families of a page, and the merge of several pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

# Type → suffixes that the names of its samples have after the name of the family.
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
    """A page that Prometheus would reject."""


LabelPair = tuple[str, str]
# Name, labels as written, and the rest of the line: the value, optionally a time, optionally " # " and an
# exemplar. Tuples of strings cost the garbage collector nothing.
Sample = tuple[str, str, str]


@dataclass
class Family:
    name: str
    type: str = "untyped"
    help: str = ""
    unit: str = ""
    sample_names: set[str] = field(default_factory=set)  # allowed for its samples
    samples: list[Sample] = field(default_factory=list)


Families = dict[str, Family]


def escape_label_value(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def join_labels(pairs: Iterable[LabelPair]) -> str:
    return ",".join([f'{name}="{value}"' for name, value in pairs])


@dataclass(frozen=True)
class MergedFamilies:
    """The families of several pages, and by page the names of those that were left out."""

    families: Families
    left_out: Mapping[str, Sequence[str]]


def merge_families(gateway_families: Families, pages: Mapping[str, Families]) -> MergedFamilies:
    """Merge the pages of several servers.

    The first page with a family defines it. A family of a later page is left out if its TYPE differs, if its
    sample names belong to another family, or if the gateway itself has a family of this name.
    """
    merged = {name: replace(family) for name, family in gateway_families.items()}
    owners = {name: family for family in merged.values() for name in family.sample_names}
    left_out: dict[str, list[str]] = {}
    for page, families in pages.items():
        for family in families.values():
            existing = merged.get(family.name)
            is_own = family.name in gateway_families
            is_compatible = existing is None or (existing.type == family.type and not is_own)
            names = family.sample_names
            if not is_compatible or any(owners.get(n, existing) is not existing for n in names):
                left_out.setdefault(page, []).append(family.name)
                continue
            if existing is None:
                existing = merged[family.name] = replace(family, sample_names=set(), samples=[])
            existing.samples += family.samples
            existing.sample_names |= family.sample_names
            owners.update(dict.fromkeys(family.sample_names, existing))
    return MergedFamilies(merged, left_out)
