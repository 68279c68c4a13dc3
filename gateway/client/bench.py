"""`triton-gateway bench`: one request again and again, by more and more at a time."""

from __future__ import annotations

import asyncio
import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import uvloop

from gateway.client.errors import ClientError, Misused
from gateway.client.inputs import Body
from gateway.client.target import Target
from gateway.client.wire import NoAnswer, Wire, failure_of

PERCENTILES: Final = (50, 90, 95, 99)
WARM_UP: Final = 3  # requests before anything is measured


@dataclass(frozen=True)
class Level:
    """What one number of requests at a time came to. Latencies are of the requests that succeeded."""

    concurrency: int
    requests: int
    failed: int
    seconds: float
    per_second: float
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True)
class Bench:
    """What is asked, and how."""

    target: Target
    model: str
    version: str
    body: Body
    seconds: float
    timeout_s: float
    streams: bool = False

    def levels(self, concurrencies: Sequence[int]) -> list[Level]:
        """Raises `ClientError` when not even one request succeeds."""
        return uvloop.run(self._levels(concurrencies))

    async def _levels(self, concurrencies: Sequence[int]) -> list[Level]:
        wire = Wire(
            self.target,
            self.model,
            self.version,
            timeout_s=self.timeout_s,
            retries=0,
            streams=self.streams,
        )
        try:
            for _ in range(WARM_UP):
                reply = await wire.infer(self.body.content_type, self.body.data)
                if failure := failure_of(reply):
                    raise ClientError(failure[0])
            return [await self._level(wire, concurrency) for concurrency in concurrencies]
        finally:
            wire.close()

    async def _level(self, wire: Wire, concurrency: int) -> Level:
        took: list[float] = []
        failed = 0
        began = time.perf_counter()
        until = began + self.seconds

        async def one_after_the_other() -> None:
            """Once at least, however short the time is."""
            nonlocal failed
            while True:
                sent = time.perf_counter()
                try:
                    reply = await wire.infer(self.body.content_type, self.body.data)
                    succeeded = failure_of(reply) is None
                except NoAnswer:
                    succeeded = False
                now = time.perf_counter()
                if succeeded:
                    took.append(now - sent)
                else:
                    failed += 1
                if now >= until:
                    return

        await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))
        return level(concurrency, sorted(took), failed, time.perf_counter() - began)


def level(concurrency: int, took: Sequence[float], failed: int, seconds: float) -> Level:
    """`took` is sorted."""
    p50, p90, p95, p99 = (round(1000 * percentile(took, percent), 3) for percent in PERCENTILES)
    return Level(
        concurrency,
        len(took),
        failed,
        round(seconds, 3),
        round(len(took) / seconds, 1),
        p50,
        p90,
        p95,
        p99,
        round(1000 * took[-1], 3) if took else math.nan,
    )


def percentile(took: Sequence[float], percent: int) -> float:
    """The smallest value that so many per cent do not exceed."""
    return took[math.ceil(len(took) * percent / 100) - 1] if took else math.nan


def example_of(described: dict[str, Any]) -> Body:
    """The request that the gateway shows for this model. Raises `Misused` where that needs a file."""
    words = shlex.split(described["curl"])
    if words[0] != "curl" or "-d" not in words:
        raise Misused(
            f"{described['name']} takes a file, or many values: name a file that holds a request"
        )
    content_type = words[words.index("-H") + 1].partition(": ")[2]
    return Body(content_type, words[words.index("-d") + 1].encode())


COLUMNS: Final = (
    "AT A TIME", "PER SECOND", "P50 MS", "P90 MS", "P95 MS", "P99 MS", "MAX MS", "FAILED",
)  # fmt: skip


def row(found: Level) -> tuple[str, ...]:
    latencies = (found.p50_ms, found.p90_ms, found.p95_ms, found.p99_ms, found.max_ms)
    return (
        str(found.concurrency),
        f"{found.per_second:.0f}",
        *(f"{value:.1f}" for value in latencies),
        str(found.failed),
    )


def plot(levels: Sequence[Level], width: int = 40) -> str:
    """Throughput and latency, a bar each, against how many at a time."""
    label = max(len(str(found.concurrency)) for found in levels)
    charts = (("requests per second", "per_second", "{:.0f}"), ("p95, ms", "p95_ms", "{:.1f}"))
    lines = []
    for title, name, form in charts:
        values: list[float] = [asdict(found)[name] for found in levels]
        most = max((value for value in values if not math.isnan(value)), default=0)
        lines.append(f"\n{title}")
        for found, value in zip(levels, values, strict=True):
            length = 0 if not most or math.isnan(value) else value / most * width
            lines.append(f"{found.concurrency:>{label}} {bar(length)} {form.format(value)}")
    return "\n".join(lines)


def bar(length: float) -> str:
    """In eighths of a character."""
    whole, eighths = divmod(round(length * 8), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[eighths].strip()
