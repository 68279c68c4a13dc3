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
from gateway.exposition.families import (
    PARTS,
    Families,
    Family,
    NotExposition,
    escaped,
    joined,
    merge,
)
from gateway.exposition.layout import Layout
from gateway.exposition.writing import Form, write
from gateway.fleet.health import State
from gateway.fleet.replica import Replica
from gateway.routes.bodies import REQUEST_ID, refusals
from gateway.routes.services import ServicesForMetrics
from gateway.words import listed

log = logging.getLogger(__name__)
router = APIRouter(tags=["metrics"])

TIMEOUT_S: Final = 2.0
MARGIN_S: Final = 0.25  # for merging, and for the way back to Prometheus
MAX_PAGE_BYTES: Final = 16 << 20
HEADERS: Final = [(b"accept", b"text/plain;version=0.0.4"), (b"content-length", b"0")]
OPEN_METRICS: Final = ("application/openmetrics-text",)
CLASSIC: Final = ("text/plain", "text/*", "*/*")
GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS
GZIP_LEVEL: Final = 4
# A thread that reads pages gives the interpreter to the event loop after so many lines.
SLICE_LINES: Final = 100
NAP_S: Final = 0.0001
BATCH_BYTES: Final = 256 << 10
TEXT: Final = {"schema": {"type": "string"}}
PAGE: Final = refusals() | {
    200: {
        "description": "The page, in the form that `Accept` asks for.",
        "headers": REQUEST_ID | {"Vary": {"required": True, "schema": {"type": "string"}}},
        "content": {"text/plain": TEXT, "application/openmetrics-text": TEXT},
    }
}


@dataclass
class Scrape:
    """What came of asking one replica for its page; without `families` it failed, and why."""

    replica: str
    layout: Layout
    duration_s: float = 0.0
    page: bytes | None = None
    families: Families | None = None
    reason: str = ""


@router.get(
    "/metrics",
    operation_id="metrics",
    summary="The gateway's metrics and every replica's",
    response_class=StreamingResponse,
    responses=PAGE,
)
async def metrics(request: Request, services: ServicesForMetrics) -> Response:
    """A replica that does not answer costs its own samples, never the page."""
    headers = request.headers
    timeout_s = timeout_of(headers.get("x-prometheus-scrape-timeout-seconds", ""))
    pool = services.pool
    scrapes = await asyncio.gather(
        *(
            scraped(replica, timeout_s, down=pool.state(replica) is State.DOWN)
            for replica in sorted(pool.replicas.values(), key=lambda replica: str(replica.address))
        )
    )
    services.metrics.flush()
    view = list(services.metrics.views.collect())  # of what the event loop changes
    families = await to_thread.run_sync(merged, services.metrics.collect, view, scrapes)
    form = form_of(headers.get("accept", ""))
    page: Iterator[bytes] = (piece.encode() for piece in write(families, form))
    about = {"content-type": form.value, "vary": "Accept, Accept-Encoding"}
    if quality(headers.get("accept-encoding", ""), ("gzip", "*")) > 0:
        about["content-encoding"] = "gzip"
        page = gzipped(page)
    return StreamingResponse(batches(page), headers=about)  # which has each made in a thread


# Asking.


def timeout_of(header: str) -> float:
    """How long replicas may take: less than Prometheus waits, and never long."""
    try:
        told_s = float(header)
    except ValueError:
        told_s = TIMEOUT_S
    limit_s = min(told_s, TIMEOUT_S) if told_s > 0 else TIMEOUT_S
    return max(limit_s - MARGIN_S, limit_s / 2)


async def scraped(replica: Replica, timeout_s: float, *, down: bool) -> Scrape:
    """One that is known to be down is not asked."""
    scrape = Scrape(replica.name, replica.page_layout, reason="it is down")
    if down:
        return scrape
    scrape.reason = f"no answer within {timeout_s:g} s"
    began = time.perf_counter()
    with anyio.move_on_after(timeout_s):
        try:
            scrape.page = await page_of(replica, timeout_s)
        except GatewayError as exc:
            scrape.reason = exc.detail
    scrape.duration_s = time.perf_counter() - began
    return scrape


async def page_of(replica: Replica, timeout_s: float) -> bytes:
    answer = await replica.metrics.send(b"GET", b"/metrics", HEADERS, timeout_s=timeout_s)
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


def merged(
    own: Callable[[], Iterable[Metric]], view: Iterable[Metric], scrapes: Sequence[Scrape]
) -> Families:
    """The families of the gateway's own metrics, of this scrape's gauges, and of all replicas."""
    understand(scrapes)
    pages = {scrape.replica: scrape.families for scrape in scrapes if scrape.families is not None}
    metrics = chain(own(), view, gauges(scrapes))
    families, left_out = merge(families_of(metrics), pages)
    for replica, names in left_out.items():
        log.warning(
            "left out of the metrics of the replica %s, because other servers' mean something else: %s",
            replica,
            listed(names),
        )
    return families


def understand(scrapes: Sequence[Scrape]) -> None:
    for scrape in scrapes:
        if scrape.page is not None:
            try:
                scrape.families = scrape.layout.read(scrape.page, scrape.replica, unhurried)
                time.sleep(NAP_S)
            except NotExposition as exc:
                scrape.reason = f"its page is no exposition: {exc}"
        if scrape.families is None:
            log.info("no metrics of the replica %s: %s", scrape.replica, scrape.reason)


def unhurried(lines: Sequence[str]) -> Iterator[str]:
    """With naps: without them a request on the event loop would wait for all of it."""
    for start in range(0, len(lines), SLICE_LINES):
        yield from lines[start : start + SLICE_LINES]
        time.sleep(NAP_S)


def families_of(metrics: Iterable[Metric]) -> Families:
    """Of prometheus_client's objects, named as in the classic form."""
    families: Families = {}
    for metric in metrics:
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        family = families[name] = Family(name, metric.type, metric.documentation)
        family.names = {name + part for part in PARTS[metric.type]}
        for number, (part, labels, value, *_) in enumerate(metric.samples, 1):
            inside = joined((label, escaped(text)) for label, text in labels.items())
            written = f"{{{inside}}}" if inside else ""
            family.samples.append((part, written, floatToGoString(value)))  # type: ignore[no-untyped-call]
            if not number % SLICE_LINES:
                time.sleep(NAP_S)
    return families


def gauges(scrapes: Sequence[Scrape]) -> Iterator[Metric]:
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


def batches(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Of such a size that it is worth the way to a thread and back."""
    batch = bytearray()
    for piece in pieces:
        batch += piece
        if len(batch) >= BATCH_BYTES:
            yield bytes(batch)
            batch.clear()
        time.sleep(NAP_S)
    yield bytes(batch)


def gzipped(pieces: Iterator[bytes]) -> Iterator[bytes]:
    packer = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_WINDOW)
    for piece in pieces:
        yield packer.compress(piece)
    yield packer.flush()


# What is asked for.


def form_of(accept: str) -> Form:
    """OpenMetrics for who would rather have it; the classic form for everybody else."""
    wanted = quality(accept, OPEN_METRICS, "1.0.0")
    open_metrics = wanted > 0 and wanted >= quality(accept, CLASSIC, "0.0.4")
    return Form.OPEN_METRICS if open_metrics else Form.CLASSIC


def quality(header: str, names: Sequence[str], version: str = "") -> float:
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
