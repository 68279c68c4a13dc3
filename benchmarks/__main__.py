"""The benchmarks of `make bench`. All ratios of a table come from one run.

The servers take turns in each round, so that a slow minute of the machine affects all of them; the
median of the rounds is reported, and for ratios of CPU time the minimum and maximum of the rounds. CPU is
the user and system time of the server's process tree, divided by the number of requests that wrk counted.
MiB is the peak of the proportional set size. A failed request aborts the run; a server that is not installed
is skipped.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import psutil
import typer

from benchmarks import (
    fleet,
    grpc_calls,
    hot_path,
    peers,
    perf_analyzer,
    results,
    servers,
    startup,
    streams,
)
from benchmarks.requests import Request, encode_v2_infer
from benchmarks.tables import Target, format_table, run_rounds
from benchmarks.workloads import JSON_HEADERS, build_workloads
from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.servers import triton_on_free_ports
from tests.support.tools import of_models

PREPARED, PREPARED_V2 = "nginx, prepared tensor", "gateway /v2, prepared tensor"
PLAIN = "plain FastAPI"
SMALL_PATH = "/v2/models/small/infer"


def start_proxies(upstream: str, stack: ExitStack) -> dict[str, servers.RunningServer]:
    """Start the proxies that pass requests to this address unchanged."""
    proxies = {
        "nginx": stack.enter_context(servers.nginx(upstream)),
        "bare ASGI proxy": stack.enter_context(servers.bare_proxy(upstream)),
    }
    envoy = peers.start_peer(stack, "Envoy", lambda: peers.envoy(upstream))
    return proxies if envoy is None else {**proxies, "Envoy": envoy}


def friendly(triton: EmbeddedTriton, stack: ExitStack, seconds: float, count: int) -> Iterator[str]:
    """Measure the conversion of `/v1` against the same work in plain FastAPI routes."""
    address = f"127.0.0.1:{triton.options.http_port}"
    gateway_url, gateway = stack.enter_context(servers.gateway(triton.options.url))
    plain_url, plain = stack.enter_context(servers.plain_fastapi(triton))
    nginx_url, nginx = stack.enter_context(servers.nginx(address))
    for work in build_workloads():
        path = f"/v1/models/{work.model}/infer"
        targets = [
            Target(PREPARED, nginx_url + work.prepared_path, nginx, work.prepared_request),
            Target(PREPARED_V2, gateway_url + work.prepared_path, gateway, work.prepared_request),
            Target("gateway /v1", gateway_url + path, gateway, work.request),
            Target(PLAIN, plain_url + work.plain_path, plain, work.plain_request),
        ]
        yield from format_table(work.title, run_rounds(targets, 4, seconds, count), PLAIN)


def pass_through(
    triton: EmbeddedTriton, stack: ExitStack, seconds: float, count: int
) -> Iterator[str]:
    """Measure the overhead of the gateway, with a key and its rate, and other proxies without."""
    address = f"127.0.0.1:{triton.options.http_port}"
    plain_url, plain = stack.enter_context(servers.plain_fastapi(triton))
    array = np.random.default_rng(0).random((1, 256), np.float32)
    request = encode_v2_infer(array, "FP32")
    request.headers["Authorization"] = f"Bearer {hot_path.KEY}"
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    keys_file = hot_path.write_key(folder, requests_per_second=1_000_000)
    settings = {"GATEWAY_KEYS_FILE": str(keys_file)}
    proxies = {
        "direct": (f"http://{address}", psutil.Process(triton.reaper_pid)),
        **start_proxies(address, stack),
        "gateway /v2": stack.enter_context(servers.gateway(triton.options.url, 1, settings)),
    }
    targets = [
        Target(name, f"{url}{SMALL_PATH}", process, request)
        for name, (url, process) in proxies.items()
    ]
    targets.append(Target(PLAIN, f"{plain_url}/small", plain, Request(array.tobytes(), {})))
    name = "KServe transformer, V1 JSON"
    kserve = peers.start_peer(stack, name, lambda: peers.kserve_transformer(address))
    if kserve is not None:
        body = json.dumps({"instances": array.tolist()}).encode()
        url, process = kserve
        url = f"{url}/v1/models/small:predict"
        targets.append(Target(name, url, process, Request(body, JSON_HEADERS)))
    for connections in (16, 1):
        title = (
            f"1 KB binary infer, {connections} connection{'s' * (connections > 1)}, one worker each"
        )
        yield from format_table(title, run_rounds(targets, connections, seconds, count), "nginx")


def instant(triton: EmbeddedTriton, stack: ExitStack, seconds: float, count: int) -> Iterator[str]:
    """Measure proxies in front of a server that answers at once, vLLM's router on its own path."""
    index = [{"name": "small", "version": "1", "state": "READY"}]
    reply = {"model_name": "small", "model_version": "1", "outputs": []}
    llm_path = "/v1/completions"
    replies = {
        "/v2/repository/index": index,
        "/v2/health/live": {},
        SMALL_PATH: reply,
        llm_path: reply,
    }
    upstream = stack.enter_context(
        servers.instant_upstream({path: json.dumps(value) for path, value in replies.items()})
    )
    request = Request(json.dumps({"model": "small", "prompt": "a" * 1000}).encode(), JSON_HEADERS)
    proxies = {
        **start_proxies(upstream, stack),
        "gateway /v2": stack.enter_context(servers.gateway(f"http://{upstream}")),
    }
    targets = [
        Target(name, f"{url}{SMALL_PATH}", process, request)
        for name, (url, process) in proxies.items()
    ]
    router = peers.start_peer(stack, "vLLM router", lambda: peers.vllm_router(upstream))
    if router is not None:
        url, process = router
        targets.append(Target("vLLM router", f"{url}{llm_path}", process, request))
    title = "1 KB of JSON to a server that answers at once, 16 connections"
    yield from format_table(title, run_rounds(targets, 16, seconds, count), "nginx")


def large(triton: EmbeddedTriton, stack: ExitStack, seconds: float, count: int) -> Iterator[str]:
    """Measure bodies of 64 MiB, to show whether they are streamed or buffered."""
    settings = {"GATEWAY_MAX_BODY_BYTES": str(1 << 30)}
    request = encode_v2_infer(np.ones(1 << 24, np.float32), "FP32")
    proxies = {
        **start_proxies(f"127.0.0.1:{triton.options.http_port}", stack),
        "gateway /v2": stack.enter_context(servers.gateway(triton.options.url, 1, settings)),
    }
    targets = [
        Target(name, f"{url}/v2/models/large/infer", process, request)
        for name, (url, process) in proxies.items()
    ]
    yield from format_table(
        "64 MiB in and out, 1 connection", run_rounds(targets, 1, 2 * seconds, count), "nginx"
    )


def workers(triton: EmbeddedTriton, stack: ExitStack, seconds: float, count: int) -> Iterator[str]:
    """Measure a second worker, also of nginx. It helps only with enough cores for it, wrk and Triton."""
    request = encode_v2_infer(np.ones((1, 256), np.float32), "FP32")
    address = f"127.0.0.1:{triton.options.http_port}"
    running = {
        "one worker": servers.gateway(triton.options.url),
        "two workers": servers.gateway(triton.options.url, workers=2),
        "nginx, one worker": servers.nginx(address),
        "nginx, two workers": servers.nginx(address, workers=2),
    }
    targets = [
        Target(name, f"{url}{SMALL_PATH}", process, request)
        for name, server in running.items()
        for url, process in [stack.enter_context(server)]
    ]
    yield from format_table(
        "1 KB, 32 connections, workers", run_rounds(targets, 32, seconds, count), "one worker"
    )


def scraping(triton: EmbeddedTriton, stack: ExitStack, seconds: float, count: int) -> Iterator[str]:
    """Measure inference during scrapes of a large metrics page: 200 models on each of 3 more replicas."""
    pages = stack.enter_context(servers.metrics_pages(of_models(200), 3))
    urls = ",".join((triton.options.url, *pages))
    url, process = stack.enter_context(servers.gateway(urls))
    request = encode_v2_infer(np.ones((1, 256), np.float32), "FP32")
    scrape = f"curl -sf --compressed -o /dev/null {url}/metrics"
    loops = {
        "no scrapes": "",
        "a scrape every second": f"while {scrape}; do sleep 1; done",
        "continuous scrapes": f"while {scrape}; do :; done",
    }
    targets = [
        Target(name, f"{url}{SMALL_PATH}", process, request, loop) for name, loop in loops.items()
    ]
    yield from format_table(
        "1 KB, 1 connection, during scrapes of 3 × 200 models",
        run_rounds(targets, 1, 2 * seconds, count),
        "no scrapes",
    )


SUITES = {
    "pass-through": pass_through,
    "instant": instant,
    "large": large,
    "friendly": friendly,
    "workers": workers,
    "scraping": scraping,
    "perf-analyzer": perf_analyzer.table,
    "start-up": startup.table,
    "streams": streams.table,
    "grpc": grpc_calls.table,
}
WITHOUT_TRITON = {"hot-path": hot_path.table, "fleet": fleet.table}


def measure_suite(name: str, triton: EmbeddedTriton, seconds: float, count: int) -> Iterator[str]:
    # The servers of a suite end with it, so that they do not use the machine during the next one.
    with ExitStack() as stack:
        yield from SUITES[name](triton, stack, seconds, count)


def main(seconds: float = 3.0, count: int = 5, only: str = "") -> None:
    """Print the tables. A full run also writes them to benchmarks/results.md."""
    if only and only not in {*SUITES, *WITHOUT_TRITON}:
        raise typer.BadParameter(f"{only} is not one of {', '.join([*SUITES, *WITHOUT_TRITON])}")
    today = f"{datetime.now(timezone.utc):%Y-%m-%d}, {results.describe_machine()}"
    lines = [
        "# Results of the last run",
        f"\n{today}. The machine is shared; only ratios count.",
        f"\n{str(__doc__).partition(chr(10))[2].strip()}",
    ]
    names = [name for name in SUITES if only in ("", name)]
    if names:
        with servers.repository() as repository, triton_on_free_ports(repository) as triton:
            for name in names:
                lines += measure_suite(name, triton, seconds, count)
    for name, table in WITHOUT_TRITON.items():
        if only in ("", name):
            lines += table()
    text = "\n".join(lines) + "\n"
    print(text)
    if not only:
        results.write_tables(text)


if __name__ == "__main__":
    typer.run(main)
