"""From a page to its families, strictly. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import isinf
from typing import Final

from gateway.exposition.families import (
    LABEL_NAME,
    LABEL_PAIR,
    LABEL_VALUE,
    SAMPLE_SUFFIXES,
    Families,
    Family,
    InvalidExposition,
    LabelPair,
    Sample,
    escape_label_value,
    join_labels,
)

MAX_LINE_CHARS: Final = 1 << 16  # of those that are read character by character

METRIC_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
METADATA: Final = re.compile(r"#[ \t]+(HELP|TYPE|UNIT)[ \t]+([^ \t]+)(?:[ \t]+(.*))?")
SAMPLE_LINE: Final = re.compile(
    rf"""({METRIC_NAME.pattern})[ \t]*(?:\{{((?:[^"}}]|"(?:[^"\\]|\\.)*")*)\}})?[ \t]*(.*)"""
)
LABEL: Final = re.compile(rf"[ \t]*{LABEL_NAME}[ \t]*=[ \t]*{LABEL_VALUE}[ \t]*(?:,|\Z)")
NUMBER_PATTERN: Final = (
    # Each text in one way only: in two, a long one that is none would take the square of its length.
    r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?(?i:inf(?:inity)?)|(?i:nan)"
)
SAMPLE_TAIL: Final = re.compile(
    rf"({NUMBER_PATTERN})(?:[ \t]+(-?[0-9]{{1,18}}))?[ \t]*"
    rf"(?:# (\{{(.*)\}} (?:{NUMBER_PATTERN})(?: [0-9]+(?:\.[0-9]*)?)?))?"
)


def decode_page(page: bytes) -> str:
    """Raises `NotExposition`, also of a page that was cut off: its last number may be half a number."""
    try:
        text = page.decode()
    except UnicodeDecodeError as exc:
        raise InvalidExposition("it is not UTF-8") from exc
    if "\0" in text:
        raise InvalidExposition("it has a NUL in it")
    if text and not text.endswith("\n"):
        raise InvalidExposition("its last line does not end")
    return text


def split_page_lines(text: str) -> list[str]:
    return text.split("\n")  # and not splitlines(): a label's value may hold what that splits at


def parse_families(lines: Iterable[str], replica: str = "") -> Families:
    """The families of a page; with `server`, each sample gets that value as its `replica` label.

    Raises `NotExposition`.
    """
    return parse_lines(lines, replica).families


def parse_lines(lines: Iterable[str], replica: str) -> PageParser:
    """It has read all of them. Raises `NotExposition`."""
    reader = PageParser(replica)
    number = 0
    try:
        for line in lines:
            number += 1
            if line[:1] in " \t":  # or nothing
                reader.parse_line(line.strip(" \t"))
            elif line[0] == "#":
                reader.parse_comment(line)
            else:
                reader.parse_sample(line)
    except ValueError as exc:
        raise InvalidExposition(f"line {number}: {exc}") from exc
    return reader


class PageParser:
    """One page, line by line. Raises `ValueError` of a line that is none."""

    def __init__(self, replica: str) -> None:
        self.families: Families = {}
        self.sample_families: list[Family] = []  # whose each sample is
        self._replica_label = escape_label_value(replica)
        self._families_by_sample: dict[str, Family] = {}
        self._default_labels = self._format_labels([])
        self._label_cache: dict[str, str] = {}  # families of one model have the same labels

    def parse_line(self, line: str) -> None:
        if line.startswith("#"):
            self.parse_comment(line)
        elif line:
            self.parse_sample(line)

    def parse_comment(self, line: str) -> None:
        found = METADATA.fullmatch(line)
        if found is None:
            return
        keyword, name, text = found.groups(default="")
        family = self._find_or_add_family(name)
        if family.name != name:
            return  # the name is that of another family's samples, and says no more
        if keyword == "TYPE":
            self._set_type(family, text.rstrip(" \t"))
        elif keyword == "HELP":
            family.help = family.help or text
        else:
            family.unit = family.unit or text

    def parse_sample(self, line: str) -> None:
        """The usual ones without a look at each of their characters."""
        name, brace, rest = line.partition("{")
        if brace:
            inside, _, tail = rest.rpartition("} ")
            labels = self._label_cache.get(inside) or self._parse_simple_labels(inside)
        else:
            name, _, tail = line.partition(" ")
            labels = self._default_labels
        family = self._families_by_sample.get(name)
        if labels is None or family is None:
            name, labels, tail = self._match_sample(line)
            family = self._find_or_add_family(name)
        elif not (tail.isdigit() and tail.isascii() and len(tail) < 20):
            tail = normalize_tail(tail)
        family.samples.append((name, labels, tail))
        self.sample_families.append(family)

    def _parse_simple_labels(self, label_text: str) -> str | None:
        """Labels without a space, a comma or a brace too many; none if there are such."""
        pairs = LABEL_PAIR.findall(label_text)
        if not pairs or join_labels(pairs) != label_text:
            return None
        labels = self._label_cache[label_text] = self._format_labels(pairs)
        return labels

    def _match_sample(self, line: str) -> Sample:
        """From left to right: a brace may stand in a label's value, or in an exemplar."""
        found = SAMPLE_LINE.fullmatch(line) if len(line) <= MAX_LINE_CHARS else None
        if found is None:
            raise ValueError("it is neither a sample nor a comment")
        name, inside, tail = found.groups(default="")
        return name, self._format_labels(parse_labels(inside)), normalize_tail(tail)

    def _find_or_add_family(self, name: str) -> Family:
        family = self._families_by_sample.get(name)
        if family is None:
            if not METRIC_NAME.fullmatch(name):
                raise ValueError("a name that is none")
            family = self._families_by_sample[name] = self.families[name] = Family(
                name, sample_names={name}
            )
        return family

    def _set_type(self, family: Family, metric_type: str) -> None:
        if metric_type not in SAMPLE_SUFFIXES:
            raise ValueError("a TYPE that is none")
        if family.type == metric_type:
            return
        if family.samples or family.type != "untyped":
            raise ValueError("a TYPE that comes too late")
        family.type = metric_type
        for part in SAMPLE_SUFFIXES[metric_type]:
            if self._families_by_sample.setdefault(family.name + part, family) is family:
                family.sample_names.add(family.name + part)

    def _format_labels(self, pairs: list[LabelPair]) -> str:
        """With a `replica` label; one that was there is called as Prometheus does in such a case."""
        values = dict(pairs)
        if len(values) < len(pairs) or "__name__" in values:
            raise ValueError("a label twice")
        if self._replica_label:
            moved = "replica"
            while moved in values:
                moved = f"exported_{moved}"
            pairs = [(moved if name == "replica" else name, value) for name, value in pairs]
            pairs.insert(0, ("replica", self._replica_label))
        return f"{{{join_labels(pairs)}}}" if pairs else ""


def parse_labels(label_text: str) -> list[LabelPair]:
    """The labels between the braces."""
    label_text = label_text.strip(" \t")
    pairs: list[LabelPair] = []
    position = 0
    while position < len(label_text):
        found = LABEL.match(label_text, position)
        if found is None:
            raise ValueError("labels that are none")
        pairs.append((found[1], found[2]))
        position = found.end()
    return pairs


def normalize_tail(text: str) -> str:
    """Value, time and exemplar, with one space between them."""
    found = SAMPLE_TAIL.fullmatch(text)
    if found is None:
        raise ValueError("a value that is none")
    value, time, exemplar, labels = found.groups(default="")
    if value[-1] in "0123456789." and isinf(float(value)):
        raise ValueError("a number that is too large")
    if labels:
        parse_labels(labels)
    return value + (f" {time}" if time else "") + (f" # {exemplar}" if exemplar else "")
