"""Sequences of a model that is loaded on demand, and only a cordoned replica has ready."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.fleet import QUICK, post_to, unload_behind
from tests.support.model_zoo.zoo import COUNTING, Names, write_repository
from tests.support.servers import Triton, gateway
from tests.support.wait import wait_until

URL = f"/v1/models/{COUNTING.name}/infer"


def state_on(triton: Triton) -> str:
    index = {each["name"]: each["state"] for each in post_to(triton, "index").json()}
    return str(index[COUNTING.name])


def send_step(client: httpx.Client, sequence: str, position: str = "") -> httpx.Response:
    headers = {"X-Sequence-ID": sequence} | ({"X-Sequence": position} if position else {})
    return client.post(URL, json={"inputs": [1]}, headers=headers)


@pytest.mark.long
def test_sequence_on_a_cordoned_replica_loads_nothing_and_a_new_one_loads_the_model(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        tritons = []
        for number in range(2):
            write_repository(tmp_path / str(number), Names(), [COUNTING])
            tritons.append(Triton(tmp_path / str(number), "*"))
            tritons[-1].start()
            stack.callback(tritons[-1].kill)  # it would wait for sequences that do not end
        for triton in tritons:
            triton.wait()
        first, second = tritons
        unload_behind(second, COUNTING.name)
        wait_until(lambda: state_on(second) == "UNAVAILABLE")
        urls = [triton.options.url for triton in tritons]
        client, _ = stack.enter_context(gateway(*urls, on_demand_models=COUNTING.name, **QUICK))
        started = send_step(client, "alone", "start").json()["outputs"]
        assert client.post(f"/v1/replicas/{first.address}/cordon").status_code == 200
        for count in (2, 3):
            answer = send_step(client, "alone")
            assert answer.status_code == 200, answer.text
            outputs = answer.json()["outputs"]
            assert (outputs["COUNT"], outputs["PROCESS"]) == ([count], started["PROCESS"])
        assert state_on(second) == "UNAVAILABLE"  # no step has loaded it there
        answer = send_step(client, "new", "start, end")
        assert answer.status_code == 200, answer.text
        assert state_on(second) == "READY"
