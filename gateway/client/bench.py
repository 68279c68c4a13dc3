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

from gateway.client.errors import ClientError, UsageError
from gateway.client.infer_client import InferClient, NoResponse, extract_failure
from gateway.client.inputs import InputBody
from gateway.client.target import Target

LATENCY_PERCENTILES: Final = (50, 90, 95, 99)
WARM_UP_REQUESTS: Final = 3  # requests before anything is measured


@dataclass(frozen=True)
class BenchResult:
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
class Benchmark:
    """What is asked, and how."""

    target: Target
    model: str
    version: str
    body: InputBody
    duration_s: float
    timeout_s: float
    is_decoupled: bool = False

    def measure(self, concurrencies: Sequence[int]) -> list[BenchResult]:
        """Raises `ClientError` when not even one request succeeds."""
        return uvloop.run(self._measure_all(concurrencies))

    async def _measure_all(self, concurrencies: Sequence[int]) -> list[BenchResult]:
        wire = InferClient(
            self.target,
            self.model,
            self.version,
            timeout_s=self.timeout_s,
            retries=0,
            is_decoupled=self.is_decoupled,
        )
        try:
            for _ in range(WARM_UP_REQUESTS):
                reply = await wire.infer(self.body.content_type, self.body.data)
                if failure := extract_failure(reply):
                    raise ClientError(failure[0])
            return [await self._measure_level(wire, concurrency) for concurrency in concurrencies]
        finally:
            wire.close()

    async def _measure_level(self, client: InferClient, concurrency: int) -> BenchResult:
        took: list[float] = []
        failed = 0
        began = time.perf_counter()
        until = began + self.duration_s

        async def one_after_the_other() -> None:
            """Once at least, however short the time is."""
            nonlocal failed
            while True:
                sent = time.perf_counter()
                try:
                    reply = await client.infer(self.body.content_type, self.body.data)
                    succeeded = extract_failure(reply) is None
                except NoResponse:
                    succeeded = False
                now = time.perf_counter()
                if succeeded:
                    took.append(now - sent)
                else:
                    failed += 1
                if now >= until:
                    return

        await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))
        return summarize_level(concurrency, sorted(took), failed, time.perf_counter() - began)


def summarize_level(
    concurrency: int, latencies_s: Sequence[float], failed: int, duration_s: float
) -> BenchResult:
    """`took` is sorted."""
    p50, p90, p95, p99 = (
        round(1000 * percentile(latencies_s, percent), 3) for percent in LATENCY_PERCENTILES
    )
    return BenchResult(
        concurrency,
        len(latencies_s),
        failed,
        round(duration_s, 3),
        round(len(latencies_s) / duration_s, 1),
        p50,
        p90,
        p95,
        p99,
        round(1000 * latencies_s[-1], 3) if latencies_s else math.nan,
    )


def percentile(sorted_values: Sequence[float], percent: int) -> float:
    """The smallest value that so many per cent do not exceed."""
    return (
        sorted_values[math.ceil(len(sorted_values) * percent / 100) - 1]
        if sorted_values
        else math.nan
    )


def build_bench_body(model: dict[str, Any]) -> InputBody:
    """The request that the gateway shows for this model. Raises `Misused` where that needs a file."""
    words = shlex.split(model["curl"])
    if words[0] != "curl" or "-d" not in words:
        raise UsageError(
            f"{model['name']} takes a file, or many values: name a file that holds a request"
        )
    content_type = words[words.index("-H") + 1].partition(": ")[2]
    return InputBody(content_type, words[words.index("-d") + 1].encode())


BENCH_COLUMNS: Final = (
    "AT A TIME", "PER SECOND", "P50 MS", "P90 MS", "P95 MS", "P99 MS", "MAX MS", "FAILED",
)  # fmt: skip


def format_bench_row(result: BenchResult) -> tuple[str, ...]:
    latencies = (result.p50_ms, result.p90_ms, result.p95_ms, result.p99_ms, result.max_ms)
    return (
        str(result.concurrency),
        f"{result.per_second:.0f}",
        *(f"{value:.1f}" for value in latencies),
        str(result.failed),
    )


def plot_results(results: Sequence[BenchResult], width: int = 40) -> str:
    """Throughput and latency, a bar each, against how many at a time."""
    label = max(len(str(found.concurrency)) for found in results)
    charts = (("requests per second", "per_second", "{:.0f}"), ("p95, ms", "p95_ms", "{:.1f}"))
    lines = []
    for title, name, form in charts:
        values: list[float] = [asdict(found)[name] for found in results]
        most = max((value for value in values if not math.isnan(value)), default=0)
        lines.append(f"\n{title}")
        for found, value in zip(results, values, strict=True):
            length = 0 if not most or math.isnan(value) else value / most * width
            lines.append(f"{found.concurrency:>{label}} {format_bar(length)} {form.format(value)}")
    return "\n".join(lines)


def format_bar(length: float) -> str:
    """In eighths of a character."""
    whole, eighths = divmod(round(length * 8), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[eighths].strip()
