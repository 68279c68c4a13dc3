"""The benchmarks of `make bench`. All ratios of a table come from one run.

The servers take turns in each round, so that a slow minute of the machine affects all of them; the
median of the rounds is reported. CPU is the user and system time of the server's process tree,
divided by the number of requests that wrk counted. A failed request aborts the run.
"""

from __future__ import annotations

import io
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import psutil
import typer
from PIL import Image
from tritonclient.http import InferenceServerClient, InferInput

from benchmarks import fleet, hot_path, servers, streams
from benchmarks.load import Measured, Request, measure
from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.servers import triton_on_free_ports
from tests.support.tools import of_models

RESULTS = Path(__file__).with_name("results.md")


@dataclass(frozen=True)
class Target:
    """A server with the URL and request that are measured."""

    name: str
    url: str
    process: psutil.Process
    request: Request
    beside: str = ""  # a shell command that runs during the measurement


def v2_infer(name: str, array: np.ndarray, datatype: str) -> Request:
    """Return the request as Triton's own client sends it."""
    tensor = InferInput("X", list(array.shape), datatype).set_data_from_numpy(array)
    body, length = InferenceServerClient.generate_request_body([tensor])
    return Request(body, {"Inference-Header-Content-Length": str(length)})


def jpeg() -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(0).normal(128, 20, (480, 640, 3)).clip(0, 255).astype(np.uint8)
    Image.fromarray(noise).resize((640, 480)).save(file, "JPEG", quality=85)
    return file.getvalue()


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def rounds(
    targets: list[Target], connections: int, seconds: float, count: int
) -> Mapping[str, Measured]:
    results: dict[str, list[Measured]] = {target.name: [] for target in targets}
    for number in range(count):
        for target in targets:
            print(f"  round {number + 1} of {count}: {target.name}", file=sys.stderr, flush=True)
            with servers.shell(target.beside):
                result = measure(target.url, target.request, target.process, connections, seconds)
            results[target.name].append(result)
    return {
        name: Measured(*map(statistics.median, zip(*map(astuple, measured), strict=True)))
        for name, measured in results.items()
    }


def table(title: str, measured: Mapping[str, Measured], base: str) -> Iterator[str]:
    yield f"\n**{title}**\n"
    yield f"| | requests/s | of {base} | p50 ms | p99 ms | CPU µs per request | of {base} | MiB | growth |"
    yield "|---|---|---|---|---|---|---|---|---|"
    reference = measured[base]
    for name, row in measured.items():
        requests_ratio = row.requests_per_s / reference.requests_per_s
        yield (
            f"| {name} | {row.requests_per_s:,.0f} | {requests_ratio:.2f} "
            f"| {row.p50_ms:.2f} | {row.p99_ms:.2f} | {row.cpu_us:.0f} "
            f"| {row.cpu_us / reference.cpu_us:.2f} | {row.peak_mib:.0f} | {row.growth_mib:.1f} |"
        )


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = (names or [platform.machine()])[0]
    return f"{os.cpu_count()} cores ({model}), CPython {platform.python_version()}"


def friendly(triton: EmbeddedTriton, stack: ExitStack, seconds: float, count: int) -> Iterator[str]:
    """Measure the conversion of `/v1` against the same work in a plain FastAPI route."""
    address = f"127.0.0.1:{triton.options.http_port}"
    gateway_url, gateway = stack.enter_context(servers.gateway(triton.options.url))
    plain_url, plain = stack.enter_context(servers.plain_fastapi(address))
    nginx_url, nginx = stack.enter_context(servers.nginx(address))
    picture = jpeg()
    array = np.random.default_rng(0).random((3, 224, 224), np.float32)
    workloads = {
        "a JPEG of 640×480 to a BYTES input": (
            "blob", Request(picture, {"Content-Type": "image/jpeg"}), np.array([[picture]], object), "BYTES",
        ),
        "a 3×224×224 FP32 array as .npy": (
            "array", Request(npy(array), {"Content-Type": "application/x-npy"}), array[None], "FP32",
        ),
    }  # fmt: skip
    for title, (model, request, tensor, datatype) in workloads.items():
        targets = [
            Target("nginx, prepared tensor", f"{nginx_url}/v2/models/{model}/infer", nginx,
                   v2_infer(model, tensor, datatype)),
            Target("gateway /v1", f"{gateway_url}/v1/models/{model}/infer", gateway, request),
            Target("plain FastAPI", f"{plain_url}/{model}", plain, request),
        ]  # fmt: skip
        yield from table(title, rounds(targets, 4, seconds, count), "nginx, prepared tensor")


def pass_through(
    triton: EmbeddedTriton, stack: ExitStack, seconds: float, count: int
) -> Iterator[str]:
    """Measure the overhead of the gateway and other proxies in front of Triton."""
    address = f"127.0.0.1:{triton.options.http_port}"
    gateway_url, gateway = stack.enter_context(servers.gateway(triton.options.url))
    plain_url, plain = stack.enter_context(servers.plain_fastapi(address))
    nginx_url, nginx = stack.enter_context(servers.nginx(address))
    array = np.random.default_rng(0).random((1, 256), np.float32)
    request, path = v2_infer("small", array, "FP32"), "/v2/models/small/infer"
    server = psutil.Process(triton.reaper_pid)
    targets = [
        Target("direct", f"http://{address}{path}", server, request),
        Target("nginx", f"{nginx_url}{path}", nginx, request),
        Target("gateway /v2", f"{gateway_url}{path}", gateway, request),
        Target("plain FastAPI", f"{plain_url}/small", plain, Request(array.tobytes(), {})),
    ]
    if servers.has_kserve():
        kserve_url, kserve = stack.enter_context(servers.kserve_transformer(address))
        body = json.dumps({"instances": array.tolist()}).encode()
        kserve_request = Request(body, {"Content-Type": "application/json"})
        url = f"{kserve_url}/v1/models/small:predict"
        targets.append(Target("KServe transformer, V1 JSON", url, kserve, kserve_request))
    for connections in (16, 1):
        title = (
            f"1 KB binary infer, {connections} connection{'s' * (connections > 1)}, one worker each"
        )
        yield from table(title, rounds(targets, connections, seconds, count), "nginx")


def large(triton: EmbeddedTriton, stack: ExitStack, seconds: float, count: int) -> Iterator[str]:
    """Measure bodies of 64 MiB, to show whether they are streamed or buffered."""
    address = f"127.0.0.1:{triton.options.http_port}"
    settings = {"GATEWAY_MAX_BODY_BYTES": str(1 << 30)}
    gateway_url, gateway = stack.enter_context(servers.gateway(triton.options.url, 1, settings))
    nginx_url, nginx = stack.enter_context(servers.nginx(address))
    request = v2_infer("large", np.ones(1 << 24, np.float32), "FP32")
    path = "/v2/models/large/infer"
    targets = [
        Target("nginx", f"{nginx_url}{path}", nginx, request),
        Target("gateway /v2", f"{gateway_url}{path}", gateway, request),
    ]
    yield from table(
        "64 MiB in and out, 1 connection", rounds(targets, 1, 2 * seconds, count), "nginx"
    )


def workers(triton: EmbeddedTriton, stack: ExitStack, seconds: float, count: int) -> Iterator[str]:
    """Measure a second worker. It helps only with enough cores for it, wrk and Triton."""
    one = stack.enter_context(servers.gateway(triton.options.url))
    two = stack.enter_context(servers.gateway(triton.options.url, workers=2))
    request = v2_infer("small", np.ones((1, 256), np.float32), "FP32")
    targets = [
        Target(name, f"{url}/v2/models/small/infer", process, request)
        for name, (url, process) in {"one worker": one, "two workers": two}.items()
    ]
    yield from table(
        "1 KB, 32 connections, workers", rounds(targets, 32, seconds, count), "one worker"
    )


def scraping(triton: EmbeddedTriton, stack: ExitStack, seconds: float, count: int) -> Iterator[str]:
    """Measure inference during scrapes of a large metrics page: 200 models on each of 3 more replicas."""
    pages = stack.enter_context(servers.metrics_pages(of_models(200), 3))
    urls = ",".join((triton.options.url, *pages))
    url, process = stack.enter_context(servers.gateway(urls))
    request = v2_infer("small", np.ones((1, 256), np.float32), "FP32")
    scrape = f"curl -sf --compressed -o /dev/null {url}/metrics"
    loops = {
        "no scrapes": "",
        "a scrape every second": f"while {scrape}; do sleep 1; done",
        "continuous scrapes": f"while {scrape}; do :; done",
    }
    targets = [
        Target(name, f"{url}/v2/models/small/infer", process, request, loop)
        for name, loop in loops.items()
    ]
    yield from table(
        "1 KB, 1 connection, during scrapes of 3 × 200 models",
        rounds(targets, 1, 2 * seconds, count),
        "no scrapes",
    )


def main(seconds: float = 3.0, count: int = 5, only: str = "") -> None:
    """Print the tables. A full run also writes them to benchmarks/results.md."""
    suites = {
        "pass-through": pass_through,
        "large": large,
        "friendly": friendly,
        "workers": workers,
        "scraping": scraping,
    }
    lines = [
        "# Results of the last run",
        f"\n{datetime.now(timezone.utc):%Y-%m-%d}, {machine()}. The machine is shared; only ratios count.",
        f"\n{__doc__.partition(chr(10))[2].strip()}",
    ]
    with ExitStack() as stack:
        repository = stack.enter_context(servers.repository())
        triton = stack.enter_context(triton_on_free_ports(repository))
        for name, suite in suites.items():
            if only in ("", name):
                lines += suite(triton, stack, seconds, count)
        if only in ("", "streams"):
            lines += streams.table(triton, stack)
    if only in ("", "hot-path"):
        lines += hot_path.table()
    if only in ("", "fleet"):
        lines += fleet.table()
    text = "\n".join(lines) + "\n"
    print(text)
    if not only:
        RESULTS.write_text(text)


if __name__ == "__main__":
    typer.run(main)
