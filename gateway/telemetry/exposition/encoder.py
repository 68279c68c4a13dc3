"""Encoders of metrics pages in the Prometheus text format and in OpenMetrics."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import Enum
from itertools import islice
from typing import Final

from gateway.telemetry.exposition.parser import LABEL_PAIR, Families, Family, LabelPair, Sample

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
