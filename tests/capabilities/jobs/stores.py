"""The two stores of jobs, and somebody else who may write to them."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from pydantic import SecretStr

from gateway.capabilities.jobs.capability import create_store
from gateway.capabilities.jobs.job import Job
from gateway.capabilities.jobs.settings import JobSettings
from gateway.capabilities.jobs.store import JobStore
from tests.capabilities.jobs.support import JOBS_SECRET
from tests.capabilities.jobs.unit.test_job import QUEUED
from tests.support.redis_server import RedisServer

MAX_UNFINISHED = 100


class SqliteNeighbour:
    """Somebody else who may write to the database of the jobs."""

    def __init__(self, folder: Path) -> None:
        self.settings = JobSettings(jobs=f"sqlite://{folder}")
        self._path = folder / "queue.db"

    def execute(self, statement: str, *values: Any) -> None:
        with closing(sqlite3.connect(self._path)) as database, database:
            database.execute(statement, values)

    def write(self, job_id: str, document: bytes | str | None, *, token: str = "0") -> None:
        self.execute("DELETE FROM documents WHERE id = ?", job_id)
        if document is not None:
            statement = "INSERT INTO documents VALUES (?, ?, 0, ?)"
            self.execute(statement, job_id, int(token), document)

    def list_job(self, name: str, member: str, score: float) -> None:
        self.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", name, member, score)


class RedisNeighbour:
    """Somebody else who may write to the Redis of the jobs."""

    def __init__(self, server: RedisServer, folder: Path | None = None, url: str = "") -> None:
        self.settings = JobSettings(
            jobs=url or server.url(), jobs_secret=SecretStr(JOBS_SECRET), jobs_folder=folder
        )
        self.prefix = self.settings.jobs.partition("prefix=")[2].partition("&")[0] + "jobs:"
        self.client = server.client()

    def write(self, job_id: str, document: bytes | str | None, *, token: str = "0") -> None:
        if document is None:
            self.client.hdel(f"{self.prefix}documents", job_id)
            self.client.hdel(f"{self.prefix}tokens", job_id)
        else:
            self.client.hset(f"{self.prefix}documents", job_id, document)
            self.client.hset(f"{self.prefix}tokens", job_id, token)

    def read(self, job_id: str) -> Mapping[str, Any]:
        document = self.client.hget(f"{self.prefix}documents", job_id)
        fields: Mapping[str, Any] = orjson.loads(document or b"{}")
        return fields

    def list_job(self, name: str, member: str, score: float) -> None:
        self.client.zadd(f"{self.prefix}{name}", {member: score})


Neighbour = SqliteNeighbour | RedisNeighbour


@asynccontextmanager
async def opened(settings: JobSettings) -> AsyncIterator[JobStore]:
    store = create_store(settings)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def build_id(name: str) -> str:
    return name.rjust(32, "0")


def build_job(name: str, **values: Any) -> Job:
    """Return a queued job, whose owner is the first letter of its name, and its time the number."""
    created_at = QUEUED.created_at + int(name[1:] or 0)
    fields = {"owner": name[0], "created_at": created_at, "callback_url": "", **values}
    return replace(QUEUED, id=build_id(name), **fields)


async def add(store: JobStore, names: str, **values: Any) -> None:
    for name in names.split():
        await store.add(build_job(name, **values), MAX_UNFINISHED)


def join_names(jobs: Any) -> str:
    return " ".join(job.id.lstrip("0") for job in jobs)
