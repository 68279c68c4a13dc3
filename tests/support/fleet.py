"""A fleet of real tritonservers behind a gateway, and load for it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.servers import Command, Triton, gateway

# A model that answers its input, and does at its start what a file beside it says.
ECHO = """
import os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        place = os.path.join(args["model_repository"], "trouble")
        trouble = open(place).read().split() if os.path.exists(place) else []
        if trouble and trouble[0] == "sleep":
            time.sleep(float(trouble[1]))
        elif trouble:
            raise RuntimeError("the weights in /opt/secret/weights.bin are " + " ".join(trouble))

    def execute(self, requests):
        answers = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            if value[0] < 0:
                time.sleep(-float(value[0]))
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", value)]))
        return answers
"""


CONFIG = """
backend: "python"
max_batch_size: 0
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
instance_group [ {{ count: {instances} kind: KIND_CPU }} ]
"""


CHAIN = """
platform: "ensemble"
max_batch_size: 0
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
ensemble_scheduling { step [
  { model_name: "echo" model_version: -1
    input_map { key: "X" value: "X" } output_map { key: "Y" value: "between" } },
  { model_name: "other" model_version: -1
    input_map { key: "X" value: "between" } output_map { key: "Y" value: "Y" } }
] }
"""


BODY = {"inputs": {"X": [1.0, 2.0]}}


def write_echo(repository: Path, name: str, dims: int = 2, instances: int = 1) -> None:
    folder = repository / name
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(CONFIG.format(dims=dims, instances=instances))
    (folder / "1" / "model.py").write_text(ECHO)


def repository(folder: Path) -> Path:
    for name in ("echo", "other", "late", "foreign"):
        write_echo(folder, name)
    (folder / "chain" / "1").mkdir(parents=True)
    (folder / "chain" / "config.pbtxt").write_text(CHAIN)
    return folder


@dataclass
class Fleet:
    """Some Tritons, each with a repository of its own, and a gateway before them."""

    tritons: list[Triton]
    client: httpx.Client
    command: Command

    def infer(self, model: str = "echo", **more: Any) -> httpx.Response:
        return self.client.post(f"/v1/models/{model}/infer", json=BODY, **more)

    def load(self, model: str, **more: Any) -> httpx.Response:
        return self.client.post(f"/v2/repository/models/{model}/load", **more)

    def unload(self, model: str, **more: Any) -> httpx.Response:
        return self.client.post(f"/v2/repository/models/{model}/unload", **more)

    def states(self, model: str) -> dict[str, str]:
        """Of a model by what each Triton itself says."""
        found = {}
        for triton in self.tritons:
            index = httpx.post(f"http://{triton.address}/v2/repository/index").json()
            entries = [entry for entry in index if entry["name"] == model]
            found[triton.address] = entries[0].get("state", "never") if entries else "unknown"
        return found

    def served(self, model: str = "echo") -> dict[str, int]:
        """How many inferences of a model each Triton counts."""
        found = {}
        for triton in self.tritons:
            stats = httpx.get(f"http://{triton.address}/v2/models/{model}/stats").json()
            found[triton.address] = stats["model_stats"][0]["inference_stats"]["success"]["count"]
        return found


def url_of(triton: Triton) -> str:
    return triton.options.url


@contextmanager
def fleet_of(
    folder: Path, count: int, load: tuple[str, ...] = ("echo", "other"), **settings: str
) -> Iterator[Fleet]:
    with ExitStack() as stack:
        tritons = [Triton(repository(folder / str(number)), *load) for number in range(count)]
        for triton in tritons:
            stack.enter_context(triton)
        for triton in tritons:
            triton.wait()
        client, command = stack.enter_context(gateway(*map(url_of, tritons), **settings))
        yield Fleet(tritons, client, command)


def hammer(
    fleet: Fleet, seconds: float, per_second: int = 200, model: str = "echo"
) -> tuple[Counter[int], list[tuple[float, int, float]]]:
    """Inferences at a steady rate whatever comes back; the statuses, and when each began and took."""
    seen: list[tuple[float, int, float]] = []
    began = time.monotonic()

    def work(worker: int) -> None:
        with httpx.Client(base_url=fleet.client.base_url, timeout=60) as client:
            for number in range(worker, int(seconds * per_second), 16):
                time.sleep(max(began + number / per_second - time.monotonic(), 0))
                at = time.monotonic()
                status = client.post(f"/v2/models/{model}/infer", json=V2_BODY).status_code
                seen.append((at, status, time.monotonic() - at))

    with ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(work, worker) for worker in range(16)]:
            done.result()
    return Counter(status for _, status, _ in seen), seen


V2_BODY = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}


def hammer_with_deadline(
    fleet: Fleet, seconds: float, timeout_s: float
) -> tuple[Counter[int], list[tuple[float, int, float]]]:
    seen: list[tuple[float, int, float]] = []
    ends = time.monotonic() + seconds

    def work() -> None:
        headers = {"X-Request-Timeout": str(timeout_s)}
        with httpx.Client(base_url=fleet.client.base_url, timeout=60, headers=headers) as client:
            while time.monotonic() < ends:
                at = time.monotonic()
                status = client.post("/v2/models/echo/infer", json=V2_BODY).status_code
                seen.append((at, status, time.monotonic() - at))
                time.sleep(0.02)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work) for _ in range(8)]:
            done.result()
    seen.sort()
    return Counter(status for _, status, _ in seen), seen


def replica_states(fleet: Fleet, model: str) -> dict[str, str]:
    """Of a model, by what the gateway knows of each Triton."""
    found = fleet.client.get("/v1/replicas").json()["replicas"]
    return {replica["address"]: replica["models"][model] for replica in found}
