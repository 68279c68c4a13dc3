"""Metrics pages: merged as the gateway does, and read as Prometheus' client does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from prometheus_client import parser
from prometheus_client.samples import Sample

from gateway.telemetry.exposition import (
    Families,
    encode_page,
    escape_label_value,
    merge_families,
    parse_families,
    split_page,
)

HISTOGRAM = """# TYPE h histogram
h_bucket{le="0.5"} 1
h_bucket{le="+Inf"} 2
h_sum 3
h_count 2
"""
# Two replicas' pages, and the names that are left out of the second.
CLASHES = [
    ("# TYPE a gauge\na 1\n", "# TYPE a gauge\na 1\n", []),
    ("# TYPE a gauge\na 1\n", "# TYPE a counter\na 1\n# TYPE b gauge\nb 1\n", ["a"]),
    ("# TYPE a gauge\na 1\n", "a 1\n", ["a"]),
    (HISTOGRAM, "# TYPE h_count counter\nh_count 1\n", ["h_count"]),
    ("# TYPE h_count counter\nh_count 1\n", HISTOGRAM, ["h"]),
    (HISTOGRAM, HISTOGRAM.replace("histogram", "summary"), ["h", "h_bucket"]),
]
OWN = "# TYPE gateway_scrape_up gauge\ngateway_scrape_up 1\n"
NOT_THE_GATEWAYS = "# TYPE gateway_scrape_up gauge\ngateway_scrape_up 5\n"
TWO_OF_A_NAME = HISTOGRAM + '# TYPE h_count counter\nh_count{x="1"} 1\n'


def whole(page: str, server: str = "") -> Families:
    return parse_families(split_page(page.encode()), server)


def merged(*pages: str, own: str = "") -> str:
    """The pages of the replicas `r0`, `r1`, … and of the gateway."""
    families = merge_families(whole(own), numbered(pages)).families
    return "".join(encode_page(families))


def left_out(own: str, *pages: str) -> Mapping[str, Sequence[str]]:
    """The names that a page loses, by its replica."""
    return merge_families(whole(own), numbered(pages)).left_out


def numbered(pages: tuple[str, ...]) -> dict[str, Families]:
    return {f"r{number}": whole(page, f"r{number}") for number, page in enumerate(pages)}


def alone(page: str) -> str:
    return merged(own=page)


def samples(page: str) -> Counter[tuple[object, ...]]:
    """Return the samples as Prometheus' client reads them."""
    families = parser.text_string_to_metric_families(page)
    return Counter(key(sample) for family in families for sample in family.samples)


def key(sample: Sample) -> tuple[object, ...]:
    return sample.name, frozenset(sample.labels.items()), repr(sample.value)


def line(name: str, labels: dict[str, str], value: object) -> str:
    inside = ",".join(f'{label}="{escape_label_value(text)}"' for label, text in labels.items())
    return f"{name}{{{inside}}} {value}\n" if inside else f"{name} {value}\n"
