"""Callbacks in each store: who gets which of them, and when."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import SecretStr

from gateway.capabilities.jobs.capability import create_store
from gateway.capabilities.jobs.job import Job
from gateway.capabilities.jobs.settings import JobSettings
from gateway.capabilities.jobs.storage.store import JobLimits, JobStore
from tests.capabilities.jobs.support import JOBS_SECRET
from tests.support.redis_server import RedisServer

JOB = Job(
    id="a" * 32, owner="shop", model="m", path="/v1/embeddings", query="", headers=(), client="",
    request_id="", caller="", caller_id="", body_digest="0" * 64, request_digest="0" * 64, created_at=1.0,
    callback_url="https://shop.example/", callback_host="shop.example",
)  # fmt: skip
LIMITS = JobLimits(max_bytes=1000, max_per_owner=10)


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[JobStore]:
    store = create_store(JobSettings(jobs=url, jobs_secret=SecretStr(JOBS_SECRET)))
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def list_due(store: JobStore, now: float, host: str = "shop.example") -> list[str]:
    return [job.id[0] for job in await store.find_due_deliveries(host, now, 60.0, 1)]


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_callback_is_due_after_the_job_and_again_until_its_outcome_is_stored(
    kind: str, tmp_path: Path
) -> None:
    if kind == "redis":
        with RedisServer(tmp_path) as server:
            await check_deliveries(server.url())
    else:
        await check_deliveries(f"sqlite://{tmp_path}")


async def check_deliveries(url: str) -> None:
    async with opened(url) as store, opened(url) as other:
        for job in (
            JOB,
            replace(JOB, id="b" * 32),
            replace(JOB, id="c" * 32, callback_host="other.example"),
        ):
            await store.add(job, LIMITS)
        assert await list_due(store, 1e9) == []
        ended = JOB.cancel(100.0)
        for job in (ended, replace(JOB, id="b" * 32).cancel(101.0)):
            assert await store.replace(job, JOB.token)
        assert await list_due(store, 99.0) == await list_due(store, 200.0, "other.example") == []
        assert [await list_due(each, 200.0) for each in (store, other, store)] == [["a"], ["b"], []]
        assert await list_due(other, 261.0) == ["a"]
        again = replace(ended, callback_due_at=500.0, callback_attempts=1)
        assert await store.replace(again, ended.token)
        assert await list_due(store, 400.0) == ["b"]
        await store.delete(replace(JOB, id="b" * 32))
        assert await list_due(store, 499.0) == []
        assert await list_due(store, 501.0) == ["a"]
        assert await store.replace(replace(again, callback_due_at=0.0), ended.token)
        assert await list_due(store, 1e9) == []
        secrets = [
            await each.keep_secret("callback", name) for each, name in ((store, "1"), (other, "2"))
        ]
        assert secrets == ["1", "1"]
