"""Two gateways before one real Triton that change the same model at once."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.errors import assert_error
from tests.support.fleet import QUICK, repository
from tests.support.redis_server import RedisServer
from tests.support.servers import Triton, gateway
from tests.support.wait import wait_until

LOAD = "/v2/repository/models/late/load"
UNLOAD = "/v2/repository/models/late/unload"


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    with Triton(repository(tmp_path_factory.mktemp("two") / "models"), "echo") as triton:
        triton.wait()
        yield triton


@pytest.fixture
def gateways(triton: Triton, tmp_path: Path) -> Iterator[list[httpx.Client]]:
    """Two gateways that share their state in Redis."""
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(tmp_path))
        state = redis.url()
        started = (gateway(triton.options.url, state=state, **QUICK) for _ in range(2))
        yield [stack.enter_context(each)[0] for each in started]


def read_model(client: httpx.Client, name: str = "late") -> dict[str, object]:
    models = {model["name"]: model for model in client.get("/v1/models").json()["models"]}
    return dict(models[name])


def wait_for_model(client: httpx.Client, field: str, value: object) -> None:
    wait_until(lambda: read_model(client).get(field) == value)


def wait_for_error(client: httpx.Client, model: str, *, is_reported: bool) -> None:
    wait_until(lambda: ("last_error" in read_model(client, model)) == is_reported)


@pytest.mark.fault("a model is loaded and unloaded at once, through two gateways")
def test_change_of_a_model_waits_for_that_of_another_gateway_and_then_fails(
    triton: Triton, gateways: list[httpx.Client]
) -> None:
    one, other = gateways
    trouble = triton.repository / "late" / "trouble"
    trouble.write_text("hold")
    location = one.post(LOAD, headers={"Prefer": "respond-async"}).headers["location"]
    wait_for_model(other, "wished", "loaded")
    refused = other.post(UNLOAD)
    assert_error(refused, 409, "CHANGE_IN_PROGRESS")
    assert f"a load on {triton.address} is in progress" in refused.json()["error"]
    trouble.unlink()
    wait_until(lambda: one.get(location).json()["operation"] == "succeeded")
    assert other.post(UNLOAD).status_code == 200


@pytest.mark.long
@pytest.mark.fault("a model is loaded and unloaded at once, through two gateways")
@pytest.mark.parametrize("races", [4, pytest.param(200, marks=pytest.mark.soak)])
def test_concurrent_loads_and_unloads_through_two_gateways_take_effect_in_turn(
    triton: Triton, gateways: list[httpx.Client], races: int
) -> None:
    statuses: Counter[tuple[int, str]] = Counter()
    with ThreadPoolExecutor(2) as pool:
        for _ in range(races):
            for response in pool.map(
                lambda client, path: client.post(path), gateways, (LOAD, UNLOAD)
            ):
                statuses[response.status_code, response.json().get("code", "")] += 1
            for client in gateways:
                client.post("/v2/repository/index")
            desired = {str(read_model(client)["wished"]) for client in gateways}
            assert len(desired) == 1
            wait_for_model(gateways[0], "ready", desired == {"loaded"})
    assert statuses.keys() <= {(200, ""), (409, "CHANGE_IN_PROGRESS")}
    assert httpx.get(f"http://{triton.address}/v2/health/live").status_code == 200


@pytest.mark.fault("a gateway exits in the middle of a load, or a Triton misses one")
def test_load_of_a_killed_gateway_is_finished_by_another_one(
    triton: Triton, tmp_path: Path
) -> None:
    trouble = triton.repository / "late" / "trouble"
    state = f"file://{tmp_path}/state.db"
    with (
        gateway(triton.options.url, state=state, **QUICK) as (killed, command),
        gateway(triton.options.url, state=state, **QUICK) as (other, _),
    ):
        assert killed.post(UNLOAD).status_code == 200
        trouble.write_text("hold")
        location = killed.post(LOAD, headers={"Prefer": "respond-async"}).headers["location"]
        wait_for_model(other, "replicas", {triton.address: "LOADING"})
        assert other.get(location).json()["operation"] == "running"
        os.kill(command.pid, signal.SIGKILL)
        wait_until(lambda: other.get(location).json()["operation"] == "lost")
        assert read_model(other)["behind"] == [triton.address]
        trouble.unlink()
        wait_until(lambda: read_model(other)["ready"] and "behind" not in read_model(other), 15)


@pytest.mark.long
@pytest.mark.fault("two gateways with states of their own")
def test_gateways_with_separate_states_correct_a_model_less_and_less_often(
    triton: Triton, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                gateway(triton.options.url, **QUICK, state=f"file://{tmp_path}/{name}/state.db")
            )
            for name in ("one", "other")
        ]
        clients = [client for client, _ in started]
        assert clients[0].post(UNLOAD).status_code == 200
        clients[1].post(LOAD)
        line = "something else loads or unloads model late"
        wait_until(lambda: any(line in command.output for _, command in started))


def test_error_of_a_load_is_reported_by_all_gateways_until_the_model_is_loaded(
    triton: Triton, gateways: list[httpx.Client]
) -> None:
    trouble = triton.repository / "foreign" / "trouble"
    trouble.write_text("raise")
    assert gateways[0].post(LOAD.replace("late", "foreign")).status_code == 422
    for client in gateways:
        wait_for_error(client, "foreign", is_reported=True)
    trouble.unlink()
    assert gateways[1].post(LOAD.replace("late", "foreign")).status_code == 200
    for client in gateways:
        wait_for_error(client, "foreign", is_reported=False)
