"""`triton-gateway bench`: latency and throughput at increasing concurrency."""

from __future__ import annotations

import asyncio
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import uvloop

from gateway.client import Body
from gateway.client.calls import build_model_path
from gateway.client.errors import translate_hints as translate_for_python
from gateway.client.replies import parse_json_object
from gateway.client.retries import CONNECT_TIMEOUT_S
from gateway.commands.errors import ClientError, GatewayUnreachable, UsageError, translate_hints
from gateway.commands.target import Target
from gateway.errors import BadUpstream, DeadlinePassed
from gateway.http_client.client import CompleteResponse, HttpClient
from gateway.http_client.connection import RequestNotSent
from gateway.media_types import NDJSON

NDJSON_BYTES: Final = NDJSON.encode()
# The gateway enforces the timeout; the client waits longer, to receive its response.
RESPONSE_GRACE_S: Final = 5.0


class LoadClient:
    """Sends one inference repeatedly over keep-alive connections. Requires a running event loop.

    A request of the gateway's own HTTP/1.1 client costs about 40 µs; one of httpx costs 2 ms, more than a
    small inference.
    """

    def __init__(
        self,
        target: Target,
        model: str,
        version: str,
        body: Body,
        *,
        timeout_s: float,  # one limit for all responses of a stream
        is_decoupled: bool = False,
    ) -> None:
        url = urlsplit(target.access.url)
        self._base_url = url.geturl()
        self._body = body.content
        self._limit_s = timeout_s + RESPONSE_GRACE_S
        self._http_client = HttpClient(
            url.hostname or "",
            url.port or (80 if target.ssl_context is None else 443),
            tls=target.ssl_context,
            connect_timeout_s=CONNECT_TIMEOUT_S,
        )
        self._path = f"{url.path}{build_model_path(model, version)}/infer".encode()
        headers = {
            "content-type": body.content_type,
            **target.access.create_headers(),
            "x-request-timeout": f"{timeout_s:g}",
        }
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        if is_decoupled:
            self._headers.append((b"accept", NDJSON_BYTES))

    async def infer(self) -> str:
        """Return the reason of a failure; empty for a successful response.

        Raises `GatewayUnreachable` if no connection can be established.
        """
        try:
            reply = await self._http_client.request(
                b"POST",
                self._path,
                headers=self._headers,
                body=self._body,
                timeout_s=self._limit_s,
            )
        except RequestNotSent:
            raise GatewayUnreachable(f"cannot reach the gateway at {self._base_url}") from None
        except DeadlinePassed:
            return f"no response within {self._limit_s:g} s"
        except BadUpstream:
            return "the connection was closed before the response was complete"
        return find_failure(reply)

    def close(self) -> None:
        self._http_client.close()


def find_failure(reply: CompleteResponse) -> str:
    """Return the error of a response, which a stream reports in its last line; empty without one."""
    is_stream = reply.header(b"content-type").startswith(NDJSON_BYTES)
    if reply.status == 200 and not is_stream:
        return ""
    message = (parse_json_object(reply.body.rstrip(b"\n").rpartition(b"\n")[2]) or {}).get("error")
    if isinstance(message, str):
        return translate_hints(translate_for_python(message))
    return "" if reply.status == 200 else f"HTTP status {reply.status} without an error message"


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
