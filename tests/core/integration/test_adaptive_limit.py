"""The limit of a model that the gateway finds, on a real Triton whose model becomes slower and faster."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.fleet.model_limits import QueueTimes, parse_queue_times
from tests.support.metrics import metric
from tests.support.model_folders import write_model_folder
from tests.support.servers import Triton, gateway
from tests.support.wait import wait_until

NAME = "variable"
INSTANCES = 2
CLIENTS = 10
SOURCE = """
import pathlib, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.place = pathlib.Path(args["model_repository"]) / "delay"

    def execute(self, requests):
        answers = []
        for request in requests:
            time.sleep(float(self.place.read_text()))
            value = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", value)]))
        return answers
"""
CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { count: %d kind: KIND_CPU } ]
"""
FAST_S, SLOW_S = 0.1, 0.2
# The limit is adjusted once a second, and follows the model after so many times.
ADJUSTMENTS = 10
LIMIT = f'gateway_model_limit{{model="{NAME}"}}'


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_model_folder(tmp_path / NAME, CONFIG % INSTANCES, {"1/model.py": SOURCE})
    set_delay(tmp_path, FAST_S)
    return tmp_path


@pytest.fixture
def client(repository: Path) -> Iterator[httpx.Client]:
    with Triton(repository, NAME) as triton:
        triton.wait()
        with gateway(triton.options.url, max_model_inflight="auto") as (client, _):
            wait_until(lambda: client.get(f"/v1/models/{NAME}").status_code == 200)
            yield client


def set_delay(repository: Path, seconds: float) -> None:
    """Let the model take so long from now on."""
    new = repository / NAME / "delay.new"
    new.write_text(str(seconds))
    new.replace(repository / NAME / "delay")


def read_times(client: httpx.Client) -> QueueTimes:
    return parse_queue_times(client.get(f"/v2/models/{NAME}/stats").content)


def has_short_queue_within(client: httpx.Client, max_requests: int) -> bool:
    """Return whether ten requests wait in Triton about as long as they are computed, before so many are.

    Without a limit, they wait four times as long.
    """
    first = before = read_times(client)
    while before.count - first.count < max_requests:
        wait_until(lambda: read_times(client).count >= before.count + 10)  # noqa: B023
        now = read_times(client)
        if 0.5 < (now - before).ratio < 2.5:
            return True
        before = now
    return False


@pytest.mark.long
@pytest.mark.parametrize("rows", [1, 2])
def test_limit_follows_a_model_that_becomes_slower_and_faster(
    client: httpx.Client, repository: Path, rows: int
) -> None:
    tensor: dict[str, Any] = {"name": "X", "datatype": "FP32", "shape": [rows, 1]}
    body = {"inputs": [{**tensor, "data": [1.0] * rows}]}
    is_over = threading.Event()

    def send() -> None:
        while not is_over.is_set():
            response = client.post(f"/v2/models/{NAME}/infer", json=body)
            assert response.status_code == 200, response.text

    with ThreadPoolExecutor(CLIENTS) as threads:
        calls = [threads.submit(send) for _ in range(CLIENTS)]
        try:
            wait_until(lambda: metric(client, LIMIT))
            for delay_s in (FAST_S, SLOW_S, FAST_S):
                set_delay(repository, delay_s)
                assert has_short_queue_within(client, round(ADJUSTMENTS * INSTANCES / delay_s))
        finally:
            is_over.set()
    for call in calls:
        call.result()
