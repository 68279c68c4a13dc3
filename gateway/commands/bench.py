"""`triton-gateway bench`: latency and throughput by the number of requests in flight."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import closing
from functools import partial
from math import ceil, inf, nan
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from gateway.client import Body
from gateway.client.calls import ApiRequest
from gateway.client.errors import translate_hints as translate_for_python
from gateway.client.replies import parse_json_object
from gateway.client.retries import CONNECT_TIMEOUT_S, RESPONSE_GRACE_S
from gateway.commands.errors import ClientError, UsageError, translate_hints
from gateway.commands.target import Target
from gateway.errors import BadUpstream, DeadlinePassed
from gateway.http_client.client import HttpClient
from gateway.http_client.connection import RequestNotSent
from gateway.media_types import JSON

Call: TypeAlias = "Callable[[], Awaitable[Any]]"
PERCENTILES: Final = {"p50_ms": 50, "p90_ms": 90, "p95_ms": 95, "p99_ms": 99, "max_ms": 100}
MAX_CONCURRENCY: Final = 1024
LATENCIES: Final = (name.upper().replace("_", " ") for name in PERCENTILES)
COLUMNS: Final = ("IN FLIGHT", "REQUESTS/S", *LATENCIES, "FAILED")


def build_example(model: Mapping[str, Any]) -> Body:
    """Return the model's own example, or that of its curl command. Raises `UsageError`."""
    required = [tensor for tensor in model["inputs"] if not tensor.get("optional")]
    if required and all("example" in tensor for tensor in required):
        inputs = {tensor["name"]: parse_example(tensor) for tensor in required}
        return Body(json.dumps({"inputs": inputs}).encode(), JSON)
    words = shlex.split(model["curl"])
    if words[0] != "curl" or "-d" not in words:
        raise UsageError(f"{model['name']} has no example: pass a FILE that contains a request")
    content_type = words[words.index("-H") + 1].partition(": ")[2]
    return Body(words[words.index("-d") + 1].encode(), content_type)


def parse_example(tensor: Mapping[str, Any]) -> Any:
    """Return the value of an example: a text, a `data:` URI of a file, or numbers as JSON."""
    example = tensor["example"]
    text = {"b64": example} if example.startswith("data:") else example
    return json.loads(example) if text == example and tensor["datatype"] != "BYTES" else text


async def measure(
    target: Target, request: ApiRequest, levels: Iterable[int], duration_s: float
) -> list[dict[str, Any]]:
    """Return the figures of each level. Raises `ClientError` if the first request fails."""
    url = urlsplit(target.access.url)
    tls = target.ssl_context
    port = url.port or (80 if tls is None else 443)
    body: Any = request.body
    # The gateway's client of Triton: a request of httpx costs 2 ms of CPU.
    client = HttpClient(url.hostname or "", port, tls=tls, connect_timeout_s=CONNECT_TIMEOUT_S)
    with closing(client):
        call = partial(
            client.request,
            b"POST",
            f"{url.path}{request.path}".encode(),
            headers=[(name.encode(), value.encode()) for name, value in request.headers.items()],
            body=body.content,
            timeout_s=float(request.headers["x-request-timeout"]) + RESPONSE_GRACE_S,
        )
        if failure := await find_failure(call):
            raise ClientError(failure)
        return [await measure_level(call, level, duration_s) for level in levels]


async def measure_level(call: Call, concurrency: int, duration_s: float) -> dict[str, Any]:
    latencies_s: list[float] = []  # infinite for a request that failed
    started_at = time.perf_counter()

    async def send_requests() -> None:
        now = started_at
        while now < started_at + duration_s:  # the shortest duration measures one request as well
            sent_at = now
            failure = await find_failure(call)
            now = time.perf_counter()
            latencies_s.append(inf if failure else now - sent_at)

    await asyncio.gather(*(send_requests() for _ in range(concurrency)))
    elapsed_s = time.perf_counter() - started_at
    ordered_s = sorted(each for each in latencies_s if each != inf) or [nan]
    ranks = {name: ceil(len(ordered_s) * each / 100) - 1 for name, each in PERCENTILES.items()}
    failed = latencies_s.count(inf)
    return {
        "concurrency": concurrency,
        "requests": len(latencies_s) - failed,
        "failed": failed,
        "seconds": round(elapsed_s, 3),
        "per_second": round((len(latencies_s) - failed) / elapsed_s, 1),
        **{name: round(1000 * ordered_s[rank], 3) for name, rank in ranks.items()},
    }


async def find_failure(call: Call) -> str:
    """Send a request; return why it failed, which a stream says in its last line, or nothing."""
    try:
        reply = await call()
    except (RequestNotSent, DeadlinePassed, BadUpstream):
        return "no complete response"
    document = parse_json_object(reply.body.rstrip(b"\n").rpartition(b"\n")[2]) or {}
    message = document.get("error", "" if reply.status == 200 else f"HTTP status {reply.status}")
    return translate_hints(translate_for_python(str(message)))


def format_row(figures: Mapping[str, Any]) -> tuple[str, ...]:
    latencies = (f"{figures[name]:.1f}" for name in PERCENTILES)
    counts = (f"{figures[name]:.0f}" for name in ("concurrency", "per_second"))
    return *counts, *latencies, str(figures["failed"])
