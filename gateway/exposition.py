"""Metrics pages of several servers become one valid page: merged by family, as text. Pure.

Pages one after the other are no exposition: a family may have one HELP and one TYPE, and its samples
stand together. Parsing and printing them anew would rename counters, so names, values and times stay as
they are, and a `replica` label is added.

Pages are read in Prometheus' text format 0.0.4, which is all that Triton speaks, and strictly: one bad
line makes Prometheus refuse the whole of a merged page, so it has to cost its own page here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice
from math import isinf
from typing import Final

# What the samples of a family are called: its name and one of these.
PARTS: Final = {
    "counter": ("",),
    "gauge": ("",),
    "untyped": ("",),
    "summary": ("", "_sum", "_count"),
    "histogram": ("", "_bucket", "_sum", "_count"),
}
OPEN_PARTS: Final = {
    "counter": ("_total", "_created"),
    "summary": ("", "_sum", "_count", "_created"),
    "histogram": ("_bucket", "_sum", "_count", "_created"),
}
# The label that tells the samples of one metric apart.
INNER: Final = {"summary": "quantile", "histogram": "le"}
END: Final = ("le", "+Inf")
EXEMPLARS: Final = {("counter", "_total"), ("histogram", "_bucket")}
MAX_LINE: Final = 1 << 16  # of those that are read character by character
CHUNK_LINES: Final = 400

NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
METADATA: Final = re.compile(r"#[ \t]+(HELP|TYPE|UNIT)[ \t]+([^ \t]+)(?:[ \t]+(.*))?")
LINE: Final = re.compile(
    rf"""({NAME.pattern})[ \t]*(?:\{{((?:[^"}}]|"(?:[^"\\]|\\.)*")*)\}})?[ \t]*(.*)"""
)
LABEL_NAME: Final = r"([a-zA-Z_][a-zA-Z0-9_]*)"
LABEL_VALUE: Final = r'"([^"\\]*(?:\\["\\n][^"\\]*)*)"'
PAIR: Final = re.compile(rf"(?<![a-zA-Z0-9_]){LABEL_NAME}={LABEL_VALUE}")
LABEL: Final = re.compile(rf"[ \t]*{LABEL_NAME}[ \t]*=[ \t]*{LABEL_VALUE}[ \t]*(?:,|\Z)")
NUMBER: Final = (
    r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?(?i:inf(?:inity)?)|(?i:nan)"
)
TAIL: Final = re.compile(
    rf"({NUMBER})(?:[ \t]+(-?[0-9]{{1,18}}))?[ \t]*"
    rf"(?:# (\{{(.*)\}} (?:{NUMBER})(?: [0-9]+(?:\.[0-9]*)?)?))?"
)
QUOTE: Final = '\\"'
ESCAPE: Final = re.compile(r'\\(.?)|"')


class NotExposition(ValueError):
    """A page that Prometheus would not read, in a sentence."""


class Form(str, Enum):
    """What a page is written as; the value is its content type."""

    CLASSIC = "text/plain; version=0.0.4; charset=utf-8"
    OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


Pair = tuple[str, str]
# Name, labels as they are written, and the rest of the line: value, perhaps a time, perhaps « # » and an
# exemplar. Strings alone, which cost the garbage collector nothing.
Sample = tuple[str, str, str]


@dataclass
class Family:
    name: str
    type: str = "untyped"
    help: str = ""
    unit: str = ""
    names: set[str] = field(default_factory=set)  # that its samples may have
    samples: list[Sample] = field(default_factory=list)


Families = dict[str, Family]


# Reading.


def lines_of(page: bytes) -> list[str]:
    """Raises `NotExposition`, also of a page that was cut off: its last number may be half a number."""
    try:
        text = page.decode()
    except UnicodeDecodeError as exc:
        raise NotExposition("it is not UTF-8") from exc
    if "\0" in text:
        raise NotExposition("it has a NUL in it")
    if text and not text.endswith("\n"):
        raise NotExposition("its last line does not end")
    return text.split("\n")  # and not splitlines(): a label's value may hold what that splits at


def read(lines: Iterable[str], server: str = "") -> Families:
    """The families of a page; with `server`, each sample gets that value as its `replica` label.

    Raises `NotExposition`.
    """
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
    return reader.families


class Reader:
    """One page, line by line. Raises `ValueError` of a line that is none."""

    def __init__(self, server: str) -> None:
        self.families: Families = {}
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


def joined(pairs: Iterable[Pair]) -> str:
    return ",".join([f'{name}="{value}"' for name, value in pairs])


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


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# Merging.


def merge(own: Families, pages: Mapping[str, Families]) -> tuple[Families, dict[str, list[str]]]:
    """All families, and by page the names of those that had to be left out of it.

    The first page that has a family says what it is. Where a later one gives it another TYPE, or another
    family's samples have its names, two meanings would have one name: what the later page has of it is
    left out. So is what a replica would say in a family of `own`.
    """
    merged = {name: replace(family) for name, family in own.items()}
    owners = {name: family for family in merged.values() for name in family.names}
    left_out: dict[str, list[str]] = {}
    for page, families in pages.items():
        for family in families.values():
            twin = merged.get(family.name)
            meant = twin is None or (twin.type == family.type and family.name not in own)
            if not meant or any(owners.get(name, twin) is not twin for name in family.names):
                left_out.setdefault(page, []).append(family.name)
                continue
            if twin is None:
                twin = merged[family.name] = replace(family, names=set(), samples=[])
            twin.samples += family.samples
            twin.names |= family.names
            owners.update(dict.fromkeys(family.names, twin))
    return merged, left_out


# Writing.


def write(families: Families, form: Form) -> Iterator[str]:
    """The page, in pieces of some hundred lines."""
    lines = open_metrics(families) if form is Form.OPEN_METRICS else classic(families)
    while chunk := "".join(islice(lines, CHUNK_LINES)):
        yield chunk


def classic(families: Families) -> Iterator[str]:
    """In format 0.0.4, which has no exemplars."""
    for family in families.values():
        if family.help:
            yield f"# HELP {family.name} {help_of(family.help)}\n"
        yield f"# TYPE {family.name} {family.type}\n"
        for name, labels, tail in family.samples:
            measured = tail if "#" not in tail else tail.partition(" # ")[0]
            yield f"{name}{labels} {measured}\n"


def open_metrics(families: Families) -> Iterator[str]:
    """In OpenMetrics 1.0, section «Suffixes»: a type that asks for other names than its samples have, or
    for some that another family has, becomes `unknown`; no sample is renamed.

    So do all of Triton's counters, for their names do not end in `_total`. Labels stay as they are, `le`
    too: the spec's canonical numbers are a wish.
    """
    families = with_creation_times(families)
    claims = Counter(name for family in families.values() for name in claimed(family))
    for family in families.values():
        yield from compound(family) if keeps_its_type(family, claims) else simple(family)
    yield "# EOF\n"


def keeps_its_type(family: Family, claims: Mapping[str, int]) -> bool:
    names = {base_of(family) + part for part in parts_of(family)}
    if not names or any(claims[name] > 1 for name in claimed(family)):
        return False
    if family.type == "histogram":
        ends = (sample for sample in family.samples if END in PAIR.findall(sample[1]))
        whole = {metric_of(family, sample) for sample in ends}
        if not whole.issuperset(metric_of(family, sample) for sample in family.samples):
            return False
    return all(name in names for name, _, _ in family.samples)


def with_creation_times(families: Families) -> Families:
    """Prometheus' client writes them as gauges in format 0.0.4; in OpenMetrics each belongs to its metric."""
    folded = dict(families)
    for family in families.values():
        gauge = folded.get(f"{base_of(family)}_created")
        if gauge is None or gauge.type != "gauge" or not parts_of(family):
            continue
        metrics = {metric_of(family, sample) for sample in family.samples}
        if metrics.issuperset(metric_of(family, sample) for sample in gauge.samples):
            folded[family.name] = replace(family, samples=family.samples + gauge.samples)
            del folded[gauge.name]
    return folded


def base_of(family: Family) -> str:
    """What OpenMetrics calls it."""
    if family.type != "counter":
        return family.name
    return family.name.removesuffix("_total") or family.name


def parts_of(family: Family) -> tuple[str, ...]:
    """What the names of its samples end in there; nothing for a type that needs no rule."""
    if family.name == base_of(family) and family.type == "counter":
        return ()
    return OPEN_PARTS.get(family.type, ())


def claimed(family: Family) -> set[str]:
    """The names that nothing else may have beside it there."""
    base = base_of(family)
    return {base, *(base + part for part in parts_of(family))}


def metric_of(family: Family, sample: Sample) -> frozenset[Pair]:
    """The labels that its buckets or quantiles have in common."""
    inner = INNER.get(family.type)
    return frozenset(pair for pair in PAIR.findall(sample[1]) if pair[0] != inner)


def simple(family: Family) -> Iterator[str]:
    """A gauge, or samples of unknown type; of such, each name is a family."""
    kind = "gauge" if family.type == "gauge" else "unknown"
    named: dict[str, list[Sample]] = {}
    for sample in family.samples:
        named.setdefault(sample[0], []).append(sample)
    for name, samples in named.items():
        yield from header(name, kind, family)
        for sample in samples:
            yield line_of(sample)


def compound(family: Family) -> Iterator[str]:
    """A counter, a histogram or a summary: what belongs to one metric stands together."""
    base = base_of(family)
    yield from header(base, family.type, family)
    metrics: dict[frozenset[Pair], list[Sample]] = {}
    for sample in family.samples:
        metrics.setdefault(metric_of(family, sample), []).append(sample)
    for samples in metrics.values():
        for sample in samples:
            part = sample[0][len(base) :]
            yield line_of(sample, exemplar=(family.type, part) in EXEMPLARS)


def header(name: str, kind: str, family: Family) -> Iterator[str]:
    yield f"# TYPE {name} {kind}\n"
    if family.unit and name.endswith(f"_{family.unit}"):
        yield f"# UNIT {name} {family.unit}\n"
    if family.help:
        yield f"# HELP {name} {help_of(family.help, QUOTE)}\n"


def line_of(sample: Sample, *, exemplar: bool = False) -> str:
    """Times are seconds in OpenMetrics, and milliseconds in what was read."""
    name, labels, tail = sample
    if " " in tail:
        measured, mark, rest = tail.partition(" # ")
        value, _, time = measured.partition(" ")
        tail = f"{value} {seconds(time)}" if time else value
        if exemplar:
            tail += mark + rest
    return f"{name}{labels} {tail}\n"


def seconds(milliseconds: str) -> str:
    sign, digits = ("-", milliseconds[1:]) if milliseconds[0] == "-" else ("", milliseconds)
    digits = digits.rjust(4, "0")
    return f"{sign}{digits[:-3]}.{digits[-3:]}"


def help_of(text: str, quote: str = '"') -> str:
    """With no escapes but those that every reader knows."""

    def written(found: re.Match[str]) -> str:
        if found[0] == '"':
            return quote
        if found[1] in ("\\", "n"):
            return found[0]
        return "\\\\" + (quote if found[1] == '"' else found[1])

    return ESCAPE.sub(written, text)
