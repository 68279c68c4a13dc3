"""Metrics pages: merged as the gateway does, and read as Prometheus' client does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from prometheus_client import Metric, parser
from prometheus_client.openmetrics import parser as open_parser
from prometheus_client.samples import Sample

from gateway.telemetry.exposition import (
    Families,
    PageFormat,
    decode_page,
    encode_page,
    escape_label_value,
    merge_families,
    parse_families,
    split_page_lines,
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
ESCAPED_HELP = (
    '# HELP a_seconds A "quote", a \\\\ and a \\n, and what is \\no \\"escape\\\n'
    "# UNIT a_seconds seconds\n# TYPE a_seconds gauge\na_seconds 1\n"
    "# UNIT b bytes\nb 1\n"
)


def whole(page: str, server: str = "") -> Families:
    return parse_families(split_page_lines(decode_page(page.encode())), server)


def merged(*pages: str, own: str = "", form: PageFormat = PageFormat.PROMETHEUS_TEXT) -> str:
    """The pages of the replicas `r0`, `r1`, … and of the gateway."""
    families = merge_families(whole(own), numbered(pages)).families
    return "".join(encode_page(families, form))


def left_out(own: str, *pages: str) -> Mapping[str, Sequence[str]]:
    """The names that a page loses, by its replica."""
    return merge_families(whole(own), numbered(pages)).left_out


def numbered(pages: tuple[str, ...]) -> dict[str, Families]:
    return {f"r{number}": whole(page, f"r{number}") for number, page in enumerate(pages)}


def alone(page: str, form: PageFormat = PageFormat.PROMETHEUS_TEXT) -> str:
    return merged(own=page, form=form)


def samples(
    page: str, form: PageFormat = PageFormat.PROMETHEUS_TEXT
) -> Counter[tuple[object, ...]]:
    """Return the samples as Prometheus' client reads them."""
    return Counter(key(sample) for family in families_of(page, form) for sample in family.samples)


def families_of(page: str, form: PageFormat) -> list[Metric]:
    if form is PageFormat.PROMETHEUS_TEXT:
        return list(parser.text_string_to_metric_families(page))
    return list(open_parser.text_string_to_metric_families(page))


def key(sample: Sample) -> tuple[object, ...]:
    return sample.name, frozenset(sample.labels.items()), repr(sample.value)


def line(name: str, labels: dict[str, str], value: object) -> str:
    inside = ",".join(f'{label}="{escape_label_value(text)}"' for label, text in labels.items())
    return f"{name}{{{inside}}} {value}\n"
