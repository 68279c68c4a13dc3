"""The fleet is one Triton: three real tritonservers behind the gateway, ended and started as it comes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton_http

from tests.support.fleet import (
    BODY,
    ECHO,
    V2_BODY,
    Fleet,
    fleet_of,
    hammer,
    hammer_with_deadline,
    replica_states,
    repository,
)
from tests.support.redis_server import RedisServer, redis_server
from tests.support.servers import ROOT, Triton, free_ports, gateway
from tests.support.wait import wait_until


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Every test leaves `echo` and `other` loaded everywhere, and all three alive."""
    with fleet_of(tmp_path_factory.mktemp("three"), 3) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def all_well(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "three" in request.fixturenames:
        fleet: Fleet = request.getfixturevalue("three")
        for triton in fleet.tritons:
            for trouble in triton.repository.glob("*/trouble"):
                trouble.unlink()
        wait_until(lambda: fleet.client.get("/readyz").text.count('"ready"') == 4)
        for model in ("echo", "other"):
            assert fleet.load(model).status_code == 200


# Loading and unloading.


def test_one_call_loads_and_unloads_on_every_replica_and_says_so_when_it_is_true(
    three: Fleet,
) -> None:
    for _ in range(2):
        unloaded = three.unload("echo")
        assert unloaded.status_code == 200
        assert set(three.states("echo").values()) == {"UNAVAILABLE"}
        assert three.infer().json()["code"] == "MODEL_NOT_READY"
        report = three.load("echo").json()
        assert set(three.states("echo").values()) == {"READY"}
        assert report["model"] == "echo"
        assert report["state"] == "READY"
        addresses = {triton.address for triton in three.tritons}
        assert report["replicas"] == {address: {"state": "READY"} for address in addresses}
        for _ in range(12):
            assert three.infer().json()["outputs"] == {"Y": [1, 2]}


def test_tritons_own_client_manages_the_fleet_unchanged(three: Fleet) -> None:
    address = str(three.client.base_url).removeprefix("http://").rstrip("/")
    with triton_http.InferenceServerClient(address) as client:
        client.unload_model("late")
        assert not client.is_model_ready("late")
        client.load_model("late")
        assert client.is_model_ready("late")
        states = {
            entry["name"]: entry["state"]
            for entry in client.get_model_repository_index()
            if entry.get("state") == "READY"
        }
        assert states == {"echo": "READY", "other": "READY", "late": "READY"}
        client.unload_model("late", unload_dependents=True)
        assert not client.is_model_ready("late")
        assert set(three.states("late").values()) == {"UNAVAILABLE"}


def test_the_index_tells_the_worst_state_and_each_replicas_own(three: Fleet) -> None:
    first, *others = three.tritons
    for triton in others:  # not by the API, so that nobody makes the first like them
        load = httpx.post(f"http://{triton.address}/v2/repository/models/foreign/load", timeout=30)
        assert load.status_code == 200

    def entry(query: str = "") -> Any:
        index = three.client.post(f"/v2/repository/index{query}").json()
        return next(entry for entry in index if entry["name"] == "foreign")

    told = entry()
    assert told["state"] == "UNAVAILABLE"
    assert first.address in told["reason"]
    detail = entry("?detail=replicas")["replicas"]
    assert detail.pop(first.address)["state"] == "UNAVAILABLE"
    assert [found["state"] for found in detail.values()] == ["READY", "READY"]
    ready = three.client.post("/v2/repository/index", json={"ready": True}).json()
    assert {entry["name"] for entry in ready} == {"echo", "other"}  # and not the half of one
    for _ in range(20):  # asked only where it is
        assert three.infer("foreign").status_code == 200
    for triton in others:
        httpx.post(f"http://{triton.address}/v2/repository/models/foreign/unload")
    wait_until(lambda: "READY" not in replica_states(three, "foreign").values())


def test_what_no_replica_knows_is_404_and_nothing_is_kept_of_it(three: Fleet) -> None:
    for call in (three.load, three.unload):
        refused = call("nobody")
        assert refused.status_code == 404
        assert refused.json()["code"] == "MODEL_NOT_FOUND"
    assert "nobody" not in three.client.get("/v1/models").text


def test_what_an_ensemble_needs_is_not_unloaded_unless_one_insists(three: Fleet) -> None:
    assert three.load("chain").status_code == 200
    assert three.infer("chain").json()["outputs"] == {"Y": [1, 2]}
    refused = three.unload("other")
    assert refused.status_code == 409
    assert "'chain'" in refused.json()["error"]
    assert three.infer("chain").status_code == 200
    insisted = three.unload("chain", json={"parameters": {"unload_dependents": True}})
    assert insisted.status_code == 200
    assert set(three.states("chain").values()) == {"UNAVAILABLE"}
    assert three.unload("other").status_code == 200


def test_a_load_that_fails_on_one_replica_is_reported_routed_around_and_made_good(
    three: Fleet,
) -> None:
    last = three.tritons[-1]
    (last.repository / "late" / "trouble").write_text("damaged")
    partly = three.load("late")
    assert partly.status_code == 502
    told = partly.json()
    assert told["code"] == "PARTLY_DONE"
    assert "2 of 3" in told["error"]
    assert "damaged" in told["replicas"][last.address]["reason"]
    assert [found["state"] for found in told["replicas"].values()].count("READY") == 2
    for _ in range(30):
        assert three.infer("late").status_code == 200
    (last.repository / "late" / "trouble").unlink()
    wait_until(lambda: three.states("late")[last.address] == "READY")
    assert three.unload("late").status_code == 200


def test_a_load_of_six_seconds_disturbs_nobody(three: Fleet) -> None:
    for triton in three.tritons:
        (triton.repository / "late" / "trouble").write_text("sleep 6")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(three.load, "late")
        slowest = 0.0
        with httpx.Client(base_url=three.client.base_url, timeout=60) as other:
            while not loading.done():
                began = time.monotonic()
                assert other.post("/v1/models/echo/infer", json=BODY).status_code == 200
                assert other.get("/livez").status_code == 200
                slowest = max(slowest, time.monotonic() - began)
                time.sleep(0.01)
    assert loading.result().status_code == 200
    assert loading.result().elapsed.total_seconds() >= 6
    print(f"the slowest inference beside it took {slowest * 1000:.0f} ms")
    assert slowest < 1  # over Triton's HTTP it would be six seconds
    assert three.unload("late").status_code == 200


def test_who_does_not_want_to_wait_is_told_where_to_look(three: Fleet) -> None:
    for triton in three.tritons:
        (triton.repository / "late" / "trouble").write_text("sleep 1")
    begun = three.load("late", headers={"Prefer": "respond-async"})
    assert begun.status_code == 202
    place = begun.headers["location"]
    first = three.client.get(place).json()
    assert (first["operation"], first["action"], first["model"]) == ("running", "load", "late")
    wait_until(lambda: three.client.get(place).json()["operation"] != "running")
    last = three.client.get(place).json()
    assert last["operation"] == "succeeded"
    assert {found["state"] for found in last["replicas"].values()} == {"READY"}
    failing = three.load("nobody", headers={"Prefer": "respond-async"}).headers["location"]
    wait_until(lambda: three.client.get(failing).json()["operation"] == "failed")
    assert three.client.get(failing).json()["code"] == "MODEL_NOT_FOUND"
    assert three.client.get("/v1/operations/" + "0" * 32).status_code == 404
    assert three.unload("late").status_code == 200


def test_fifty_calls_for_one_model_end_as_the_last_of_them_says(three: Fleet) -> None:
    """An ensemble, because nothing is started for it: each call takes milliseconds."""
    statuses: Counter[int] = Counter()

    def call(number: int) -> None:
        with httpx.Client(base_url=three.client.base_url, timeout=120) as client:
            verb = "load" if number % 3 else "unload"
            statuses[client.post(f"/v2/repository/models/chain/{verb}").status_code] += 1

    with ThreadPoolExecutor(50) as pool:
        for done in [pool.submit(call, number) for number in range(50)]:
            done.result()
    assert statuses == {200: 50}
    models = three.client.get("/v1/models").json()["models"]
    wished = next(model["wished"] for model in models if model["name"] == "chain")
    state = "READY" if wished == "loaded" else "UNAVAILABLE"
    assert set(three.states("chain").values()) == {state}
    assert three.unload("chain").status_code == 200


# Replicas come and go.


def test_one_of_three_killed_costs_no_request_but_those_sent_to_it_and_it_comes_back_by_itself(
    three: Fleet,
) -> None:
    victim = three.tritons[0]
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(hammer, three, 6)
        time.sleep(1.5)
        victim.kill()
        killed = time.monotonic()
        statuses, seen = load.result()
    failed = [at for at, status, _ in seen if status != 200]
    print(f"{sum(statuses.values())} requests, {len(failed)} failed, {statuses}")
    assert set(statuses) <= {200, 502, 503}
    assert len(failed) <= 16  # one per client: those that were under way
    assert all(at < killed + 0.05 for at in failed)
    assert three.client.get("/readyz").json()["replicas"][victim.address].startswith("down")
    partly = three.load("late")  # it misses this one, and must come back with it
    assert (partly.status_code, partly.json()["code"]) == (502, "PARTLY_DONE")
    assert partly.json()["replicas"][victim.address]["state"] == "UNREACHABLE"
    assert three.infer("late").status_code == 200
    victim.start()
    victim.wait()
    back = wait_until(lambda: set(three.states("late").values()) == {"READY"})
    print(f"its models were back {back:.1f} s after it was up")
    before = three.served()[victim.address]
    wait_until(lambda: three.infer().is_success and three.served()[victim.address] > before)
    assert three.unload("late").status_code == 200


def test_one_of_three_that_never_answers_is_left_alone(three: Fleet) -> None:
    stopped = three.tritons[1]
    stopped.signal(signal.SIGSTOP)
    try:
        statuses, seen = hammer_with_deadline(three, 5, timeout_s=1.0)
        late = [at for at, status, _ in seen if status != 200]
        took = [took for _, status, took in seen if status == 504]
        print(f"{statuses}; the last failure {max(late, default=0) - seen[0][0]:.1f} s after")
        assert set(statuses) <= {200, 504}
        assert all(0.9 < each < 1.3 for each in took)
        assert all(at < seen[0][0] + 3 for at in late)
        assert three.client.get("/readyz").json()["replicas"][stopped.address].startswith("slow")
        assert three.client.get("/readyz").status_code == 200
    finally:
        stopped.signal(signal.SIGCONT)


def test_what_a_model_takes_is_asked_of_another_where_the_first_is_silent(three: Fleet) -> None:
    stopped = three.tritons[2]
    unread = [f"/v1/models/{name}/versions/1" for name in ("echo", "other")]
    stopped.signal(signal.SIGSTOP)
    try:
        answers = [three.client.get(path) for path in unread]
        took = [answer.elapsed.total_seconds() for answer in answers]
        print(", ".join(f"{each * 1000:.0f} ms" for each in took))
        assert [answer.status_code for answer in answers] == [200, 200]
        assert max(took) < 3
    finally:
        stopped.signal(signal.SIGCONT)
    wait_until(
        lambda: (
            {each["state"] for each in three.client.get("/v1/replicas").json()["replicas"]}
            == {"UP"}
        ),
        10,
    )


def test_a_triton_that_is_asked_to_stop_does_so_at_once_with_the_gateway_attached(
    three: Fleet,
) -> None:
    leaving = three.tritons[2]
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(hammer, three, 4)
        time.sleep(1)
        leaving.signal(signal.SIGTERM)
        took = leaving.ended(30)
        statuses, _ = load.result()
    print(f"it took {took:.1f} s; {statuses}")
    leaving.end()
    leaving.start()
    leaving.wait()
    assert took < 10  # of the 30 s that it would wait for a connection
    assert set(statuses) == {200}


def test_a_model_unloaded_behind_our_back_costs_no_request(three: Fleet) -> None:
    for triton in three.tritons:
        load = httpx.post(f"http://{triton.address}/v2/repository/models/foreign/load", timeout=30)
        assert load.status_code == 200
    wait_until(lambda: set(replica_states(three, "foreign").values()) == {"READY"})
    for triton in three.tritons[:2]:
        httpx.post(
            f"http://{triton.address}/v2/repository/models/foreign/unload"
        ).raise_for_status()
        for _ in range(30):
            assert three.infer("foreign").status_code == 200
    httpx.post(f"http://{three.tritons[2].address}/v2/repository/models/foreign/unload")


# One alone.


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Fleet]:
    with fleet_of(tmp_path, 1) as fleet:
        yield fleet


def test_the_only_triton_killed_is_said_fast_and_serves_again_when_it_is_back(one: Fleet) -> None:
    triton = one.tritons[0]
    assert one.unload("other").status_code == 200
    triton.kill()
    wait_until(lambda: one.infer().json().get("code") == "NO_REPLICA")
    took = []
    for _ in range(100):
        began = time.monotonic()
        refused = one.client.post("/v2/models/echo/infer", json=V2_BODY)
        took.append(time.monotonic() - began)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    print(f"p99 of the refusals {sorted(took)[98] * 1000:.1f} ms")
    assert sorted(took)[50] < 0.01
    assert one.client.get("/readyz").status_code == 503
    assert one.client.get("/livez").status_code == 200
    assert one.load("echo").status_code == 503
    triton.start()
    triton.wait()
    back = wait_until(lambda: one.infer().status_code == 200)
    print(f"serving {back:.2f} s after Triton was")
    # It starts with --load-model=other, which the API unloaded.
    wait_until(lambda: one.states("other") == {triton.address: "UNAVAILABLE"})


def test_a_load_that_fails_everywhere_says_why_and_the_older_version_keeps_serving(
    one: Fleet,
) -> None:
    for triton in one.tritons:
        (triton.repository / "echo" / "trouble").write_text("damaged")
        (triton.repository / "echo" / "1" / "model.py").write_text(ECHO + "\n# another\n")
    refused = one.load("echo")
    assert refused.status_code == 422
    told = refused.json()
    assert told["code"] == "LOAD_FAILED"
    assert "are damaged" in told["error"]
    assert "/opt/secret" not in refused.text
    assert list(told["replicas"]) == [one.tritons[0].address]
    assert one.infer().status_code == 200
    errors = {
        model["name"]: model.get("last_error")
        for model in one.client.get("/v1/models").json()["models"]
    }
    assert "damaged" in errors["echo"]
    one.tritons[0].kill()  # after a reload that failed a tritonserver does not end by itself


def test_a_triton_without_grpc_is_managed_over_http_with_a_warning(tmp_path: Path) -> None:
    with Triton(repository(tmp_path), "echo") as triton:
        triton.wait()
        (closed,) = free_ports(1)
        with gateway(f"http://{triton.address}?grpc={closed}") as (client, command):
            assert client.post("/v2/repository/models/other/load").status_code == 200
            assert client.post("/v1/models/other/infer", json=BODY).status_code == 200
            command.wait_for("managing models over HTTP", 5)


# What is declared, and what is kept.


def test_declared_models_are_loaded_awaited_and_protected(tmp_path: Path) -> None:
    declared = tmp_path / "models.yaml"
    declared.write_text("models: [echo]\n")
    with Triton(repository(tmp_path / "models")) as triton:
        triton.wait()
        with gateway(triton.options.url, models_file=str(declared)) as (client, command):
            wait_until(lambda: client.get("/readyz").status_code == 200)
            assert client.post("/v1/models/echo/infer", json=BODY).status_code == 200
            refused = client.post("/v2/repository/models/echo/unload")
            assert (refused.status_code, refused.json()["code"]) == (409, "CONFLICT")
            declared.write_text("models: [")
            command.wait_for("stays as it was", 5)
            assert client.get("/readyz").status_code == 200
            (triton.repository / "late" / "trouble").write_text("sleep 1")
            declared.write_text("models: [echo, {name: late, versions: [1]}]\n")
            wait_until(lambda: client.get("/readyz").status_code == 503)
            assert list(client.get("/readyz").json()["missing"]) == ["late"]
            wait_until(lambda: client.get("/readyz").status_code == 200)
            declared.write_text("models: []\n")
            wait_until(lambda: client.post("/v2/repository/models/echo/unload").is_success)


def test_a_models_file_that_cannot_be_read_ends_the_start_with_a_sentence(tmp_path: Path) -> None:
    declared = tmp_path / "models.yaml"
    declared.write_text("models: {}")
    command = [sys.executable, "-m", "gateway", "serve", "--port", "0"]
    environment = {"GATEWAY_MODELS_FILE": str(declared), "GATEWAY_STATE": "memory:", "PATH": ""}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode != 0
    assert "'models' must be a list" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_was_loaded_survives_the_gateway_and_triton(tmp_path: Path) -> None:
    state = f"file://{tmp_path}/state/state.json"
    with Triton(repository(tmp_path / "models"), "echo") as triton:
        triton.wait()
        with gateway(triton.options.url, state=state) as (client, _):
            assert client.post("/v2/repository/models/other/load").status_code == 200
            assert client.post("/v2/repository/models/echo/unload").status_code == 200
        triton.kill()
        triton.start()
        triton.wait()
        with gateway(triton.options.url, state=state) as (client, _):
            wait_until(lambda: client.post("/v1/models/other/infer", json=BODY).is_success)
            wait_until(lambda: client.post("/v1/models/echo/infer", json=BODY).status_code == 503)


def test_two_gateways_with_one_redis_are_of_one_mind(tmp_path: Path, redis: RedisServer) -> None:
    with Triton(repository(tmp_path / "models"), "echo") as triton:
        triton.wait()
        url, state = triton.options.url, redis.url()
        with (
            gateway(url, state=state) as (one, _),
            gateway(url, state=state) as (other, _),
        ):
            assert one.post("/v2/repository/models/other/load").status_code == 200

            def wished(client: httpx.Client) -> dict[str, str]:
                models = client.get("/v1/models").json()["models"]
                return {model["name"]: model["wished"] for model in models if "wished" in model}

            wait_until(lambda: wished(other) == {"other": "loaded"})
            begun = one.post(
                "/v2/repository/models/late/load", headers={"Prefer": "respond-async"}
            ).headers["location"]
            wait_until(lambda: other.get(begun).json().get("operation") == "succeeded")
            redis.stop()
            refused = one.post("/v2/repository/models/late/unload")
            assert (refused.status_code, refused.json()["code"]) == (503, "STATE_UNAVAILABLE")
            for client in (one, other):
                assert client.post("/v1/models/late/infer", json=BODY).status_code == 200
            triton.kill()
            triton.start()
            triton.wait()
            wait_until(lambda: other.post("/v1/models/other/infer", json=BODY).is_success)
            redis.start()
            wait_until(lambda: one.post("/v2/repository/models/late/unload").is_success)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    with redis_server(folder, "--appendonly", "yes") as server:
        yield server


def test_the_state_of_a_replica_can_be_seen(three: Fleet) -> None:
    found = three.client.get("/v1/replicas").json()["replicas"]
    assert {replica["address"] for replica in found} == {t.address for t in three.tritons}
    assert {replica["state"] for replica in found} == {"UP"}
    assert {replica["models"]["echo"] for replica in found} == {"READY"}
    values = np.array([replica["outstanding"] for replica in found])
    assert (values == 0).all()


def test_health_is_answered_from_what_is_known(three: Fleet) -> None:
    three.tritons[0].signal(signal.SIGSTOP)  # whoever asked it would wait
    try:
        for path in ("/livez", "/readyz"):
            took = sorted(three.client.get(path).elapsed.total_seconds() for _ in range(50))
            print(f"{path}: half of them within {took[25] * 1000:.1f} ms")
            assert took[25] < 0.05
    finally:
        three.tritons[0].signal(signal.SIGCONT)
