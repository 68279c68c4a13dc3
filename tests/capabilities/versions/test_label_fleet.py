"""Labels of a fleet of two real Tritons behind two gateways, while a replica or a model changes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import pytest

from tests.capabilities.versions.support.versioned import (
    LABELS,
    NAME,
    V1_BODY,
    count_versions,
    write_versions,
)
from tests.support.errors import assert_error
from tests.support.fleet import QUICK, url_of, write_echo
from tests.support.servers import Triton, gateway_before
from tests.support.wait import wait_until

V1, V2 = f"/v1/models/{NAME}", f"/v2/models/{NAME}"


@dataclass
class Pair:
    tritons: list[Triton]
    client: httpx.Client
    other: httpx.Client

    def call(self, action: str) -> None:
        """Cordon or uncordon the first replica."""
        path = f"/v1/replicas/{self.tritons[0].address}/{action}"
        self.client.post(path).raise_for_status()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("labels")
    state = f"file://{folder}/state.db"
    with ExitStack() as stack:
        tritons = []
        for number in range(2):
            repository = write_versions(folder / str(number), (1,) if number else (1, 2))
            write_echo(repository, "late")
            tritons.append(stack.enter_context(Triton(repository, NAME)))
        for triton in tritons:
            triton.wait()
        urls = [url_of(triton) for triton in tritons]
        gateways = (gateway_before(*urls, state=state, **QUICK) for _ in range(2))
        pair = Pair(tritons, *(stack.enter_context(each) for each in gateways))
        for client in (pair.client, pair.other):
            wait_until(lambda client=client: client.get(f"{V1}/versions/2").is_success)  # type: ignore[misc]
        yield pair


def is_cordoned(client: httpx.Client) -> bool:
    return any(each.get("cordoned") for each in client.get("/v1/replicas").json()["replicas"])


def test_label_skips_a_version_that_only_a_cordoned_replica_has(pair: Pair) -> None:
    for label, versions in (("canary", {"1": 50, "2": 50}), ("next", {"2": 1})):
        path = f"{LABELS}/{label}"
        assert pair.client.put(path, json={"versions": versions}).status_code == 200
    wait_until(lambda: pair.other.get(f"{LABELS}/next").is_success)
    for client in (pair.client, pair.other):
        assert count_versions(client, f"{V1}/versions/canary/infer", 2) == {"1": 1, "2": 1}
    pair.call("cordon")
    wait_until(lambda: is_cordoned(pair.other))
    for client in (pair.client, pair.other):
        ready = [client.get(f"{LABELS}/{label}").json()["ready"] for label in ("canary", "next")]
        assert ready == [{"1": True, "2": False}, {"2": False}]
        for path in (f"{V1}/versions/canary/infer", f"{V2}/versions/canary/infer"):
            assert count_versions(client, path, 10) == {"1": 10}
        refused = client.post(f"{V1}/versions/next/infer", json=V1_BODY)
        assert refused.status_code == 503
    for label in ("canary", "next"):
        assert pair.client.delete(f"{LABELS}/{label}").status_code == 200
    pair.call("uncordon")


@pytest.mark.fault("a replica accepts connections and never answers, while models")
def test_label_does_not_wait_for_a_hung_replica(pair: Pair) -> None:
    pair.tritons[1].signal(signal.SIGSTOP)
    try:
        for response in (
            pair.client.put(f"{LABELS}/stable", json={"version": "1"}),
            pair.client.delete(f"{LABELS}/stable"),
        ):
            response.raise_for_status()
            assert response.elapsed.total_seconds() <= 3
    finally:
        pair.tritons[1].signal(signal.SIGCONT)


@pytest.mark.fault("a model is loaded and unloaded at once, through two gateways")
def test_label_waits_for_a_load_by_another_gateway_and_then_fails(pair: Pair) -> None:
    trouble = pair.tritons[0].repository / "late" / "trouble"
    trouble.write_text("hold")
    load = "/v2/repository/models/late/load"
    location = pair.client.post(load, headers={"Prefer": "respond-async"}).headers["location"]

    def read_desired_state() -> str | None:
        models = pair.other.get("/v1/models").json()["models"]
        return next((each.get("wished") for each in models if each["name"] == "late"), None)

    wait_until(lambda: read_desired_state() == "loaded")
    refused = pair.other.put("/v1/models/late/labels/stable", json={"version": 1})
    assert_error(refused, 409, "CHANGE_IN_PROGRESS")
    assert "a load on" in refused.json()["error"]
    trouble.unlink()
    wait_until(lambda: pair.client.get(location).json()["operation"] == "succeeded")
