"""The benchmarks of `make bench`. All ratios of a table come from one run.

The servers take turns in each round, so that a slow minute of the machine affects all of them; the
median of the rounds is reported, and for ratios of CPU time the minimum and maximum of the rounds. CPU is
the user and system time of the server's process tree, divided by the number of requests that wrk counted.
MiB is the peak of the proportional set size. A failed request aborts the run; a server that is not installed
is skipped. The first table judges the run: it compares measures with their limits.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
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
    idle,
    overload,
    page,
    peers,
    perf_analyzer,
    results,
    samples,
    servers,
    startup,
    streams,
    verdicts,
)
from benchmarks.credentials import KEY, write_credentials
from benchmarks.requests import Request, encode_v2_infer
from benchmarks.run import Run
from benchmarks.tables import Target
from benchmarks.verdicts import PLAIN
from benchmarks.workloads import (
    FORM_TITLE,
    JPEG_TITLE,
    JSON_HEADERS,
    NPY_TITLE,
    STREAM_TITLE,
    TEXT_TITLE,
    build_workloads,
)
from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.servers import triton_on_free_ports
from tests.support.tools import of_models

PREPARED = "nginx, prepared tensor"
PREPARED_V2 = "gateway /v2, prepared tensor"
GATEWAY = "gateway /v1"
WITH_KEY = "gateway /v2, a key with a rate"
WITH_TOKEN = "gateway /v2, a known token"
# The rows of the verdicts that compare the gateway with plain FastAPI, by the title of the workload.
PLAIN_ROWS = {
    JPEG_TITLE: "JPEG",
    FORM_TITLE: "form",
    NPY_TITLE: "npy",
    STREAM_TITLE: "stream",
}
LOADS = (1, 2, 4, 8, 16, 32)  # connections of the suite `latency`
SMALL_PATH = "/v2/models/small/infer"
INTERRUPTED = 130  # the exit status of a program that Ctrl-C ends


def start_proxies(upstream: str, stack: ExitStack) -> dict[str, servers.RunningServer]:
    """Start the proxies that pass requests to this address unchanged."""
    proxies = {
        "nginx": stack.enter_context(servers.nginx(upstream)),
        "bare ASGI proxy": stack.enter_context(servers.bare_proxy(upstream)),
    }
    envoy = peers.start_peer(stack, "Envoy", lambda: peers.envoy(upstream))
    return proxies if envoy is None else {**proxies, "Envoy": envoy}


def friendly(triton: EmbeddedTriton, stack: ExitStack, run: Run) -> Iterator[str]:
    """Measure the conversion of `/v1` against the same work in plain FastAPI routes."""
    address = f"127.0.0.1:{triton.options.http_port}"
    gateway_url, gateway = stack.enter_context(servers.gateway(triton.options.url))
    plain_url, plain = stack.enter_context(servers.plain_fastapi(triton))
    nginx_url, nginx = stack.enter_context(servers.nginx(address))
    judged = {TEXT_TITLE, *PLAIN_ROWS}
    for work in build_workloads():
        if run.is_quick and work.title not in judged:
            continue
        path = f"/v1/models/{work.model}/infer"
        targets = [
            Target(PREPARED, nginx_url + work.prepared_path, nginx, work.prepared_request),
            Target(PREPARED_V2, gateway_url + work.prepared_path, gateway, work.prepared_request),
            Target(GATEWAY, gateway_url + path, gateway, work.request),
            Target(PLAIN, plain_url + work.plain_path, plain, work.plain_request),
        ]
        rounds = run.measure(targets, 4)
        if row := PLAIN_ROWS.get(work.title):
            run.record_cpu(row, rounds, GATEWAY, PLAIN)
        if work.title == TEXT_TITLE:
            run.record_cpu("text", rounds, GATEWAY, PREPARED_V2)
        if work.title == STREAM_TITLE:
            speeds, plain_speeds = (
                [each.requests_per_s for each in rounds[name]] for name in (GATEWAY, PLAIN)
            )
            run.record_ratios("events", speeds, plain_speeds)
        yield from run.tabulate(work.title, rounds, PLAIN)


def pass_through(triton: EmbeddedTriton, stack: ExitStack, run: Run) -> Iterator[str]:
    """Measure the overhead of proxies that let everybody in, and of the gateway with credentials."""
    address = f"127.0.0.1:{triton.options.http_port}"
    plain_url, plain = stack.enter_context(servers.plain_fastapi(triton))
    array = np.random.default_rng(0).random((1, 256), np.float32)
    request = encode_v2_infer(array, "FP32")
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    credentials = write_credentials(folder, requests_per_second=1_000_000)
    settings = {f"GATEWAY_{name.upper()}": value for name, value in credentials.settings.items()}
    proxies = {
        "direct": (f"http://{address}", psutil.Process(triton.reaper_pid)),
        **start_proxies(address, stack),
        "gateway /v2": stack.enter_context(servers.gateway(triton.options.url)),
    }
    targets = [
        Target(name, f"{url}{SMALL_PATH}", process, request)
        for name, (url, process) in proxies.items()
    ]
    url, process = stack.enter_context(servers.gateway(triton.options.url, 1, settings))
    for name, secret in ((WITH_KEY, KEY), (WITH_TOKEN, credentials.token)):
        headers = request.headers | {"Authorization": f"Bearer {secret}"}
        targets.append(Target(name, f"{url}{SMALL_PATH}", process, Request(request.body, headers)))
    targets.append(Target(PLAIN, f"{plain_url}/small", plain, Request(array.tobytes(), {})))
    name = "KServe transformer, V1 JSON"
    kserve = peers.start_peer(stack, name, lambda: peers.kserve_transformer(address))
    if kserve is not None:
        body = json.dumps({"instances": array.tolist()}).encode()
        url, process = kserve
        url = f"{url}/v1/models/small:predict"
        targets.append(Target(name, url, process, Request(body, JSON_HEADERS)))
    for connections, title in ((16, page.PASS_THROUGH), (1, page.ONE_CONNECTION)):
        rounds = run.measure(targets, connections)
        if connections == 16:
            run.record_cpu("Envoy", rounds, "gateway /v2", "Envoy")
            run.record_cpu("key", rounds, WITH_KEY, "gateway /v2")
            run.record_cpu("token", rounds, WITH_TOKEN, WITH_KEY)
        yield from run.tabulate(title, rounds, "nginx")


def instant(triton: EmbeddedTriton, stack: ExitStack, run: Run) -> Iterator[str]:
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
    yield from run.tabulate(page.INSTANT, run.measure(targets, 16), "nginx")


def latency(triton: EmbeddedTriton, stack: ExitStack, run: Run) -> Iterator[str]:
    """Measure the latency with more and more connections, of which each sends one request after the other."""
    address = f"127.0.0.1:{triton.options.http_port}"
    array = np.random.default_rng(0).random((1, 256), np.float32)
    plain_url, plain = stack.enter_context(servers.plain_fastapi(triton))
    url, process = stack.enter_context(servers.gateway(triton.options.url))
    nginx_url, nginx = stack.enter_context(servers.nginx(address))
    request = encode_v2_infer(array, "FP32")
    targets = [
        Target("nginx", nginx_url + SMALL_PATH, nginx, request),
        Target("gateway /v2", url + SMALL_PATH, process, request),
        Target(PLAIN, f"{plain_url}/small", plain, Request(array.tobytes(), {})),
    ]
    for connections in LOADS:
        name = f"{page.LATENCY}{connections}"
        yield from run.tabulate(name, run.measure(targets, connections), "nginx")


def large(triton: EmbeddedTriton, stack: ExitStack, run: Run) -> Iterator[str]:
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
    yield from run.tabulate("64 MiB in and out, 1 connection", run.measure(targets, 1, 2), "nginx")


def workers(triton: EmbeddedTriton, stack: ExitStack, run: Run) -> Iterator[str]:
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
    yield from run.tabulate("1 KB, 32 connections, workers", run.measure(targets, 32), "one worker")


def scraping(triton: EmbeddedTriton, stack: ExitStack, run: Run) -> Iterator[str]:
    """Measure inference during scrapes of a large metrics page: 100 models on each of 30 more replicas."""
    pages = stack.enter_context(servers.metrics_pages(of_models(100), 30))
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
    title = "1 KB, 1 connection, during scrapes of 30 × 100 models"
    yield from run.tabulate(title, run.measure(targets, 1, 2), "no scrapes")


SUITES = {
    "pass-through": pass_through,
    "instant": instant,
    "latency": latency,
    "large": large,
    "friendly": friendly,
    "workers": workers,
    "scraping": scraping,
    "perf-analyzer": perf_analyzer.table,
    "start-up": startup.table,
    "streams": streams.table,
    "grpc": grpc_calls.table,
    "samples": samples.table,
}
WITHOUT_TRITON = {
    "hot-path": hot_path.table,
    "fleet": fleet.table,
    "idle": idle.table,
    "overload": overload.table,
}
ALL_SUITES = (*SUITES, *WITHOUT_TRITON)
# The suites that judge a row, or that the page about performance shows.
QUICK_SUITES = {*(row.suite for row in verdicts.ROWS), "instant", "latency"}
QUICK_SECONDS, QUICK_COUNT = 1, 7


def measure_suites(names: Sequence[str], run: Run) -> Iterator[str]:
    with ExitStack() as tritons:
        triton = None
        for number, name in enumerate(names, 1):
            run.suite = f"{name} ({number} of {len(names)})"
            # The servers of a suite end with it, so that they do not use the machine during the next one.
            with ExitStack() as stack:
                if name in WITHOUT_TRITON:
                    yield from WITHOUT_TRITON[name](stack, run)
                    continue
                if triton is None:
                    repository = tritons.enter_context(servers.repository())
                    triton = tritons.enter_context(triton_on_free_ports(repository))
                yield from SUITES[name](triton, stack, run)


def choose_suites(only: str, *, quick: bool) -> list[str]:
    """Return the suites to run. Raises `typer.BadParameter`."""
    chosen = [name for name in only.split(",") if name]
    if unknown := [name for name in chosen if name not in ALL_SUITES]:
        raise typer.BadParameter(f"{unknown[0]} is not one of {', '.join(ALL_SUITES)}")
    return [
        name
        for name in ALL_SUITES
        if name in chosen or (not chosen and (not quick or name in QUICK_SUITES))
    ]


def main(seconds: int = 3, count: int = 5, only: str = "", quick: bool = False) -> None:
    """Measure, print the tables and compare the measures with their limits; exit with 1 if one fails.

    A run of all suites also writes benchmarks/results.md, benchmarks/results.json, and
    benchmarks/performance.md with its images. --quick measures for a shorter time, only what is judged or
    shown there, and leaves results.md. --only takes the names of suites, separated by commas, and writes
    nothing.
    """
    if quick:
        seconds, count = QUICK_SECONDS, QUICK_COUNT
    run = Run(seconds, count, quick)
    names = choose_suites(only, quick=quick)
    today = f"{datetime.now(timezone.utc):%Y-%m-%d}, {results.describe_machine()}"
    head = [
        "# Results of the last run",
        f"\n{today}. The machine is shared; only ratios count.",
        f"\n{str(__doc__).partition(chr(10))[2].strip()}",
    ]
    lines = []
    try:
        for line in measure_suites(names, run):
            lines.append(line)
            print(line, flush=True)
    except KeyboardInterrupt:
        names = [row.suite for row in verdicts.ROWS if row.name in run.ratios]
        print("\n".join(verdicts.format_verdicts(run.ratios, names)))
        sys.exit(INTERRUPTED)
    judged = list(verdicts.format_verdicts(run.ratios, names))
    text = "\n".join([*head, *judged, *lines]) + "\n"
    if not only:
        results.write_measured(results.describe_run(run))
        page.write_page(results.read_measured())
        if not quick:
            results.write_tables(text)
    print("\n".join(judged), file=sys.stderr)
    sys.exit(verdicts.has_failed(run.ratios, names))


if __name__ == "__main__":
    typer.run(main)
