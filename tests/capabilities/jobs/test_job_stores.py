"""The two stores of jobs, without a gateway."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from urllib.parse import urlsplit

import orjson
import pytest
from pydantic import SecretStr

from gateway.capabilities.jobs.acceptance import add_job
from gateway.capabilities.jobs.capability import create_store
from gateway.capabilities.jobs.errors import JobsFull, JobsUnavailable, TooManyJobs
from gateway.capabilities.jobs.job import Job, JobState, encode_job
from gateway.capabilities.jobs.service import ArrivingBody, Jobs
from gateway.capabilities.jobs.settings import JobSettings
from gateway.capabilities.jobs.storage.files import LEFT_OVER_AFTER_S
from gateway.capabilities.jobs.storage.store import JobLimits, JobQuery, JobStore
from gateway.errors import MalformedRequest
from tests.capabilities.jobs.support import JOBS_SECRET
from tests.capabilities.jobs.unit.test_job import QUEUED
from tests.support.redis_server import RedisServer
from tests.support.wait import wait_until_async

LIMITS = JobLimits(10_000, 100)
SECRET = SecretStr(JOBS_SECRET)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["sqlite", "redis"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> JobSettings:
    if request.param == "sqlite":
        return JobSettings(jobs=f"sqlite://{tmp_path}")
    server: RedisServer = request.getfixturevalue("redis")
    return JobSettings(jobs=server.url(), jobs_secret=SECRET, jobs_folder=tmp_path / "files")


@asynccontextmanager
async def opened(settings: JobSettings) -> AsyncIterator[JobStore]:
    store = create_store(settings)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def run_with(settings: JobSettings, work: Callable[[JobStore], Awaitable[None]]) -> None:
    async def run() -> None:
        async with opened(settings) as store:
            await work(store)

    asyncio.run(run())


async def add(store: JobStore, *names: str) -> None:
    """Add a job for each name, whose first letter is the owner."""
    for name in names:
        job = replace(QUEUED, id=build_id(name), owner=name[0], callback_url="")
        await store.add(job, LIMITS)


def build_id(name: str) -> str:
    return name.rjust(32, "0")


def build_file(name: str) -> str:
    job, _, suffix = name.partition(".")
    return f"{build_id(job)}.{suffix}"


def list_names(jobs: Iterable[Job]) -> list[str]:
    return [job.id.lstrip("0") for job in jobs]


def test_bodies_that_arrive_count_at_the_limit_of_bytes(tmp_path: Path) -> None:
    settings = JobSettings(jobs=f"sqlite://{tmp_path}", max_jobs_bytes=100)

    async def work(store: JobStore) -> None:
        jobs = Jobs(store, settings, 100)
        first, second = ArrivingBody(jobs, "a.body"), ArrivingBody(jobs, "b.body")
        await first.append(bytes(60))
        with pytest.raises(JobsFull, match="GATEWAY_MAX_JOBS_BYTES"):
            await second.append(bytes(60))
        await second.discard()
        await first.append(bytes(40))
        await first.discard()
        assert jobs.incoming_bytes == 0

    run_with(settings, work)


def test_bodies_that_cannot_be_deleted_count_no_longer(tmp_path: Path) -> None:
    settings = JobSettings(jobs=f"sqlite://{tmp_path}")

    async def work(store: JobStore) -> None:
        jobs = Jobs(store, settings, 100)

        async def receive() -> None:
            async with ArrivingBody(jobs, "a.body") as body, ArrivingBody(jobs, "b.body") as other:
                await body.append(bytes(10))
                await other.append(bytes(10))
                shutil.rmtree(tmp_path / "files")
                (tmp_path / "files").touch()
                raise MalformedRequest("the body is damaged")

        with pytest.raises(JobsUnavailable):
            await receive()
        assert jobs.incoming_bytes == 0
        async with ArrivingBody(jobs, "c.body"):
            """There is nothing to delete."""

    run_with(settings, work)


def test_body_counts_no_longer_whatever_error_the_store_has(tmp_path: Path) -> None:
    settings = JobSettings(jobs=f"sqlite://{tmp_path}")

    async def work(store: JobStore) -> None:
        jobs = Jobs(store, settings, 10)
        body = ArrivingBody(jobs, QUEUED.body_file)
        await body.append(b"abc")
        with pytest.raises(TypeError):
            await add_job(jobs, replace(QUEUED, error="\ud800"), body)
        assert jobs.incoming_bytes == 0

    run_with(settings, work)


def test_callers_take_turns(settings: JobSettings) -> None:
    async def work(store: JobStore) -> None:
        await add(store, "a1", "a2", "a3", "a4", "b1", "b2")
        jobs = [await store.find(build_id(name)) for name in ("a1", "a2", "b1", "b2")]
        assert [await store.find_position(job) for job in jobs if job] == [0, 2, 1, 3]
        order: list[str] = []
        for _ in range(3):
            order += list_names(await store.claim(1, time.time()))
        await add(store, "c1", "a5")
        for _ in range(5):
            order += list_names(await store.claim(1, time.time()))
        assert order[:2] == ["a1", "b1"]
        assert set(order[2:5]) == {"a2", "b2", "c1"}  # the new caller waits for one round
        assert order[5:] == ["a3", "a4", "a5"]

    run_with(settings, work)


def test_no_caller_and_no_model_gets_all_places(settings: JobSettings) -> None:
    async def work(store: JobStore) -> None:
        await add(store, *(f"a{number}" for number in range(6)))
        running = list(await store.claim(6, time.time()))
        assert list_names(running) == ["a0", "a1", "a2", "a3"]
        await add(store, "b0")  # of the same model
        for name in ("c0", "c1"):
            job = replace(QUEUED, id=build_id(name), owner="c", model="other", callback_url="")
            await store.add(job, LIMITS)
        running += await store.claim(2, time.time(), running)
        assert list_names(running[4:]) == ["c0", "c1"]
        for job in (running.pop(0), running.pop(0)):
            assert await store.replace(job.finish(time.time(), 200, [], 50), job.token)
        running += await store.claim(2, time.time(), running)
        # The model has one place more, which the next caller gets.
        assert set(list_names(running)) == {"a2", "a3", "b0", "c0", "c1"}

    run_with(settings, work)


def test_list_has_the_newest_jobs_of_a_caller_in_a_state_and_of_a_model(
    settings: JobSettings,
) -> None:
    async def work(store: JobStore) -> None:
        for number, name in enumerate(("a1", "a2", "a3", "a4", "b1", "b2")):
            job = replace(
                QUEUED, id=build_id(name), owner=name[0], model="mn"[number % 2], callback_url=""
            )
            await store.add(job, LIMITS)
        a1, b1, a2 = [job for _ in range(3) for job in await store.claim(1, time.time())]
        assert await store.replace(a1.finish(time.time(), 200, [], 50), a1.token)
        assert await store.replace(a2.postpone(time.time()), a2.token)
        await store.delete(b1)
        everything = await store.list_jobs(JobQuery(None))
        assert list_names(everything) == ["b2", "a4", "a3", "a2", "a1"]
        for owner, state, model in product((None, "a", "b"), (None, *JobState), ("", "m", "n")):
            wanted = [
                job
                for job in everything
                if owner in (None, job.owner)
                and state in (None, job.state)
                and model in ("", job.model)
            ]
            query = JobQuery(owner, state, model)
            assert await store.list_jobs(query) == wanted
            if wanted:
                next_page = replace(query, after=wanted[0].id, limit=1)
                assert await store.list_jobs(next_page) == wanted[1:2]

    run_with(settings, work)


def test_counts_follow_every_change(settings: JobSettings) -> None:
    async def work(store: JobStore) -> None:
        await add(store, "a1", "a2", "b1")
        assert (await store.count_jobs()).size_bytes == 3 * QUEUED.body_bytes
        for job in await store.claim(2, time.time()):
            assert await store.replace(job.finish(time.time(), 200, [], 50), job.token)
        await store.delete((await store.list_jobs(JobQuery("b")))[0])
        counts = await store.count_jobs()
        assert {state: n for state, n in counts.by_state.items() if n} == {
            JobState.done: 1,
            JobState.queued: 1,
        }
        assert counts.size_bytes == 50 + QUEUED.body_bytes
        assert counts.oldest_queued_at == QUEUED.created_at

    run_with(settings, work)


def test_unfinished_jobs_of_a_caller_are_limited(settings: JobSettings) -> None:
    limits = JobLimits(10_000, 2)

    async def work(store: JobStore) -> None:
        await add(store, "a1", "a2", "b1")
        (running,) = await store.claim(1, time.time())
        third = replace(QUEUED, id=build_id("a3"), owner="a")
        with pytest.raises(TooManyJobs):
            await store.add(third, limits)
        assert await store.replace(running.cancel(500.0), running.token)
        assert await store.add(third, limits) is third

    run_with(settings, work)


def test_outdated_jobs_have_ended_or_wait_since_then(settings: JobSettings) -> None:
    async def work(store: JobStore) -> None:
        await add(store, "a1", "a2", "a3")
        ended, running = [job for _ in range(2) for job in await store.claim(1, time.time())]
        assert await store.replace(ended.cancel(500.0), ended.token)
        for when, names in ((499.0, []), (501.0, ["a1"]), (QUEUED.created_at + 1, ["a1", "a3"])):
            assert list_names(await store.find_outdated(when, 10)) == names
        assert running.id == build_id("a2")

    run_with(settings, work)


def test_many_callers_ask_at_the_same_time(settings: JobSettings) -> None:
    async def work(store: JobStore) -> None:
        await add(store, "a1")
        found = await asyncio.gather(*(store.find(build_id("a1")) for _ in range(300)))
        assert None not in found

    run_with(settings, work)


def test_files_that_a_killed_process_left_are_deleted(
    settings: JobSettings, tmp_path: Path
) -> None:
    async def work(store: JobStore) -> None:
        await add(store, "a1")
        for name in ("a1.body", "b0.body", "b0.2.result", "c0.body"):
            await store.files.append(build_file(name), b"abc")
        (tmp_path / "files/notes.txt").touch()
        old = time.time() - LEFT_OVER_AFTER_S - 10
        for name in ("a1.body", "b0.body", "b0.2.result"):
            os.utime(tmp_path / "files" / build_file(name), (old, old))
        os.utime(tmp_path / "files/notes.txt", (old, old))
        await Jobs(store, settings, 10).delete_left_over()
        left = [each.name for each in (tmp_path / "files").iterdir()]
        assert sorted(left) == [build_file("a1.body"), build_file("c0.body"), "notes.txt"]

    run_with(settings, work)


def test_clock_that_is_set_ends_no_lease(tmp_path: Path) -> None:
    settings = JobSettings(jobs=f"sqlite://{tmp_path}")

    async def work(store: JobStore) -> None:
        await add(store, "a1")
        async with opened(settings) as other:
            assert await store.claim(1, time.time())
            assert not await other.claim(1, time.time() + 3600)

    run_with(settings, work)


def test_worker_past_its_lease_has_lost_its_job_to_the_next(settings: JobSettings) -> None:
    settings = settings.model_copy(update={"job_lease_s": 1.0})

    async def work(store: JobStore) -> None:
        await add(store, "a1")
        async with opened(settings) as other:
            (lost,) = await store.claim(1, time.time())
            taken: list[Job] = []

            async def take() -> list[Job]:
                taken.extend(await other.claim(1, time.time()))
                return taken

            await wait_until_async(take)
            assert [(job.id, job.starts) for job in taken] == [(build_id("a1"), 2)]
            assert await store.renew([lost]) == [lost]
            assert not await store.replace(lost.finish(time.time(), 200, [], 50), lost.token)
            assert await store.find(build_id("a1")) == taken[0]

    run_with(settings, work)


def test_lease_that_is_missing_for_a_moment_is_renewed(redis: RedisServer) -> None:
    """After an outage of Redis, the leases of all workers have expired."""
    settings = JobSettings(jobs=redis.url(), jobs_secret=SECRET, job_lease_s=1)
    lease = settings.jobs.partition("prefix=")[2] + "jobs:lease:" + build_id("a1")

    async def work(store: JobStore) -> None:
        await add(store, "a1")
        (job,) = await store.claim(1, time.time())
        async with opened(settings) as other:
            await other.claim(1, time.time())
            await asyncio.sleep(0.5)
            redis.client().delete(lease)
            assert not await other.claim(1, time.time())
            assert not await store.renew([job])
            assert redis.client().exists(lease)

    run_with(settings, work)


def test_workers_that_claim_at_the_same_time_find_different_jobs(redis: RedisServer) -> None:
    settings = JobSettings(jobs=redis.url(), jobs_secret=SECRET)

    def count_scripts() -> int:
        return int(redis.client().info("commandstats")["cmdstat_eval"]["calls"])

    async def work(store: JobStore) -> None:
        await add(store, "a1", "a2", "a3", "a4", "a5")
        before = count_scripts()
        claims = await asyncio.gather(*(store.claim(1, time.time()) for _ in range(5)))
        assert sorted(name for jobs in claims for name in list_names(jobs)) == [
            "a1",
            "a2",
            "a3",
            "a4",
            "a5",
        ]
        # One for the lapsed leases, one that finds a job, and one that starts it.
        assert count_scripts() - before == 3 * 5

    run_with(settings, work)


def test_jobs_that_were_started_run_though_redis_fails_then(redis: RedisServer) -> None:
    settings = JobSettings(jobs=redis.url(), jobs_secret=SECRET)
    prefix = settings.jobs.partition("prefix=")[2]

    async def work(store: JobStore) -> None:
        await add(store, "a1")
        await store.add(replace(QUEUED, id=build_id("b1"), callback_host="broken"), LIMITS)
        redis.client().set(f"{prefix}jobs:callbacks:broken", "no sorted set")
        assert list_names(await store.claim(2, time.time())) == ["a1"]

    run_with(settings, work)


def test_jobs_that_cannot_be_read_hold_up_no_others(redis: RedisServer) -> None:
    settings = JobSettings(jobs=redis.url(), jobs_secret=SECRET)
    prefix = settings.jobs.partition("prefix=")[2] + "jobs:"
    documents = f"{prefix}documents"

    async def work(store: JobStore) -> None:
        await add(store, "a1", "b1", "c1", "d1", "e1", "e2", "f1")
        a1, b1, c1, d1 = map(build_id, ("a1", "b1", "c1", "d1"))
        invalid = orjson.dumps({**orjson.loads(encode_job(QUEUED)), "id": a1, "kind": "none"})
        redis.client().hset(documents, mapping={a1: invalid, b1: "{damaged"})
        redis.client().hdel(documents, c1)
        redis.client().delete(f"{prefix}line:f\n{QUEUED.model}")
        running: list[Job] = []
        for _ in range(6):
            running += await store.claim(6, time.time())
        assert list_names(running) == ["d1", "e1", "e2"]
        assert not redis.client().exists(f"{prefix}lines")
        assert list_names(await store.list_jobs(JobQuery(None))) == ["f1", "e2", "e1", "d1"]
        for name in ("a1", "b1", "c1"):
            assert await store.find(build_id(name)) is None
        assert list_names(await store.find_outdated(time.time(), 10)) == ["f1"]
        redis.client().hdel(documents, d1)
        assert list_names(await store.renew(running)) == ["d1"]
        # One that was found and not started is found again after a lease.
        readable = replace(QUEUED, id=build_id("a1"), owner="a", callback_url="")
        redis.client().hset(documents, a1, encode_job(readable))
        assert not await store.claim(6, time.time())
        due_at = time.time() + settings.job_lease_s
        assert list_names(await store.claim(6, due_at)) == ["a1"]

    run_with(settings, work)


def test_damaged_job_in_sqlite_holds_up_no_others(tmp_path: Path) -> None:
    async def work(store: JobStore) -> None:
        await add(store, "a1", "b1")
        with closing(sqlite3.connect(tmp_path / "jobs.db")) as database, database:
            database.execute("UPDATE jobs SET document = '{damaged' WHERE owner = 'a'")
        assert list_names(await store.claim(6, time.time())) == ["b1"]
        assert await store.find(build_id("a1")) is None

    run_with(JobSettings(jobs=f"sqlite://{tmp_path}"), work)


def test_idempotency_key_of_a_job_that_is_lost_is_free_again(redis: RedisServer) -> None:
    settings = JobSettings(jobs=redis.url(), jobs_secret=SECRET)
    documents = settings.jobs.partition("prefix=")[2] + "jobs:documents"

    async def work(store: JobStore) -> None:
        first, second = (
            replace(QUEUED, id=build_id(each), idempotency_key="key") for each in ("1", "2")
        )
        await store.add(first, LIMITS)
        redis.client().hset(documents, first.id, "{damaged")
        assert await store.find_by_key(first.owner, "key") is None
        assert await store.add(second, LIMITS) is second

    run_with(settings, work)


def test_jobs_end_and_are_deleted_in_a_redis_that_is_full(
    redis: RedisServer, tmp_path: Path
) -> None:
    settings = JobSettings(jobs=redis.url(), jobs_secret=SECRET, jobs_folder=tmp_path / "files")

    async def work(store: JobStore) -> None:
        await add(store, "a1", "b1", "c1", "d1")
        first, second = [job for _ in range(2) for job in await store.claim(1, time.time())]
        redis.client().config_set("maxmemory", 1)
        try:
            with pytest.raises(JobsFull):
                await add(store, "e1")
            assert await store.find(build_id("e1")) is None
            with pytest.raises(JobsFull):
                await store.claim(1, time.time())
            queued = await store.find(build_id("c1"))
            assert queued
            assert await store.replace(queued.cancel(time.time()), queued.token)
            assert await store.replace(first.finish(time.time(), 200, [], 50), first.token)
            await store.delete(first)
            await store.delete(second)
        finally:
            redis.client().config_set("maxmemory", 0)
        assert list_names(await store.list_jobs(JobQuery(None))) == ["d1", "c1"]
        assert list_names(await store.claim(4, time.time())) == ["d1"]
        counts = await store.count_jobs()
        assert counts.size_bytes == QUEUED.body_bytes

    run_with(settings, work)


def test_job_that_is_kept_though_redis_answers_too_late_has_its_body(redis: RedisServer) -> None:
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

    async def run() -> None:
        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        direct = JobSettings(jobs=redis.url(), jobs_secret=SECRET)
        through = direct.jobs.replace(str(urlsplit(direct.jobs).port), str(port), 1)
        relayed = JobSettings(jobs=through, jobs_secret=SECRET)
        async with server, opened(direct) as store, opened(relayed) as relayed_store:
            await relayed_store.files.append(QUEUED.body_file, b"abc")
            jobs = Jobs(relayed_store, relayed, 10)
            body = ArrivingBody(jobs, QUEUED.body_file)
            with pytest.raises(JobsUnavailable):
                await add_job(jobs, QUEUED, body)
            assert await store.find(QUEUED.id) is not None
            assert await store.files.read(QUEUED.body_file, 0, 10) == b"abc"

    asyncio.run(run())
