"""Jobs in Redis, for gateways on several machines. `redis_scripts.py` has their keys.

The lease of a job is a key that expires, unless its worker renews it. The bodies and results are in a folder
that the gateways share, or in Redis.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar, cast

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
    JobReader,
    JobState,
    StoredJob,
    encode_job,
)
from gateway.capabilities.jobs.storage import redis_scripts
from gateway.capabilities.jobs.storage.files import FILE_THREADS, BlockingCalls, FolderFiles
from gateway.capabilities.jobs.storage.store import (
    FreePlaces,
    JobCounts,
    JobFiles,
    JobLimits,
    JobQuery,
)
from gateway.errors import BodyTooLarge, StateUnavailable
from gateway.messages import CommandError
from gateway.repository.state.interface import READ_ACTION, WRITE_ACTION
from gateway.repository.state.redis_connection import REDIS_REASONS, RedisConnection, RedisServer

log = logging.getLogger(__name__)

T = TypeVar("T")
# Without a shared folder, Redis keeps bodies and results up to these sizes.
MAX_BODY_BYTES: Final = 1 << 20
MAX_RESULT_BYTES: Final = 64 << 20
BODY_WITHOUT_JOB_TTL_S: Final = 3600
RENEWAL_S: Final = 5.0  # every worker has renewed its leases twice
OLDEST_FIRST: Final = ("-inf", "+inf", "BYSCORE")
SAFE_POLICY: Final = "noeviction"
OUT_OF_MEMORY: Final = REDIS_REASONS["OutOfMemoryError"]


class RedisJobStore:
    """Jobs that several gateways share."""

    def __init__(
        self, server: RedisServer, prefix: str, lease_s: float, folder: Path | None
    ) -> None:
        self._redis = JobRedis(server, f"{prefix}jobs:", "queue of jobs")
        self.reader = JobReader()
        self._lease_s = lease_s
        self._lease_ms = int(lease_s * 1000)
        self._folder_files: BlockingCalls | None = None
        if folder is not None:
            self._folder_files = BlockingCalls(FolderFiles(folder), FILE_THREADS)
        self.files = cast("JobFiles", self._folder_files or RedisFiles(self._redis))
        # Since when the lease of a running job, by its ID and token, is missing: `time.monotonic`.
        self._missing_since: dict[tuple[str, int], float] = {}

    async def open(self) -> None:
        """Create the folder. Raises `CommandError`. While Redis cannot be reached, no job is accepted."""
        try:
            if self._folder_files is not None:
                await self._folder_files.create()
        except (JobsFull, JobsUnavailable) as exc:
            raise CommandError(f"GATEWAY_JOBS_FOLDER cannot be used: {exc.detail}") from None
        with suppress(StateUnavailable):
            if not await self._redis.is_append_only():
                log.warning(
                    "the Redis of GATEWAY_JOBS loses accepted jobs when it ends: its appendonly is off"
                )
            facts = await self._redis.execute(READ_ACTION, "INFO", "memory", decode=dict)
            if (policy := facts.get("maxmemory_policy", SAFE_POLICY)) != SAFE_POLICY:
                log.warning(
                    "the Redis of GATEWAY_JOBS may forget jobs when it is full: its maxmemory-policy is %s, "
                    "not %s",
                    policy,
                    SAFE_POLICY,
                )

    async def close(self) -> None:
        await self._redis.close()
        if self._folder_files is not None:
            await self._folder_files.close()

    async def add(self, job: Job, limits: JobLimits) -> Job:
        arguments = (encode_job(job), limits.max_per_owner, limits.max_bytes)
        reply = await self._redis.run(redis_scripts.ADD, *arguments, decode=bytes)
        if reply == b"TOO_MANY":
            raise TooManyJobs(limits.max_per_owner)
        if reply == b"FULL":
            raise JobBytesExceeded(limits.max_bytes)
        if (kept := await self.find(decode_id(reply))) is None:
            raise JobsUnavailable("the job of this Idempotency-Key is damaged")
        return job if kept.id == job.id else kept

    async def find(self, job_id: str) -> Job | None:
        return next(iter(await self._find_all([job_id])), None)

    async def _find_all(self, job_ids: Sequence[str | bytes]) -> list[Job]:
        return self.reader.read(await self._redis.look(redis_scripts.FIND, *job_ids))

    async def _find_first(self, limit: int, key: str, *order: Any, owner: str = "") -> list[Job]:
        """Return the first jobs of a sorted set that can be read, and belong to the owner if there is one."""
        found: list[Job] = []
        position = 0
        while len(found) < limit:
            page = (*order, "LIMIT", position, limit)
            ids = await self._redis.read("ZRANGE", key, *page, decode=list)
            if not ids:
                break
            jobs = await self._find_all(ids)
            found += [job for job in jobs if owner in ("", job.owner)]
            position += limit
        return found[:limit]

    async def find_by_key(self, owner: str, idempotency_key: str) -> Job | None:
        key = f"{owner}\n{idempotency_key}"
        job_id = await self._redis.read("HGET", "keys", key, decode=decode_id)
        return await self.find(job_id) if job_id else None

    async def replace(self, job: Job, seen_token: int) -> bool:
        arguments = (encode_job(job), seen_token, self._lease_ms)
        return await self._redis.run(redis_scripts.REPLACE, *arguments, decode=bool)

    async def delete(self, job: Job) -> None:
        await self._redis.run(redis_scripts.DELETE, job.id, decode=bool)

    async def find_unknown(self, job_ids: Sequence[str]) -> Set[str]:
        numbers = await self._redis.read("ZMSCORE", name_list(), *job_ids, decode=list)
        return {name for name, number in zip(job_ids, numbers, strict=True) if number is None}

    async def list_jobs(self, query: JobQuery) -> Sequence[Job]:
        owner = query.owner or ""
        last = "+inf"
        if query.after:
            command = ("ZSCORE", name_list(owner=owner), query.after)
            last = f"({await self._redis.read(*command, decode=decode_number)}"
        key = name_list(query.state, query.model, owner)
        order = (last, "-inf", "BYSCORE", "REV")
        return await self._find_first(query.limit, key, *order, owner=owner)

    async def find_position(self, job: Job) -> int:
        return await self._redis.read("ZRANK", "ready", job.id, decode=decode_number)

    async def claim(self, count: int, now: float, running: Collection[Job] = ()) -> Sequence[Job]:
        await self._end_lapsed_leases(now, {job.id for job in running})
        places = FreePlaces(count, running)
        started: list[Job] = []
        try:
            while places.count and (found := await self._find_next(now, places)):
                for waiting in self.reader.read(found):
                    job = waiting.start(now)
                    if waiting.state is not JobState.queued:
                        continue
                    if await self.replace(job, waiting.token):
                        places.take(job)
                        started.append(job)
        except (JobsUnavailable, JobsFull):
            if not started:  # those that are started must run
                raise
        return started

    async def _find_next(self, now: float, places: FreePlaces) -> Sequence[StoredJob]:
        full = (places.list_full_owners(), places.list_full_models())
        names = (orjson.dumps(dict.fromkeys(each, True)) for each in full)
        arguments = (now, now + self._lease_s, *names)
        return await self._redis.run(redis_scripts.FIND_NEXT, *arguments, decode=decode_stored)

    async def _end_lapsed_leases(self, now: float, running: Set[str]) -> None:
        """End the leases that are missing, once their workers had time to renew them after an outage."""
        seen_at = time.monotonic()
        missing_since = {}
        stored = await self._redis.run(redis_scripts.FIND_LAPSED, decode=decode_stored)
        for job in self.reader.read(stored):
            if job.id in running or job.state is not JobState.running:
                continue
            since = self._missing_since.get((job.id, job.token), seen_at)
            if seen_at - since < min(self._lease_s / 3, RENEWAL_S):
                missing_since[job.id, job.token] = since
            else:
                await self.replace(job.lose_worker(now, self._lease_s), job.token)
        self._missing_since = missing_since

    async def renew(self, jobs: Sequence[Job]) -> Sequence[Job]:
        tokens = {job.id: job.token for job in await self._find_all([job.id for job in jobs])}
        for job in jobs:
            lease = f"lease:{job.id}"
            if tokens.get(job.id) == job.token and not await self._redis.write(
                "PEXPIRE", lease, self._lease_ms, decode=bool
            ):
                with suppress(JobsFull):
                    await self._redis.write("SET", lease, "", "PX", self._lease_ms, decode=bool)
        return [job for job in jobs if tokens.get(job.id) != job.token]

    async def count_jobs(self) -> JobCounts:
        counts = {}
        for state in JobState:
            counts[state] = await self._redis.read("ZCARD", name_list(state), decode=int)
        size_bytes = await self._redis.read("GET", "bytes", decode=decode_number)
        oldest = await self._find_first(1, name_list(JobState.queued), *OLDEST_FIRST)
        return JobCounts(counts, oldest[0].created_at if oldest else None, size_bytes)

    async def find_outdated(self, when: float, limit: int) -> Sequence[Job]:
        ended: list[Job] = []
        while len(ended) < limit:
            page = ("-inf", when, "BYSCORE", "LIMIT", len(ended), limit)
            ids = await self._redis.read("ZRANGE", "ended", *page, decode=list)
            if not ids:
                break
            jobs = await self._find_all(ids)
            for job_id in set(ids) - {job.id.encode() for job in jobs}:
                await self._redis.run(redis_scripts.DELETE, job_id, decode=bool)
            ended += jobs
        queued = await self._find_first(limit, name_list(JobState.queued), *OLDEST_FIRST)
        return ended[:limit] + [job for job in queued if job.created_at < when]

    async def find_due_deliveries(
        self, host: str, now: float, lease_s: float, limit: int
    ) -> Sequence[Job]:
        arguments = (now, now + lease_s, limit, host)
        stored = await self._redis.run(
            redis_scripts.TAKE_DELIVERIES, *arguments, decode=decode_stored
        )
        return self.reader.read(stored)

    async def keep_secret(self, name: str, value: str) -> str:
        await self._redis.write("HSETNX", "secrets", name, value, decode=bool)
        return await self._redis.read("HGET", "secrets", name, decode=bytes.decode)


class RedisFiles:
    """`JobFiles` in Redis, where nothing is left over: bodies without a job expire."""

    def __init__(self, redis: JobRedis) -> None:
        self._redis = redis

    async def append(self, file: str, data: bytes) -> None:
        is_body = file.endswith(BODY_SUFFIX)
        max_bytes = MAX_BODY_BYTES if is_body else MAX_RESULT_BYTES
        length = await self._redis.read("STRLEN", name_file(file), decode=int)
        if length + len(data) > max_bytes:
            raise BodyTooLarge(max_bytes) if is_body else ResultTooLarge(max_bytes)
        # Unlike APPEND, this may be repeated on another connection.
        if is_body:
            arguments = (file, length, data, BODY_WITHOUT_JOB_TTL_S)
            await self._redis.run(redis_scripts.WRITE_BODY, *arguments, decode=bool)
        else:
            await self._redis.write("SETRANGE", name_file(file), length, data, decode=int)

    async def write(self, file: str, data: bytes) -> None:
        await self.delete(file)
        await self.append(file, data)

    async def flush(self, file: str) -> None:
        """Redis has written it."""

    async def read(self, file: str, start: int, length: int) -> bytes:
        command = ("GETRANGE", name_file(file), start, start + length - 1)
        return await self._redis.read(*command, decode=bytes)

    async def delete(self, *files: str) -> None:
        for file in files:
            await self._redis.write("DEL", name_file(file), decode=bool)

    async def list_old(self) -> Sequence[str]:
        return ()


class JobRedis(RedisConnection):
    """The Redis of the jobs. What it does here raises `JobsUnavailable` or `JobsFull`."""

    async def read(self, command: str, key: str, *arguments: Any, decode: Callable[[Any], T]) -> T:
        command_line = (command, self.full_key(key), *arguments)
        with describe_outage():
            return await self.execute(READ_ACTION, *command_line, decode=decode)

    async def write(self, command: str, key: str, *arguments: Any, decode: Callable[[Any], T]) -> T:
        command_line = (command, self.full_key(key), *arguments)
        with describe_outage():
            return await self.execute(WRITE_ACTION, *command_line, decode=decode)

    async def look(self, script: str, *arguments: Any) -> Sequence[StoredJob]:
        """Return the jobs that a script finds, which changes nothing."""
        with describe_outage():
            return await self.run_script(
                READ_ACTION, script, ("",), *arguments, decode=decode_stored
            )

    async def run(self, script: str, *arguments: Any, decode: Callable[[Any], T]) -> T:
        with describe_outage():
            return await self.run_script(WRITE_ACTION, script, ("",), *arguments, decode=decode)


@contextmanager
def describe_outage() -> Iterator[None]:
    try:
        yield
    except StateUnavailable as exc:
        if exc.reason.startswith(OUT_OF_MEMORY):
            raise JobsFull(exc.reason) from None
        raise JobsUnavailable(exc.reason) from None


def name_list(state: JobState | None = None, model: str = "", owner: str = "") -> str:
    return f"list:{state.value if state else ''}\n{model}\n{owner}"


def name_file(file: str) -> str:
    return f"file:{file}"


def decode_stored(reply: Sequence[bytes | None]) -> list[StoredJob]:
    """Return the jobs of a reply, which has the ID and the document of each."""
    ids = cast("Sequence[bytes]", reply[::2])
    return [StoredJob(*each) for each in zip(ids, reply[1::2], strict=True)]


def decode_id(value: bytes | None) -> str:
    return (value or b"").decode()


def decode_number(value: Any) -> int:
    """Return a number; 0 if there is none, or something else in its place."""
    with suppress(ValueError, OverflowError):
        return int(float(value or 0))
    return 0
