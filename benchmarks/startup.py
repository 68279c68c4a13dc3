"""The time that servers and imports take to start, and the memory of the servers.

On a busy machine, their CPU time says more than the wall-clock time.
"""

from __future__ import annotations

import http.client
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks import peers, servers
from benchmarks.load import cpu_s, family, measure, memory_mib, pss_kib
from benchmarks.requests import Request, encode_v2_infer
from benchmarks.run import Run
from benchmarks.tables import describe_spread
from benchmarks.workloads import build_workloads
from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.servers import ROOT, free_ports

POLL_S = 0.002
REST_S = 1.0
TIMEOUT_S = 60.0
# Installed packages have bytecode, so the sources are not compiled at each start.
WITH_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}
IMPORTS = {
    "the interpreter": "pass",
    "the command line": "import gateway.cli",
    "the server": "import gateway.app, gateway.server.http",
    "plain FastAPI": "import uvicorn, benchmarks.baselines.fastapi_app",
}


class ServerStart(NamedTuple):
    """A server, the path that tells that it lives, and an inference."""

    command: Sequence[str]
    environment: Mapping[str, str]
    port: int
    live_path: str
    infer_path: str
    request: Request


class Memory(NamedTuple):
    """The proportional set size of a server's processes, and of the largest that serves after the load."""

    rest_mib: float
    load_mib: float
    worker_mib: float


class StartTimes(NamedTuple):
    live_s: float
    live_cpu_s: float  # of all processes
    infer_s: float


def list_starts(triton: EmbeddedTriton) -> Mapping[str, ServerStart]:
    text = build_workloads()[0]
    small = encode_v2_infer(np.ones((1, 256), np.float32), "FP32")
    ports = free_ports(4)
    variables = servers.triton_variables(triton)
    gateway_command = [sys.executable, "-m", "gateway", "serve", "--port", str(ports[0])]
    gateway_variables = {
        "GATEWAY_TRITON_URLS": triton.options.url,
        "GATEWAY_LOG_LEVEL": "warning",
        "GATEWAY_STATE": "memory:",
        "GATEWAY_DRAIN_S": "0",
    }
    plain = servers.uvicorn_command("benchmarks.baselines.fastapi_app:app", ports[1])
    bare = servers.uvicorn_command("benchmarks.baselines.bare_proxy:app", ports[2])
    small_path = "/v2/models/small/infer"
    worker_command = [*gateway_command[:-1], str(ports[3]), "--workers", "2"]
    return {
        "gateway": ServerStart(
            gateway_command,
            gateway_variables,
            ports[0],
            "/livez",
            f"/v1/models/{text.model}/infer",
            text.request,
        ),
        "gateway, two workers": ServerStart(
            worker_command,
            gateway_variables,
            ports[3],
            "/livez",
            f"/v1/models/{text.model}/infer",
            text.request,
        ),
        "plain FastAPI": ServerStart(
            plain, variables, ports[1], "/docs", text.plain_path, text.plain_request
        ),
        "bare ASGI proxy": ServerStart(
            [*bare, "--lifespan", "off"], variables, ports[2], servers.LIVE, small_path, small
        ),
    }


def is_ok(port: int, method: str, path: str, request: Request) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path, request.body or None, request.headers)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def measure_start(start: ServerStart, seconds: float) -> tuple[StartTimes, Memory]:
    """Return the times from the command to the first 200, and the memory. Raises `TimeoutError`."""
    started_at = time.perf_counter()
    running = subprocess.Popen(
        start.command,
        env={**os.environ, **WITH_BYTECODE, **start.environment},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    process = psutil.Process(running.pid)

    def wait_for(method: str, path: str, request: Request) -> float:
        while not is_ok(start.port, method, path, request):
            if time.perf_counter() - started_at > TIMEOUT_S:
                raise TimeoutError(f"{path} did not return 200 in {TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)
        return time.perf_counter() - started_at

    try:
        times = StartTimes(
            wait_for("GET", start.live_path, Request(b"", {})),
            cpu_s(process),
            wait_for("POST", start.infer_path, start.request),
        )
        time.sleep(REST_S)
        rest_mib = memory_mib(process)
        url = f"http://127.0.0.1:{start.port}{start.infer_path}"
        loaded = measure(url, start.request, process, 16, seconds)
        return times, Memory(rest_mib, loaded.peak_mib, worker_mib(process))
    finally:
        running.terminate()
        running.wait(20)


def worker_mib(process: psutil.Process) -> float:
    """Return the memory of the largest process that started no other: those that did only supervise."""
    workers = [member for member in family(process) if not member.children()]
    return max(pss_kib(worker.pid) for worker in workers) / 1024


def measure_peer_memory(
    name: str,
    server: Callable[[], AbstractContextManager[servers.RunningServer]],
    seconds: float,
) -> Memory | None:
    request = encode_v2_infer(np.ones((1, 256), np.float32), "FP32")
    with ExitStack() as stack:
        started = peers.start_peer(stack, name, server)
        if started is None:
            return None
        url, process = started
        time.sleep(REST_S)
        rest_mib = memory_mib(process)
        loaded = measure(f"{url}/v2/models/small/infer", request, process, 16, seconds)
        return Memory(rest_mib, loaded.peak_mib, worker_mib(process))


def measure_import(statement: str) -> tuple[float, float]:
    """Return the wall-clock and the CPU time."""
    started_at, used_s = time.perf_counter(), children_cpu_s()
    environment = {**os.environ, **WITH_BYTECODE}
    subprocess.run([sys.executable, "-c", statement], cwd=ROOT, check=True, env=environment)
    return time.perf_counter() - started_at, children_cpu_s() - used_s


def children_cpu_s() -> float:
    """Return the CPU time of the child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def tabulate_starts(triton: EmbeddedTriton, run: Run) -> Iterator[str]:
    starts = list_starts(triton)
    measured: dict[str, list[tuple[StartTimes, Memory]]] = {name: [] for name in starts}
    for number in range(run.count):
        for name, start in starts.items():
            run.report(number, name)
            measured[name].append(measure_start(start, run.seconds))
    yield "\n**Start-up, from the command to the first 200, and PSS of all processes**\n"
    yield (
        "| | first 200, s | CPU s until then | first inference, s | MiB at rest | MiB under load "
        "| MiB of a worker |"
    )
    yield "|---|---|---|---|---|---|---|"
    for name, pairs in measured.items():
        live = describe_spread([times.live_s for times, _ in pairs])
        cpu = describe_spread([times.live_cpu_s for times, _ in pairs])
        infer = describe_spread([times.infer_s for times, _ in pairs])
        memory = Memory(*map(statistics.median, zip(*(each for _, each in pairs), strict=True)))
        yield f"| {name} | {live} | {cpu} | {infer} | {format_memory(memory)} |"
    address = f"127.0.0.1:{triton.options.http_port}"
    others = {"nginx": lambda: servers.nginx(address), "Envoy": lambda: peers.envoy(address)}
    for name, server in others.items():
        peer_memory = measure_peer_memory(name, server, run.seconds)
        if peer_memory is not None:
            yield f"| {name} | | | | {format_memory(peer_memory)} |"


def format_memory(memory: Memory) -> str:
    return " | ".join(f"{mib:.0f}" for mib in memory)


def tabulate_imports(run: Run) -> Iterator[str]:
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in IMPORTS}
    for number in range(run.count):
        for name, statement in IMPORTS.items():
            run.report(number, f"imports of {name}")
            measured[name].append(measure_import(statement))
    yield "\n**Imports, in a new process**\n"
    yield "| | s | CPU s |"
    yield "|---|---|---|"
    for name, times in measured.items():
        wall, cpu = (describe_spread(column) for column in zip(*times, strict=True))
        yield f"| {name} | {wall} | {cpu} |"


def table(triton: EmbeddedTriton, stack: ExitStack, run: Run) -> Iterator[str]:
    yield from tabulate_starts(triton, run)
    yield from tabulate_imports(run)
