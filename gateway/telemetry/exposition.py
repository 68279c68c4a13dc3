"""Parsing, merging and encoding of metrics pages in Prometheus' text format, without I/O.

Concatenated pages are invalid: a family must have one HELP and one TYPE, and its samples must be adjacent.
The pages of several servers are therefore merged by family, as text: names, values and timestamps stay
unchanged (a client library would rename counters), and a `replica` label is added.

Pages are parsed strictly in the text format 0.0.4, the only one that Triton supports: one invalid line makes
Prometheus reject the whole merged page, so a page with such a line is left out.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import blake2b
from itertools import islice
from math import isinf
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


# The parser

# Longer lines are not matched with the regular expression SAMPLE_LINE.
MAX_LINE_CHARS: Final = 1 << 16

METRIC_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
METADATA: Final = re.compile(r"#[ \t]+(HELP|TYPE|UNIT)[ \t]+([^ \t]+)(?:[ \t]+(.*))?")
SAMPLE_LINE: Final = re.compile(
    rf"""({METRIC_NAME.pattern})[ \t]*(?:\{{((?:[^"}}]|"(?:[^"\\]|\\.)*")*)\}})?[ \t]*(.*)"""
)
LABEL: Final = re.compile(rf"[ \t]*{LABEL_NAME}[ \t]*=[ \t]*{LABEL_VALUE}[ \t]*(?:,|\Z)")
NUMBER_PATTERN: Final = (
    # Unambiguous: otherwise a long invalid text would take quadratic time.
    r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?(?i:inf(?:inity)?)|(?i:nan)"
)
SAMPLE_TAIL: Final = re.compile(
    rf"({NUMBER_PATTERN})(?:[ \t]+(-?[0-9]{{1,18}}))?[ \t]*"
    rf"(?:# (\{{(.*)\}} (?:{NUMBER_PATTERN})(?: [0-9]+(?:\.[0-9]*)?)?))?"
)


def decode_page(page: bytes) -> str:
    """Decode a page. Raises `InvalidExposition`, also if the last line is incomplete."""
    try:
        text = page.decode()
    except UnicodeDecodeError as exc:
        raise InvalidExposition("invalid UTF-8") from exc
    if "\0" in text:
        raise InvalidExposition("the page contains a NUL character")
    if text and not text.endswith("\n"):
        raise InvalidExposition("the last line is incomplete")
    return text


def split_page_lines(text: str) -> list[str]:
    # splitlines() would split label values at other characters as well.
    return text.split("\n")


def parse_families(lines: Iterable[str], replica: str = "") -> Families:
    """Parse a page; if `replica` is given, add it to each sample as a label. Raises `InvalidExposition`."""
    return parse_lines(lines, replica).families


def parse_lines(lines: Iterable[str], replica: str) -> PageParser:
    parser = PageParser(replica)
    number = 0
    try:
        for line in lines:
            number += 1
            text = line.strip(" \t") if line[:1] in " \t" else line  # it may be empty
            if text[:1] == "#":
                parser.parse_comment(text)
            elif text:
                parser.parse_sample(text)
    except ValueError as exc:
        raise InvalidExposition(f"line {number}: {exc}") from exc
    return parser


class PageParser:
    """A parser of one page, line by line. Its methods raise `ValueError` for an invalid line."""

    def __init__(self, replica: str) -> None:
        self.families: Families = {}
        self.sample_families: list[Family] = []  # the family of each sample, in order
        self._replica_label = escape_label_value(replica)
        self._families_by_sample: dict[str, Family] = {}
        self._default_labels = self._format_labels([])
        self._label_cache: dict[str, str] = {}  # the families of a model have the same labels

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
            self._set_type(family, text.rstrip(" \t"))
        elif keyword == "HELP":
            family.help = family.help or text
        else:
            family.unit = family.unit or text

    def parse_sample(self, line: str) -> None:
        # Ordinary samples take a fast path that does not match the whole line.
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
        """Return the labels, or None unless they are in canonical form (no spaces, no trailing comma)."""
        pairs = LABEL_PAIR.findall(label_text)
        if not pairs or join_labels(pairs) != label_text:
            return None
        labels = self._label_cache[label_text] = self._format_labels(pairs)
        return labels

    def _match_sample(self, line: str) -> Sample:
        # A full match, because label values and exemplars can contain braces.
        match = SAMPLE_LINE.fullmatch(line) if len(line) <= MAX_LINE_CHARS else None
        if match is None:
            raise ValueError("not a valid sample or comment")
        name, inside, tail = match.groups(default="")
        return name, self._format_labels(parse_labels(inside)), normalize_tail(tail)

    def _find_or_add_family(self, name: str) -> Family:
        family = self._families_by_sample.get(name)
        if family is None:
            if not METRIC_NAME.fullmatch(name):
                raise ValueError("invalid metric name")
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
        for part in SAMPLE_SUFFIXES[metric_type]:
            if self._families_by_sample.setdefault(family.name + part, family) is family:
                family.sample_names.add(family.name + part)

    def _format_labels(self, pairs: list[LabelPair]) -> str:
        """Add the `replica` label; an existing one is renamed to `exported_replica`, as in Prometheus."""
        values = dict(pairs)
        if len(values) < len(pairs) or "__name__" in values:
            raise ValueError("duplicate or reserved label")
        if self._replica_label:
            new_name = "replica"
            while new_name in values:
                new_name = f"exported_{new_name}"
            pairs = [(new_name if name == "replica" else name, value) for name, value in pairs]
            pairs.insert(0, ("replica", self._replica_label))
        return f"{{{join_labels(pairs)}}}" if pairs else ""


def parse_labels(label_text: str) -> list[LabelPair]:
    label_text = label_text.strip(" \t")
    pairs: list[LabelPair] = []
    position = 0
    while position < len(label_text):
        match = LABEL.match(label_text, position)
        if match is None:
            raise ValueError("invalid labels")
        pairs.append((match[1], match[2]))
        position = match.end()
    return pairs


def normalize_tail(text: str) -> str:
    """Validate value, time and exemplar, and join them with single spaces."""
    match = SAMPLE_TAIL.fullmatch(text)
    if match is None:
        raise ValueError("invalid value")
    value, time, exemplar, labels = match.groups(default="")
    if value[-1] in "0123456789." and isinf(float(value)):
        raise ValueError("number out of range")
    if labels:
        parse_labels(labels)
    return value + (f" {time}" if time else "") + (f" # {exemplar}" if exemplar else "")


# The cache: if only values changed since the last page, only these are parsed.

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
        """Parse a page like `parse_families`. Raises `InvalidExposition`."""
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


# The encoders, of the Prometheus text format and of OpenMetrics.

OPENMETRICS_SUFFIXES: Final = {
    "counter": ("_total", "_created"),
    "summary": ("", "_sum", "_count", "_created"),
    "histogram": ("_bucket", "_sum", "_count", "_created"),
}
# The label that distinguishes the samples of one metric.
BUCKET_LABELS: Final = {"summary": "quantile", "histogram": "le"}
INFINITE_BUCKET: Final = ("le", "+Inf")
EXEMPLAR_SUFFIXES: Final = {("counter", "_total"), ("histogram", "_bucket")}
CHUNK_LINES: Final = 400
ESCAPED_QUOTE: Final = '\\"'
HELP_ESCAPE: Final = re.compile(r'\\(.?)|"')


class PageFormat(str, Enum):
    """The format of a page; the value is its content type."""

    PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
    OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def encode_page(families: Families, page_format: PageFormat) -> Iterator[str]:
    is_openmetrics = page_format is PageFormat.OPEN_METRICS
    lines = encode_openmetrics(families) if is_openmetrics else encode_prometheus_text(families)
    while chunk := "".join(islice(lines, CHUNK_LINES)):
        yield chunk


def encode_prometheus_text(families: Families) -> Iterator[str]:
    # Format 0.0.4 has no exemplars.
    for family in families.values():
        if family.help:
            yield f"# HELP {family.name} {escape_help(family.help)}\n"
        yield f"# TYPE {family.name} {family.type}\n"
        for name, labels, tail in family.samples:
            measured = tail if "#" not in tail else tail.partition(" # ")[0]
            yield f"{name}{labels} {measured}\n"


def encode_openmetrics(families: Families) -> Iterator[str]:
    """Yield lines of OpenMetrics 1.0 without renaming any sample.

    A type becomes `unknown` if it requires other suffixes than the samples have (section "Suffixes"), or
    names that another family has. This includes Triton's counters, whose names do not end in `_total`.
    Labels stay unchanged, too: the canonical numbers for `le` are only recommended.
    """
    families = merge_created_gauges(families)
    claims = Counter(name for family in families.values() for name in reserved_names(family))
    for family in families.values():
        is_compound = can_keep_type(family, claims)
        yield from encode_compound_family(family) if is_compound else encode_simple_family(family)
    yield "# EOF\n"


def can_keep_type(family: Family, name_counts: Mapping[str, int]) -> bool:
    names = {openmetrics_name(family) + part for part in openmetrics_suffixes(family)}
    if not names or any(name_counts[name] > 1 for name in reserved_names(family)):
        return False
    if family.type == "histogram":
        complete = {
            metric_labels(family, sample)
            for sample in family.samples
            if INFINITE_BUCKET in LABEL_PAIR.findall(sample[1])
        }
        if not complete.issuperset(metric_labels(family, sample) for sample in family.samples):
            return False
    return all(name in names for name, _, _ in family.samples)


def merge_created_gauges(families: Families) -> Families:
    """Merge `_created` gauges, as Prometheus' client writes them in format 0.0.4, into their metrics."""
    merged = dict(families)
    for family in families.values():
        gauge = merged.get(f"{openmetrics_name(family)}_created")
        if gauge is None or gauge.type != "gauge" or not openmetrics_suffixes(family):
            continue
        metrics = {metric_labels(family, sample) for sample in family.samples}
        if metrics.issuperset(metric_labels(family, sample) for sample in gauge.samples):
            merged[family.name] = replace(family, samples=family.samples + gauge.samples)
            del merged[gauge.name]
    return merged


def openmetrics_name(family: Family) -> str:
    if family.type != "counter":
        return family.name
    return family.name.removesuffix("_total") or family.name


def openmetrics_suffixes(family: Family) -> tuple[str, ...]:
    """Return the suffixes that OpenMetrics requires; empty for a type without a rule."""
    if family.name == openmetrics_name(family) and family.type == "counter":
        return ()
    return OPENMETRICS_SUFFIXES.get(family.type, ())


def reserved_names(family: Family) -> set[str]:
    """Return the names that no other family of an OpenMetrics page may use."""
    base = openmetrics_name(family)
    return {base, *(base + part for part in openmetrics_suffixes(family))}


def metric_labels(family: Family, sample: Sample) -> frozenset[LabelPair]:
    """Return the labels that all buckets or quantiles of a metric have in common."""
    inner = BUCKET_LABELS.get(family.type)
    return frozenset(pair for pair in LABEL_PAIR.findall(sample[1]) if pair[0] != inner)


def encode_simple_family(family: Family) -> Iterator[str]:
    # Samples of an unknown type get a family for each name.
    kind = "gauge" if family.type == "gauge" else "unknown"
    samples_by_name: dict[str, list[Sample]] = {}
    for sample in family.samples:
        samples_by_name.setdefault(sample[0], []).append(sample)
    for name, samples in samples_by_name.items():
        yield from encode_metadata(name, kind, family)
        for sample in samples:
            yield encode_sample(sample)


def encode_compound_family(family: Family) -> Iterator[str]:
    """Yield the lines of a counter, histogram or summary, with the samples of each metric together."""
    base = openmetrics_name(family)
    yield from encode_metadata(base, family.type, family)
    metrics: dict[frozenset[LabelPair], list[Sample]] = {}
    for sample in family.samples:
        metrics.setdefault(metric_labels(family, sample), []).append(sample)
    for samples in metrics.values():
        for sample in samples:
            part = sample[0][len(base) :]
            yield encode_sample(sample, can_have_exemplar=(family.type, part) in EXEMPLAR_SUFFIXES)


def encode_metadata(name: str, metric_type: str, family: Family) -> Iterator[str]:
    yield f"# TYPE {name} {metric_type}\n"
    if family.unit and name.endswith(f"_{family.unit}"):
        yield f"# UNIT {name} {family.unit}\n"
    if family.help:
        yield f"# HELP {name} {escape_help(family.help, ESCAPED_QUOTE)}\n"


def encode_sample(sample: Sample, *, can_have_exemplar: bool = False) -> str:
    # Times are in seconds in OpenMetrics, and in milliseconds in the samples.
    name, labels, tail = sample
    if " " in tail:
        measured, mark, rest = tail.partition(" # ")
        value, _, time = measured.partition(" ")
        tail = f"{value} {format_seconds(time)}" if time else value
        if can_have_exemplar:
            tail += mark + rest
    return f"{name}{labels} {tail}\n"


def format_seconds(milliseconds: str) -> str:
    sign, digits = ("-", milliseconds[1:]) if milliseconds[0] == "-" else ("", milliseconds)
    digits = digits.rjust(4, "0")
    return f"{sign}{digits[:-3]}.{digits[-3:]}"


def escape_help(text: str, quote: str = '"') -> str:
    """Return the HELP text with only the escapes that every parser supports."""

    def escape_match(match: re.Match[str]) -> str:
        if match[0] == '"':
            return quote
        if match[1] in ("\\", "n"):
            return match[0]
        return "\\\\" + (quote if match[1] == '"' else match[1])

    return HELP_ESCAPE.sub(escape_match, text)
