"""Slow start: a replica that comes back gets few requests at first, in front of two real tritonservers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.fleet import BODY, QUICK, write_echo
from tests.support.servers import Triton, gateway
from tests.support.wait import TIMEOUT_S, wait_until

pytestmark = pytest.mark.long


def count_inferences(triton: Triton) -> int:
    url = f"http://{triton.address}/v2/models/echo/stats"
    (stats,) = httpx.get(url, timeout=TIMEOUT_S).json()["model_stats"]
    return int(stats["inference_stats"]["success"]["count"])


def infer(client: httpx.Client, times: int) -> None:
    for _ in range(times):
        assert client.post("/v1/models/echo/infer", json=BODY).status_code == 200


def wait_for_state(client: httpx.Client, triton: Triton, state: str) -> None:
    expected = (triton.address, state)

    def is_known() -> bool:
        replicas = client.get("/v1/replicas").json()["replicas"]
        return expected in {(each["address"], each["state"]) for each in replicas}

    wait_until(is_known)


def test_replica_that_comes_back_gets_a_tenth_of_its_share_at_first(tmp_path: Path) -> None:
    with ExitStack() as stack:
        tritons = []
        for number in range(2):
            write_echo(tmp_path / str(number), "echo")
            tritons.append(stack.enter_context(Triton(tmp_path / str(number), "*")))
        for triton in tritons:
            triton.wait()
        urls = [triton.options.url for triton in tritons]
        # So slow that the share does not grow while the test runs, on however busy a machine; and so quick
        # that the replica has its full share after the first requests.
        slow, quick = (
            stack.enter_context(gateway(*urls, slow_start_s=seconds, **QUICK))[0]
            for seconds in ("36000", "0.01")
        )
        for client in (slow, quick):
            infer(client, 60)
        second = tritons[1]
        assert count_inferences(second) > 20  # both replicas were there when the gateways started
        second.kill()
        for client in (slow, quick):
            wait_for_state(client, second, "DOWN")
        second.start()
        second.wait()
        for client in (slow, quick):
            wait_for_state(client, second, "UP")
        infer(slow, 400)
        assert 0 < count_inferences(second) < 80  # 20 is a twentieth

        def is_used() -> bool:
            before = count_inferences(second)
            infer(quick, 50)
            return count_inferences(second) - before > 10

        wait_until(is_used)
