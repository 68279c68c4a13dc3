"""SIGTERM: unready first, then quiet, then gone; and nobody who was being served notices."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.fleet import V2_BODY, repository
from tests.support.servers import Command, Triton, free_ports
from tests.support.wait import wait_until

SLOW_BODY = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [2], "data": [-2, 0]}]}


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    with Triton(repository(tmp_path_factory.mktemp("models")), "echo", "other") as running:
        running.wait()
        yield running


def serve(triton: Triton, port: int, *arguments: str, drain_s: str = "1.5") -> Command:
    environment = {"GATEWAY_TRITON_URLS": triton.options.url, "GATEWAY_DRAIN_S": drain_s}
    command = Command("serve", "--port", str(port), *arguments, environment=environment)
    command.wait_for("serving")
    return command


def asking(url: str) -> Counter[str]:
    """Ask again and again, as a load balancer would: for a second after it is not ready any more.

    Each answer's status, and whatever else came.
    """
    seen: Counter[str] = Counter()
    ends = float("inf")
    with httpx.Client(base_url=url, timeout=30) as client:
        while time.monotonic() < ends:
            try:
                seen[str(client.post("/v2/models/other/infer", json=V2_BODY).status_code)] += 1
                if ends == float("inf") and client.get("/readyz").status_code == 503:
                    ends = time.monotonic() + 1
            except httpx.HTTPError as exc:
                seen[type(exc).__name__] += 1
    return seen


@pytest.mark.parametrize("arguments", [(), ("--workers", "2")], ids=["one process", "two workers"])
def test_it_says_that_it_is_not_ready_finishes_what_it_has_and_ends_with_0(
    triton: Triton, arguments: tuple[str, ...]
) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with serve(triton, port, *arguments) as command, ThreadPoolExecutor(9) as pool:
        wait_until(lambda: is_ready(url))
        askers = [pool.submit(asking, url) for _ in range(8)]
        time.sleep(0.5)
        os.kill(command.pid, signal.SIGTERM)
        told = time.monotonic()
        wait_until(lambda: not is_ready(url))
        time.sleep(max(told + 0.8 - time.monotonic(), 0))
        # It is still there, for those who have not noticed yet; this one takes two seconds.
        slow = pool.submit(httpx.post, f"{url}/v2/models/echo/infer", json=SLOW_BODY, timeout=30)
        assert command.end() == 0
        took = time.monotonic() - told
        assert slow.result().status_code == 200
        seen = sum((asker.result() for asker in askers), Counter[str]())
    print(f"{seen}; ended after {took:.1f} s")
    assert set(seen) == {"200"}
    assert seen["200"] > 100
    assert 2 < took < 6


def is_ready(url: str) -> bool:
    return httpx.get(f"{url}/readyz").status_code == 200


def test_a_second_signal_ends_it_at_once(triton: Triton) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with serve(triton, port, drain_s="30") as command, ThreadPoolExecutor(1) as pool:
        body = {"inputs": [{**SLOW_BODY["inputs"][0], "data": [-5, 0]}]}
        pool.submit(httpx.post, f"{url}/v2/models/echo/infer", json=body, timeout=30)
        time.sleep(0.3)
        os.kill(command.pid, signal.SIGTERM)
        wait_until(lambda: not is_ready(url))
        os.kill(command.pid, signal.SIGTERM)
        began = time.monotonic()
        command.end()
        assert time.monotonic() - began < 2


def test_while_it_drains_it_says_so_and_closes_connections_after_their_answers(
    triton: Triton,
) -> None:
    (port,) = free_ports(1)
    with (
        serve(triton, port) as command,
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        assert "connection" not in client.get("/livez").headers
        os.kill(command.pid, signal.SIGTERM)
        wait_until(lambda: client.get("/readyz").status_code == 503)
        assert client.get("/readyz").json()["draining"] is True
        assert client.get("/livez").headers["connection"] == "close"
        assert client.get("/livez").status_code == 200
        assert command.end() == 0
