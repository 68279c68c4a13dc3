"""Requests wait while no replica is up, in bounded memory, and are answered by the first one."""

from __future__ import annotations

import asyncio
import math
import resource
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from tests.capabilities.on_demand.support.from_zero import (
    Sleeping,
    WaitingClients,
    send_request,
    sleeping_fleet,
    waiting_gateway,
)
from tests.support.metrics import metric
from tests.support.wait import wait_until, wait_until_async

COUNT = 100
# The gateway needs two file descriptors for each connection.
OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
MAX_BYTES_PER_REQUEST = 40 * 1024


def count_held(fleet: Sleeping) -> int:
    return int(metric(fleet.client, "gateway_requests_held"))


def has_held(fleet: Sleeping, count: int) -> bool:
    return count_held(fleet) == count


@pytest.mark.fault("no Triton is up, with `GATEWAY_HOLD_S`")
def test_requests_wait_for_the_first_replica(tmp_path: Path) -> None:
    with sleeping_fleet(tmp_path) as fleet, ThreadPoolExecutor(COUNT) as pool:
        ready = fleet.client.get("/readyz")
        assert ready.status_code == 200
        assert ready.json()["asleep"] is True
        assert fleet.client.get("/v2/health/ready").status_code == 200
        assert fleet.client.get("/v2/models/echo/ready").status_code == 503  # a check does not wait
        url = str(fleet.client.base_url).rstrip("/")
        answers = [pool.submit(send_request, url, number) for number in range(COUNT)]
        wait_until(lambda: count_held(fleet) == COUNT)
        assert metric(fleet.client, "gateway_demand") == COUNT  # by which KEDA starts the fleet
        fleet.triton.start()
        statuses = Counter(answer.result().status_code for answer in answers)
        assert statuses == {200: COUNT}
        wait_until(lambda: count_held(fleet) == 0)
        wait_until(lambda: "asleep" not in fleet.client.get("/readyz").json())
        assert fleet.client.get("/readyz").json()["ready"] is True


@pytest.mark.long
@pytest.mark.fault("no Triton is up, with `GATEWAY_HOLD_S`")
def test_requests_without_a_replica_are_503_after_the_hold_time(tmp_path: Path) -> None:
    with sleeping_fleet(tmp_path, hold_s="1") as fleet:
        refused = [send_request(str(fleet.client.base_url).rstrip("/"), each) for each in range(3)]
        assert {answer.status_code for answer in refused} == {503}
        assert {answer.json()["code"] for answer in refused} == {"NO_REPLICA"}
        assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)


def test_requests_without_a_hold_time_are_503_at_once(tmp_path: Path) -> None:
    with sleeping_fleet(tmp_path, hold_s="0") as fleet:
        assert fleet.client.get("/readyz").status_code == 503
        refused = send_request(str(fleet.client.base_url).rstrip("/"), 2)
        assert (refused.status_code, refused.json()["code"]) == (503, "NO_REPLICA")


@pytest.mark.long
@pytest.mark.fault("no Triton is up, with `GATEWAY_HOLD_S`")
def test_requests_above_the_queue_limit_are_429(tmp_path: Path) -> None:
    with sleeping_fleet(tmp_path, max_queue="5") as fleet, ThreadPoolExecutor(20) as pool:
        url = str(fleet.client.base_url).rstrip("/")
        answers = [pool.submit(send_request, url, number) for number in range(20)]
        wait_until(lambda: sum(answer.done() for answer in answers) == 15)
        assert {answer.result().status_code for answer in answers if answer.done()} == {429}
        fleet.triton.start()
        statuses = Counter(answer.result().status_code for answer in answers)
        assert statuses == {429: 15, 200: 5}


@pytest.mark.long
@pytest.mark.fault("no Triton is up, with `GATEWAY_HOLD_S`")
@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_waiting_requests_take_little_memory(tmp_path: Path, count: int) -> None:
    """Ten thousand requests wait at two gateways if one may not open enough files."""
    gateways = 1 if OPEN_FILES < 0 else math.ceil(count / ((OPEN_FILES - 1000) // 2))
    each = math.ceil(count / gateways)
    settings = {
        "max_queue": str(each),
        "max_connections": str(each + 100),
        "max_connections_per_client": "0",
        "hold_s": "300",
        "log_level": "error",
    }
    with sleeping_fleet(tmp_path, **settings) as fleet, ExitStack() as stack:
        fleets = [fleet]
        for _ in range(gateways - 1):
            other = waiting_gateway(tmp_path, fleet.triton, **settings)
            fleets.append(Sleeping(*stack.enter_context(other), fleet.triton))
        processes = [psutil.Process(each.command.pid) for each in fleets]
        before = [process.memory_info().rss for process in processes]
        clients = WaitingClients(*(str(each.client.base_url) for each in fleets))

        async def start_triton() -> None:
            for one in fleets:
                await wait_until_async(partial(asyncio.to_thread, has_held, one, each))
            for process, size in zip(processes, before, strict=True):
                grown = (process.memory_info().rss - size) / each
                assert grown < MAX_BYTES_PER_REQUEST, f"{grown / 1024:.1f} KiB for each request"
            fleet.triton.start()

        asyncio.run(clients.run(each * gateways, start_triton))
        assert Counter(clients.statuses) == {200: each * gateways}


@pytest.mark.long
def test_body_of_a_waiting_request_is_not_read(tmp_path: Path) -> None:
    size, count = 32 << 20, 8
    with sleeping_fleet(tmp_path, max_body_bytes=str(size)) as fleet:
        process = psutil.Process(fleet.command.pid)
        before = process.memory_info().rss

        def upload(number: int) -> int:
            path = ("/v1/models/echo/infer", "/v2/models/echo/infer")[number % 2]
            url = f"{str(fleet.client.base_url).rstrip('/')}{path}"
            headers = {"Content-Type": "application/octet-stream"}
            return httpx.post(url, content=bytes(size), headers=headers, timeout=120).status_code

        with ThreadPoolExecutor(count) as pool:
            answers = [pool.submit(upload, number) for number in range(count)]
            wait_until(lambda: count_held(fleet) == count)
            wait_until(lambda: process.cpu_percent(0.5) < 50)
            grown = process.memory_info().rss - before
            assert grown < size, f"{count} waiting bodies: {grown / 2**20:.1f} MiB"
            fleet.triton.start()
            assert {answer.result() for answer in answers} <= {400, 415, 422}
