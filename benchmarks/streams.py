"""Streams of a decoupled model: the time to the first event, and the CPU time of events that come slowly."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import numpy as np
import psutil
import tritonclient.grpc as triton_grpc
import uvloop

from benchmarks import servers
from benchmarks.load import cpu_s
from benchmarks.requests import Request
from benchmarks.run import Run
from benchmarks.tables import describe_spread
from benchmarks.verdicts import PLAIN
from benchmarks.workloads import EVENTS, STREAM_HEADERS, build_stream
from gateway.embedded.supervisor import EmbeddedTriton

PAIRS = 40  # of requests, in each round
EVENT_MARK = b'"NUMBER"'
SLOW_EVENT_S = 0.02
ONE_EVENT = {"inputs": {"COUNT": [1], "SECONDS": [0.0]}}


class Direct:
    """Triton's gRPC client on one connection."""

    def __init__(self, client: triton_grpc.InferenceServerClient) -> None:
        self._client = client
        self._arrived = threading.Event()
        self._inputs = []
        for name, kind, value in (
            ("COUNT", "INT32", np.int32(1)),
            ("SECONDS", "FP32", np.float32(0)),
        ):
            tensor = triton_grpc.InferInput(name, [1], kind)
            self._inputs.append(tensor.set_data_from_numpy(np.array([value])))
        client.start_stream(lambda result, error: self._arrived.set())

    def first_event_s(self) -> float:
        self._arrived.clear()
        started = time.perf_counter()
        self._client.async_stream_infer("ticking", self._inputs)
        self._arrived.wait()
        return time.perf_counter() - started


def first_event_s(client: httpx.Client) -> float:
    started = time.perf_counter()
    path = "/v1/models/ticking/infer"
    with client.stream("POST", path, json=ONE_EVENT, headers=STREAM_HEADERS) as response:
        pieces = response.iter_raw()
        next(pieces)
        took_s = time.perf_counter() - started
        for _ in pieces:
            pass
    return took_s


def tabulate_first_events(triton: EmbeddedTriton, gateway_url: str, run: Run) -> Iterator[str]:
    direct_s: list[float] = []
    gateway_s: list[float] = []
    address = f"127.0.0.1:{triton.options.grpc_port}"
    with (
        httpx.Client(base_url=gateway_url, timeout=60) as client,
        triton_grpc.InferenceServerClient(address) as direct_client,
    ):
        direct = Direct(direct_client)
        first_event_s(client)
        direct.first_event_s()
        for number in range(run.count):
            run.report(number, "the first event")
            # The clients take turns, so that a slow moment of the machine affects both.
            pairs = [(direct.first_event_s(), first_event_s(client)) for _ in range(PAIRS)]
            direct_times, gateway_times = zip(*pairs, strict=True)
            direct_s.append(statistics.median(direct_times))
            gateway_s.append(statistics.median(gateway_times))
    run.record_ratios("first event", gateway_s, direct_s)
    yield "\n**The first event of a stream, sequential requests**\n"
    yield "| | p50 ms | of Triton's client |"
    yield "|---|---|---|"
    yield f"| Triton's client, gRPC | {statistics.median(direct_s) * 1e3:.2f} | 1.00 |"
    ratio = describe_spread(run.ratios["first event"])
    yield f"| gateway /v1, httpx | {statistics.median(gateway_s) * 1e3:.2f} | {ratio} |"


async def read_stream(url: httpx.URL, request: Request) -> None:
    """Send a request and read its events. Raises `RuntimeError` unless all have come.

    It uses asyncio's streams, because httpx would use more of the machine than the servers.
    """
    reader, writer = await asyncio.open_connection(url.host, url.port)
    headers = {**request.headers, "Host": url.host, "Content-Length": str(len(request.body))}
    lines = [f"{name}: {value}\r\n" for name, value in {**headers, "Connection": "close"}.items()]
    writer.write(f"POST {url.path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode() + request.body)
    response = await reader.read(-1)
    writer.close()
    if response.count(EVENT_MARK) != EVENTS:
        raise RuntimeError(f"{url}: not all events have come\n{response[:500]!r}")


async def read_streams(url: str, request: Request, seconds: float) -> int:
    """Read streams at the same time until the seconds have passed; return the number of events."""
    started_at = time.perf_counter()
    events = 0
    while not events or time.perf_counter() - started_at < seconds:
        await asyncio.gather(
            *(read_stream(httpx.URL(url), request) for _ in range(servers.SLOW_STREAMS))
        )
        events += servers.SLOW_STREAMS * EVENTS
    return events


@dataclass(frozen=True)
class StreamTarget:
    name: str
    url: str
    process: psutil.Process
    request: Request


def measure_event_cpu_us(target: StreamTarget, seconds: float) -> float:
    before_s = cpu_s(target.process)
    events = uvloop.run(read_streams(target.url, target.request, seconds))
    return (cpu_s(target.process) - before_s) / events * 1e6


def tabulate_slow_streams(
    gateway: servers.RunningServer, plain: servers.RunningServer, run: Run
) -> Iterator[str]:
    work = build_stream(servers.SLOW_TICKING.name, SLOW_EVENT_S)
    gateway_url, gateway_process = gateway
    plain_url, plain_process = plain
    path = f"/v1/models/{work.model}/infer"
    targets = (
        StreamTarget("gateway /v1", gateway_url + path, gateway_process, work.request),
        StreamTarget(PLAIN, plain_url + work.plain_path, plain_process, work.plain_request),
    )
    spent_us: dict[str, list[float]] = {target.name: [] for target in targets}
    for target in targets:
        measure_event_cpu_us(target, 0)
    for number in range(run.count):
        for target in targets:
            run.report(number, f"slow events, {target.name}")
            spent_us[target.name].append(measure_event_cpu_us(target, run.seconds))
    run.record_ratios("slow stream", spent_us["gateway /v1"], spent_us[PLAIN])
    interval = f"an event every {SLOW_EVENT_S * 1e3:.0f} ms"
    yield f"\n**{servers.SLOW_STREAMS} streams of {EVENTS} events, {interval}**\n"
    yield f"| | CPU µs per event | of {PLAIN} |"
    yield "|---|---|---|"
    for name, values in spent_us.items():
        ratios = [one / other for one, other in zip(values, spent_us[PLAIN], strict=True)]
        yield f"| {name} | {describe_spread(values, 0)} | {describe_spread(ratios)} |"
        run.values[f"slow stream, {name}"] = statistics.median(values)


def table(triton: EmbeddedTriton, stack: ExitStack, run: Run) -> Iterator[str]:
    gateway = stack.enter_context(servers.gateway(triton.options.url))
    plain = stack.enter_context(servers.plain_fastapi(triton))
    gateway_url, _ = gateway
    yield from tabulate_first_events(triton, gateway_url, run)
    yield from tabulate_slow_streams(gateway, plain, run)
