"""Parsing, merging and encoding of metrics pages in Prometheus' text format 0.0.4, without I/O.

Concatenated pages are invalid: a family must have one HELP and one TYPE, and its samples must be adjacent.
The pages of several servers are therefore merged by family, as text: names, values and timestamps stay
unchanged (a client library would rename counters), and a `replica` label is added.

Pages are parsed in the form in which Triton and Prometheus' client libraries write them, with one space
between the parts of a line: one invalid line makes Prometheus reject the whole merged page, so a page with
any other line is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
# Type → suffixes that the names of its samples have after the name of the family.
SAMPLE_SUFFIXES: Final = {
    "counter": ("",),
    "gauge": ("",),
    "untyped": ("",),
    "summary": ("", "_sum", "_count"),
    "histogram": ("", "_bucket", "_sum", "_count"),
}

METRIC_NAME: Final = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL_NAME: Final = r"[a-zA-Z_][a-zA-Z0-9_]*"
LABEL_VALUE: Final = r'[^"\\\0]*(?:\\["\\n][^"\\\0]*)*'
LABEL: Final = f'{LABEL_NAME}="{LABEL_VALUE}"'
LABEL_PAIR: Final = re.compile(f'({LABEL_NAME})="({LABEL_VALUE})"')
NUMBER: Final = r"(?:-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?|[+-]Inf|Na[Nn])"
SAMPLE: Final = re.compile(
    rf"({METRIC_NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? ({NUMBER}(?: -?[0-9]{{1,18}})?)"
)
METADATA: Final = re.compile(rf"# (HELP|TYPE) ({METRIC_NAME})(?: (.*))?")
# A regular expression keeps the GIL to its end, so it is not tried on longer lines.
MAX_LINE_CHARS: Final = 1 << 16
CHUNK_LINES: Final = 400


class InvalidExposition(ValueError):
    """A page that Prometheus would reject."""


# Name, labels as written, and value with an optional time.
Sample = tuple[str, str, str]


@dataclass
class Family:
    name: str
    type: str = "untyped"
    help: str = ""
    sample_names: set[str] = field(default_factory=set)  # allowed for its samples
    samples: list[Sample] = field(default_factory=list)


Families = dict[str, Family]


def escape_label_value(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def join_labels(pairs: Iterable[tuple[str, str]]) -> str:
    return ",".join([f'{name}="{value}"' for name, value in pairs])


def split_page(page: bytes) -> list[str]:
    """Return the lines of a page. Raises `InvalidExposition`, also if the last line is incomplete."""
    try:
        text = page.decode()
    except UnicodeDecodeError as exc:
        raise InvalidExposition("invalid UTF-8") from exc
    if text and not text.endswith("\n"):
        raise InvalidExposition("the last line is incomplete")
    # splitlines() would split label values at other characters as well.
    return text.split("\n")


def parse_families(lines: Iterable[str], replica: str = "") -> Families:
    """Parse a page; if `replica` is given, add it to each sample as a label. Raises `InvalidExposition`."""
    parser = PageParser(replica)
    for number, line in enumerate(lines, 1):
        try:
            if line.startswith("#"):
                parser.parse_comment(line)
            elif line:
                parser.parse_sample(line)
        except ValueError as exc:
            raise InvalidExposition(f"line {number}: {exc}") from exc
    return parser.families


class PageParser:
    """A parser of one page, line by line. Its methods raise `ValueError` for an invalid line."""

    def __init__(self, replica: str) -> None:
        self.families: Families = {}
        self._families_by_sample: dict[str, Family] = {}
        self._replica_label = f'replica="{escape_label_value(replica)}"' if replica else ""

    def parse_comment(self, line: str) -> None:
        match = METADATA.fullmatch(line)
        if match is None:
            return
        keyword, name, text = match.groups(default="")
        family = self._find_or_add_family(name)
        if family.name != name:
            # The name belongs to the samples of another family.
            return
        if keyword == "TYPE":
            self._set_type(family, text)
        else:
            family.help = family.help or text

    def parse_sample(self, line: str) -> None:
        match = SAMPLE.fullmatch(line) if len(line) <= MAX_LINE_CHARS else None
        if match is None:
            raise ValueError("not a valid sample or comment")
        name, labels, value = match.groups(default="")
        if self._replica_label:
            labels = self._add_replica_label(labels)
        sample = (name, f"{{{labels}}}" if labels else "", value)
        self._find_or_add_family(name).samples.append(sample)

    def _find_or_add_family(self, name: str) -> Family:
        family = self._families_by_sample.get(name)
        if family is None:
            family = Family(name, sample_names={name})
            self._families_by_sample[name] = self.families[name] = family
        return family

    def _set_type(self, family: Family, metric_type: str) -> None:
        if metric_type not in SAMPLE_SUFFIXES:
            raise ValueError("invalid TYPE")
        if family.type == metric_type:
            return
        if family.samples or family.type != "untyped":
            raise ValueError("TYPE after the first sample, or a second TYPE")
        family.type = metric_type
        for suffix in SAMPLE_SUFFIXES[metric_type]:
            if self._families_by_sample.setdefault(family.name + suffix, family) is family:
                family.sample_names.add(family.name + suffix)

    def _add_replica_label(self, labels: str) -> str:
        """Add the `replica` label; an existing one is renamed to `exported_replica`, as in Prometheus."""
        if not labels:
            return self._replica_label
        if 'replica="' in labels:
            pairs = LABEL_PAIR.findall(labels)
            names = {name for name, _ in pairs}
            new_name = "exported_replica"
            while new_name in names:
                new_name = f"exported_{new_name}"
            labels = join_labels(
                (new_name if name == "replica" else name, value) for name, value in pairs
            )
        return f"{self._replica_label},{labels}"


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


def encode_page(families: Families) -> Iterator[str]:
    lines = encode_lines(families)
    while chunk := "".join(islice(lines, CHUNK_LINES)):
        yield chunk


def encode_lines(families: Families) -> Iterator[str]:
    for family in families.values():
        if family.help:
            yield f"# HELP {family.name} {family.help}\n"
        yield f"# TYPE {family.name} {family.type}\n"
        for name, labels, value in family.samples:
            yield f"{name}{labels} {value}\n"
