"""Management while one of three real Tritons is stopped: it accepts connections, and never answers."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.support.fleet import QUICK, Fleet, fleet_of
from tests.support.wait import wait_until


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("hung")
    with fleet_of(folder, 3, **QUICK, load_timeout_s="10") as fleet:
        yield fleet


@pytest.fixture
def hung(fleet: Fleet) -> Iterator[str]:
    """The address of a replica that has just been stopped, and goes on after the test."""
    triton = fleet.tritons[0]
    triton.signal(signal.SIGSTOP)
    yield triton.address
    triton.signal(signal.SIGCONT)
    fleet.restore()


def measure(response: httpx.Response, max_s: float) -> httpx.Response:
    assert response.elapsed.total_seconds() <= max_s
    return response


@pytest.mark.fault("a replica accepts connections and never answers, while models")
def test_index_does_not_wait_for_a_hung_replica(fleet: Fleet, hung: str) -> None:
    for _ in range(3):
        measure(fleet.client.post("/v2/repository/index"), 3).raise_for_status()


@pytest.mark.fault("a replica accepts connections and never answers, while models")
def test_load_reaches_the_others_at_once_and_a_hung_replica_later(fleet: Fleet, hung: str) -> None:
    response = measure(fleet.load("late"), 4)
    assert (response.status_code, response.json()["code"]) == (502, "PARTLY_DONE")
    states = {at: each["state"] for at, each in response.json()["replicas"].items()}
    assert states.pop(hung) == "UNREACHABLE"
    assert set(states.values()) == {"READY"}
    fleet.tritons[0].signal(signal.SIGCONT)
    assert wait_until(lambda: set(fleet.states("late").values()) == {"READY"}) <= 15
    unloaded = fleet.unload("late")
    assert unloaded.status_code == 200, unloaded.text


@pytest.mark.long
@pytest.mark.fault("a replica accepts connections and never answers, while models")
def test_unload_reaches_the_others_at_once_and_a_hung_replica_later(
    fleet: Fleet, hung: str
) -> None:
    response = measure(fleet.unload("other"), 4)
    assert response.json()["replicas"][hung]["state"] == "UNREACHABLE"
    fleet.tritons[0].signal(signal.SIGCONT)
    assert wait_until(lambda: set(fleet.states("other").values()) == {"UNAVAILABLE"}) <= 15


@pytest.mark.long
@pytest.mark.fault("a replica accepts connections and never answers, while models")
def test_load_that_the_others_refuse_is_not_repeated_on_a_hung_replica(
    fleet: Fleet, hung: str
) -> None:
    fleet.write_model("damaged", trouble="damaged")
    refused = measure(fleet.load("damaged"), 9)
    assert (refused.status_code, refused.json()["code"]) == (422, "LOAD_FAILED"), refused.text
    assert refused.json()["replicas"][hung]["state"] == "UNREACHABLE"
    models = fleet.client.get("/v1/models").json()["models"]
    (damaged,) = (model for model in models if model["name"] == "damaged")
    assert "wished" not in damaged
