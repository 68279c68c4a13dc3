"""From families to a page, in either form. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import Enum
from itertools import islice
from typing import Final

from gateway.exposition.families import PAIR, Families, Family, Pair, Sample

OPEN_PARTS: Final = {
    "counter": ("_total", "_created"),
    "summary": ("", "_sum", "_count", "_created"),
    "histogram": ("_bucket", "_sum", "_count", "_created"),
}
# The label that tells the samples of one metric apart.
INNER: Final = {"summary": "quantile", "histogram": "le"}
END: Final = ("le", "+Inf")
EXEMPLARS: Final = {("counter", "_total"), ("histogram", "_bucket")}
CHUNK_LINES: Final = 400
QUOTE: Final = '\\"'
ESCAPE: Final = re.compile(r'\\(.?)|"')


class Form(str, Enum):
    """What a page is written as; the value is its content type."""

    CLASSIC = "text/plain; version=0.0.4; charset=utf-8"
    OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


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
