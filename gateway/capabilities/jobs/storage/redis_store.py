"""Jobs in Redis, for gateways on several machines: a stream with a consumer group is their queue.

The lease of a job is the time for which its entry in the stream has not been claimed. The bodies and results
are in a folder that the gateways share, or in Redis.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar, cast

import orjson

from gateway.capabilities.jobs.errors import (
    JobBytesExceeded,
    JobsFull,
    JobsUnavailable,
    ResultTooLarge,
    TooManyJobs,
)
from gateway.capabilities.jobs.job import (
    BODY_SUFFIX,
    Job,
    JobState,
    decode_jobs,
    encode_job,
    find_job_id,
)
from gateway.capabilities.jobs.storage import redis_scripts
from gateway.capabilities.jobs.storage.blocking import BlockingCalls, FolderFiles
from gateway.capabilities.jobs.storage.store import FreePlaces, JobCounts, JobLimits, JobQuery
from gateway.errors import BodyTooLarge, StateUnavailable
from gateway.messages import CommandError, join_names
from gateway.repository.state.interface import READ_ACTION, WRITE_ACTION
from gateway.repository.state.redis_connection import REDIS_REASONS, RedisConnection, RedisServer

log = logging.getLogger(__name__)

T = TypeVar("T")
GROUP: Final = "gateways"
# Without a shared folder, Redis keeps bodies and results up to these sizes.
MAX_BODY_BYTES: Final = 1 << 20
MAX_RESULT_BYTES: Final = 64 << 20
BODY_WITHOUT_JOB_TTL_S: Final = 3600
LEFT_OVER_BATCH: Final = 500  # files
MAX_LAPSED: Final = 100
OUT_OF_MEMORY: Final = REDIS_REASONS["OutOfMemoryError"]


class RedisJobStore:
    """Jobs that several gateways share. `redis_scripts.py` has their keys."""

    def __init__(
        self, server: RedisServer, prefix: str, lease_s: float, folder: Path | None
    ) -> None:
        self._redis = RedisConnection(server, f"{prefix}jobs:", "queue of jobs")
        self._lease_s = lease_s
        self._consumer = secrets.token_hex(8)
        self._files = None if folder is None else BlockingCalls(FolderFiles(folder))
        self._held: set[str] = set()  # IDs of the jobs that this process runs
        # Since when Redis has answered. After an outage every worker gets time to renew its leases.
        self._available_since = 0.0

    async def open(self) -> None:
        """Create the folder. Raises `CommandError`. While Redis cannot be reached, no job is accepted."""
        try:
            if self._files is not None:
                await self._files.create()
        except (JobsFull, JobsUnavailable) as exc:
            raise CommandError(f"GATEWAY_JOBS_FOLDER cannot be used: {exc.detail}") from None
        with suppress(JobsUnavailable):
            facts = await self._execute(READ_ACTION, "INFO", "persistence", decode=dict)
            if not facts.get("aof_enabled"):
                log.warning(
                    "the Redis of GATEWAY_JOBS loses accepted jobs when it ends: its appendonly is off"
                )

    async def close(self) -> None:
        with suppress(JobsUnavailable, JobsFull):
            script = redis_scripts.DELETE_CONSUMERS
            await self._run_script(script, self._consumer, decode=bool)
        await self._redis.close()
        if self._files is not None:
            await self._files.close()

    async def add(self, job: Job, limits: JobLimits) -> Job:
        arguments = (encode_job(job), limits.max_per_owner, limits.max_bytes)
        reply = await self._run_script(redis_scripts.ADD, *arguments, decode=bytes)
        if reply == b"TOO_MANY":
            raise TooManyJobs(limits.max_per_owner)
        if reply == b"FULL":
            raise JobBytesExceeded(limits.max_bytes)
        for kept in decode_jobs([reply]):
            return job if kept.id == job.id else kept
        raise JobsUnavailable("only a later release can read the job of this Idempotency-Key")

    async def find(self, job_id: str) -> Job | None:
        return next(iter(await self._find_all([job_id])), None)

    async def _find_all(self, job_ids: Sequence[str | bytes]) -> list[Job]:
        if not job_ids:
            return []
        command = ("HMGET", self._full_key("documents"), *job_ids)
        return await self._execute(READ_ACTION, *command, decode=decode_jobs)

    async def find_by_key(self, owner: str, idempotency_key: str) -> Job | None:
        command = ("HMGET", self._full_key("keys"), f"{owner}\n{idempotency_key}")
        job_ids = await self._execute(READ_ACTION, *command, decode=list)
        return await self.find(job_ids[0]) if job_ids[0] else None

    async def replace(self, job: Job, seen_token: int) -> bool:
        arguments = (encode_job(job), seen_token)
        if job.state is not JobState.running:
            self._held.discard(job.id)
        return await self._run_script(redis_scripts.REPLACE, *arguments, decode=bool)

    async def delete(self, job: Job) -> None:
        files = job.files
        if self._files is not None:  # first, so that none is left behind
            await self._files.delete_file(*files)
            files = ()
        await self._run_script(redis_scripts.DELETE, job.id, *files, decode=bool)

    async def list_jobs(self, query: JobQuery) -> Sequence[Job]:
        owner = query.owner or ""
        last = "+inf"
        if query.after:
            command = ("ZSCORE", self._list_key(owner=owner), query.after)
            number = await self._execute(READ_ACTION, *command, decode=decode_number)
            last = f"({number}"
        key = self._list_key(query.state, query.model, owner)
        if query.id_prefix:
            key = self._full_key(f"list:{query.id_prefix}\n{owner}")
        page = ("ZREVRANGEBYSCORE", key, last, "-inf", "LIMIT", 0, query.limit)
        return await self._find_all(await self._execute(READ_ACTION, *page, decode=list))

    async def find_position(self, job: Job) -> int:
        command = ("ZRANK", self._full_key("ready"), job.id)
        return await self._execute(READ_ACTION, *command, decode=decode_number)

    async def claim(self, count: int, now: float, running: Collection[Job] = ()) -> Sequence[Job]:
        unstarted = await self._take_lapsed(now)
        places = FreePlaces(count, running)
        while places.count and (job := await self._enqueue_next(now, places)) is not None:
            places.take(job)
        options = ("COUNT", count, "STREAMS", self._full_key("queue"), ">")
        command = ("XREADGROUP", "GROUP", GROUP, self._consumer, *options)
        entries = await self._execute(WRITE_ACTION, *command, decode=decode_stream)
        return await self._start_jobs([*unstarted, *entries], now)

    async def _enqueue_next(self, now: float, places: FreePlaces) -> Job | None:
        full = (places.list_full_owners(), places.list_full_models())
        names = (orjson.dumps(dict.fromkeys(each, True)) for each in full)
        script = redis_scripts.ENQUEUE_NEXT
        found = await self._run_script(script, now, *names, decode=decode_jobs)
        return next(iter(found), None)

    async def _take_lapsed(self, now: float) -> Sequence[str]:
        """End the leases that have run out; return the jobs that their worker had not started yet."""
        if not self._redis.is_available or not self._available_since:
            self._available_since = time.monotonic()
        lease_ms = int(self._lease_s * 1000)
        if time.monotonic() - self._available_since < self._lease_s / 3:
            return []
        arguments = (self._consumer, lease_ms, MAX_LAPSED)
        lapsed = await self._run_script(redis_scripts.TAKE_LAPSED, *arguments, decode=decode_texts)
        jobs = await self._find_all([job_id for job_id in lapsed if job_id not in self._held])
        for job in jobs:
            if job.state is JobState.running:
                await self.replace(job.lose_worker(now, self._lease_s), job.token)
        return [job.id for job in jobs if job.state is JobState.queued]

    async def _start_jobs(self, job_ids: Sequence[str], now: float) -> Sequence[Job]:
        started: list[Job] = []
        waiting = await self._find_all(job_ids)
        if len(waiting) < len(job_ids):
            unread = set(job_ids) - {job.id for job in waiting}
            log.warning("this release cannot read the jobs %s", join_names(sorted(unread)))
        with suppress(JobsUnavailable, JobsFull):  # those that are started must run
            for job in waiting:
                running = job.start(now)
                if job.state is JobState.queued and await self.replace(running, job.token):
                    self._held.add(job.id)
                    started.append(running)
        return started

    async def renew(self, jobs: Sequence[Job]) -> Sequence[Job]:
        pairs = (value for job in jobs for value in (job.id, job.token))
        lost = await self._run_script(
            redis_scripts.RENEW, self._consumer, *pairs, decode=decode_texts
        )
        self._held = {job.id for job in jobs} - set(lost)
        return [job for job in jobs if job.id in lost]

    async def count_jobs(self) -> JobCounts:
        counts = {}
        for state in JobState:
            key = self._list_key(state)
            counts[state] = await self._execute(READ_ACTION, "ZCARD", key, decode=int)
        command = ("GET", self._full_key("bytes"))
        size_bytes = await self._execute(READ_ACTION, *command, decode=decode_number)
        oldest = await self._find_oldest_queued(1)
        return JobCounts(counts, oldest[0].created_at if oldest else None, size_bytes)

    async def find_outdated(self, when: float, limit: int) -> Sequence[Job]:
        page = (self._full_key("ended"), "-inf", when, "LIMIT", 0, limit)
        job_ids = await self._execute(READ_ACTION, "ZRANGEBYSCORE", *page, decode=list)
        queued = await self._find_oldest_queued(limit)
        return await self._find_all(job_ids) + [job for job in queued if job.created_at < when]

    async def _find_oldest_queued(self, limit: int) -> list[Job]:
        page = (self._list_key(JobState.queued), 0, limit - 1)
        return await self._find_all(await self._execute(READ_ACTION, "ZRANGE", *page, decode=list))

    async def find_due_deliveries(
        self, host: str, now: float, lease_s: float, limit: int
    ) -> Sequence[Job]:
        arguments = (now, now + lease_s, limit, host)
        return await self._run_script(redis_scripts.TAKE_DELIVERIES, *arguments, decode=decode_jobs)

    async def keep_secret(self, name: str, value: str) -> str:
        secret = self._full_key("secrets")
        await self._execute(WRITE_ACTION, "HSETNX", secret, name, value, decode=bool)
        return await self._execute(READ_ACTION, "HGET", secret, name, decode=bytes.decode)

    async def append(self, file: str, data: bytes) -> None:
        if self._files is not None:
            await self._files.append(file, data)
            return
        is_body = file.endswith(BODY_SUFFIX)
        max_bytes = MAX_BODY_BYTES if is_body else MAX_RESULT_BYTES
        key = self._full_key(f"file:{file}")
        length = await self._execute(READ_ACTION, "STRLEN", key, decode=int)
        if length + len(data) > max_bytes:
            raise BodyTooLarge(max_bytes) if is_body else ResultTooLarge(max_bytes)
        # Unlike APPEND, this may be repeated on another connection.
        if is_body:
            arguments = (file, length, data, BODY_WITHOUT_JOB_TTL_S)
            await self._run_script(redis_scripts.WRITE_BODY, *arguments, decode=bool)
        else:
            await self._execute(WRITE_ACTION, "SETRANGE", key, length, data, decode=int)

    async def flush(self, file: str) -> None:
        if self._files is not None:
            await self._files.flush(file)

    async def read(self, file: str, start: int, length: int) -> bytes:
        if self._files is not None:
            data: bytes = await self._files.read(file, start, length)
            return data
        command = ("GETRANGE", self._full_key(f"file:{file}"), start, start + length - 1)
        return await self._execute(READ_ACTION, *command, decode=bytes)

    async def open_file(self, file: str) -> BinaryIO:
        if self._files is not None:
            return cast("BinaryIO", await self._files.open_file(file))
        copy = tempfile.SpooledTemporaryFile(2 * MAX_BODY_BYTES)  # noqa: SIM115 - the caller closes it
        copy.write(await self.read(file, 0, MAX_BODY_BYTES))
        copy.seek(0)
        return cast("BinaryIO", copy)

    async def delete_file(self, file: str) -> None:
        if self._files is not None:
            await self._files.delete_file(file)
        else:
            command = ("DEL", self._full_key(f"file:{file}"))
            await self._execute(WRITE_ACTION, *command, decode=bool)

    async def delete_left_over(self) -> None:
        if self._files is None:
            return  # in Redis, bodies without a job expire
        names = await self._files.list_old()
        for start in range(0, len(names), LEFT_OVER_BATCH):
            batch = names[start : start + LEFT_OVER_BATCH]
            command = ("ZMSCORE", self._list_key(), *map(find_job_id, batch))
            numbers = await self._execute(READ_ACTION, *command, decode=list)
            lost = [name for name, number in zip(batch, numbers, strict=True) if number is None]
            await self._files.delete_file(*lost)

    def _full_key(self, name: str) -> str:
        return self._redis.full_key(name)

    def _list_key(self, state: JobState | None = None, model: str = "", owner: str = "") -> str:
        return self._full_key(f"list:{state.value if state else ''}\n{model}\n{owner}")

    async def _execute(self, action: str, *command: Any, decode: Callable[[Any], T]) -> T:
        with describe_outage():
            return await self._redis.execute(action, *command, decode=decode)

    async def _run_script(self, script: str, *arguments: Any, decode: Callable[[Any], T]) -> T:
        with describe_outage():
            return await self._redis.run_script(
                WRITE_ACTION, script, ("",), *arguments, decode=decode
            )


@contextmanager
def describe_outage() -> Iterator[None]:
    try:
        yield
    except StateUnavailable as exc:
        if exc.reason.startswith(OUT_OF_MEMORY):
            raise JobsFull(exc.reason) from None
        raise JobsUnavailable(exc.reason) from None


def decode_texts(values: Sequence[bytes]) -> list[str]:
    return [value.decode() for value in values]


def decode_number(value: Any) -> int:
    return int(value or 0)


def decode_entries(entries: Sequence[Any]) -> list[str]:
    """Return the IDs in entries of the stream; an entry that was deleted has none."""
    return [fields[b"id"].decode() for _, fields in entries if fields]


def decode_stream(reply: Any) -> list[str]:
    return decode_entries(reply[0][1]) if reply else []
