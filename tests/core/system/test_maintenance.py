"""Cordon and drain of a replica: two real tritonservers behind two gateways that share their state."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fleet import BODY, QUICK, load_behind, post_to, unload_behind, write_echo
from tests.support.gateway_forks import run_gateway
from tests.support.model_zoo.zoo import COUNTING, Names, write_repository
from tests.support.servers import Triton, gateway
from tests.support.wait import TIMEOUT_S, wait_until

V2_STEP = {
    "inputs": [{"name": "X", "datatype": "INT32", "shape": [1, 1], "data": [1]}],
    "parameters": {"sequence_id": "alone"},
}


@dataclass
class Pair:
    tritons: list[Triton]
    client: httpx.Client
    other: httpx.Client

    def call(self, action: str, address: str, **more: Any) -> httpx.Response:
        return self.client.post(f"/v1/replicas/{address}/{action}", **more)

    def served(self, model: str = "echo") -> list[int]:
        """Return the number of inferences that each Triton has counted."""
        found = []
        for triton in self.tritons:
            url = f"http://{triton.address}/v2/models/{model}/stats"
            stats = httpx.get(url, timeout=TIMEOUT_S).json()["model_stats"][0]
            found.append(stats["inference_stats"]["success"]["count"])
        return found

    def described(self, client: httpx.Client, address: str) -> dict[str, Any]:
        replicas = client.get("/v1/replicas").json()["replicas"]
        (found,) = (each for each in replicas if each["address"] == address)
        return dict(found)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("maintenance")
    state = f"file://{folder}/state.db"
    with ExitStack() as stack:
        tritons = []
        for number in range(2):
            repository = folder / str(number)
            write_repository(repository, Names(), [COUNTING])
            write_echo(repository, "echo", instances=2)
            tritons.append(Triton(repository, "*"))
            tritons[-1].start()
            stack.callback(tritons[-1].kill)  # it would wait for sequences that do not end
        for triton in tritons:
            triton.wait()
        clients = [
            stack.enter_context(
                gateway(*(triton.options.url for triton in tritons), state=state, **QUICK)
            )[0]
            for _ in range(2)
        ]
        yield Pair(tritons, *clients)


@pytest.fixture
def pair(running: Pair) -> Iterator[Pair]:
    yield running
    for triton in running.tritons:
        (triton.repository / "echo" / "hold").unlink(missing_ok=True)
        assert running.call("uncordon", triton.address).status_code == 200
    wait_until(lambda: not cordoned(running.other))


def cordoned(client: httpx.Client) -> set[str]:
    replicas = client.get("/v1/replicas").json()["replicas"]
    return {each["address"] for each in replicas if each.get("cordoned")}


def run_command(pair: Pair, *words: str) -> subprocess.CompletedProcess[str]:
    return run_gateway("replicas", *words, "--url", str(pair.client.base_url))


def test_cordoned_replica_gets_no_new_requests_from_any_gateway(pair: Pair) -> None:
    first, _ = pair.tritons
    result = pair.call("cordon", first.address)
    assert result.status_code == 200
    assert (result.json()["address"], result.json()["cordoned"]) == (first.address, True)
    wait_until(lambda: cordoned(pair.other) == {first.address})
    before, _ = pair.served()
    for client in (pair.client, pair.other):
        for _ in range(20):
            assert client.post("/v1/models/echo/infer", json=BODY).status_code == 200
        # It is still ready: with the other replica, it can serve.
        readiness = client.get("/readyz")
        assert readiness.status_code == 200
        assert readiness.json()["replicas"][first.address] == "cordoned"
        assert (
            f'gateway_replica_cordoned{{replica="{first.address}"}} 1'
            in client.get("/metrics").text
        )
    assert pair.served()[0] == before
    assert pair.call("uncordon", first.address).json()["cordoned"] is False

    def is_used() -> bool:
        pair.client.post("/v1/models/echo/infer", json=BODY)
        return pair.served()[0] > before

    wait_until(is_used)


def test_drain_waits_for_running_requests(pair: Pair) -> None:
    first, second = pair.tritons
    (first.repository / "echo" / "hold").touch()
    pair.call("cordon", second.address)
    with ThreadPoolExecutor(2) as threads:
        held = {"inputs": {"X": [-1000.0, 2.0]}}
        running = threads.submit(
            pair.client.post, "/v1/models/echo/infer", json=held, timeout=TIMEOUT_S
        )
        wait_until((first.repository / "echo" / "held").exists)
        assert pair.call("uncordon", second.address).status_code == 200
        late = run_command(pair, "drain", first.address, "--timeout", "0.5")
        assert (late.returncode, "drain it again" in late.stderr) == (1, True), late.stderr
        assert cordoned(pair.client) == {first.address}
        draining = threads.submit(run_command, pair, "drain", first.address)
        for _ in range(10):
            assert pair.client.post("/v1/models/echo/infer", json=BODY).status_code == 200
        assert not draining.done()
        (first.repository / "echo" / "hold").unlink()
        assert running.result().status_code == 200
        ended = draining.result()
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == (f"{first.address} is cordoned: 0 requests and 0 sequences in flight\n")


def step(client: httpx.Client, sequence: str, position: str = "") -> dict[str, Any]:
    headers = {"X-Sequence-ID": sequence} | ({"X-Sequence": position} if position else {})
    path = f"/v1/models/{COUNTING.name}/infer"
    response = client.post(path, json={"inputs": [1]}, headers=headers)
    assert response.status_code == 200, response.text
    return dict(response.json()["outputs"])


def start_sequences(client: httpx.Client, kind: str) -> dict[str, Any]:
    """The process of each sequence, by its name."""
    return {
        name: step(client, name, "start")["PROCESS"]
        for name in (f"{kind} {number}" for number in range(8))
    }


def cordon_replica_with_sequences(pair: Pair) -> str:
    """Return the address of the cordoned replica; one that was slow before may have no sequence."""
    for triton in pair.tritons:
        if pair.call("cordon", triton.address).json()["sequences"]:
            return triton.address
        pair.call("uncordon", triton.address)
    raise AssertionError("no replica has a sequence")


@pytest.mark.long
def test_drain_lets_sequences_finish(pair: Pair) -> None:
    processes = start_sequences(pair.client, "speaker")
    first = cordon_replica_with_sequences(pair)
    refused = pair.call("drain", first, headers={"X-Request-Timeout": "3"})
    assert refused.json()["code"] == "DRAIN_TIMEOUT"
    for name, process in processes.items():
        assert step(pair.client, name)["PROCESS"] == process
        assert step(pair.client, name, "end")["PROCESS"] == process
    assert pair.call("drain", first).json()["sequences"] == 0
    # Those that start now run on the other one.
    later = {
        str(step(pair.client, f"late {number}", "start, end")["PROCESS"]) for number in range(8)
    }
    assert len(later) == 1


def test_gateway_that_did_not_start_a_sequence_finds_it_on_a_cordoned_replica(pair: Pair) -> None:
    processes = start_sequences(pair.client, "guessed")
    first = pair.tritons[0].address
    pair.call("cordon", first)
    wait_until(lambda: cordoned(pair.other) == {first})
    for name, process in processes.items():
        assert step(pair.other, name, "end")["PROCESS"] == process


def state_on(triton: Triton, model: str = COUNTING.name) -> str:
    index = {each["name"]: each["state"] for each in post_to(triton, "index").json()}
    return str(index[model])


@pytest.mark.long
def test_sequences_continue_if_only_a_cordoned_replica_has_the_model(
    pair: Pair, tmp_path: Path
) -> None:
    first, second = pair.tritons
    urls = [triton.options.url for triton in pair.tritons]
    state = f"file://{tmp_path}/state.db"
    unload_behind(second, COUNTING.name)
    wait_until(lambda: state_on(second) == "UNAVAILABLE")
    with (
        gateway(*urls, state=state, **QUICK) as (client, _),
        gateway(*urls, state=state, **QUICK) as (other, _),
    ):
        started = step(client, "alone", "start")
        assert client.post(f"/v1/replicas/{first.address}/cordon").status_code == 200
        wait_until(lambda: cordoned(other) == {first.address})
        # The other one has not read the metadata, and does not know the sequence.
        counts = []
        for each in (client, other):
            in_body = {"inputs": [1], "parameters": {"sequence_id": "alone"}}
            answer = each.post(f"/v1/models/{COUNTING.name}/infer", json=in_body)
            assert answer.status_code == 200, answer.text
            for found in (answer.json()["outputs"], step(each, "alone")):
                counts.append(found["COUNT"])
                assert found["PROCESS"] == started["PROCESS"]
            passed = each.post(f"/v2/models/{COUNTING.name}/infer", json=V2_STEP)
            assert passed.status_code == 200, passed.text
            counts.append(passed.json()["outputs"][0]["data"])
        assert counts == [[number] for number in range(2, 8)]
        assert state_on(second) == "UNAVAILABLE"  # no step has loaded it there
        new = {"X-Sequence-ID": "new", "X-Sequence": "start, end"}
        refused = client.post(
            f"/v1/models/{COUNTING.name}/infer", json={"inputs": [1]}, headers=new
        )
        assert refused.status_code == 503, refused.text
        assert step(client, "alone", "end")["PROCESS"] == started["PROCESS"]
    load_behind(second, COUNTING.name)


def test_last_or_unknown_replica_cannot_be_cordoned(pair: Pair) -> None:
    first, second = (triton.address for triton in pair.tritons)
    assert pair.call("cordon", first).status_code == 200
    refused = pair.call("cordon", second)
    assert (refused.status_code, refused.json()["code"]) == (409, "CONFLICT")
    assert cordoned(pair.client) == {first}
    for action in ("cordon", "uncordon", "drain"):
        unknown = pair.call(action, "192.0.2.1:8000")
        assert (unknown.status_code, unknown.json()["code"]) == (404, "REPLICA_NOT_FOUND")


@pytest.mark.long
def test_commands_cordon_list_and_uncordon_a_replica(pair: Pair) -> None:
    first = pair.tritons[0].address
    assert run_command(pair, "cordon", first).returncode == 0
    listed = run_command(pair).stdout
    assert f"{first}  ready, cordoned" in " ".join(listed.splitlines())
    assert run_command(pair, "uncordon", first).stdout.startswith(f"{first} is in service: ")
    ended = run_gateway("replicas", "--url", "http://a", "drain", first)
    assert ended.returncode == 2
    assert "write --url after drain" in ended.stderr


def test_cordon_survives_a_restart_of_the_gateway(pair: Pair, tmp_path: Path) -> None:
    urls = [triton.options.url for triton in pair.tritons]
    first = pair.tritons[0].address
    state = f"file://{tmp_path}/state.db"
    for is_first in (True, False):
        with gateway(*urls, state=state, **QUICK) as (client, _):
            if is_first:
                assert client.post(f"/v1/replicas/{first}/cordon").status_code == 200
            assert cordoned(client) == {first}


def test_cordon_without_a_shared_state_is_refused(pair: Pair) -> None:
    urls = [triton.options.url for triton in pair.tritons]
    with gateway(*urls, state="none:", **QUICK) as (client, _):
        refused = client.post(f"/v1/replicas/{pair.tritons[0].address}/cordon")
        assert (refused.status_code, refused.json()["code"]) == (409, "STATE_NOT_SHARED")
