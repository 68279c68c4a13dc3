"""`GET /metrics`: one page with the metrics of the gateway and of every replica."""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Final

import anyio
from anyio import to_thread
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

from gateway.errors import BadUpstream, GatewayError
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.replica import Replica
from gateway.headers import parse_accept
from gateway.messages import join_names
from gateway.repository.collector import replica_gauge
from gateway.routes.dependencies import ServicesForMetrics
from gateway.routes.openapi import (
    STRING_CONTENT,
    STRING_SCHEMA,
    build_error_responses,
    build_response,
)
from gateway.services import Services
from gateway.telemetry.exposition import (
    CONTENT_TYPE,
    SAMPLE_SUFFIXES,
    Families,
    Family,
    InvalidExposition,
    encode_page,
    escape_label_value,
    join_labels,
    merge_families,
    parse_families,
    split_page,
)

METRICS_RESPONSES: Final = build_error_responses() | {
    200: build_response(
        "The page, in Prometheus' text format 0.0.4.",
        {"text/plain": STRING_CONTENT},
        {"Vary": {"required": True, "schema": STRING_SCHEMA}},
    )
}


log = logging.getLogger(__name__)
router = APIRouter(tags=["metrics"])

MAX_SCRAPE_TIMEOUT_S: Final = 2.0
SCRAPE_MARGIN_S: Final = 0.25  # left for merging the pages and sending the response
MAX_PAGE_BYTES: Final = 16 << 20
SCRAPE_HEADERS: Final = [(b"accept", b"text/plain;version=0.0.4")]
GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS
GZIP_LEVEL: Final = 4
# A thread that parses pages releases the GIL to the event loop after this number of lines.
SLICE_LINES: Final = 100
PAUSE_S: Final = 0.0001
PAGE_BATCH_BYTES: Final = 256 << 10


@dataclass
class Scrape:
    """The result of scraping one replica. If it failed, `families` is None and `reason` says why."""

    replica: str
    duration_s: float = 0.0
    page: bytes | None = None
    families: Families | None = None
    reason: str = ""


@router.get(
    "/metrics",
    operation_id="metrics",
    summary="Metrics of the gateway and all replicas",
    response_class=StreamingResponse,
    responses=METRICS_RESPONSES,
)
async def get_metrics_page(request: Request, services: ServicesForMetrics) -> Response:
    """Return the merged metrics. If a replica does not respond, only its samples are missing."""
    headers = request.headers
    timeout_s = parse_scrape_timeout(headers.get("x-prometheus-scrape-timeout-seconds", ""))
    async with services.metrics_page_turns:
        families = await scrape_fleet(services, timeout_s)
    page: Iterator[bytes] = (piece.encode() for piece in encode_page(families))
    response_headers = {"content-type": CONTENT_TYPE, "vary": "Accept-Encoding"}
    if accepts_gzip(headers.get("accept-encoding", "")):
        response_headers["content-encoding"] = "gzip"
        page = gzip_chunks(page)
    pieces = iterate_in_thread(batch_chunks(page), services.metrics_page_threads)
    return StreamingResponse(pieces, headers=response_headers)


async def iterate_in_thread(
    pieces: Iterator[bytes], limiter: anyio.CapacityLimiter
) -> AsyncIterator[bytes]:
    while (piece := await to_thread.run_sync(next, pieces, None, limiter=limiter)) is not None:
        yield piece


# Scraping.


async def scrape_fleet(services: Services, timeout_s: float) -> Families:
    is_enabled = services.settings.metrics_replicas
    replicas = sorted(services.pool.replicas.values(), key=attrgetter("name")) if is_enabled else []
    scrapes = await asyncio.gather(
        *(scrape_replica(services.pool, replica, timeout_s) for replica in replicas)
    )
    services.metrics.flush()
    # Collected here, because these metrics read state that the event loop changes.
    loop_metrics = list(services.metrics.collector_registry.collect())
    return await to_thread.run_sync(
        merge_metrics_pages, services.metrics.collect, loop_metrics, scrapes
    )


def parse_scrape_timeout(header: str) -> float:
    try:
        prometheus_s = float(header)
    except ValueError:
        prometheus_s = MAX_SCRAPE_TIMEOUT_S
    limit_s = min(prometheus_s, MAX_SCRAPE_TIMEOUT_S) if prometheus_s > 0 else MAX_SCRAPE_TIMEOUT_S
    return max(limit_s - SCRAPE_MARGIN_S, limit_s / 2)


async def scrape_replica(pool: ReplicaPool, replica: Replica, timeout_s: float) -> Scrape:
    scrape = Scrape(replica.name, reason="the replica is down")
    if not pool.is_live(replica):
        return scrape
    scrape.reason = f"no response within {timeout_s:g} s"
    started = time.perf_counter()
    with anyio.move_on_after(timeout_s):
        try:
            scrape.page = await fetch_metrics_page(replica, timeout_s)
        except GatewayError as exc:
            scrape.reason = exc.detail
    scrape.duration_s = time.perf_counter() - started
    return scrape


async def fetch_metrics_page(replica: Replica, timeout_s: float) -> bytes:
    response = await replica.metrics.request(
        b"GET",
        b"/metrics",
        headers=SCRAPE_HEADERS,
        timeout_s=timeout_s,
        max_bytes=MAX_PAGE_BYTES,
    )
    if response.status != 200:
        raise BadUpstream(f"the replica returned status {response.status}")
    return response.body


# Merging, in a thread.


def merge_metrics_pages(
    collect_own: Callable[[], Iterable[Metric]],
    loop_metrics: Iterable[Metric],
    scrapes: Sequence[Scrape],
) -> Families:
    parse_scrapes(scrapes)
    pages = {scrape.replica: scrape.families for scrape in scrapes if scrape.families is not None}
    metrics = chain(collect_own(), loop_metrics, collect_scrape_gauges(scrapes))
    merged = merge_families(convert_metrics(metrics), pages)
    for replica, names in merged.left_out.items():
        message = "omitted metrics of replica %s whose types differ from those of other servers: %s"
        log.warning(message, replica, join_names(names))
    return merged.families


def parse_scrapes(scrapes: Sequence[Scrape]) -> None:
    for scrape in scrapes:
        if scrape.page is not None:
            try:
                lines = iterate_with_pauses(split_page(scrape.page))
                scrape.families = parse_families(lines, scrape.replica)
            except InvalidExposition as exc:
                scrape.reason = f"invalid metrics page: {exc}"
            scrape.page = None  # the pages of a large fleet would fill the memory
        if scrape.families is None:
            log.info("no metrics from replica %s: %s", scrape.replica, scrape.reason)


def iterate_with_pauses(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines with pauses, in which the event loop gets the GIL."""
    for start in range(0, len(lines), SLICE_LINES):
        yield from lines[start : start + SLICE_LINES]
        time.sleep(PAUSE_S)


def convert_metrics(metrics: Iterable[Metric]) -> Families:
    families: Families = {}
    for metric in metrics:
        # The classic text format has the suffix in the family's name.
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        family = families[name] = Family(name, metric.type, metric.documentation)
        family.sample_names = {name + part for part in SAMPLE_SUFFIXES[metric.type]}
        for number, (part, labels, value, *_) in enumerate(metric.samples, 1):
            joined = join_labels((key, escape_label_value(text)) for key, text in labels.items())
            label_text = f"{{{joined}}}" if joined else ""
            family.samples.append((part, label_text, floatToGoString(value)))
            if not number % SLICE_LINES:
                time.sleep(PAUSE_S)
    return families


def collect_scrape_gauges(scrapes: Sequence[Scrape]) -> Iterator[Metric]:
    # Not registered with the gateway's own metrics, because workers add those up.
    up = replica_gauge("gateway_scrape_up", "1 if the replica's metrics are in this page.")
    duration = replica_gauge(
        "gateway_scrape_duration_seconds", "Time to fetch the replica's metrics."
    )
    for scrape in scrapes:
        up.add_metric([scrape.replica], float(scrape.families is not None))
        duration.add_metric([scrape.replica], scrape.duration_s)
    yield from (up, duration)


def batch_chunks(chunks: Iterator[bytes]) -> Iterator[bytes]:
    # Each item is passed from a thread to the event loop, which is slow for small chunks.
    batch = bytearray()
    for piece in chunks:
        batch += piece
        if len(batch) >= PAGE_BATCH_BYTES:
            yield bytes(batch)
            batch.clear()
        time.sleep(PAUSE_S)
    yield bytes(batch)


def gzip_chunks(chunks: Iterator[bytes]) -> Iterator[bytes]:
    compressor = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_WINDOW)
    for piece in chunks:
        yield compressor.compress(piece)
    yield compressor.flush()


def accepts_gzip(accept_encoding: str) -> bool:
    """Return whether the weight of gzip, or else of `*`, is above 0 (RFC 9110, section 12.5.3)."""
    weights = {each.name: each.quality for each in parse_accept(accept_encoding)}
    return weights.get("gzip", weights.get("*", 0)) > 0
