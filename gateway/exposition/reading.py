"""From a page to its families, strictly. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import isinf
from typing import Final

from gateway.exposition.families import (
    LABEL_NAME,
    LABEL_VALUE,
    PAIR,
    PARTS,
    Families,
    Family,
    NotExposition,
    Pair,
    Sample,
    escaped,
    joined,
)

MAX_LINE: Final = 1 << 16  # of those that are read character by character

NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
METADATA: Final = re.compile(r"#[ \t]+(HELP|TYPE|UNIT)[ \t]+([^ \t]+)(?:[ \t]+(.*))?")
LINE: Final = re.compile(
    rf"""({NAME.pattern})[ \t]*(?:\{{((?:[^"}}]|"(?:[^"\\]|\\.)*")*)\}})?[ \t]*(.*)"""
)
LABEL: Final = re.compile(rf"[ \t]*{LABEL_NAME}[ \t]*=[ \t]*{LABEL_VALUE}[ \t]*(?:,|\Z)")
NUMBER: Final = (
    # Each text in one way only: in two, a long one that is none would take the square of its length.
    r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?(?i:inf(?:inity)?)|(?i:nan)"
)
TAIL: Final = re.compile(
    rf"({NUMBER})(?:[ \t]+(-?[0-9]{{1,18}}))?[ \t]*"
    rf"(?:# (\{{(.*)\}} (?:{NUMBER})(?: [0-9]+(?:\.[0-9]*)?)?))?"
)


def text_of(page: bytes) -> str:
    """Raises `NotExposition`, also of a page that was cut off: its last number may be half a number."""
    try:
        text = page.decode()
    except UnicodeDecodeError as exc:
        raise NotExposition("it is not UTF-8") from exc
    if "\0" in text:
        raise NotExposition("it has a NUL in it")
    if text and not text.endswith("\n"):
        raise NotExposition("its last line does not end")
    return text


def lines_of(text: str) -> list[str]:
    return text.split("\n")  # and not splitlines(): a label's value may hold what that splits at


def read(lines: Iterable[str], server: str = "") -> Families:
    """The families of a page; with `server`, each sample gets that value as its `replica` label.

    Raises `NotExposition`.
    """
    return reader_of(lines, server).families


def reader_of(lines: Iterable[str], server: str) -> Reader:
    """It has read all of them. Raises `NotExposition`."""
    reader = Reader(server)
    number = 0
    try:
        for line in lines:
            number += 1
            if line[:1] in " \t":  # or nothing
                reader.line(line.strip(" \t"))
            elif line[0] == "#":
                reader.comment(line)
            else:
                reader.sample(line)
    except ValueError as exc:
        raise NotExposition(f"line {number}: {exc}") from exc
    return reader


class Reader:
    """One page, line by line. Raises `ValueError` of a line that is none."""

    def __init__(self, server: str) -> None:
        self.families: Families = {}
        self.order: list[Family] = []  # whose each sample is
        self._replica = escaped(server)
        self._owners: dict[str, Family] = {}
        self._bare = self._labelled([])
        self._labels: dict[str, str] = {}  # families of one model have the same labels

    def line(self, line: str) -> None:
        if line.startswith("#"):
            self.comment(line)
        elif line:
            self.sample(line)

    def comment(self, line: str) -> None:
        found = METADATA.fullmatch(line)
        if found is None:
            return
        keyword, name, text = found.groups(default="")
        family = self._family(name)
        if family.name != name:
            return  # the name is that of another family's samples, and says no more
        if keyword == "TYPE":
            self._typed(family, text.rstrip(" \t"))
        elif keyword == "HELP":
            family.help = family.help or text
        else:
            family.unit = family.unit or text

    def sample(self, line: str) -> None:
        """The usual ones without a look at each of their characters."""
        name, brace, rest = line.partition("{")
        if brace:
            inside, _, tail = rest.rpartition("} ")
            labels = self._labels.get(inside) or self._plain(inside)
        else:
            name, _, tail = line.partition(" ")
            labels = self._bare
        family = self._owners.get(name)
        if labels is None or family is None:
            name, labels, tail = self._sample(line)
            family = self._family(name)
        elif not (tail.isdigit() and tail.isascii() and len(tail) < 20):
            tail = tail_of(tail)
        family.samples.append((name, labels, tail))
        self.order.append(family)

    def _plain(self, inside: str) -> str | None:
        """Labels without a space, a comma or a brace too many; none if there are such."""
        pairs = PAIR.findall(inside)
        if not pairs or joined(pairs) != inside:
            return None
        labels = self._labels[inside] = self._labelled(pairs)
        return labels

    def _sample(self, line: str) -> Sample:
        """From left to right: a brace may stand in a label's value, or in an exemplar."""
        found = LINE.fullmatch(line) if len(line) <= MAX_LINE else None
        if found is None:
            raise ValueError("it is neither a sample nor a comment")
        name, inside, tail = found.groups(default="")
        return name, self._labelled(pairs_of(inside)), tail_of(tail)

    def _family(self, name: str) -> Family:
        family = self._owners.get(name)
        if family is None:
            if not NAME.fullmatch(name):
                raise ValueError("a name that is none")
            family = self._owners[name] = self.families[name] = Family(name, names={name})
        return family

    def _typed(self, family: Family, kind: str) -> None:
        if kind not in PARTS:
            raise ValueError("a TYPE that is none")
        if family.type == kind:
            return
        if family.samples or family.type != "untyped":
            raise ValueError("a TYPE that comes too late")
        family.type = kind
        for part in PARTS[kind]:
            if self._owners.setdefault(family.name + part, family) is family:
                family.names.add(family.name + part)

    def _labelled(self, pairs: list[Pair]) -> str:
        """With a `replica` label; one that was there is called as Prometheus does in such a case."""
        values = dict(pairs)
        if len(values) < len(pairs) or "__name__" in values:
            raise ValueError("a label twice")
        if self._replica:
            moved = "replica"
            while moved in values:
                moved = f"exported_{moved}"
            pairs = [(moved if name == "replica" else name, value) for name, value in pairs]
            pairs.insert(0, ("replica", self._replica))
        return f"{{{joined(pairs)}}}" if pairs else ""


def pairs_of(inside: str) -> list[Pair]:
    """The labels between the braces."""
    inside = inside.strip(" \t")
    pairs: list[Pair] = []
    position = 0
    while position < len(inside):
        found = LABEL.match(inside, position)
        if found is None:
            raise ValueError("labels that are none")
        pairs.append((found[1], found[2]))
        position = found.end()
    return pairs


def tail_of(text: str) -> str:
    """Value, time and exemplar, with one space between them."""
    found = TAIL.fullmatch(text)
    if found is None:
        raise ValueError("a value that is none")
    value, time, exemplar, labels = found.groups(default="")
    if value[-1] in "0123456789." and isinf(float(value)):
        raise ValueError("a number that is too large")
    if labels:
        pairs_of(labels)
    return value + (f" {time}" if time else "") + (f" # {exemplar}" if exemplar else "")
