"""What a gateway at rest costs before a large simulated fleet, and what a scrape costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import httpx
import numpy as np

from benchmarks import servers
from benchmarks.load import cpu_s, memory_mib
from benchmarks.requests import encode_v2_infer
from benchmarks.run import Run
from benchmarks.simulated_fleet import ADD_PATH, name_models, simulated_fleet
from benchmarks.tables import Target, describe_spread

REPLICAS, MODELS = 100, 200
SETTLE_S = 3.0
WINDOW_FACTOR = 10  # times the seconds of the run: 30 s of rest in each round
CHANGES = 4  # in each round, of which the slowest counts
POLL_S = 0.005
NOTICE_TIMEOUT_S = 10.0
CONNECTIONS = 4


def measure_rest(server: servers.RunningServer, seconds: float) -> float:
    """Return the CPU time of the gateway at rest, in percent of a core."""
    _, process = server
    before_s = cpu_s(process)
    started_at = time.perf_counter()
    time.sleep(seconds)
    return 100 * (cpu_s(process) - before_s) / (time.perf_counter() - started_at)


def measure_notice_s(client: httpx.Client, port: int, model: str) -> float:
    """Add a model to one replica; return the time until the gateway knows it. Raises `TimeoutError`."""
    httpx.post(f"http://127.0.0.1:{port}{ADD_PATH}{model}").raise_for_status()
    started_at = time.perf_counter()
    while client.get(f"/v1/models/{model}").status_code != 200:
        if time.perf_counter() - started_at > NOTICE_TIMEOUT_S:
            raise TimeoutError(f"{model} is not known after {NOTICE_TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)
    return time.perf_counter() - started_at


def measure_idle(
    server: servers.RunningServer, ports: Sequence[int], run: Run
) -> Mapping[str, Sequence[float]]:
    url, process = server
    measured: dict[str, list[float]] = {"CPU": [], "memory": [], "change": []}
    with httpx.Client(base_url=url, timeout=60) as client:
        time.sleep(SETTLE_S)
        for number in range(run.count):
            run.report(number, "at rest")
            measured["CPU"].append(measure_rest(server, WINDOW_FACTOR * run.seconds))
            measured["memory"].append(memory_mib(process))
            run.report(number, "until a change is noticed")
            names = [f"added_{number}_{change}" for change in range(CHANGES)]
            measured["change"].append(
                max(measure_notice_s(client, ports[0], name) for name in names)
            )
    return measured


def tabulate_scrapes(server: servers.RunningServer, run: Run) -> Iterator[str]:
    url, process = server
    pages_s: list[float] = []
    with httpx.Client(base_url=url, timeout=60) as client:
        for number in range(run.count):
            run.report(number, "a scrape")
            started_at = time.perf_counter()
            page = client.get("/metrics").raise_for_status()
            pages_s.append(time.perf_counter() - started_at)
    run.values["scrape MB"] = len(page.content) / 1e6
    run.values["scrape s"] = statistics.median(pages_s)
    run.values["MiB after scrapes"] = memory_mib(process)
    yield (
        f"\nA scrape takes {describe_spread(pages_s)} s, and the page has"
        f" {run.values['scrape MB']:.1f} MB. Then the gateway has"
        f" {run.values['MiB after scrapes']:.0f} MiB."
    )


def tabulate_inference(server: servers.RunningServer, run: Run) -> Iterator[str]:
    """Measure inference with and without scrapes beside it."""
    url, process = server
    request = encode_v2_infer(np.ones((1, 256), np.float32), "FP32")
    scrapes = f"while curl -sf --compressed -o /dev/null {url}/metrics; do sleep 1; done"
    path = f"{url}/v2/models/{name_models(1)[0]}/infer"
    targets = [
        Target("no scrapes", path, process, request),
        Target("a scrape every second", path, process, request, scrapes),
    ]
    title = f"1 KB, {CONNECTIONS} connections, during scrapes of {REPLICAS} × {MODELS} models"
    yield from run.tabulate(title, run.measure(targets, CONNECTIONS, 2), "no scrapes")


def table(stack: ExitStack, run: Run) -> Iterator[str]:
    ports = stack.enter_context(simulated_fleet(REPLICAS, name_models(MODELS)))
    urls = ",".join(f"http://127.0.0.1:{port}?grpc=1&metrics={port}" for port in ports)
    server = stack.enter_context(servers.gateway(urls))
    measured = measure_idle(server, ports, run)
    yield f"\n**A gateway at rest before {REPLICAS} replicas × {MODELS} models**\n"
    yield "| CPU, % of a core | MiB | s until a change of an index is noticed |"
    yield "|---|---|---|"
    yield f"| {' | '.join(describe_spread(values) for values in measured.values())} |"
    for name, values in measured.items():
        run.ratios[f"idle {name}"] = list(values)
    yield from tabulate_scrapes(server, run)
    yield from tabulate_inference(server, run)
