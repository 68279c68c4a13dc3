"""Replicas that are killed, hang and come back: real tritonservers behind the gateway."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.errors import assert_error
from tests.support.fleet import BODY, ECHO, QUICK, V2_BODY, Fleet, Load, fleet_of, repository
from tests.support.keys import INFER, bearer, entry, written
from tests.support.servers import Triton, free_ports, gateway
from tests.support.wait import wait_until


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_of(tmp_path_factory.mktemp("three"), 3, **QUICK) as fleet:
        yield fleet


@pytest.fixture
def three(running: Fleet) -> Iterator[Fleet]:
    """Each test begins with three replicas that respond, with `echo` and `other` on all of them."""
    yield running
    running.restore()


def load_on(fleet: Fleet, **headers: str) -> Load:
    return Load(str(fleet.client.base_url), headers=headers)


def read_state(fleet: Fleet, triton: Triton) -> str:
    """Return the state of a replica in /readyz."""
    replicas: dict[str, str] = fleet.client.get("/readyz").json()["replicas"]
    return replicas[triton.address]


@pytest.mark.fault("one of three Tritons is killed under load")
def test_killed_replica_costs_only_its_requests_and_gets_its_models_again(
    three: Fleet,
) -> None:
    victim = three.tritons[0]
    with load_on(three) as load:
        load.wait_for_more()
        victim.kill()
        wait_until(lambda: read_state(three, victim).startswith("down"))
        assert {each.status for each in load.wait_for_more()} == {200}
    failed = [each for each in load.sent if each.status != 200]
    assert {each.status for each in failed} <= {502, 503}
    assert len(failed) <= 16  # the requests in progress: one for each client
    partly = three.load("chain")  # not on this replica, which must load it when it is back
    assert (partly.status_code, partly.json()["code"]) == (502, "PARTLY_DONE")
    assert partly.json()["replicas"][victim.address]["state"] == "UNREACHABLE"
    assert three.infer("chain").status_code == 200
    victim.start()
    victim.wait()
    wait_until(lambda: set(three.states("chain").values()) == {"READY"})
    before = three.served()[victim.address]
    wait_until(lambda: three.infer().is_success and three.served()[victim.address] > before)


def count_with_statistics(fleet: Fleet, query: str = "") -> int:
    """Return the inferences of a model in the statistics that the gateway gives."""
    response = fleet.client.get(f"/v2/models/echo/stats{query}")
    (version,) = response.raise_for_status().json()["model_stats"]
    count: int = version["inference_stats"]["success"]["count"]
    return count


def test_statistics_are_the_sum_of_the_replicas_that_answer(three: Fleet) -> None:
    victim, *others = three.tritons
    expected = sum(three.served().values())
    wait_until(lambda: count_with_statistics(three) >= expected)
    before = count_with_statistics(three)
    with load_on(three) as load:
        load.wait_for_more()
    wait_until(lambda: count_with_statistics(three) == before + load.statuses[200])
    all_models = three.client.get("/v2/models/stats").json()["model_stats"]
    assert {each["name"]: each["inference_count"] for each in all_models}["echo"] == (
        count_with_statistics(three)
    )
    own = {
        each.address: count_with_statistics(three, f"?replica={each.address}") for each in others
    }
    assert own == {address: three.served()[address] for address in own}
    assert_error(three.client.get("/v2/models/echo/stats?replica=no:1"), 404, "REPLICA_NOT_FOUND")
    victim.kill()
    wait_until(lambda: read_state(three, victim).startswith("down"))
    assert count_with_statistics(three) == sum(own.values())
    victim.start()
    victim.wait()
    wait_until(lambda: three.states("echo")[victim.address] == "READY")
    assert count_with_statistics(three) == sum(own.values())  # it counts from 0 again


@pytest.mark.fault("one of three replicas fails every inference of a model at once")
@pytest.mark.parametrize(
    ("kind", "status"),
    [("INTERNAL", 500), pytest.param("UNAVAILABLE", 503, marks=pytest.mark.long)],
)
def test_replica_that_fails_every_inference_gets_few_requests_until_it_recovers(
    three: Fleet, kind: str, status: int
) -> None:
    victim = three.tritons[0]
    broken = victim.repository / "echo" / "broken"
    with Load(str(three.client.base_url), clients=12) as load:
        load.wait_for_more()
        broken.write_text(kind)
        first = load.wait_for_more(300)
        later = load.wait_for_more(300)
        replicas = three.client.get("/v1/replicas").json()["replicas"]
        failing = {each["address"]: each.get("failing_models") for each in replicas}
        assert failing == {**dict.fromkeys(failing), victim.address: ["echo"]}
        broken.unlink()
        before = three.served()[victim.address]
        if kind == "INTERNAL":
            wait_until(lambda: three.served()[victim.address] > before + 50)
    assert {each.status for each in [*first, *later]} == {200, status}
    assert sum(each.status != 200 for each in first) <= 0.1 * len(first)
    assert sum(each.status != 200 for each in later) <= 0.02 * len(later)
    metrics = three.client.get("/metrics?name=gateway_upstream_attempts_total").text
    assert f'replica="{victim.address}",outcome="failed"' in metrics


@pytest.mark.fault(
    "a key for inference provokes errors of replicas, servers of completions and loads"
)
def test_error_does_not_reveal_the_address_of_a_replica(three: Fleet, tmp_path: Path) -> None:
    """The replica is lost between two probes, so that each request finds out by itself."""
    keys = written(tmp_path / "keys.yaml", [entry(INFER, "infer")])
    triton, caller = three.tritons[0], bearer(INFER)
    settings: dict[str, str] = {
        "connect_timeout_s": QUICK["connect_timeout_s"],
        "poll_interval_s": "60",
        "keys_file": str(keys),
        "log_level": "warning",
    }
    stream = {**caller, "Accept": "text/event-stream"}
    calls: list[tuple[str, Any, dict[str, str]]] = [
        ("/v1/models/echo/infer", BODY, caller),
        ("/v1/models/echo/infer", BODY, stream),
        ("/v2/models/echo/infer", V2_BODY, caller),
    ]
    errors = []
    with ExitStack() as stack:
        gateways = [stack.enter_context(gateway(triton.options.url, **settings)) for _ in calls]
        for (client, _), (path, body, _) in zip(gateways, calls, strict=True):
            answer = client.post(path, json=body, headers=caller)
            assert answer.status_code == 200, answer.text
        triton.kill()
        for (client, _), (path, body, headers) in zip(gateways, calls, strict=True):
            refused = client.post(path, json=body, headers=headers)
            assert_error(refused, 503, "UNAVAILABLE", "the replica")
            errors.append(refused.text)
        gateways[0][1].wait_for(f"replica {triton.address} is DOWN")
    triton.start()
    assert [each for each in errors if re.search(r"\d+\.\d+\.\d+|localhost|:\d{3,}", each)] == []


@pytest.mark.long
def test_triton_stops_at_once_although_a_gateway_is_connected(
    three: Fleet,
) -> None:
    """Triton waits for ten minutes for a connection that is left open."""
    leaving = three.tritons[2]
    with load_on(three) as load:
        load.wait_for_more()
        leaving.signal(signal.SIGTERM)
        leaving.ended()
        load.wait_for_more()
    leaving.end()
    leaving.start()
    leaving.wait()
    assert set(load.statuses) == {200}


@pytest.mark.long
def test_metadata_is_read_from_another_replica_if_the_first_does_not_respond(three: Fleet) -> None:
    """Several concurrent requests, so that the hung replica gets some, which would be 504 after 30 s."""
    stopped = three.tritons[2]
    names = ["echo", "other", "unread1", "unread2", "unread3", "unread4"]
    for name in names[2:]:
        three.write_model(name)
        assert three.load(name).status_code == 200
    stopped.signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(len(names)) as pool:
            paths = [f"/v1/models/{name}/versions/1" for name in names]
            answers = list(pool.map(three.client.get, paths))
        assert {answer.status_code for answer in answers} == {200}
    finally:
        stopped.signal(signal.SIGCONT)


def test_health_does_not_wait_for_replicas(three: Fleet) -> None:
    """Requests to a Triton would take at least a second each, 100 s together."""
    for triton in three.tritons:
        triton.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        for path in ("/livez", "/readyz") * 50:
            three.client.get(path)
        took_s = time.monotonic() - began
        assert took_s < 40
    finally:
        for triton in three.tritons:
            triton.signal(signal.SIGCONT)


# A single replica.


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Fleet]:
    with fleet_of(tmp_path, 1, **QUICK) as fleet:
        yield fleet


@pytest.mark.fault("a load fails: an invalid config, no version, an exception at startup")
def test_load_that_fails_everywhere_gives_the_reason_and_the_old_version_serves(
    one: Fleet,
) -> None:
    (triton,) = one.tritons
    (triton.repository / "echo" / "trouble").write_text("damaged")
    (triton.repository / "echo" / "1" / "model.py").write_text(ECHO + "\n# another\n")
    refused = one.load("echo")
    assert refused.status_code == 422
    report = refused.json()
    assert report["code"] == "LOAD_FAILED"
    assert "are damaged" in report["error"]
    assert "/opt/secret" not in refused.text
    assert list(report["replicas"]) == [triton.address]
    assert one.infer().status_code == 200
    errors = {
        model["name"]: model.get("last_error")
        for model in one.client.get("/v1/models").json()["models"]
    }
    assert "damaged" in errors["echo"]
    triton.kill()  # after a reload that failed a tritonserver does not end by itself


@pytest.mark.long
def test_triton_without_grpc_is_managed_over_http_with_a_warning(tmp_path: Path) -> None:
    with Triton(repository(tmp_path), "echo") as triton:
        triton.wait()
        (closed,) = free_ports(1)
        with gateway(f"http://{triton.address}?grpc={closed}") as (client, command):
            assert client.post("/v2/repository/models/other/load").status_code == 200
            assert client.post("/v1/models/other/infer", json=BODY).status_code == 200
            command.wait_for("managing models over HTTP")
