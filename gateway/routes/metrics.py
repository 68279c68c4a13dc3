"""`GET /metrics`: the gateway's own page and every replica's, as one."""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import anyio
from anyio import to_thread
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from gateway.errors import BadUpstream, GatewayError
from gateway.exposition.encoder import PageFormat, encode_page
from gateway.exposition.families import (
    SAMPLE_SUFFIXES,
    Families,
    Family,
    InvalidExposition,
    escape_label_value,
    join_labels,
    merge_families,
)
from gateway.exposition.page_cache import PageCache
from gateway.fleet.health import HealthState
from gateway.fleet.replica import Replica
from gateway.messages import join_names
from gateway.routes.dependencies import ServicesForMetrics
from gateway.routes.request_body import REQUEST_ID_HEADER, build_error_responses

log = logging.getLogger(__name__)
router = APIRouter(tags=["metrics"])

MAX_SCRAPE_TIMEOUT_S: Final = 2.0
SCRAPE_MARGIN_S: Final = 0.25  # for merging, and for the way back to Prometheus
MAX_PAGE_BYTES: Final = 16 << 20
SCRAPE_HEADERS: Final = [(b"accept", b"text/plain;version=0.0.4"), (b"content-length", b"0")]
OPEN_METRICS_TYPES: Final = ("application/openmetrics-text",)
CLASSIC_TYPES: Final = ("text/plain", "text/*", "*/*")
GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS
GZIP_LEVEL: Final = 4
# A thread that reads pages gives the interpreter to the event loop after so many lines.
SLICE_LINES: Final = 100
PAUSE_S: Final = 0.0001
PAGE_BATCH_BYTES: Final = 256 << 10
TEXT_CONTENT: Final = {"schema": {"type": "string"}}
METRICS_RESPONSES: Final = build_error_responses() | {
    200: {
        "description": "The page, in the form that `Accept` asks for.",
        "headers": REQUEST_ID_HEADER | {"Vary": {"required": True, "schema": {"type": "string"}}},
        "content": {"text/plain": TEXT_CONTENT, "application/openmetrics-text": TEXT_CONTENT},
    }
}


@dataclass
class Scrape:
    """What came of asking one replica for its page; without `families` it failed, and why."""

    replica: str
    page_cache: PageCache
    duration_s: float = 0.0
    page: bytes | None = None
    families: Families | None = None
    reason: str = ""


@router.get(
    "/metrics",
    operation_id="metrics",
    summary="The gateway's metrics and every replica's",
    response_class=StreamingResponse,
    responses=METRICS_RESPONSES,
)
async def get_metrics_page(request: Request, services: ServicesForMetrics) -> Response:
    """A replica that does not answer costs its own samples, never the page."""
    headers = request.headers
    timeout_s = parse_scrape_timeout(headers.get("x-prometheus-scrape-timeout-seconds", ""))
    pool = services.pool
    scrapes = await asyncio.gather(
        *(
            scrape_replica(
                replica, timeout_s, is_down=pool.replica_state(replica) is HealthState.DOWN
            )
            for replica in sorted(pool.replicas.values(), key=lambda replica: str(replica.address))
        )
    )
    services.metrics.flush()
    view = list(services.metrics.collector_registry.collect())  # of what the event loop changes
    families = await to_thread.run_sync(
        merge_metrics_pages, services.metrics.collect, view, scrapes
    )
    form = choose_page_format(headers.get("accept", ""))
    page: Iterator[bytes] = (piece.encode() for piece in encode_page(families, form))
    about = {"content-type": form.value, "vary": "Accept, Accept-Encoding"}
    if parse_quality_value(headers.get("accept-encoding", ""), ("gzip", "*")) > 0:
        about["content-encoding"] = "gzip"
        page = gzip_chunks(page)
    return StreamingResponse(batch_chunks(page), headers=about)  # which has each made in a thread


# Asking.


def parse_scrape_timeout(header: str) -> float:
    """How long replicas may take: less than Prometheus waits, and never long."""
    try:
        told_s = float(header)
    except ValueError:
        told_s = MAX_SCRAPE_TIMEOUT_S
    limit_s = min(told_s, MAX_SCRAPE_TIMEOUT_S) if told_s > 0 else MAX_SCRAPE_TIMEOUT_S
    return max(limit_s - SCRAPE_MARGIN_S, limit_s / 2)


async def scrape_replica(replica: Replica, timeout_s: float, *, is_down: bool) -> Scrape:
    """One that is known to be down is not asked."""
    scrape = Scrape(replica.name, replica.page_cache, reason="it is down")
    if is_down:
        return scrape
    scrape.reason = f"no answer within {timeout_s:g} s"
    began = time.perf_counter()
    with anyio.move_on_after(timeout_s):
        try:
            scrape.page = await fetch_metrics_page(replica, timeout_s)
        except GatewayError as exc:
            scrape.reason = exc.detail
    scrape.duration_s = time.perf_counter() - began
    return scrape


async def fetch_metrics_page(replica: Replica, timeout_s: float) -> bytes:
    answer = await replica.metrics.send(b"GET", b"/metrics", SCRAPE_HEADERS, timeout_s=timeout_s)
    try:
        if answer.status != 200:
            raise BadUpstream(f"it answers {answer.status}")
        page = bytearray()
        while chunk := await answer.next_chunk():
            page += chunk
            if len(page) > MAX_PAGE_BYTES:
                raise BadUpstream("its page is too large")
        return bytes(page)
    finally:
        answer.close()


# Merging, in a thread.


def merge_metrics_pages(
    collect_own: Callable[[], Iterable[Metric]],
    view_metrics: Iterable[Metric],
    scrapes: Sequence[Scrape],
) -> Families:
    """The families of the gateway's own metrics, of this scrape's gauges, and of all replicas."""
    parse_scrapes(scrapes)
    pages = {scrape.replica: scrape.families for scrape in scrapes if scrape.families is not None}
    metrics = chain(collect_own(), view_metrics, collect_scrape_gauges(scrapes))
    families, left_out = merge_families(convert_metrics(metrics), pages)
    for replica, names in left_out.items():
        log.warning(
            "left out of the metrics of the replica %s, because other servers' mean something else: %s",
            replica,
            join_names(names),
        )
    return families


def parse_scrapes(scrapes: Sequence[Scrape]) -> None:
    for scrape in scrapes:
        if scrape.page is not None:
            try:
                scrape.families = scrape.page_cache.parse_page(
                    scrape.page, scrape.replica, iterate_with_pauses
                )
                time.sleep(PAUSE_S)
            except InvalidExposition as exc:
                scrape.reason = f"its page is no exposition: {exc}"
        if scrape.families is None:
            log.info("no metrics of the replica %s: %s", scrape.replica, scrape.reason)


def iterate_with_pauses(lines: Sequence[str]) -> Iterator[str]:
    """With naps: without them a request on the event loop would wait for all of it."""
    for start in range(0, len(lines), SLICE_LINES):
        yield from lines[start : start + SLICE_LINES]
        time.sleep(PAUSE_S)


def convert_metrics(metrics: Iterable[Metric]) -> Families:
    """Of prometheus_client's objects, named as in the classic form."""
    families: Families = {}
    for metric in metrics:
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        family = families[name] = Family(name, metric.type, metric.documentation)
        family.sample_names = {name + part for part in SAMPLE_SUFFIXES[metric.type]}
        for number, (part, labels, value, *_) in enumerate(metric.samples, 1):
            inside = join_labels(
                (label, escape_label_value(text)) for label, text in labels.items()
            )
            written = f"{{{inside}}}" if inside else ""
            family.samples.append((part, written, floatToGoString(value)))  # type: ignore[no-untyped-call]
            if not number % SLICE_LINES:
                time.sleep(PAUSE_S)
    return families


def collect_scrape_gauges(scrapes: Sequence[Scrape]) -> Iterator[Metric]:
    """Of this scrape alone, and so not kept among the gateway's own metrics, which workers add up."""
    up = GaugeMetricFamily(
        "gateway_scrape_up", "1 if the replica's metrics are in this page.", labels=["replica"]
    )
    took = GaugeMetricFamily(
        "gateway_scrape_duration_seconds", "How long the replica's page took.", labels=["replica"]
    )
    for scrape in scrapes:
        up.add_metric([scrape.replica], float(scrape.families is not None))
        took.add_metric([scrape.replica], scrape.duration_s)
    yield from (up, took)


def batch_chunks(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Of such a size that it is worth the way to a thread and back."""
    batch = bytearray()
    for piece in chunks:
        batch += piece
        if len(batch) >= PAGE_BATCH_BYTES:
            yield bytes(batch)
            batch.clear()
        time.sleep(PAUSE_S)
    yield bytes(batch)


def gzip_chunks(chunks: Iterator[bytes]) -> Iterator[bytes]:
    packer = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_WINDOW)
    for piece in chunks:
        yield packer.compress(piece)
    yield packer.flush()


# What is asked for.


def choose_page_format(accept: str) -> PageFormat:
    """OpenMetrics for who would rather have it; the classic form for everybody else."""
    wanted = parse_quality_value(accept, OPEN_METRICS_TYPES, "1.0.0")
    open_metrics = wanted > 0 and wanted >= parse_quality_value(accept, CLASSIC_TYPES, "0.0.4")
    return PageFormat.OPEN_METRICS if open_metrics else PageFormat.PROMETHEUS_TEXT


def parse_quality_value(header: str, names: Sequence[str], version: str = "") -> float:
    """What the header gives to the first of these names that it has (RFC 9110, section 12.4.2)."""
    found: dict[str, float] = {}
    for entry in header.lower().split(","):
        name, *told = (part.strip() for part in entry.split(";"))
        parameters = dict(part.partition("=")[::2] for part in told)
        try:
            weight = float(parameters.get("q", "1"))
        except ValueError:
            continue
        if 0 <= weight <= 1 and parameters.get("version", version).strip('"') == version:
            found[name] = max(found.get(name, 0.0), weight)
    return next((found[name] for name in names if name in found), 0.0)
