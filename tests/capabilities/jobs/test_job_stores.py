"""The two stores of jobs, without a gateway."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from pydantic import SecretStr
from starlette.requests import Request

from gateway.callers import Caller, CallerKind
from gateway.capabilities.jobs.acceptance import Submission
from gateway.capabilities.jobs.errors import JobsFull, JobsUnavailable, TooManyJobs
from gateway.capabilities.jobs.files import LEFT_OVER_AFTER_S
from gateway.capabilities.jobs.job import Job, JobState
from gateway.capabilities.jobs.service import Jobs
from gateway.capabilities.jobs.settings import JobSettings
from gateway.capabilities.jobs.store import JobQuery, JobStore
from gateway.errors import MalformedRequest
from gateway.telemetry.request_info import RequestInfo
from tests.capabilities.jobs.stores import (
    MAX_UNFINISHED,
    Neighbour,
    RedisNeighbour,
    SqliteNeighbour,
    add,
    build_id,
    build_job,
    join_names,
    opened,
)
from tests.capabilities.jobs.support import JOBS_SECRET
from tests.capabilities.jobs.unit.test_job import QUEUED
from tests.support.redis_server import RedisServer
from tests.support.wait import wait_until_async


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_neighbour(redis: RedisServer, tmp_path: Path) -> RedisNeighbour:
    return RedisNeighbour(redis, tmp_path / "files")


@pytest.fixture(params=["sqlite", "redis"])
def neighbour(request: pytest.FixtureRequest, tmp_path: Path) -> Neighbour:
    if request.param == "sqlite":
        return SqliteNeighbour(tmp_path)
    found: RedisNeighbour = request.getfixturevalue("redis_neighbour")
    return found


@pytest.fixture
async def store(neighbour: Neighbour) -> AsyncIterator[JobStore]:
    async with opened(neighbour.settings) as store:
        yield store


@pytest.fixture
async def redis_store(redis_neighbour: RedisNeighbour) -> AsyncIterator[JobStore]:
    async with opened(redis_neighbour.settings) as store:
        yield store


async def claim(store: JobStore, count: int, running: Any = (), now: float = 0.0) -> list[Job]:
    return [job async for job in store.claim(count, now or time.time(), running)]


async def finish(store: JobStore, job: Job, **values: Any) -> None:
    assert await store.replace(replace(job.finish(500.0, 200, [], 50), **values), job.token)


# Jobs that are added (a name begins with its caller), and numbers of places; which jobs are started in order.
TURNS = [
    ("a1 a2 a3 a4 b1 b2 1 1 1 1 1 1", "a1 b1 a2 b2 a3 a4"),
    ("a1 a2 1 a3 b1 1 1 c1 1 1 1", "a1 a2 b1 a3 c1"),  # a new caller waits for one round
    ("a0 a1 a2 a3 a4 a5 6", "a0 a1 a2 a3"),  # and gets no more than two thirds
    ("a1 a2 a3 b1 3", "a1 b1 a2"),
    ("a1 2", "a1"),
]


@pytest.mark.parametrize(("steps", "expected"), TURNS)
async def test_callers_take_turns(store: JobStore, steps: str, expected: str) -> None:
    started: list[Job] = []
    for step in steps.split():
        if step.isdigit():
            started += await claim(store, int(step))
        else:
            await add(store, step)
    assert join_names(started) == expected


async def test_running_jobs_of_a_caller_leave_places_for_others(store: JobStore) -> None:
    await add(store, "a0 a1 a2 a3 a4 a5 b0")
    running = await claim(store, 5)
    assert join_names(running) == "a0 b0 a1 a2 a3"
    assert await claim(store, 1, running) == []
    await add(store, "c0")
    assert join_names(await claim(store, 1, running)) == "c0"
    await finish(store, running[0])
    assert join_names(await claim(store, 2, running[2:])) == "a4"


async def test_position_is_that_of_the_turn(store: JobStore) -> None:
    await add(store, "a1 a2 a3 a4 b1 b2")
    jobs = [build_job(name) for name in ("a1", "a2", "a4", "b1", "b2")]
    assert [await store.find_position(job) for job in jobs] == [0, 2, 5, 1, 3]
    await claim(store, 1)
    assert [await store.find_position(job) for job in jobs] == [0, 1, 4, 0, 2]


# The caller, the state, the model, the page's size and its last ID: the jobs. a1 and a3 are those of n.
LISTS: list[tuple[tuple[Any, ...], str]] = [
    ((None,), "b2 a4 a3 a2 a1"),
    (("a",), "a4 a3 a2 a1"),
    (("a", JobState.done), "a1"),
    ((None, JobState.queued), "b2 a4 a3 a2"),
    ((None, JobState.failed), ""),
    ((None, None, "n"), "a3 a1"),
    (("b", JobState.queued, "m"), "b2"),
    (("b", None, "n"), ""),
    (("a", None, "", 2), "a4 a3"),
    (("a", None, "", 2, build_id("a3")), "a2 a1"),
    (("a", JobState.queued, "", 1, build_id("a3")), "a2"),
    (("c",), ""),
    (("a", None, "", 2, build_id("b1")), ""),  # it was deleted
]


async def test_list_has_the_newest_jobs_of_a_caller_in_a_state_and_of_a_model(
    store: JobStore,
) -> None:
    await add(store, "a1 a3", model="n")
    await add(store, "a2 a4 b1 b2")
    a1, b1, a3 = [job for _ in range(3) for job in await claim(store, 1)]
    await finish(store, a1)
    assert await store.replace(a3.postpone(time.time()), a3.token)
    await store.delete(b1)
    for query, expected in LISTS:
        jobs = await store.list_jobs(JobQuery(*query))
        # Two of the same time are in any order.
        assert sorted(join_names(jobs).split()) == sorted(expected.split()), query
        assert [job.created_at for job in jobs] == sorted(
            (job.created_at for job in jobs), reverse=True
        )


async def test_pages_have_each_job_once_also_those_of_the_same_time(store: JobStore) -> None:
    await add(store, "a1 b1 c1 a2 b2")
    seen: list[Job] = []
    while page := await store.list_jobs(JobQuery(None, limit=2, after=seen[-1].id if seen else "")):
        seen += page
    assert join_names(seen) == "b2 a2 c1 b1 a1"


async def test_counts_follow_every_change(store: JobStore) -> None:
    await add(store, "a1 a2 b1")
    assert (await store.count_jobs()).size_bytes == 3 * QUEUED.body_bytes
    for job in await claim(store, 2):
        await finish(store, job)
    await store.delete(build_job("b1"))
    await store.delete((await store.list_jobs(JobQuery("a", JobState.queued)))[0])
    await add(store, "c7")
    counts = await store.count_jobs()
    found = {state.value: number for state, number in counts.by_state.items() if number}
    assert found == {"done": 1, "queued": 1}
    assert (counts.size_bytes, counts.oldest_queued_at) == (53, QUEUED.created_at + 7)


async def test_unfinished_jobs_of_a_caller_are_limited(store: JobStore) -> None:
    await add(store, "a1 a2 b1")
    (running,) = await claim(store, 1)
    with pytest.raises(TooManyJobs):
        await store.add(build_job("a3"), 2)
    assert await store.replace(running.cancel(500.0), running.token)
    assert await store.add(build_job("a3"), 2) == build_job("a3")


async def test_outdated_jobs_have_ended_or_wait_since_then(store: JobStore) -> None:
    await add(store, "a1 a2 a3")
    ended, running = [job for _ in range(2) for job in await claim(store, 1)]
    assert await store.replace(ended.cancel(500.0), ended.token)
    for when, names in ((499.0, ""), (501.0, "a1"), (QUEUED.created_at + 9, "a3 a1")):
        assert join_names(await store.find_outdated(when, 10)) == names
    assert running.id == build_id("a2")


async def test_postponed_job_waits_for_its_time(store: JobStore) -> None:
    await add(store, "a1 a2")
    (job,) = await claim(store, 1)
    assert await store.replace(job.postpone(2000.0), job.token)
    assert join_names(await claim(store, 9, now=1999.0)) == "a2"
    assert join_names(await claim(store, 9, now=2000.0)) == "a1"


async def test_idempotency_key_is_that_of_a_caller(store: JobStore) -> None:
    jobs = [build_job(name, idempotency_key="key") for name in ("a1", "a2", "b1")]
    kept = [await store.add(job, MAX_UNFINISHED) for job in jobs]
    assert join_names(kept) == "a1 a1 b1"
    assert join_names(filter(None, [await store.find_by_key("b", "key")])) == "b1"
    await store.delete(jobs[0])
    assert await store.find_by_key("a", "key") is None
    assert join_names([await store.add(jobs[1], MAX_UNFINISHED)]) == "a2"


async def test_callback_is_due_after_the_job_and_again_until_its_outcome_is_stored(
    neighbour: Neighbour, store: JobStore
) -> None:
    shop = {"callback_url": "https://shop.example/", "callback_host": "shop"}
    await add(store, "a1 b1", **shop)
    await add(store, "c1", **{**shop, "callback_host": "other"})

    async def find_due(store: JobStore, now: float, host: str = "shop") -> list[Job]:
        return list(await store.find_due_deliveries(host, now, 60.0, 1))

    async with opened(neighbour.settings) as other:
        assert await find_due(store, 1e9) == []
        for name, at in (("a1", 100.0), ("b1", 101.0)):
            assert await store.replace(build_job(name, **shop).cancel(at), 0)
        assert await find_due(store, 99.0) == await find_due(store, 200.0, "other") == []
        due = [await find_due(each, 200.0) for each in (store, other, store)]
        assert list(map(join_names, due)) == ["a1", "b1", ""]
        (again,) = await find_due(other, 261.0)
        assert join_names([again]) == "a1"
        # The outcome of the first attempt, which took too long, changes nothing.
        assert not await store.replace(replace(due[0][0], callback_due_at=0.0), due[0][0].token)
        assert await store.replace(replace(again, callback_due_at=500.0), again.token)
        assert join_names(await find_due(store, 400.0)) == "b1"
        await store.delete(build_job("b1", **shop))
        assert await find_due(store, 499.0) == []
        (last,) = await find_due(store, 501.0)
        assert await store.replace(replace(last, callback_due_at=0.0), last.token)
        assert await find_due(store, 1e9) == []
        for each, value in ((store, "1"), (other, "2")):
            assert await each.keep_name("secret", value) == "1"


async def test_many_callers_ask_at_the_same_time(store: JobStore) -> None:
    await add(store, "a1")
    found = await asyncio.gather(*(store.find(build_id("a1")) for _ in range(300)))
    assert None not in found


# Leases.


async def test_clock_that_is_set_ends_no_lease(tmp_path: Path) -> None:
    settings = JobSettings(jobs=f"sqlite://{tmp_path}")
    async with opened(settings) as store, opened(settings) as other:
        await add(store, "a1")
        assert await claim(store, 1)
        assert not await claim(other, 1, now=time.time() + 3600)


async def test_lease_from_before_a_restart_of_the_machine_is_over(tmp_path: Path) -> None:
    neighbour = SqliteNeighbour(tmp_path)
    async with opened(neighbour.settings) as store:
        await add(store, "a1")
        assert await claim(store, 1)
        neighbour.list_job("leases", build_id("a1"), time.monotonic() + 1e6)
        assert not await claim(store, 1)
    async with opened(neighbour.settings) as store:
        assert join_names(await claim(store, 1)) == "a1"


async def test_worker_past_its_lease_has_lost_its_job_to_the_next(neighbour: Neighbour) -> None:
    settings = neighbour.settings.model_copy(update={"job_lease_s": 1.0})
    async with opened(settings) as store, opened(settings) as other:
        await add(store, "a1")
        (lost,) = await claim(store, 1)
        taken: list[Job] = []

        async def take() -> list[Job]:
            taken.extend(await claim(other, 1))
            return taken

        await wait_until_async(take)
        assert [(join_names([job]), job.starts) for job in taken] == [("a1", 2)]
        assert await store.renew([lost]) == [lost]
        assert not await store.replace(lost.finish(time.time(), 200, [], 50), lost.token)
        assert await store.find(build_id("a1")) == taken[0]


async def test_lease_that_is_over_for_a_moment_is_renewed(
    redis_neighbour: RedisNeighbour, redis_store: JobStore
) -> None:
    """After an outage of Redis, the leases of all workers are over."""
    await add(redis_store, "a1")
    (job,) = await claim(redis_store, 1)
    async with opened(redis_neighbour.settings) as other:
        for _ in range(2):
            redis_neighbour.list_job("leases", build_id("a1"), 1)
            assert not await claim(other, 1)
        assert not await redis_store.renew([job])
    lease = redis_neighbour.client.zscore(f"{redis_neighbour.prefix}leases", build_id("a1"))
    assert float(lease or 0) > time.time()


# Redis.


async def test_workers_that_claim_at_the_same_time_find_different_jobs(
    redis_store: JobStore,
) -> None:
    await add(redis_store, "a1 a2 a3 b1 b2")
    claims = await asyncio.gather(*(claim(redis_store, 5) for _ in range(5)))
    assert sorted(join_names(job for jobs in claims for job in jobs).split()) == [
        *("a1", "a2", "a3", "b1", "b2"),
    ]


async def test_jobs_that_were_started_run_though_redis_fails_then(
    redis_neighbour: RedisNeighbour, redis_store: JobStore
) -> None:
    await add(redis_store, "a1")
    await add(redis_store, "b1", callback_host="broken")
    redis_neighbour.client.set(f"{redis_neighbour.prefix}callbacks:broken", "no sorted set")
    claims = redis_store.claim(2, time.time())
    assert join_names([await anext(claims)]) == "a1"
    with pytest.raises(JobsUnavailable):
        await anext(claims)


async def test_jobs_end_and_are_deleted_in_a_redis_that_is_full(
    redis: RedisServer, redis_store: JobStore
) -> None:
    store = redis_store
    await add(store, "a1 b1 c1 d1")
    first, second = [job for _ in range(2) for job in await claim(store, 1)]
    redis.client().config_set("maxmemory", 1)
    try:
        with pytest.raises(JobsFull):
            await add(store, "e1")
        with pytest.raises(JobsFull):
            await claim(store, 1)
        assert await store.find(build_id("e1")) is None
        assert await store.replace(build_job("c1").cancel(time.time()), 0)
        await finish(store, first)
        await store.delete(first)
        await store.delete(second)
    finally:
        redis.client().config_set("maxmemory", 0)
    assert sorted(join_names(await store.list_jobs(JobQuery(None))).split()) == ["c1", "d1"]
    assert join_names(await claim(store, 4)) == "d1"
    assert (await store.count_jobs()).size_bytes == QUEUED.body_bytes


async def test_job_that_is_kept_though_redis_answers_too_late_has_its_body(
    redis: RedisServer,
) -> None:
    """The client repeats its request, and gets this job."""
    loses_answer = False

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal loses_answer
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", redis.port)

        async def send_back() -> None:
            nonlocal loses_answer
            while data := await far_reader.read(1 << 16):
                if not loses_answer:
                    writer.write(data)
                loses_answer = False

        answers = asyncio.create_task(send_back())
        while data := await reader.read(1 << 16):
            loses_answer = loses_answer or b"TOO_MANY" in data  # the script that adds a job
            far_writer.write(data)
        answers.cancel()
        far_writer.close()
        writer.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    direct = JobSettings(jobs=redis.url(), jobs_secret=SecretStr(JOBS_SECRET))
    through = direct.jobs.replace(str(urlsplit(direct.jobs).port), str(port), 1)
    relayed = direct.model_copy(update={"jobs": through})
    async with server, opened(direct) as store, opened(relayed) as relayed_store:
        async with submit(Jobs(relayed_store, relayed, 10)) as body:
            await body.append(b"abc")
            with pytest.raises(JobsUnavailable):
                await body.keep()
        (job,) = await store.list_jobs(JobQuery(None))
        assert await store.files.read(job.body_file, 0, 10) == b"abc"


# Files.


async def test_files_that_a_killed_process_left_are_deleted(
    neighbour: Neighbour, store: JobStore, tmp_path: Path
) -> None:
    await add(store, "a1")
    names = [f"{build_id(job)}.{suffix}" for job, suffix in
             (("a1", "body"), ("b0", "body"), ("b0", "2.result"), ("c0", "body"))]  # fmt: skip
    for name in names:
        await store.files.append(name, b"abc")
    (tmp_path / "files/notes.txt").touch()
    old = time.time() - LEFT_OVER_AFTER_S - 10
    for name in (*names[:3], "notes.txt"):
        os.utime(tmp_path / "files" / name, (old, old))
    await Jobs(store, neighbour.settings, 10).delete_left_over()
    left = [each.name for each in (tmp_path / "files").iterdir()]
    assert sorted(left) == [names[0], names[3], "notes.txt"]


@pytest.fixture
async def jobs(tmp_path: Path) -> AsyncIterator[Jobs]:
    settings = JobSettings(jobs=f"sqlite://{tmp_path}", max_jobs_bytes=100)
    async with opened(settings) as store:
        yield Jobs(store, settings, 100)


def submit(jobs: Jobs) -> Submission:
    info = RequestInfo("id", caller_name="10.0.0.7")
    info.caller = Caller("", kind=CallerKind.anonymous)
    scope: dict[str, Any] = {
        "type": "http", "path": "/v1/models/m/infer", "raw_path": b"/v1/models/m/infer", "query_string": b"",
        "headers": [], "client": None, "request_info": info, "path_params": {"model": "m"},
    }  # fmt: skip
    return Submission(jobs, Request(scope), 1000)


async def test_bodies_that_arrive_count_at_the_limit_of_bytes(jobs: Jobs) -> None:
    async with submit(jobs) as first:
        await first.append(bytes(60))
        async with submit(jobs) as second:
            with pytest.raises(JobsFull, match="GATEWAY_MAX_JOBS_BYTES"):
                await second.append(bytes(60))
        await first.append(bytes(40))
    assert jobs.incoming_bytes == 0
    # Those of a job count at once, and not only when all are counted again.
    async with submit(jobs) as kept:
        await kept.append(bytes(60))
        await kept.keep()
    async with submit(jobs) as third:
        with pytest.raises(JobsFull):
            await third.append(bytes(60))
    assert jobs.incoming_bytes == 0


async def test_bodies_that_cannot_be_deleted_count_no_longer(jobs: Jobs, tmp_path: Path) -> None:
    async def receive() -> None:
        async with submit(jobs) as body, submit(jobs) as other:
            await body.append(bytes(10))
            await other.append(bytes(10))
            shutil.rmtree(tmp_path / "files")
            (tmp_path / "files").touch()
            raise MalformedRequest("the body is damaged")

    with pytest.raises(JobsUnavailable):
        await receive()
    assert jobs.incoming_bytes == 0
    async with submit(jobs):
        """There is nothing to delete."""


async def test_body_counts_no_longer_whatever_error_the_store_has(
    jobs: Jobs, tmp_path: Path
) -> None:
    neighbour = SqliteNeighbour(tmp_path)
    neighbour.execute("DROP TABLE entries")
    async with submit(jobs) as body:
        await body.append(b"abc")
        with pytest.raises(JobsUnavailable):
            await body.keep()
    assert jobs.incoming_bytes == 0
