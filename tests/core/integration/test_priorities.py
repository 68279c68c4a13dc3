"""Priorities on a real Triton: who is served first while requests wait for one place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.errors import assert_error
from tests.support.keys import bearer, entry, written
from tests.support.metrics import metric
from tests.support.model_zoo.zoo import CANCELLABLE, Zoo
from tests.support.servers import gateway_before
from tests.support.wait import wait_until

USER, BATCH = "tgw_user-secret", "tgw_batch-secret"
PATH = f"/v1/models/{CANCELLABLE.name}/infer"
# The scrape is one of them.
IN_PROGRESS = 'gateway_requests_in_flight{route="/v1"}'
WAITING = 'gateway_queue_length{priority="background"}'
WAITED = 'gateway_queue_wait_seconds_count{priority="interactive"}'


@pytest.fixture(scope="module")
def narrow(
    zoo_triton: EmbeddedTriton,
    zoo_as_written: Zoo,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[httpx.Client]:
    """A gateway that runs one inference at a time."""
    keys = [
        entry(USER, "infer", "metrics", priority="interactive"),
        entry(BATCH, "infer", priority="background"),
    ]
    file: Path = written(tmp_path_factory.mktemp("priorities") / "keys.yaml", keys)
    zoo_as_written.load(CANCELLABLE.name)
    settings = {"keys_file": str(file), "max_model_inflight": "1", "max_queue": "16"}
    with gateway_before(zoo_triton.options.url, **settings) as client:
        client.headers.update(bearer(USER))
        yield client


def test_interactive_request_overtakes_those_that_wait_in_the_background(
    narrow: httpx.Client,
) -> None:
    order: list[str] = []
    lock = threading.Lock()

    def infer(key: str, seconds: float) -> None:
        response = narrow.post(PATH, json={"inputs": seconds}, headers=bearer(key))
        assert response.status_code == 200, response.text
        with lock:
            order.append(key)

    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(infer, BATCH, 3.0)]
        wait_until(lambda: metric(narrow, IN_PROGRESS) == 2)
        calls += [threads.submit(infer, BATCH, 0.01) for _ in range(4)]
        wait_until(lambda: metric(narrow, WAITING) == 4)
        calls.append(threads.submit(infer, USER, 0.01))
        for call in calls:
            call.result()
    assert order.index(USER) == 1


def test_request_that_timed_out_keeps_its_place_while_triton_computes_it(
    narrow: httpx.Client,
) -> None:
    tensor = {"name": "SECONDS", "datatype": "FP32", "shape": [1, 1], "data": [2.0]}
    path = f"/v2/models/{CANCELLABLE.name}/infer"
    headers = {"X-Request-Timeout": "0.1"}
    waited = metric(narrow, WAITED)
    response = narrow.post(path, json={"inputs": [tensor]}, headers=headers)
    assert_error(response, 504, "DEADLINE_PASSED", "no response within 0.1 s")
    assert narrow.post(PATH, json={"inputs": 0.01}).status_code == 200
    assert metric(narrow, WAITED) == waited + 1
    assert narrow.post(PATH, json={"inputs": 0.01}).status_code == 200
    assert metric(narrow, WAITED) == waited + 1


def test_unknown_priority_is_refused_except_for_probes(narrow: httpx.Client) -> None:
    headers = {"X-Priority": "urgent"}
    assert narrow.get("/livez", headers=headers).status_code == 200
    response = narrow.post(PATH, json={"inputs": 0.01}, headers=headers)
    assert_error(response, 400, "MALFORMED_REQUEST", "'urgent', which is not one of background,")
