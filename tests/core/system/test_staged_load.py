"""Staged loads on three real Tritons: one after the other, a probe on each, and a failure stops them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.errors import assert_error
from tests.support.fleet import QUICK, Fleet, fleet_of, unload_behind, url_of, write_echo
from tests.support.servers import gateway
from tests.support.wait import wait_until

STAGED = {"parameters": {"staged": True}}
PROBE = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_of(tmp_path_factory.mktemp("fleet"), 3, **QUICK) as running:
        wait_until(lambda: set(running.replicas().values()) == {"UP"})
        yield running


@pytest.fixture
def fleet(shared: Fleet) -> Iterator[Fleet]:
    yield shared
    shared.restore()


def in_order(fleet: Fleet) -> list[int]:
    """Return the Tritons by their address, in which they are loaded."""
    return sorted(range(3), key=lambda number: fleet.tritons[number].address)


def states(fleet: Fleet, model: str) -> list[str]:
    found = fleet.states(model)
    return [found[fleet.tritons[number].address] for number in in_order(fleet)]


def trouble_at(fleet: Fleet, model: str, position: int, text: str) -> Path:
    files = fleet.write_model(model)
    place = files[in_order(fleet)[position]]
    place.write_text(text)
    return place


def operation_of(fleet: Fleet, location: str) -> dict[str, Any]:
    document: dict[str, Any] = fleet.client.get(location).raise_for_status().json()
    return document


def test_staged_load_takes_one_replica_after_the_other(fleet: Fleet) -> None:
    held = trouble_at(fleet, "steps", 1, "hold")
    headers = {"Prefer": "respond-async"}
    answer = fleet.load("steps", json=STAGED, headers=headers)
    assert answer.status_code == 202
    location = answer.headers["location"]
    wait_until(lambda: len(operation_of(fleet, location)["replicas"]) == 1)
    running = operation_of(fleet, location)
    assert running["operation"] == "running"
    first = fleet.tritons[in_order(fleet)[0]].address
    assert running["replicas"] == {first: {"state": "READY"}}
    # The third one waits for the second one.
    assert states(fleet, "steps")[0] == "READY"
    assert states(fleet, "steps")[2] == "never"
    held.unlink()
    wait_until(lambda: operation_of(fleet, location)["operation"] != "running")
    done = operation_of(fleet, location)
    assert (done["operation"], done["state"]) == ("succeeded", "READY")
    assert len(done["replicas"]) == 3
    assert states(fleet, "steps") == ["READY"] * 3


@pytest.mark.fault("a staged load fails on a replica")
def test_staged_load_that_fails_stops_and_names_the_replica(fleet: Fleet) -> None:
    trouble_at(fleet, "stopped", 1, "missing")
    second = fleet.tritons[in_order(fleet)[1]].address
    answer = fleet.load("stopped", json=STAGED)
    body = answer.json()
    assert (answer.status_code, body["code"]) == (502, "STAGED_LOAD_FAILED")
    assert f"stopped at {second}: " in body["error"]
    assert "is loaded on 1 of 3 replicas" in body["error"]
    assert set(body["replicas"]) == {fleet.tritons[each].address for each in in_order(fleet)[:2]}
    assert states(fleet, "stopped")[0] == "READY"
    assert states(fleet, "stopped")[2] == "never"
    # It is not desired: no gateway loads the rest later.
    models = {each["name"]: each for each in fleet.client.get("/v1/models").json()["models"]}
    assert "wished" not in models["stopped"]
    fleet.unload("stopped")


@pytest.mark.fault("a staged load fails on a replica")
def test_loaded_model_keeps_serving_if_a_staged_load_fails(fleet: Fleet) -> None:
    fleet.write_model("served")
    assert fleet.load("served").status_code == 200
    trouble_at(fleet, "served", 0, "missing")
    answer = fleet.load("served", json=STAGED)
    assert answer.json()["code"] == "STAGED_LOAD_FAILED"
    assert "is loaded on 0 of 3 replicas" in answer.json()["error"]
    assert states(fleet, "served") == ["READY"] * 3
    for _ in range(6):
        assert fleet.infer("served").status_code == 200
    models = {each["name"]: each for each in fleet.client.get("/v1/models").json()["models"]}
    assert models["served"]["wished"] == "loaded"
    assert "behind" not in models["served"]


@pytest.mark.long
@pytest.mark.fault("the gateway is killed or restarted during a staged load")
def test_staged_load_of_a_killed_gateway_leaves_the_other_replicas_unchanged(
    fleet: Fleet, tmp_path: Path
) -> None:
    held = trouble_at(fleet, "unfinished", 1, "hold")
    third = fleet.tritons[in_order(fleet)[2]]
    urls, state = list(map(url_of, fleet.tritons)), f"file://{tmp_path}/state.json"
    with (
        gateway(*urls, state=state, **QUICK) as (killed, command),
        gateway(*urls, state=state, **QUICK) as (other, _),
    ):
        path = "/v2/repository/models/unfinished/load"
        killed.post(path, json=STAGED, headers={"Prefer": "respond-async"}).raise_for_status()
        wait_until(lambda: states(fleet, "unfinished")[:2] == ["READY", "LOADING"])
        os.kill(command.pid, signal.SIGKILL)
        held.unlink()
        # The other one repairs the third replica, and loads only what is desired.
        other.post("/v2/repository/models/late/load").raise_for_status()
        unload_behind(third, "late")
        wait_until(lambda: fleet.states("late")[third.address] == "READY")
        assert states(fleet, "unfinished")[2] == "never"
        other.post("/v2/repository/models/late/unload").raise_for_status()
    fleet.unload("unfinished")


def write_probe(fleet: Fleet, model: str, probe: Any) -> None:
    value = json.dumps(json.dumps(probe))
    for triton in fleet.tritons:
        write_echo(triton.repository, model)
        config = triton.repository / model / "config.pbtxt"
        entry = f'parameters {{ key: "gateway.probe" value {{ string_value: {value} }} }}'
        config.write_text(f"{config.read_text()}\n{entry}")


def test_staged_load_sends_the_probe_of_the_config_to_each_replica(fleet: Fleet) -> None:
    write_probe(fleet, "probed", PROBE)
    assert fleet.load("probed", json=STAGED).status_code == 200
    assert set(fleet.served("probed").values()) == {1}


@pytest.mark.fault("a staged load fails on a replica")
def test_staged_load_stops_if_the_probe_fails(fleet: Fleet) -> None:
    write_probe(fleet, "wrong", {"inputs": [{**PROBE["inputs"][0], "shape": [3]}]})
    answer = fleet.load("wrong", json=STAGED)
    assert answer.json()["code"] == "STAGED_LOAD_FAILED"
    assert len(answer.json()["replicas"]) == 1
    assert states(fleet, "wrong")[1:] == ["never", "never"]
    fleet.unload("wrong")


@pytest.mark.long
@pytest.mark.fault("an uploaded config whose `gateway.probe` crashes a Triton")
@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"shape": [1 << 31, 1 << 31]}, "elements"),
        ({"parameters": {f"key{number}": 1 for number in range(2000)}}, "keys"),
        ({"parameters": {"classification": 1}}, "classification"),
    ],
)
def test_probe_that_could_crash_triton_is_not_sent(
    fleet: Fleet, entry: dict[str, Any], words: str
) -> None:
    """A key that may upload only data may write the probe of a config."""
    write_probe(fleet, "harmful", {"inputs": [{**PROBE["inputs"][0], **entry}]})
    before = [triton.pid for triton in fleet.tritons]
    answer = fleet.load("harmful", json=STAGED)
    assert answer.json()["code"] == "STAGED_LOAD_FAILED"
    assert words in answer.json()["error"]
    assert [triton.pid for triton in fleet.tritons] == before
    fleet.unload("harmful")


@pytest.mark.parametrize("value", [1, "true", None])
def test_staged_parameter_that_is_not_a_boolean_is_400(fleet: Fleet, value: Any) -> None:
    answer = fleet.load("echo", json={"parameters": {"staged": value}})
    assert_error(answer, 400, "MALFORMED_REQUEST", "staged must be true or false")
