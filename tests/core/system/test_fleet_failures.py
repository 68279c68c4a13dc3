"""Replicas end, hang and come back: real tritonservers behind the gateway, ended and started as it comes."""

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
import tritonclient.grpc as triton_grpc

from tests.support.errors import assert_error
from tests.support.fleet import BODY, ECHO, QUICK, V2_BODY, Fleet, Load, fleet_of, repository
from tests.support.grpc_gateway import failure, fp32, grpc_gateway
from tests.support.keys import INFER, bearer, entry, written
from tests.support.servers import Triton, free_ports, gateway
from tests.support.wait import wait_until


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_of(tmp_path_factory.mktemp("three"), 3, **QUICK) as fleet:
        yield fleet


@pytest.fixture
def three(running: Fleet) -> Iterator[Fleet]:
    """Each test begins with three that answer, `echo` and `other` on all of them."""
    yield running
    running.restore()


def load_on(fleet: Fleet, **headers: str) -> Load:
    return Load(str(fleet.client.base_url), headers=headers)


def told(fleet: Fleet, triton: Triton) -> str:
    """What /readyz says of one replica."""
    replicas: dict[str, str] = fleet.client.get("/readyz").json()["replicas"]
    return replicas[triton.address]


@pytest.mark.fault("one of three Tritons is killed under load")
def test_one_of_three_killed_costs_only_the_requests_that_it_had_and_comes_back(
    three: Fleet,
) -> None:
    victim = three.tritons[0]
    with load_on(three) as load:
        load.wait_for_more()
        victim.kill()
        wait_until(lambda: told(three, victim).startswith("down"))
        assert {each.status for each in load.wait_for_more()} == {200}
    failed = [each for each in load.sent if each.status != 200]
    print(f"{len(load.sent)} requests, {len(failed)} failed: {dict(load.statuses)}")
    assert {each.status for each in failed} <= {502, 503}
    assert len(failed) <= 16  # one per client: those that were under way
    partly = three.load("chain")  # it misses this one, and must come back with it
    assert (partly.status_code, partly.json()["code"]) == (502, "PARTLY_DONE")
    assert partly.json()["replicas"][victim.address]["state"] == "UNREACHABLE"
    assert three.infer("chain").status_code == 200
    victim.start()
    victim.wait()
    back = wait_until(lambda: set(three.states("chain").values()) == {"READY"})
    print(f"its models were back {back:.1f} s after it was up")
    before = three.served()[victim.address]
    wait_until(lambda: three.infer().is_success and three.served()[victim.address] > before)


@pytest.mark.fault("one of three replicas fails every inference of a model at once")
@pytest.mark.parametrize(("kind", "status"), [("INTERNAL", 500), ("UNAVAILABLE", 503)])
def test_a_replica_that_fails_every_inference_gets_only_trials_until_it_recovers(
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
def test_no_error_tells_a_caller_the_address_of_a_replica(three: Fleet, tmp_path: Path) -> None:
    """The replica is lost between two probes, so that each request finds out by itself."""
    keys = written(tmp_path / "keys.yaml", [entry(INFER, "infer")])
    triton, caller = three.tritons[0], bearer(INFER)
    (nobody,) = free_ports(1)
    settings: dict[str, str] = {
        "connect_timeout_s": QUICK["connect_timeout_s"],
        "poll_interval_s": "60",
        "keys_file": str(keys),
        "openai_urls": f"http://127.0.0.1:{nobody}",
        "log_level": "warning",
    }
    metadata = {name.lower(): value for name, value in caller.items()}
    stream = {**caller, "Accept": "text/event-stream"}
    calls: list[tuple[str, Any, dict[str, str]]] = [
        ("/v1/models/echo/infer", BODY, caller),
        ("/v1/models/echo/infer", BODY, stream),
        ("/v2/models/echo/infer", V2_BODY, caller),
    ]
    errors = []
    with ExitStack() as stack:
        gateways = [
            stack.enter_context(grpc_gateway(triton.options.url, **settings)) for _ in calls
        ]
        for running, (path, body, _) in zip(gateways, calls, strict=True):
            answer = running.http.post(path, json=body, headers=caller)
            assert answer.status_code == 200, answer.text
        triton.kill()
        with triton_grpc.InferenceServerClient(gateways[0].address) as client:
            code, message = failure(client.infer, "echo", [fp32(1, shape=(1, 1))], headers=metadata)
        assert code == "UNAVAILABLE"
        errors.append(message)
        for running, (path, body, headers) in zip(gateways, calls, strict=True):
            refused = running.http.post(path, json=body, headers=headers)
            assert_error(refused, 503, "UNAVAILABLE", "the replica")
            errors.append(refused.text)
        gateways[0].command.wait_for(f"replica {triton.address} is DOWN")
        question = {"model": "m", "messages": []}
        refused = gateways[0].http.post("/v1/chat/completions", json=question, headers=caller)
        assert refused.status_code == 503
        errors.append(refused.text)
        gateways[0].command.wait_for(f"OpenAI server 127.0.0.1:{nobody} cannot be reached")
    triton.start()
    assert [each for each in errors if re.search(r"\d+\.\d+\.\d+|localhost|:\d{3,}", each)] == []


@pytest.mark.long
def test_a_triton_that_is_asked_to_stop_does_so_at_once_with_the_gateway_attached(
    three: Fleet,
) -> None:
    """It would wait for ten minutes for a connection that is left open."""
    leaving = three.tritons[2]
    with load_on(three) as load:
        load.wait_for_more()
        leaving.signal(signal.SIGTERM)
        took = leaving.ended()
        load.wait_for_more()
    print(f"it took {took:.1f} s; {dict(load.statuses)}")
    leaving.end()
    leaving.start()
    leaving.wait()
    assert set(load.statuses) == {200}


def test_what_a_model_takes_is_asked_of_another_where_the_first_is_silent(three: Fleet) -> None:
    """Several at once, so that the silent one gets some of them; alone it would be 504 after 30 s."""
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
        print(", ".join(f"{answer.elapsed.total_seconds() * 1000:.0f} ms" for answer in answers))
        assert {answer.status_code for answer in answers} == {200}
    finally:
        stopped.signal(signal.SIGCONT)


def test_health_is_answered_from_what_is_known(three: Fleet) -> None:
    """Whoever asked a Triton would wait for it: at least a second a time, 100 s in all."""
    for triton in three.tritons:
        triton.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        for path in ("/livez", "/readyz") * 50:
            three.client.get(path)
        took_s = time.monotonic() - began
        print(f"{took_s * 10:.1f} ms each")
        assert took_s < 40
    finally:
        for triton in three.tritons:
            triton.signal(signal.SIGCONT)


@pytest.mark.fault("a Triton accepts requests and never responds")
def test_one_of_three_that_never_answers_is_left_alone(three: Fleet) -> None:
    """The last one here: afterwards it is left out for 5 s, as it was ejected."""
    stopped = three.tritons[1]
    stopped.signal(signal.SIGSTOP)
    try:
        with load_on(three, **{"X-Request-Timeout": "1"}) as impatient:
            wait_until(lambda: told(three, stopped).startswith("slow"))
        with load_on(three) as load:
            load.wait_for_more()
        assert set(load.statuses) == {200}
        assert set(impatient.statuses) == {200, 504}
        late = [each for each in impatient.sent if each.status == 504]
        assert all(each.took_s > 0.9 for each in late)
        print(f"{dict(impatient.statuses)}, the last {late[-1].began - late[0].began:.1f} s later")
        assert three.client.get("/readyz").status_code == 200
    finally:
        stopped.signal(signal.SIGCONT)


# One alone.


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Fleet]:
    with fleet_of(tmp_path, 1, **QUICK) as fleet:
        yield fleet


@pytest.mark.fault("the only Triton is killed under load")
def test_without_its_only_triton_it_refuses_and_serves_again_when_that_is_back(one: Fleet) -> None:
    triton = one.tritons[0]
    assert one.unload("other").status_code == 200
    triton.kill()
    wait_until(lambda: one.infer().json().get("code") == "NO_REPLICA")
    took_s = []
    for _ in range(100):
        refused = one.client.post("/v2/models/echo/infer", json=V2_BODY)
        took_s.append(refused.elapsed.total_seconds())
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    print(f"half of the refusals within {sorted(took_s)[50] * 1000:.1f} ms")
    assert one.client.get("/readyz").status_code == 503
    assert one.client.get("/livez").status_code == 200
    assert one.load("echo").status_code == 503
    (down,) = one.client.get("/v1/replicas").json()["replicas"]
    assert (down["state"], down["models"]) == ("DOWN", {})
    page = one.client.get("/metrics").text
    counts = re.findall(r"^gateway_replica_models\{.*\} (\S+)$", page, re.MULTILINE)
    assert counts
    assert {*counts} == {"0.0"}
    triton.start()
    triton.wait()
    back = wait_until(lambda: one.infer().status_code == 200)
    print(f"serving {back:.2f} s after Triton was")
    # It starts with --load-model=other, which the API unloaded.
    wait_until(lambda: one.states("other") == {triton.address: "UNAVAILABLE"})


@pytest.mark.fault("a load fails: an invalid config, no version, an exception at startup")
def test_a_load_that_fails_everywhere_says_why_and_the_older_version_keeps_serving(
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
def test_a_triton_without_grpc_is_managed_over_http_with_a_warning(tmp_path: Path) -> None:
    with Triton(repository(tmp_path), "echo") as triton:
        triton.wait()
        (closed,) = free_ports(1)
        with gateway(f"http://{triton.address}?grpc={closed}") as (client, command):
            assert client.post("/v2/repository/models/other/load").status_code == 200
            assert client.post("/v1/models/other/infer", json=BODY).status_code == 200
            command.wait_for("managing models over HTTP")
