"""Triton's own load generator, perf_analyzer, as a second measurement of `/v2` and of gRPC."""

from __future__ import annotations

import csv
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
import psutil

from benchmarks import peers, servers
from benchmarks.load import cpu_s
from benchmarks.run import Run
from benchmarks.tables import describe_spread
from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.servers import free_ports

NAME = "perf_analyzer"
CONCURRENCY = 16
WINDOWS = 3  # that perf_analyzer measures and averages, without a warm-up


class Analysis(NamedTuple):
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: float  # of the proxy, per inference


def count_inferences(triton: EmbeddedTriton) -> int:
    """Return the inferences that Triton has run, those of perf_analyzer's warm-up included."""
    url = f"http://127.0.0.1:{triton.options.http_port}/v2/models/small/stats"
    (stats,) = httpx.get(url, timeout=10).raise_for_status().json()["model_stats"]
    return int(stats["inference_count"])


def analyze(
    program: str, url: str, process: psutil.Process, triton: EmbeddedTriton, seconds: float
) -> Analysis:
    """Run perf_analyzer. Raises `ServerNotStarted` if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.csv"
        command = [program, "-m", "small", "-u", urlsplit(url).netloc, "-b", "1"]
        command += ["-i", "grpc" if urlsplit(url).scheme == "grpc" else "http"]
        command += ["--concurrency-range", str(CONCURRENCY), "-f", str(file)]
        command += ["--measurement-interval", str(round(seconds * 1000 / WINDOWS))]
        command += ["--max-trials", str(WINDOWS), "--stability-percentage", "999"]
        cpu_before_s, count_before = cpu_s(process), count_inferences(triton)
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        cpu_spent_s, count = cpu_s(process) - cpu_before_s, count_inferences(triton) - count_before
        if ended.returncode or not file.exists():
            raise servers.ServerNotStarted(f"it failed: {(ended.stderr or ended.stdout)[-500:]}")
        (row,) = csv.DictReader(file.read_text().splitlines())
    return Analysis(
        float(row["Inferences/Second"]),
        float(row["p50 latency"]) / 1e3,
        float(row["p99 latency"]) / 1e3,
        cpu_spent_s / count * 1e6,
    )


def table(triton: EmbeddedTriton, stack: ExitStack, run: Run) -> Iterator[str]:
    address = f"127.0.0.1:{triton.options.http_port}"
    try:
        program = peers.find_program(NAME)
        (grpc_port,) = free_ports(1)
        settings = {"GATEWAY_GRPC_PORT": str(grpc_port)}
        url, gateway = stack.enter_context(servers.gateway(triton.options.url, settings=settings))
        targets = {
            "nginx": stack.enter_context(servers.nginx(address)),
            "gateway /v2": (url, gateway),
            "gateway gRPC": (f"grpc://127.0.0.1:{grpc_port}", gateway),
        }
        rounds = analyze_rounds(program, targets, triton, run)
    except servers.ServerNotStarted as exc:
        peers.report_skipped(NAME, exc)
        return
    yield f"\n**The same request from perf_analyzer, {CONCURRENCY} connections**\n"
    yield "| | requests/s | p50 ms | p99 ms | CPU µs per request | of nginx |"
    yield "|---|---|---|---|---|---|"
    for name, analyses in rounds.items():
        speeds, p50s_ms, p99s_ms, cpus_us = zip(*analyses, strict=True)
        ratios = [
            one.cpu_us / other.cpu_us for one, other in zip(analyses, rounds["nginx"], strict=True)
        ]
        yield (
            f"| {name} | {describe_spread(speeds, 0)} | {describe_spread(p50s_ms)} "
            f"| {describe_spread(p99s_ms)} | {describe_spread(cpus_us, 0)} "
            f"| {describe_spread(ratios)} |"
        )


def analyze_rounds(
    program: str,
    targets: Mapping[str, servers.RunningServer],
    triton: EmbeddedTriton,
    run: Run,
) -> Mapping[str, Sequence[Analysis]]:
    rounds: dict[str, list[Analysis]] = {name: [] for name in targets}
    for number in range(run.count):
        for name, (url, process) in targets.items():
            run.report(number, name)
            rounds[name].append(analyze(program, url, process, triton, run.seconds))
    return rounds
