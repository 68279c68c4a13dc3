"""`triton-gateway bench`: latency and throughput at increasing concurrency."""

from __future__ import annotations

import asyncio
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import uvloop

from gateway.client import Body
from gateway.commands.errors import ClientError, UsageError
from gateway.commands.load_client import LoadClient
from gateway.commands.target import Target

LATENCY_PERCENTILES: Final = (50, 90, 95, 99, 100)
WARM_UP_REQUESTS: Final = 3  # requests before anything is measured
BAR_CHARS: Final = 40


@dataclass(frozen=True)
class BenchResult:
    """The figures of one concurrency level. Only successful requests have latencies."""

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
    """A request to repeat, its target, and how long to repeat it at each level."""

    target: Target
    model: str
    version: str
    body: Body
    duration_s: float
    timeout_s: float
    is_decoupled: bool = False

    def measure(self, concurrencies: Sequence[int]) -> list[BenchResult]:
        return uvloop.run(self._measure_all(concurrencies))

    async def _measure_all(self, concurrencies: Sequence[int]) -> list[BenchResult]:
        client = LoadClient(
            self.target,
            self.model,
            self.version,
            self.body,
            timeout_s=self.timeout_s,
            is_decoupled=self.is_decoupled,
        )
        try:
            for _ in range(WARM_UP_REQUESTS):
                if failure := await client.infer():
                    raise ClientError(failure)
            return [await self._measure_level(client, concurrency) for concurrency in concurrencies]
        finally:
            client.close()

    async def _measure_level(self, client: LoadClient, concurrency: int) -> BenchResult:
        latencies_s: list[float] = []
        failed = 0
        started_at = time.perf_counter()
        end = started_at + self.duration_s

        async def send_requests() -> None:
            nonlocal failed
            while True:  # the shortest duration measures one request as well
                sent_at = time.perf_counter()
                failure = await client.infer()
                now = time.perf_counter()
                if not failure:
                    latencies_s.append(now - sent_at)
                else:
                    failed += 1
                if now >= end:
                    return

        await asyncio.gather(*(send_requests() for _ in range(concurrency)))
        duration_s = time.perf_counter() - started_at
        return summarize_level(concurrency, sorted(latencies_s), failed, duration_s)


def summarize_level(
    concurrency: int, sorted_latencies_s: Sequence[float], failed: int, duration_s: float
) -> BenchResult:
    latencies_s = [percentile(sorted_latencies_s, percent) for percent in LATENCY_PERCENTILES]
    return BenchResult(
        concurrency,
        len(sorted_latencies_s),
        failed,
        round(duration_s, 3),
        round(len(sorted_latencies_s) / duration_s, 1),
        *(round(1000 * latency_s, 3) for latency_s in latencies_s),
    )


def percentile(sorted_values: Sequence[float], percent: int) -> float:
    position = math.ceil(len(sorted_values) * percent / 100) - 1
    return sorted_values[position] if sorted_values else math.nan


def build_bench_body(model: Mapping[str, Any]) -> Body:
    """Return the model's example request. Raises `UsageError` if that needs a file."""
    words = shlex.split(model["curl"])
    if words[0] != "curl" or "-d" not in words:
        raise UsageError(
            f"{model['name']} has no example request: pass a FILE that contains a request"
        )
    content_type = words[words.index("-H") + 1].partition(": ")[2]
    return Body(words[words.index("-d") + 1].encode(), content_type)


BENCH_COLUMNS: Final = (
    "CONCURRENCY", "PER SECOND", "P50 MS", "P90 MS", "P95 MS", "P99 MS", "MAX MS", "FAILED",
)  # fmt: skip


def format_bench_row(result: BenchResult) -> tuple[str, ...]:
    latencies = (result.p50_ms, result.p90_ms, result.p95_ms, result.p99_ms, result.max_ms)
    figures = (f"{value:.1f}" for value in latencies)
    return str(result.concurrency), f"{result.per_second:.0f}", *figures, str(result.failed)


def plot_results(results: Sequence[BenchResult]) -> str:
    label = max(len(str(result.concurrency)) for result in results)
    charts = (("requests per second", "per_second", "{:.0f}"), ("p95, ms", "p95_ms", "{:.1f}"))
    lines = []
    for title, name, number_format in charts:
        values: list[float] = [asdict(result)[name] for result in results]
        maximum = max((value for value in values if not math.isnan(value)), default=0)
        lines.append(f"\n{title}")
        for result, value in zip(results, values, strict=True):
            length = 0 if not maximum or math.isnan(value) else value / maximum * BAR_CHARS
            bar = format_bar(length)
            figure = number_format.format(value)
            lines.append(f"{result.concurrency:>{label}} {bar} {figure}")
    return "\n".join(lines)


def format_bar(length: float) -> str:
    whole, eighths = divmod(round(length * 8), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[eighths].strip()


def parse_concurrencies(text: str) -> list[int]:
    try:
        levels = [int(word) for word in text.split(",")]
    except ValueError:
        levels = []
    if not levels or min(levels) < 1 or max(levels) > 1024:
        raise UsageError(f"--concurrency must be numbers up to 1024, such as 1,2,4, not {text!r}")
    return levels
