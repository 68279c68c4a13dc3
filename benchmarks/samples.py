"""What samples of all requests cost, also while their sink does not answer, or is down."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import numpy as np

from benchmarks import servers
from benchmarks.load import memory_mib
from benchmarks.requests import encode_v2_infer
from benchmarks.run import Run
from benchmarks.tables import Target, format_table, measure_rounds
from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.servers import free_ports

PATH = "/v2/models/small/infer"
NO_SAMPLES = "no samples"
SILENT = "all to a sink that does not answer"
DOWN = "all to a sink that is down"
# The sink of each gateway is stopped for a minute of load, in at least so many rounds.
STOPPED_S = 60.0
MIN_ROUNDS = 7
# 1,000 requests per second, with a pause of 31 ms and an answer after 1 ms on average.
CONNECTIONS = 32
MAX_PAUSE_MS = 62


@contextmanager
def silent_sink() -> Iterator[str]:
    """Yield the address of a server that accepts connections and requests, and does not answer."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def start_targets(
    triton: EmbeddedTriton, stack: ExitStack, sinks: Mapping[str, tuple[str, str]], pause_ms: int
) -> list[Target]:
    """Start a gateway for each sink and its rate."""
    request = encode_v2_infer(np.ones((1, 256), np.float32), "FP32")
    targets = []
    for name, (sink, rate) in sinks.items():
        settings = {"GATEWAY_SAMPLES": sink, "GATEWAY_SAMPLE_RATE": rate}
        url, process = stack.enter_context(servers.gateway(triton.options.url, 1, settings))
        target = Target(name, f"{url}{PATH}", process, request, max_pause_ms=pause_ms)
        targets.append(target)
    return targets


def table(triton: EmbeddedTriton, stack: ExitStack, run: Run) -> Iterator[str]:
    yield from measure_stopped(triton, run)
    sinks = {
        NO_SAMPLES: ("", "0"),
        SILENT: (stack.enter_context(silent_sink()), "1"),
    }
    targets = start_targets(triton, stack, sinks, 0)
    title = "1 KB, 1 connection, samples"
    yield from run.tabulate(title, run.measure(targets, 1), NO_SAMPLES)


def measure_stopped(triton: EmbeddedTriton, run: Run) -> Iterator[str]:
    """Compare latency and memory while sinks are stopped with those of a gateway without samples."""
    with ExitStack() as stack:
        (free_port,) = free_ports(1)
        sinks = {
            NO_SAMPLES: ("", "0"),
            SILENT: (stack.enter_context(silent_sink()), "1"),
            DOWN: (f"http://127.0.0.1:{free_port}", "1"),
        }
        targets = start_targets(triton, stack, sinks, MAX_PAUSE_MS)
        idle_mib = {target.name: memory_mib(target.process) for target in targets}
        count = max(run.count, MIN_ROUNDS)
        # wrk takes whole seconds.
        seconds = run.seconds if run.is_quick else math.ceil(STOPPED_S / count)
        rounds = measure_rounds(targets, CONNECTIONS, seconds, count, report=run.report)
    growth_mib = {}
    for target in targets:
        peak_mib = max(each.peak_mib for each in rounds[target.name])
        growth_mib[target.name] = peak_mib - idle_mib[target.name]
    for name, row in ((SILENT, "silent sink"), (DOWN, "no sink")):
        latencies_ms, reference_ms = (
            [each.p99_ms for each in rounds[each_name]] for each_name in (name, NO_SAMPLES)
        )
        run.record_ratios(row, latencies_ms, reference_ms)
    run.ratios["samples memory"] = [max(growth_mib.values()) - growth_mib[NO_SAMPLES]]
    yield from format_table("1 KB, 1,000 requests/s, a sink that is stopped", rounds, NO_SAMPLES)
