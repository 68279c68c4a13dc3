"""`triton-gateway serve --workers 2`: several processes, one port, one metrics page."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from gateway.triton.embedded import EmbeddedTriton
from tests.support.servers import Command, free_ports, workers
from tests.support.wait import wait_until


@pytest.fixture(scope="module")
def pair(demo_triton: EmbeddedTriton) -> Iterator[tuple[Command, str]]:
    (port,) = free_ports(1)
    environment = {"GATEWAY_TRITON_URLS": demo_triton.options.url}
    with Command(
        "serve", "--port", str(port), "--workers", "2", environment=environment
    ) as command:
        command.wait_for("serving")
        url = f"http://127.0.0.1:{port}"
        httpx.get(f"{url}/livez", timeout=30)  # it listens before a worker is up
        yield command, url


def counted(url: str) -> float:
    page = httpx.get(f"{url}/metrics").text
    samples = [
        line
        for line in page.splitlines()
        if line.startswith("gateway_request_duration_seconds_count")
    ]
    return sum(float(line.split()[-1]) for line in samples if 'route="/v2"' in line)


def test_the_metrics_of_the_workers_add_up(pair: tuple[Command, str]) -> None:
    _, url = pair
    before = counted(url)
    for _ in range(60):  # a connection each, so that both workers get some
        assert httpx.get(f"{url}/v2/health/live").status_code == 200
    deadline = time.monotonic() + 5
    while counted(url) < before + 60 and time.monotonic() < deadline:
        time.sleep(0.05)  # the other worker's are a second behind
    assert counted(url) == before + 60
    kinds = [
        line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith("# TYPE")
    ]
    assert len(kinds) == len(set(kinds))


def test_a_killed_worker_is_replaced_while_the_other_serves(pair: tuple[Command, str]) -> None:
    command, url = pair
    wait_until(lambda: len(workers(command)) == 2)
    before = workers(command)
    before[0].kill()
    deadline = time.monotonic() + 30
    while (
        len([w for w in workers(command) if w.status() != psutil.STATUS_ZOMBIE]) < 2
        or before[0].is_running()
    ):
        assert httpx.get(f"{url}/livez", timeout=10).status_code == 200
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert httpx.get(f"{url}/v2/health/live").status_code == 200
