"""Accepted jobs survive killed and stopped gateways, a stopped Redis and a full disk."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event, Thread
from typing import cast

import httpx
import orjson
import pytest

from gateway.embedded.supervisor import EmbeddedTriton
from tests.capabilities.jobs.support import (
    CANCELLABLE,
    JOBS_SECRET,
    VECTOR,
    submit,
    wait_for,
    wait_for_state,
)
from tests.support.measurements import assert_number
from tests.support.redis_server import RedisServer
from tests.support.servers import GatewayProcess
from tests.support.wait import wait_until


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


STORES = ("sqlite", "redis")
# Each test of both stores is long with one of them.
SQLITE_FIRST = ("sqlite", pytest.param("redis", marks=pytest.mark.long))
REDIS_FIRST = (pytest.param("sqlite", marks=pytest.mark.long), "redis")


@pytest.fixture
def jobs(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A value of GATEWAY_JOBS for a store of this kind."""
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/jobs"
    return cast(RedisServer, request.getfixturevalue("redis")).url()


@pytest.fixture
def start_gateway(zoo_triton: EmbeddedTriton) -> Iterator[Callable[..., GatewayProcess]]:
    with ExitStack() as stack:

        def start(jobs: str, **settings: str) -> GatewayProcess:
            named = {f"GATEWAY_{name.upper()}": value for name, value in settings.items()}
            process = GatewayProcess(
                {
                    "GATEWAY_TRITON_URLS": zoo_triton.options.url,
                    "GATEWAY_JOBS": jobs,
                    "GATEWAY_JOBS_SECRET": JOBS_SECRET,
                    "GATEWAY_CONNECT_TIMEOUT_S": "10",
                    **named,
                }
            )
            process.start()
            stack.callback(process.kill)
            for model in ("vector_FP32", "cancellable"):
                path = f"{process.url}/v2/repository/models/{model}/load"
                assert httpx.post(path, timeout=60).is_success
            return process

        yield start


def submit_until_accepted(urls: Sequence[str], number: int) -> str:
    """Return the job of a number, which one of the gateways has accepted."""
    headers = {"Idempotency-Key": f"job {number}"}
    while True:
        url = random.choice(urls)
        try:
            with httpx.Client(base_url=url, timeout=30) as client:
                answer = submit(client, json={"inputs": [[number]]}, headers=headers)
        except httpx.TransportError:
            time.sleep(0.05)
            continue
        if answer.status_code == 202:
            return str(answer.json()["id"])
        assert answer.status_code in (409, 429, 503), answer.text
        time.sleep(0.05)


def check_survival(
    gateways: Sequence[GatewayProcess], count: int, kills: int, longest_pause_s: float
) -> Counter[int]:
    """Kill gateways while jobs are submitted and run; return how often jobs were started."""
    urls = [gateway.url for gateway in gateways]
    done = Event()

    def kill_some() -> None:
        for _ in range(kills):
            if done.wait(random.uniform(0.1, longest_pause_s)):
                break
            gateway = random.choice(gateways)
            gateway.kill()
            gateway.start()

    killer = Thread(target=kill_some)
    killer.start()
    with ThreadPoolExecutor(8) as threads:
        ids = list(threads.map(lambda number: submit_until_accepted(urls, number), range(count)))
    killer.join()
    done.set()
    starts: Counter[int] = Counter()
    with httpx.Client(base_url=urls[0], timeout=60) as client:
        for number, job in enumerate(ids):
            document = wait_for(client, job)
            assert document["state"] == "done", str(document)
            outputs = client.get(f"/v1/jobs/{job}/result").json()["outputs"]
            assert outputs == {"Y": [[number]]}
            starts[document["starts"]] += 1
    return starts


@pytest.mark.parametrize("jobs", SQLITE_FIRST, indirect=True)
def test_accepted_jobs_survive_killed_gateways(
    jobs: str, start_gateway: Callable[..., GatewayProcess]
) -> None:
    count = 1 if jobs.startswith("sqlite") else 2
    gateways = [start_gateway(jobs, job_lease_s="2") for _ in range(count)]
    check_survival(gateways, count=60, kills=2, longest_pause_s=1)


@pytest.mark.soak
@pytest.mark.parametrize("jobs", STORES, indirect=True)
def test_thousands_of_jobs_survive_killed_gateways(
    jobs: str, start_gateway: Callable[..., GatewayProcess]
) -> None:
    count = 1 if jobs.startswith("sqlite") else 2
    gateways = [start_gateway(jobs) for _ in range(count)]
    starts = check_survival(gateways, count=5000, kills=6, longest_pause_s=15)
    store = jobs.partition(":")[0]
    again = sum(number for times, number in starts.items() if times > 1)
    print(f"{store}: {starts.total()} jobs, by starts {dict(starts)}")
    assert_number(f"jobs on {store} that were started again", again, at_most=25)


@pytest.mark.parametrize("jobs", REDIS_FIRST, indirect=True)
def test_worker_that_was_stopped_past_its_lease_changes_nothing(
    jobs: str, start_gateway: Callable[..., GatewayProcess], tmp_path: Path
) -> None:
    stopped = start_gateway(jobs, job_lease_s="1")
    with httpx.Client(base_url=stopped.url, timeout=60) as client:
        job = submit(client, CANCELLABLE, json={"inputs": [2]}).json()["id"]
        wait_for_state(client, job, "running")
        stopped.signal(signal.SIGSTOP)
        other = start_gateway(jobs, job_lease_s="1")
        with httpx.Client(base_url=other.url, timeout=60) as other_client:
            document = wait_for(other_client, job)
            assert (document["state"], document["starts"]) == ("done", 2)
            result = other_client.get(f"/v1/jobs/{job}/result").content
            stopped.signal(signal.SIGCONT)
            # It notices that the job is not its own any more, and works on.
            next_job = submit(client, CANCELLABLE, json={"inputs": [0]}).json()["id"]
            assert wait_for(client, next_job)["state"] == "done"
            assert wait_for(client, job) == document
            assert client.get(f"/v1/jobs/{job}/result").content == result
        if jobs.startswith("sqlite"):
            files = tmp_path / "jobs/files"
            wait_until(lambda: len(list(files.glob(f"{job}.*.result"))) == 1)


@pytest.mark.long
def test_job_that_waits_too_long_expires_and_is_deleted_later(
    tmp_path: Path, start_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = start_gateway(f"sqlite://{tmp_path}/jobs", job_retention_s="1", max_running_jobs="1")
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        running = submit(client, CANCELLABLE, json={"inputs": [3600]}).json()["id"]
        waiting = submit(client).json()["id"]
        wait_for_state(client, waiting, "expired")
        wait_until(lambda: client.get(f"/v1/jobs/{waiting}").status_code == 404)
        assert client.delete(f"/v1/jobs/{running}").json()["state"] == "cancelled"


def submit_batch(client: httpx.Client, padding: str = "") -> str:
    """Submit 16 rows, of which the ninth takes four seconds; return the job when some have run."""
    rows = [{"custom_id": padding, "inputs": [4 * (number == 8)]} for number in range(16)]
    headers = {"Content-Type": "application/x-ndjson"}
    body = b"\n".join(map(orjson.dumps, rows))
    answer = client.post("/v1/models/cancellable/jobs", content=body, headers=headers)
    job = str(answer.json()["id"])
    wait_until(lambda: client.get(f"/v1/jobs/{job}").json()["progress"]["done"])
    return job


def read_rows(client: httpx.Client, job: str) -> bytes:
    """Return the result of a batch, which has each row once, and in the order of the rows."""
    result = client.get(f"/v1/jobs/{job}/result").content
    rows = list(map(orjson.loads, result.splitlines()))
    assert [(row["row"], row["status"]) for row in rows] == [(row, 200) for row in range(1, 17)]
    return result


@pytest.mark.long
@pytest.mark.parametrize("jobs", STORES, indirect=True)
def test_batch_of_a_gateway_that_was_stopped_or_killed_goes_on_in_another(
    jobs: str, start_gateway: Callable[..., GatewayProcess]
) -> None:
    first = start_gateway(jobs, job_lease_s="1")
    with httpx.Client(base_url=first.url, timeout=60) as first_client:
        job = submit_batch(first_client)
        first.signal(signal.SIGSTOP)
        second = start_gateway(jobs, job_lease_s="1")
        with httpx.Client(base_url=second.url, timeout=60) as second_client:
            document = wait_for(second_client, job)
            assert (document["state"], document["starts"]) == ("done", 2)
            rows = read_rows(second_client, job)
            next_job = submit_batch(second_client)
        first.signal(signal.SIGCONT)
        second.kill()
        next_document = wait_for(first_client, next_job)
        assert (next_document["state"], next_document["starts"]) == ("done", 2)
        read_rows(first_client, next_job)
        assert wait_for(first_client, job) == document
        assert read_rows(first_client, job) == rows


def test_jobs_wait_while_redis_is_stopped(
    redis: RedisServer, start_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = start_gateway(redis.url(), job_lease_s="2")
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        ids = [submit(client, CANCELLABLE, json={"inputs": [1]}).json()["id"] for _ in range(3)]
        wait_for_state(client, ids[-1], "running")
        redis.signal(signal.SIGSTOP)
        try:
            refused = submit(client)
            assert (refused.status_code, refused.json()["code"]) == (503, "JOBS_UNAVAILABLE")
        finally:
            redis.signal(signal.SIGCONT)
        for job in ids:
            document = wait_for(client, job)
            assert (document["state"], document["starts"]) == ("done", 1)
        assert wait_for(client, submit(client).json()["id"])["state"] == "done"


@pytest.mark.long
def test_age_of_the_queue_grows_while_redis_is_stopped(
    redis: RedisServer, start_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = start_gateway(redis.url(), max_running_jobs="1")
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        for _ in range(2):
            submit(client, CANCELLABLE, json={"inputs": [3600]})

        def wait_for_growth() -> None:
            seen = read_queue_age(client)
            wait_until(lambda: read_queue_age(client) > seen)

        wait_for_growth()
        redis.signal(signal.SIGSTOP)
        try:
            wait_for_growth()  # it may have been counted before
            wait_for_growth()
        finally:
            redis.signal(signal.SIGCONT)


def read_queue_age(client: httpx.Client) -> float:
    page = client.get("/metrics").text
    value = re.search(r"^gateway_job_queue_age_seconds(?:{.*})? (\S+)$", page, re.MULTILINE)
    assert value is not None
    return float(value[1])


def test_gateway_that_starts_before_its_redis_has_jobs_later(
    tmp_path: Path, start_gateway: Callable[..., GatewayProcess]
) -> None:
    redis = RedisServer(tmp_path)
    gateway = start_gateway(redis.url())
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        assert submit(client).json()["code"] == "JOBS_UNAVAILABLE"
        with redis:
            wait_until(lambda: submit(client).status_code == 202)
            assert len(client.get("/v1/jobs/secret").json()["secrets"]) == 1


@pytest.mark.soak
def test_redis_that_was_stopped_past_the_leases_starts_no_job_again(
    redis: RedisServer, start_gateway: Callable[..., GatewayProcess]
) -> None:
    jobs = redis.url()
    gateways = [start_gateway(jobs) for _ in range(2)]
    ids = []
    for gateway in gateways:
        with httpx.Client(base_url=gateway.url, timeout=60) as client:
            bodies = [{"inputs": [2]}] * 8
            ids += [submit(client, CANCELLABLE, json=body).json()["id"] for body in bodies]
    with httpx.Client(base_url=gateways[0].url, timeout=60) as client:
        wait_for_state(client, ids[0], "running")
        batch = submit_batch(client)
        redis.signal(signal.SIGSTOP)
        time.sleep(35)
        redis.signal(signal.SIGCONT)
        documents = [wait_for(client, job) for job in ids]
        assert wait_for(client, batch)["state"] == "done"
        read_rows(client, batch)
    assert {document["state"] for document in documents} == {"done"}
    assert_number("starts of 16 jobs", sum(each["starts"] for each in documents), at_most=16)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path, free_bytes: int) -> Path:
    """Return a file that leaves so much of the disk."""
    filler = folder / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1024)):
            pass
    os.truncate(filler, filler.stat().st_size - free_bytes)
    return filler


def test_full_disk_refuses_jobs_and_loses_none(
    small_disk: Path, start_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = start_gateway(f"sqlite://{small_disk}/jobs")
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        accepted = submit(client, CANCELLABLE, json={"inputs": [1]}).json()["id"]
        wait_for_state(client, accepted, "running")
        rows = b'{"inputs": [0]}'.ljust(100_000) + b"\n"
        headers = {"Content-Type": "application/x-ndjson"}
        too_large = client.post("/v1/models/cancellable/jobs", content=rows * 45, headers=headers)
        filler = fill(small_disk, 0)
        for refused in (too_large, submit(client)):
            assert (refused.status_code, refused.json()["code"]) == (507, "JOBS_FULL")
            assert "delete finished jobs with DELETE /v1/jobs/ID" in refused.json()["error"]
        filler.unlink()
        assert wait_for(client, accepted)["state"] == "done"
        # Its body is deleted, and that of the batch.
        files = small_disk / "jobs/files"
        wait_until(lambda: [each.name for each in files.glob("*")] == [f"{accepted}.1.result"])
        assert submit(client, VECTOR).status_code == 202


@pytest.mark.long
def test_batch_waits_for_room_on_a_disk_that_is_full(
    small_disk: Path, start_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = start_gateway(f"sqlite://{small_disk}/jobs")
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        job = submit_batch(client, padding="x" * 50_000)
        filler = fill(small_disk, 256 << 10)
        wait_for_state(client, job, "queued")
        assert submit(client).status_code == 507
        filler.unlink()
        assert wait_for(client, job)["state"] == "done"
        read_rows(client, job)
