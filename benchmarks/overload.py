"""More load than Triton can take: what each priority gets, by the limit of the model.

Requests arrive at random times, whether or not earlier ones have ended. Each model runs 40 inferences a
second. Users (`interactive`) send a fifth of that, in each load; the rest is one part `normal` and one part
`background`, the last from a single caller. `make bench` measures the first model;
`python -m benchmarks.overload --models python,batching,ensemble` compares the limits with each.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

import orjson
import typer
import uvloop
import yaml

from benchmarks import page, results, servers
from benchmarks.run import Run
from gateway.callers import Priority
from gateway.media_types import JSON
from tests.support.load import Pool, post
from tests.support.servers import triton_on_free_ports

CAPACITY = 40.0
INTERACTIVE = 0.2 * CAPACITY
LOADS = (0.5, 1.0, 2.0, 10.0)
WARM_UP_S = 6.0
MEASURED_S = 15.0
TIMEOUT_S = 2.0
KEYS: Mapping[Priority, str] = {priority: f"key-of-{priority.name}" for priority in Priority}
CONFIG = """
name: "{name}" backend: "python" max_batch_size: {max_batch_size}
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ 1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_CPU count: {instances} }} ]
"""
BATCHING = "dynamic_batching { }"
PROGRAM = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep({batch_s} + {request_s} * len(requests))
        responses = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", values)]))
        return responses
"""
ENSEMBLE_CONFIG = """
name: "ensemble" platform: "ensemble" max_batch_size: 0
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
ensemble_scheduling { step [
  { model_name: "first_step" model_version: -1
    input_map { key: "X" value: "X" } output_map { key: "Y" value: "between" } },
  { model_name: "python" model_version: -1
    input_map { key: "X" value: "between" } output_map { key: "Y" value: "Y" } }
] }
"""


@dataclass(frozen=True)
class SlowModel:
    """A model that sleeps: so long for each batch, and for each request in it."""

    name: str
    instances: int
    batch_s: float
    request_s: float
    max_batch_size: int = 0

    def write(self, folder: Path) -> None:
        version = folder / self.name / "1"
        version.mkdir(parents=True)
        config = CONFIG.format(
            name=self.name, max_batch_size=self.max_batch_size, instances=self.instances
        )
        batching = BATCHING if self.max_batch_size else ""
        (folder / self.name / "config.pbtxt").write_text(config + batching)
        program = PROGRAM.format(batch_s=self.batch_s, request_s=self.request_s)
        (version / "model.py").write_text(program)


MODELS = (
    SlowModel("python", instances=2, batch_s=0.0, request_s=0.05),
    SlowModel("batching", instances=1, batch_s=0.06, request_s=0.01, max_batch_size=4),
    SlowModel("first_step", instances=1, batch_s=0.0, request_s=0.01),
)
# Two batches, or two inferences for each instance, which the slowest step of the ensemble has.
FIXED_LIMITS = {"python": 3, "batching": 8, "ensemble": 4}


def find_settings(limit: str, model: str) -> Mapping[str, str]:
    limits = {"fixed": str(FIXED_LIMITS[model]), "none": "1024"}
    return {"GATEWAY_MAX_MODEL_INFLIGHT": limits[limit]}


def encode_request(model: str) -> bytes:
    shape = [1, 1] if model == "batching" else [1]
    return orjson.dumps(
        {"inputs": [{"name": "X", "datatype": "FP32", "shape": shape, "data": [1.0]}]}
    )


@dataclass
class Served:
    """What became of the requests of one priority."""

    latencies_ms: list[float] = field(default_factory=list)
    rejections_ms: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    def percentile_ms(self, share: float) -> float:
        ordered = sorted(self.latencies_ms)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else math.nan


def write_models(folder: Path) -> None:
    for model in MODELS:
        model.write(folder)
    (folder / "ensemble" / "1").mkdir(parents=True)
    (folder / "ensemble" / "config.pbtxt").write_text(ENSEMBLE_CONFIG)


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


async def send_load(
    url: str, model: str, load: float, *, measured_s: float, warm_up_s: float
) -> tuple[dict[Priority, Served], float]:
    """Send requests at their times.

    Returns what became of those after the warm-up, and the seconds in which they were sent.
    """
    served: dict[Priority, Served] = defaultdict(Served)
    port = urlsplit(url).port
    assert port is not None
    path = f"/v2/models/{model}/infer"
    with Pool(port) as pool:

        async def send(priority: Priority, *, is_measured: bool) -> None:
            headers = (f"X-API-Key: {KEYS[priority]}", f"X-Request-Timeout: {TIMEOUT_S}")
            request = post(path, encode_request(model), JSON, *headers)
            sent_at = time.perf_counter()
            response = await pool.ask(request)
            took_ms = 1000 * (time.perf_counter() - sent_at)
            if is_measured:
                found = served[priority]
                found.statuses[response.status] += 1
                if response.status == 200:
                    found.latencies_ms.append(took_ms)
                elif response.status == 429:
                    found.rejections_ms.append(took_ms)

        started_at = time.perf_counter()
        tasks = []
        measured_from = started_at
        for at, priority in list_arrivals(find_rates(load), warm_up_s + measured_s):
            await asyncio.sleep(max(at - (time.perf_counter() - started_at), 0))
            if at <= warm_up_s:
                measured_from = time.perf_counter()
            tasks.append(asyncio.create_task(send(priority, is_measured=at > warm_up_s)))
        sent_s = time.perf_counter() - measured_from
        await asyncio.gather(*tasks)
    return served, sent_s


def table(stack: ExitStack, run: Run) -> Iterator[str]:
    yield from compare(stack, run, ("python",))


def compare(
    stack: ExitStack,
    run: Run,
    models: Sequence[str],
    limits: Sequence[str] = ("fixed", "none"),
    loads: Sequence[float] = LOADS,
    *,
    measured_s: float = MEASURED_S,
    warm_up_s: float = WARM_UP_S,
) -> Iterator[str]:
    """Yield a table, and record what it contains."""
    repository = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    write_models(repository)
    keys_file = repository.parent / f"{repository.name}-keys.yaml"
    write_keys(keys_file)
    stack.callback(keys_file.unlink)
    triton = stack.enter_context(triton_on_free_ports(repository))
    yield "\n## overload: priorities at a multiple of the capacity"
    yield ""
    yield (
        "| model | limit | load | goodput of capacity | "
        + " | ".join(
            f"{priority.name} p50, p99 ms (answered)" for priority in sorted(Priority, reverse=True)
        )
        + " | rejections p99 ms |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for model in models:
        for limit in limits:
            environment = {
                **find_settings(limit, model),
                "GATEWAY_MAX_QUEUE": "64",
                "GATEWAY_KEYS_FILE": str(keys_file),
            }
            # It takes the size of the queue, which is fixed otherwise.
            module = "tests.support.gateway_main"
            with servers.gateway(triton.options.url, 1, environment, module) as (url, _):
                for load in loads:
                    run.report(0, f"{model}, {limit} limit, {load:g} × capacity")
                    served, sent_s = uvloop.run(
                        send_load(url, model, load, measured_s=measured_s, warm_up_s=warm_up_s)
                    )
                    goodput = find_goodput(load, served, sent_s)
                    run.tables[f"{page.OVERLOAD}{model}, {limit}, {load:g}"] = {
                        "all": {"goodput": goodput},
                        **{
                            priority.name: {
                                "p50_ms": each.percentile_ms(0.5),
                                "p99_ms": each.percentile_ms(0.99),
                            }
                            for priority, each in served.items()
                            if each.latencies_ms
                        },
                    }
                    yield format_row(f"{model} | {limit}", load, served, goodput)


def find_goodput(load: float, served: Mapping[Priority, Served], sent_s: float) -> float:
    answered = sum(len(each.latencies_ms) for each in served.values())
    return answered / (min(load, 1.0) * CAPACITY * sent_s)


def format_row(name: str, load: float, served: Mapping[Priority, Served], goodput: float) -> str:
    cells = [name, f"{load:g} ×", f"{goodput:.0%}"]
    for priority in sorted(Priority, reverse=True):
        each = served[priority]
        share = len(each.latencies_ms) / max(each.statuses.total(), 1)
        cells.append(f"{each.percentile_ms(0.5):.0f}, {each.percentile_ms(0.99):.0f} ({share:.0%})")
    rejections = [ms for each in served.values() for ms in each.rejections_ms]
    cells.append(
        f"{statistics.quantiles(rejections, n=100)[98]:.1f}" if len(rejections) > 9 else "–"
    )
    return "| " + " | ".join(cells) + " |"


def main(
    models: str = "python,batching,ensemble",
    limits: str = "fixed,none",
    loads: str = "1,2,10",
    seconds: float = MEASURED_S,
    warm_up: float = WARM_UP_S,
    record: bool = False,
) -> None:
    """Compare limits with models of several kinds, and print a table.

    --record writes what was measured to benchmarks/results.json, and its charts to docs/charts.
    """
    run = Run(suite="overload", count=1)
    with ExitStack() as stack:
        for line in compare(
            stack,
            run,
            models.split(","),
            limits.split(","),
            [float(each) for each in loads.split(",")],
            measured_s=seconds,
            warm_up_s=warm_up,
        ):
            print(line, flush=True)
    if record:
        measured = results.read_measured()
        results.write_measured(replace(measured, tables={**measured.tables, **run.tables}))
        page.write_page(results.read_measured())


if __name__ == "__main__":
    typer.run(main)
