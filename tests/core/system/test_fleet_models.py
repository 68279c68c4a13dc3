"""Models are managed on the whole fleet: three real tritonservers behind the gateway, all of which run."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tritonclient.http as triton_http

from tests.support.fleet import (
    BODY,
    QUICK,
    Fleet,
    fleet_of,
    load_behind,
    replica_states,
    unload_behind,
)
from tests.support.wait import wait_until


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    # One thread, so that a request that blocks it blocks all HTTP requests to this Triton.
    one_thread = ("--http-thread-count=1",)
    with fleet_of(tmp_path_factory.mktemp("three"), 3, arguments=one_thread, **QUICK) as fleet:
        yield fleet


@pytest.fixture
def three(running: Fleet) -> Iterator[Fleet]:
    """Each test begins with `echo` and `other` on all three, and names its other models differently."""
    yield running
    running.restore()


def test_load_and_unload_take_effect_on_every_replica(three: Fleet) -> None:
    addresses = {triton.address for triton in three.tritons}
    for _ in range(2):
        assert three.unload("echo").status_code == 200
        assert set(three.states("echo").values()) == {"UNAVAILABLE"}
        assert three.infer().json()["code"] == "MODEL_NOT_READY"
        report = three.load("echo").json()
        assert set(three.states("echo").values()) == {"READY"}
        assert report["model"] == "echo"
        assert report["state"] == "READY"
        assert report["replicas"] == {address: {"state": "READY"} for address in addresses}
        for _ in range(12):
            assert three.infer().json()["outputs"] == {"Y": [1, 2]}


@pytest.mark.long
def test_triton_client_manages_the_models_of_the_fleet(three: Fleet) -> None:
    address = str(three.client.base_url).removeprefix("http://").rstrip("/")
    with triton_http.InferenceServerClient(address) as client:

        def ready() -> set[str]:
            index = client.get_model_repository_index()
            return {entry["name"] for entry in index if entry.get("state") == "READY"}

        client.unload_model("late")
        assert not client.is_model_ready("late")
        before = ready()
        client.load_model("late")
        assert client.is_model_ready("late")
        assert ready() == before | {"late"} >= {"echo", "other"}
        client.unload_model("late", unload_dependents=True)
        assert not client.is_model_ready("late")
        assert set(three.states("late").values()) == {"UNAVAILABLE"}


def test_index_has_the_worst_state_and_that_of_each_replica(three: Fleet) -> None:
    first, *others = three.tritons
    for triton in others:  # not by the API, so that the reconciler does not load it on the first
        load_behind(triton, "foreign")

    def entry(query: str = "") -> Any:
        index = three.client.post(f"/v2/repository/index{query}").json()
        return next(entry for entry in index if entry["name"] == "foreign")

    found = entry()
    assert found["state"] == "UNAVAILABLE"
    assert first.address in found["reason"]
    detail = entry("?detail=replicas")["replicas"]
    assert detail.pop(first.address)["state"] == "UNAVAILABLE"
    assert [replica["state"] for replica in detail.values()] == ["READY", "READY"]
    ready = three.client.post("/v2/repository/index", json={"ready": True}).json()
    names = {entry["name"] for entry in ready}
    assert names >= {"echo", "other"}
    assert "foreign" not in names  # which is ready on two of three
    for _ in range(20):  # sent only to the replicas that have it
        assert three.infer("foreign").status_code == 200
    for triton in others:
        unload_behind(triton, "foreign")
    wait_until(lambda: "READY" not in replica_states(three, "foreign").values())


def test_load_of_an_unknown_model_is_404_and_not_stored(three: Fleet) -> None:
    for call in (three.load, three.unload):
        refused = call("nobody")
        assert refused.status_code == 404
        assert refused.json()["code"] == "MODEL_NOT_FOUND"
    assert "nobody" not in three.client.get("/v1/models").text


@pytest.mark.long
def test_step_of_an_ensemble_is_unloaded_only_with_the_ensemble(three: Fleet) -> None:
    assert three.load("chain").status_code == 200
    assert three.infer("chain").json()["outputs"] == {"Y": [1, 2]}
    refused = three.unload("other")
    assert refused.status_code == 409
    assert "'chain'" in refused.json()["error"]
    assert three.infer("chain").status_code == 200
    forced = three.unload("chain", json={"parameters": {"unload_dependents": True}})
    assert forced.status_code == 200
    assert set(three.states("chain").values()) == {"UNAVAILABLE"}
    assert three.unload("other").status_code == 200


@pytest.mark.fault("a load reaches two of three Tritons")
def test_load_that_fails_on_one_replica_is_reported_and_repeated_there(
    three: Fleet,
) -> None:
    last, trouble = three.tritons[-1], three.write_model("damaged")[-1]
    trouble.write_text("damaged")
    partly = three.load("damaged")
    assert partly.status_code == 502
    report = partly.json()
    assert report["code"] == "PARTLY_DONE"
    assert "2 of 3" in report["error"]
    assert "damaged" in report["replicas"][last.address]["reason"]
    assert [found["state"] for found in report["replicas"].values()].count("READY") == 2
    for _ in range(30):
        assert three.infer("damaged").status_code == 200
    trouble.unlink()
    wait_until(lambda: three.states("damaged")[last.address] == "READY")


@pytest.mark.fault("a model takes long to load")
def test_slow_load_does_not_delay_other_models(three: Fleet) -> None:
    """The load lasts until the others have been served: a load that blocked them would be 504."""
    troubles = three.write_model("slow", "hold")
    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(16) as others:
        loading = pool.submit(three.load, "slow")
        wait_until(lambda: set(three.states("slow").values()) == {"LOADING"})
        for _ in range(5):
            assert three.client.get("/livez").status_code == 200
            inferences = [others.submit(three.infer) for _ in range(32)]
            assert {each.result().status_code for each in inferences} == {200}
        assert not loading.done()
        for trouble in troubles:
            trouble.unlink()
        assert loading.result().status_code == 200


@pytest.mark.long
def test_asynchronous_load_has_an_operation_with_its_result(three: Fleet) -> None:
    troubles = three.write_model("awaited", "hold")
    started = three.load("awaited", headers={"Prefer": "respond-async"})
    assert started.status_code == 202
    location = started.headers["location"]
    first = three.client.get(location).json()
    assert (first["operation"], first["action"], first["model"]) == ("running", "load", "awaited")
    for trouble in troubles:
        trouble.unlink()
    wait_until(lambda: three.client.get(location).json()["operation"] != "running")
    last = three.client.get(location).json()
    assert last["operation"] == "succeeded"
    assert {found["state"] for found in last["replicas"].values()} == {"READY"}
    failing = three.load("nobody", headers={"Prefer": "respond-async"}).headers["location"]
    wait_until(lambda: three.client.get(failing).json()["operation"] == "failed")
    assert three.client.get(failing).json()["code"] == "MODEL_NOT_FOUND"
    assert three.client.get("/v1/operations/" + "0" * 32).status_code == 404


@pytest.mark.fault("a model is unloaded without the gateway's knowledge")
def test_model_unloaded_directly_on_a_replica_fails_no_request(three: Fleet) -> None:
    for triton in three.tritons:
        load_behind(triton, "foreign")
    wait_until(lambda: set(replica_states(three, "foreign").values()) == {"READY"})
    for triton in three.tritons[:2]:
        unload_behind(triton, "foreign")
        for _ in range(30):
            assert three.infer("foreign").status_code == 200
    unload_behind(three.tritons[2], "foreign")


def test_replicas_are_listed_with_their_state_and_models(three: Fleet) -> None:
    assert three.client.post("/v1/models/echo/infer", json=BODY).status_code == 200
    found = three.client.get("/v1/replicas").json()["replicas"]
    assert {replica["address"] for replica in found} == {t.address for t in three.tritons}
    assert {replica["state"] for replica in found} == {"UP"}
    assert {replica["models"]["echo"] for replica in found} == {"READY"}
    assert {replica["outstanding"] for replica in found} == {0}
