"""More load than Triton can take: what each priority gets, by the limit of the model.

Requests arrive at random times, whether or not earlier ones have ended. The model takes 50 ms on each of two
instances, so that Triton runs 40 inferences a second. Users (`interactive`) send a fifth of that, in each
load; the rest is one part `normal` and one part `background`, the last from a single caller.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import orjson
import yaml

from benchmarks import servers
from benchmarks.run import Run
from gateway.callers import Priority
from tests.support.servers import triton_on_free_ports

MODEL = "slow"
SERVICE_S = 0.05
INSTANCES = 2
CAPACITY = INSTANCES / SERVICE_S
INTERACTIVE = 0.2 * CAPACITY
LOADS = (0.5, 1.0, 2.0, 10.0)
WARM_UP_S = 6.0
MEASURED_S = 15.0
TIMEOUT_S = 2.0
LIMITS: Mapping[str, Mapping[str, str]] = {
    "fixed": {"GATEWAY_MAX_MODEL_INFLIGHT": str(2 * INSTANCES)},
    "auto": {"GATEWAY_MAX_MODEL_INFLIGHT": "auto"},
    "none": {"GATEWAY_MAX_MODEL_INFLIGHT": "1024"},
}
KEYS: Mapping[Priority, str] = {priority: f"key-of-{priority.name}" for priority in Priority}
CONFIG = f"""
name: "{MODEL}" backend: "python" max_batch_size: 0
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ 1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_CPU count: {INSTANCES} }} ]
"""
PROGRAM = f"""
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            time.sleep({SERVICE_S})
            values = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", values)]))
        return responses
"""
BODY = orjson.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [1.0]}]})


@dataclass
class Served:
    """What became of the requests of one priority."""

    latencies_ms: list[float] = field(default_factory=list)
    rejections_ms: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    def percentile_ms(self, share: float) -> float:
        ordered = sorted(self.latencies_ms)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else math.nan


def write_model(folder: Path) -> None:
    (folder / MODEL / "1").mkdir(parents=True)
    (folder / MODEL / "config.pbtxt").write_text(CONFIG)
    (folder / MODEL / "1" / "model.py").write_text(PROGRAM)


def write_keys(path: Path) -> None:
    """Write a key for each priority."""
    entries = [
        {
            "name": priority.name,
            "sha256": hashlib.sha256(key.encode()).hexdigest(),
            "roles": ["infer"],
            "priority": priority.name,
        }
        for priority, key in KEYS.items()
    ]
    path.write_text(yaml.safe_dump({"keys": entries}))


def list_arrivals(rates: Mapping[Priority, float], seconds: float) -> list[tuple[float, Priority]]:
    """Return the times of requests that arrive independently of each other, in their order."""
    chance = random.Random(0)
    arrivals = []
    for priority, rate in rates.items():
        at = chance.expovariate(rate)
        while at < seconds:
            arrivals.append((at, priority))
            at += chance.expovariate(rate)
    return sorted(arrivals)


def find_rates(load: float) -> dict[Priority, float]:
    others = max(load * CAPACITY - INTERACTIVE, 0.0) / 2
    return {
        Priority.interactive: INTERACTIVE,
        Priority.normal: others,
        Priority.background: others,
    }


async def send_load(url: str, load: float) -> tuple[dict[Priority, Served], float]:
    """Send requests at their times.

    Returns what became of those after the warm-up, and the seconds in which they were sent.
    """
    served: dict[Priority, Served] = defaultdict(Served)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=3 * TIMEOUT_S) as client:

        async def send(priority: Priority, *, is_measured: bool) -> None:
            headers = {
                "X-API-Key": KEYS[priority],
                "X-Request-Timeout": str(TIMEOUT_S),
                "Content-Type": "application/json",
            }
            sent_at = time.perf_counter()
            response = await client.post(
                f"{url}/v2/models/{MODEL}/infer", content=BODY, headers=headers
            )
            took_ms = 1000 * (time.perf_counter() - sent_at)
            if is_measured:
                found = served[priority]
                found.statuses[response.status_code] += 1
                if response.status_code == 200:
                    found.latencies_ms.append(took_ms)
                elif response.status_code == 429:
                    found.rejections_ms.append(took_ms)

        started_at = time.perf_counter()
        tasks = []
        measured_from = started_at
        for at, priority in list_arrivals(find_rates(load), WARM_UP_S + MEASURED_S):
            await asyncio.sleep(max(at - (time.perf_counter() - started_at), 0))
            if at <= WARM_UP_S:
                measured_from = time.perf_counter()
            tasks.append(asyncio.create_task(send(priority, is_measured=at > WARM_UP_S)))
        sent_s = time.perf_counter() - measured_from
        await asyncio.gather(*tasks)
    return served, sent_s


def table(stack: ExitStack, run: Run) -> Iterator[str]:
    repository = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    write_model(repository)
    keys_file = repository.parent / f"{repository.name}-keys.yaml"
    write_keys(keys_file)
    stack.callback(keys_file.unlink)
    triton = stack.enter_context(triton_on_free_ports(repository))
    yield "\n## overload: priorities at a multiple of the capacity"
    yield ""
    yield (
        "| limit | load | goodput of capacity | "
        + " | ".join(
            f"{priority.name} p50, p99 ms (answered)" for priority in sorted(Priority, reverse=True)
        )
        + " | rejections p99 ms |"
    )
    yield "|---|---|---|---|---|---|---|"
    for limit, settings in LIMITS.items():
        environment = {
            **settings,
            "GATEWAY_MAX_QUEUE": "64",
            "GATEWAY_KEYS_FILE": str(keys_file),
        }
        with servers.gateway(triton.options.url, 1, environment) as (url, _):
            for load in LOADS:
                run.report(0, f"{limit} limit, {load:g} × capacity")
                served, sent_s = asyncio.run(send_load(url, load))
                yield format_row(limit, load, served, sent_s)


def format_row(limit: str, load: float, served: Mapping[Priority, Served], sent_s: float) -> str:
    answered = sum(len(each.latencies_ms) for each in served.values())
    possible = min(load, 1.0) * CAPACITY * sent_s
    cells = [limit, f"{load:g} ×", f"{answered / possible:.0%}"]
    for priority in sorted(Priority, reverse=True):
        each = served[priority]
        share = len(each.latencies_ms) / max(each.statuses.total(), 1)
        cells.append(f"{each.percentile_ms(0.5):.0f}, {each.percentile_ms(0.99):.0f} ({share:.0%})")
    rejections = [ms for each in served.values() for ms in each.rejections_ms]
    cells.append(
        f"{statistics.quantiles(rejections, n=100)[98]:.1f}" if len(rejections) > 9 else "–"
    )
    return "| " + " | ".join(cells) + " |"
