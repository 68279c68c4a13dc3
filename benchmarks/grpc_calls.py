"""The gRPC front end, compared with a bare forwarder; and HTTP with and without it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import grpc
import numpy as np
import psutil
import uvloop
from tritonclient.grpc import service_pb2

from benchmarks import servers
from benchmarks.baselines.grpc_forwarder import INFER
from benchmarks.load import cpu_s
from benchmarks.requests import encode_v2_infer
from benchmarks.run import Run
from benchmarks.tables import Target, describe_spread
from benchmarks.verdicts import PLAIN_GRPC
from benchmarks.workloads import build_workloads
from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.servers import ROOT, free_ports

CONCURRENCY = 16
BATCH = 200  # calls between two looks at the clock
FORWARDER = "bare grpc.aio forwarder"
READY_TIMEOUT_S = 30
FLOATS = 256  # 1 KB
RunningGrpcServer = tuple[str, psutil.Process]  # its address and process


class GrpcMeasurement(NamedTuple):
    requests_per_s: float
    cpu_us: float  # of the server, per call


def encode_infer_message(values: np.ndarray) -> bytes:
    request = service_pb2.ModelInferRequest(model_name="small")
    request.inputs.add(name="X", datatype="FP32", shape=values.shape)
    request.raw_input_contents.append(values.tobytes())
    return bytes(request.SerializeToString())


@contextmanager
def grpc_forwarder(triton: EmbeddedTriton) -> Iterator[RunningGrpcServer]:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "benchmarks.baselines.grpc_forwarder", str(port)]
    environment = {**os.environ, **servers.triton_variables(triton)}
    started = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        wait_until_connected(f"127.0.0.1:{port}")
        yield f"127.0.0.1:{port}", psutil.Process(started.pid)
    finally:
        started.kill()
        started.wait()


def wait_until_connected(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(READY_TIMEOUT_S)


async def send_calls(address: str, message: bytes, seconds: float) -> tuple[int, float]:
    """Return the number of calls and the time that they took. Raises `grpc.RpcError` if one fails."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(INFER)

        async def send(count: int) -> None:
            for _ in range(count):
                await call(message)

        await asyncio.gather(*(send(5) for _ in range(CONCURRENCY)))
        count, started_at = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - started_at) < seconds:
            await asyncio.gather(*(send(BATCH // CONCURRENCY) for _ in range(CONCURRENCY)))
            count += BATCH // CONCURRENCY * CONCURRENCY
        return count, elapsed_s


def measure_grpc(server: RunningGrpcServer, message: bytes, seconds: float) -> GrpcMeasurement:
    address, process = server
    before_s = cpu_s(process)
    count, elapsed_s = uvloop.run(send_calls(address, message, seconds))
    warm_up = 5 * CONCURRENCY
    return GrpcMeasurement(count / elapsed_s, (cpu_s(process) - before_s) / (count + warm_up) * 1e6)


def run_grpc_rounds(
    targets: Mapping[str, RunningGrpcServer], message: bytes, run: Run
) -> Mapping[str, Sequence[GrpcMeasurement]]:
    rounds: dict[str, list[GrpcMeasurement]] = {name: [] for name in targets}
    for number in range(run.count):
        for name, server in targets.items():
            run.report(number, name)
            rounds[name].append(measure_grpc(server, message, run.seconds))
    return rounds


def format_grpc_table(rounds: Mapping[str, Sequence[GrpcMeasurement]]) -> Iterator[str]:
    yield f"\n**ModelInfer with 1 KB over gRPC, {CONCURRENCY} concurrent calls**\n"
    yield f"| | requests/s | CPU µs per request | of {FORWARDER} |"
    yield "|---|---|---|---|"
    for name, measurements in rounds.items():
        speeds, cpus_us = zip(*measurements, strict=True)
        pairs = zip(measurements, rounds[FORWARDER], strict=True)
        ratios = [one.cpu_us / other.cpu_us for one, other in pairs]
        yield (
            f"| {name} | {describe_spread(speeds, 0)} | {describe_spread(cpus_us, 0)} "
            f"| {describe_spread(ratios)} |"
        )


def tabulate_cancellable(triton: EmbeddedTriton, stack: ExitStack, run: Run) -> Iterator[str]:
    """Measure a model that the gateway calls over gRPC, so that its calls can be cancelled."""
    work = build_workloads()[0]
    settings = {"GATEWAY_CANCELLABLE_MODELS": work.model}
    url, process = stack.enter_context(servers.gateway(triton.options.url, settings=settings))
    plain_url, plain = stack.enter_context(servers.plain_fastapi(triton))
    path = f"/v1/models/{work.model}/infer"
    targets = [
        Target("gateway /v1", url + path, process, work.request),
        Target(PLAIN_GRPC, f"{plain_url}/blob-grpc", plain, work.plain_request),
    ]
    rounds = run.measure(targets, 4)
    run.record_cpu("cancellable", rounds, "gateway /v1", PLAIN_GRPC)
    yield from run.tabulate(f"{work.title}, a cancellable model", rounds, PLAIN_GRPC)


def table(triton: EmbeddedTriton, stack: ExitStack, run: Run) -> Iterator[str]:
    (port,) = free_ports(1)
    values = np.zeros((1, FLOATS), np.float32)
    with_grpc = servers.gateway(triton.options.url, settings={"GATEWAY_GRPC_PORT": str(port)})
    url, process = stack.enter_context(with_grpc)
    forwarder = stack.enter_context(grpc_forwarder(triton))
    targets = {FORWARDER: forwarder, "gateway": (f"127.0.0.1:{port}", process)}
    rounds = run_grpc_rounds(targets, encode_infer_message(values), run)
    spent_us, reference_us = (
        [each.cpu_us for each in rounds[name]] for name in ("gateway", FORWARDER)
    )
    run.record_ratios("gRPC", spent_us, reference_us)
    yield from format_grpc_table(rounds)
    plain_url, plain = stack.enter_context(servers.gateway(triton.options.url))
    request = encode_v2_infer(values, "FP32")
    path = "/v2/models/small/infer"
    http_targets = [
        Target("without gRPC", plain_url + path, plain, request),
        Target("with gRPC", url + path, process, request),
    ]
    title = f"1 KB over HTTP, {CONCURRENCY} connections, with and without the gRPC front end"
    yield from run.tabulate(title, run.measure(http_targets, CONCURRENCY), "without gRPC")
    yield from tabulate_cancellable(triton, stack, run)
