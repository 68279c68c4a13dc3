"""Documents that no gateway has written, in each store: everything else goes on as without them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.capabilities.jobs.job import Job, JobState, encode_job
from gateway.capabilities.jobs.service import Jobs
from gateway.capabilities.jobs.store import JobQuery, JobStore
from tests.capabilities.jobs.stores import (
    Neighbour,
    RedisNeighbour,
    SqliteNeighbour,
    build_job,
    opened,
)
from tests.capabilities.jobs.unit.test_job import QUEUED
from tests.support.redis_server import RedisServer

HOST = "shop.example"
MODEL_JOB = replace(QUEUED, owner="a", callback_url=f"https://{HOST}/", callback_host=HOST)
DEEP = 10_000
HUGE = 64 << 20
FIELDS: Mapping[str, Any] = orjson.loads(encode_job(MODEL_JOB))
MISSING = ("owner", "model", "path", "headers", "caller_id", "body_digest", "created_at")
# What a document is, instead of a job.
OTHER_KINDS: Mapping[str, bytes] = {
    "nothing": b"",
    "null": b"null",
    "a text": b'"job"',
    "a number": b"5",
    "a list": b"[]",
    "an empty object": b"{}",
    "other bytes": b"\xff\xfe\x00",
    "an open list of 10,000 levels": b"[" * DEEP,
    "10,000 levels": b"[" * DEEP + b"]" * DEEP,
    "10,000 objects": b'{"id":' * DEEP + b"1" + b"}" * DEEP,
    "64 MiB": orjson.dumps(FIELDS) + b" " * HUGE,
}
# Fields of a job with values that no gateway writes.
OTHER_VALUES: tuple[Mapping[str, Any], ...] = (
    {"id": 5},
    {"id": ["1d" * 16]},
    {"id": None},
    {"id": "../precious"},
    {"id": "/etc/passwd"},
    {"id": "1D" * 16},
    {"id": "ff" * 16},
    {"owner": ["a"]},
    {"owner": 7},
    {"owner": ""},
    {"owner": "a\nb"},
    {"model": ["m"]},
    {"path": "/v2/logging"},
    {"path": "/v2/repository/models/m/load"},
    {"path": "/v1/models/m/../../../v2/logging"},
    {"path": "/v1/models/m/infer\n"},
    {"path": "http://other.example/v1/models/m/infer"},
    {"path": ["/v1/models/m/infer"]},
    {"headers": {"accept": "*/*"}},
    {"headers": ["accept"]},
    {"headers": [["authorization", "Bearer key"]]},
    {"headers": [["prefer", "respond-async"]]},
    {"headers": [["accept", "a\r\nx: y"]]},
    {"kind": "none"},
    {"state": "paused"},
    {"token": -1},
    {"token": "0"},
    {"token": 1 << 60},
    {"body_bytes": 1.5},
    {"created_at": "now"},
    {"created_at": 1e300},
    {"due_at": None},
    {"result_file": "/proc/self/environ"},
    {"result_token": "../keys.yaml"},
    {"response_headers": [["set-cookie", "a=b"]]},
    {"status": 9999},
    {"done_rows": 1 << 50},
    {"starts": [1]},
    {"signature": {"hmac": "ab"}},
)


def list_documents(job_id: str) -> list[bytes]:
    """Return the hostile documents, as if they were those of a job."""
    fields = {**FIELDS, "id": job_id}
    missing = [{name: fields[name] for name in fields if name != each} for each in MISSING]
    changed = [{**fields, **each} for each in OTHER_VALUES]
    text = orjson.dumps(fields)
    numbers = [text.replace(b'"token":0', b'"token":' + each) for each in (b"1e400", b"NaN")]
    return [*OTHER_KINDS.values(), *map(orjson.dumps, [*missing, *changed]), *numbers]


def plant(neighbour: Neighbour, job_id: str, state: JobState, document: bytes) -> None:
    """Replace the document of a queued job, and list it first where jobs in a state are found."""
    neighbour.write(job_id, document)
    lists = ["all", "owner:a", "owner:b", "queue:a", "queue:b", "leases", f"callbacks:{HOST}"]
    for name in (*lists, f"state:{state.value}"):
        is_newest_first = name.startswith(("all", "owner"))
        neighbour.list_job(name, job_id, 1e9 if is_newest_first else 1)


@pytest.fixture(params=["sqlite", "redis"])
def neighbour(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Neighbour]:
    folder = tmp_path / "jobs"
    if request.param == "sqlite":
        yield SqliteNeighbour(folder)
        return
    with RedisServer(tmp_path) as server:
        yield RedisNeighbour(server, folder / "files")


async def add(store: JobStore, name: str) -> Job:
    job = build_job(name)
    await store.files.write(job.body_file, b"abc")
    return await store.add(job, 10_000)


async def test_hostile_documents_stop_no_list_no_queue_and_no_cleaning(
    neighbour: Neighbour, tmp_path: Path
) -> None:
    outside = tmp_path / "precious"
    outside.write_text("precious")
    async with opened(neighbour.settings) as store:
        first = await add(store, "a1")
        count = len(list_documents(""))
        assert count >= 40
        states = (JobState.queued, JobState.running, JobState.done)
        for number in range(count * len(states)):
            job_id = f"e{number:031x}"
            state = states[number % len(states)]
            await store.add(replace(MODEL_JOB, id=job_id), 10_000)
            plant(neighbour, job_id, state, list_documents(job_id)[number // len(states)])
        others = [await add(store, name) for name in ("b2", "a3", "b4")]

        everything = [*reversed(others), first]
        assert await store.list_jobs(JobQuery(None)) == everything
        assert await store.list_jobs(JobQuery(None, JobState.queued, limit=1)) == everything[:1]
        own = await store.list_jobs(JobQuery("a", limit=1))
        assert own == [others[1]]
        assert await store.list_jobs(JobQuery("a", limit=1, after=own[0].id)) == [first]
        assert list(await store.find_due_deliveries(HOST, time.time(), 60.0, 100)) == []
        assert (await store.count_jobs()).oldest_queued_at == QUEUED.created_at + 1
        assert await store.find_outdated(QUEUED.created_at - 1, 100) == []
        assert len(await store.find_outdated(QUEUED.created_at + 2, 2)) == 2

        running: list[Job] = []
        for _ in range(2):  # of the places of a process, one caller gets no more than two thirds
            claims = store.claim(6 - len(running), time.time(), [*running])
            running += [job async for job in claims]
        assert {job.id for job in running} == {job.id for job in everything}
        assert await store.renew(running) == []
        jobs = Jobs(store, neighbour.settings, 10)
        for job in running:
            result = b"result of a job"
            await store.files.write(job.own_result_file, result)
            ended = job.finish(500.0, 200, [], len(result))
            assert await jobs.replace(ended, job.token)
            assert await store.files.read(ended.result_file, 0, 100) == result

        cleaned: set[str] = set()
        while outdated := await store.find_outdated(501.0, 1):
            for job in outdated:
                await jobs.delete(job)
                cleaned.add(job.id)
        assert cleaned == {job.id for job in everything}
        assert store.reader.unreadable >= count
    assert outside.read_text() == "precious"
    assert [*(tmp_path / "jobs/files").iterdir()] == []
