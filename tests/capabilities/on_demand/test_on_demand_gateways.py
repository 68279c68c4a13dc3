"""Two gateways on one Redis agree on what they load on demand, and two without one do no harm."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.capabilities.on_demand.usage import MAX_USED_MODELS
from tests.capabilities.on_demand.support.on_demand import (
    TRACE_SECONDS,
    IndexWatch,
    Trace,
    clear,
    count_lru_loads,
    evictions,
    list_held,
    loads,
    model_names,
    on_demand_fleet,
    on_demand_gateway,
    tritons_with,
    used_continuously,
)
from tests.support.fleet import BODY, Fleet, url_of
from tests.support.metrics import metric
from tests.support.redis_server import RedisServer
from tests.support.servers import Command, Triton, free_ports, gateway_before
from tests.support.state import opened
from tests.support.wait import wait_until

pytestmark = pytest.mark.long

MODELS = model_names(12)
BUDGET = 2


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Triton]]:
    with tritons_with(tmp_path_factory.mktemp("three"), 3, MODELS) as tritons:
        yield tritons


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@contextmanager
def two_gateways(tritons: list[Triton], state: str, **settings: str) -> Iterator[list[Fleet]]:
    with (
        on_demand_fleet(tritons, state=state, log_level="warning", **settings) as first,
        on_demand_gateway(tritons, state=state, log_level="warning", **settings) as second,
    ):
        yield [first, second]


def test_first_requests_at_two_gateways_share_one_load(
    three: list[Triton], redis: RedisServer
) -> None:
    with two_gateways(three, redis.url()) as gateways, ThreadPoolExecutor(40) as pool:
        for model in MODELS[:4]:
            answers = pool.map(
                lambda number, model=model: gateways[number % 2].infer(model), range(40)
            )
            assert {answer.status_code for answer in answers} == {200}
        assert sum(map(loads, gateways)) == 4
        assert sum(len(list_held(triton)) for triton in three) == 4


def test_first_requests_at_two_workers_share_one_load(three: list[Triton]) -> None:
    for triton in three:
        clear(triton)
    (port,) = free_ports(1)
    environment = {
        "GATEWAY_TRITON_URLS": ",".join(map(url_of, three)),
        "GATEWAY_ON_DEMAND_MODELS": "*",
        "GATEWAY_LOG_LEVEL": "warning",
    }
    url = f"http://127.0.0.1:{port}"
    with (
        Command("serve", "--port", str(port), "--workers", "2", environment=environment) as command,
        ThreadPoolExecutor(40) as pool,
    ):
        command.wait_for("serving")
        for model in MODELS[:4]:
            path = f"{url}/v1/models/{model}/infer"
            answers = pool.map(
                lambda _, path=path: httpx.post(path, json=BODY, timeout=60), range(40)
            )
            assert {answer.status_code for answer in answers} == {200}
        with httpx.Client(base_url=url) as client:
            wait_until(lambda: loads(Fleet(three, client, command)) == 4)
        assert sum(len(list_held(triton)) for triton in three) == 4


@pytest.mark.parametrize("seconds", TRACE_SECONDS)
def test_two_gateways_keep_one_budget_with_as_few_loads_as_one_lru_cache(
    three: list[Triton], redis: RedisServer, seconds: float
) -> None:
    trace = Trace(MODELS, seed=2)
    with two_gateways(three, redis.url(), max_loaded_models=str(BUDGET)) as gateways:
        with IndexWatch(three) as watch:
            trace.run([str(each.client.base_url) for each in gateways], seconds)
        assert not trace.failures
        assert max(watch.most.values()) <= BUDGET
        load_count = sum(map(loads, gateways))
        assert load_count <= 1.2 * count_lru_loads(trace.began, 3 * BUDGET) + 1
        held_count = sum(len(list_held(triton)) for triton in three)
        assert sum(map(evictions, gateways)) == load_count - held_count


@pytest.mark.parametrize("seconds", TRACE_SECONDS)
def test_two_gateways_without_a_shared_state_serve_all_models(
    three: list[Triton], seconds: float
) -> None:
    trace = Trace(MODELS, seed=3)
    with two_gateways(three, "none:", max_loaded_models="4") as gateways:
        trace.run([str(each.client.base_url) for each in gateways], seconds)
        assert not trace.failures


def test_gateway_unloads_no_model_that_another_gateway_uses(
    three: list[Triton], redis: RedisServer
) -> None:
    settings = {"idle_unload_s": "1", "max_loaded_models": "2"}
    with (
        two_gateways(three[:1], redis.url(), **settings) as (first, second),
        used_continuously(first, "model00") as statuses,
    ):
        wait_until(lambda: 200 in statuses)
        for model in MODELS[1:4]:  # others make room for each other, and are idle in the meantime
            assert second.infer(model).status_code == 200
        wait_until(lambda: list_held(three[0]) == {"model00"})
        assert set(statuses) == {200}
        assert loads(first) == 1
        assert loads(second) == 3


def test_redis_that_hangs_delays_no_load_for_long(three: list[Triton], tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path) as server,
        on_demand_fleet(three[:1], state=server.url(), log_level="warning") as fleet,
    ):
        assert fleet.infer("model00").status_code == 200
        server.signal(signal.SIGSTOP)
        try:
            wait_until(lambda: metric(fleet.client, "gateway_state_up") == 0)
            for model in MODELS[1:3]:
                answer = fleet.infer(model, headers={"X-Request-Timeout": "10"})
                assert answer.status_code == 200, answer.text
        finally:
            server.signal(signal.SIGCONT)
        wait_until(lambda: metric(fleet.client, "gateway_state_up") == 1)
        assert fleet.infer("model03").status_code == 200


@pytest.mark.fault(
    "thousands of unknown model names, and names that a server of completions accepts"
)
def test_reported_names_of_unknown_models_are_bounded(tmp_path: Path) -> None:
    """Gateways report to each other when each model was used, and each request is a use of its model."""
    (nobody,) = free_ports(1)
    settings = {"on_demand_models": "*", "state": f"file:{tmp_path}/state", "log_level": "warning"}
    with gateway_before(f"http://127.0.0.1:{nobody}", **settings) as client:
        for number in range(MAX_USED_MODELS + 100):
            client.post(f"/v2/models/invented{number}/infer", json={"inputs": []})

        async def read_report() -> Mapping[str, Any]:
            async with opened(settings["state"]) as (store,):
                reports = await store.exchange_reports({})  # and those of this test
                return next(each for each in reports if "ages" in each)

        def are_forgotten() -> bool:
            client.post("/v2/models/last/infer", json={"inputs": []})
            reported = asyncio.run(read_report())["ages"]
            return "last" in reported and len(reported) <= MAX_USED_MODELS

        wait_until(are_forgotten)
