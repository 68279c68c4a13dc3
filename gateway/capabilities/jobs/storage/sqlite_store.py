"""Jobs in a SQLite database, for the gateways of one machine, with files beside it."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Collection, Sequence, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from gateway.capabilities.jobs.errors import (
    JobBytesExceeded,
    JobsFull,
    JobsUnavailable,
    TooManyJobs,
)
from gateway.capabilities.jobs.job import (
    MAX_DOCUMENT_BYTES,
    Job,
    JobReader,
    JobState,
    StoredJob,
    encode_job,
)
from gateway.capabilities.jobs.storage.files import (
    FILE_MODE,
    FILE_THREADS,
    FOLDER_MODE,
    BlockingCalls,
    FolderFiles,
    describe_failures,
)
from gateway.capabilities.jobs.storage.store import FreePlaces, JobCounts, JobLimits, JobQuery
from gateway.messages import CommandError
from gateway.repository.state.sqlite_connection import open_database, transaction

FILES: Final = "files"  # their folder
BUSY_TIMEOUT_S: Final = 10.0
MAX_LAPSED: Final = 100  # jobs that are taken back in one transaction
PAGE_ROWS: Final = 1000  # after a page with jobs that cannot be read
# `document` has the whole job; the other columns are what is searched for. Jobs run in the order of their
# turns, so that a caller with many jobs does not keep those of others waiting. `totals` is what all jobs
# together are, because it takes long to count a million of them.
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
    model TEXT NOT NULL, idempotency_key TEXT NOT NULL, created_at REAL NOT NULL,
    turn INTEGER NOT NULL,
    state TEXT NOT NULL, token INTEGER NOT NULL, due_at REAL NOT NULL, ended_at REAL NOT NULL,
    callback_host TEXT NOT NULL, callback_due_at REAL NOT NULL, size_bytes INTEGER NOT NULL,
    document BLOB NOT NULL,
    worker TEXT NOT NULL DEFAULT '', lease_until REAL NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS jobs_by_state
    ON jobs (state, turn, number, due_at, created_at, owner, model);
CREATE INDEX IF NOT EXISTS jobs_by_owner ON jobs (owner, state, turn);
CREATE INDEX IF NOT EXISTS jobs_by_owner_and_number ON jobs (owner, number, state, model);
CREATE INDEX IF NOT EXISTS jobs_by_end ON jobs (ended_at) WHERE ended_at > 0;
CREATE INDEX IF NOT EXISTS jobs_by_callback ON jobs (callback_host, callback_due_at)
    WHERE callback_due_at > 0;
CREATE UNIQUE INDEX IF NOT EXISTS jobs_by_key ON jobs (owner, idempotency_key)
    WHERE idempotency_key != '';
CREATE TABLE IF NOT EXISTS secrets (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS totals (
    state TEXT PRIMARY KEY, jobs INTEGER NOT NULL, size_bytes INTEGER NOT NULL);
CREATE TRIGGER IF NOT EXISTS count_added AFTER INSERT ON jobs BEGIN
    INSERT INTO totals VALUES (new.state, 1, new.size_bytes) ON CONFLICT DO UPDATE
        SET jobs = jobs + 1, size_bytes = size_bytes + new.size_bytes;
END;
CREATE TRIGGER IF NOT EXISTS count_changed AFTER UPDATE OF state, size_bytes ON jobs BEGIN
    UPDATE totals SET jobs = jobs - 1, size_bytes = size_bytes - old.size_bytes WHERE state = old.state;
    INSERT INTO totals VALUES (new.state, 1, new.size_bytes) ON CONFLICT DO UPDATE
        SET jobs = jobs + 1, size_bytes = size_bytes + new.size_bytes;
END;
CREATE TRIGGER IF NOT EXISTS count_deleted AFTER DELETE ON jobs BEGIN
    UPDATE totals SET jobs = jobs - 1, size_bytes = size_bytes - old.size_bytes WHERE state = old.state;
END;
"""
INSERT: Final = """INSERT INTO jobs (id, owner, model, idempotency_key, created_at, callback_host, turn,
    state, token, due_at, ended_at, callback_due_at, size_bytes, document)
    VALUES (:id, :owner, :model, :idempotency_key, :created_at, :callback_host, :turn,
    :state, :token, :due_at, :ended_at, :callback_due_at, :size_bytes, :document)"""
UPDATE: Final = """UPDATE jobs SET state = :state, token = :token, due_at = :due_at, ended_at = :ended_at,
    callback_due_at = :callback_due_at, size_bytes = :size_bytes, document = :document
    WHERE id = :id AND token = :seen_token"""
# The document is empty if it is too large for a job, or of another kind.
FIND_DOCUMENT: Final = (
    f"iif(typeof(document) = 'blob' AND length(document) <= {MAX_DOCUMENT_BYTES}, document, x'')"
)
SELECT: Final = (
    "SELECT number, id, owner, model, state, token, "  # noqa: S608 - constants
    + FIND_DOCUMENT
    + " FROM jobs WHERE "
)
IS_NEXT: Final = """state = 'queued' AND due_at <= ?
    AND owner NOT IN (SELECT value FROM json_each(?)) AND model NOT IN (SELECT value FROM json_each(?))
    ORDER BY turn, number"""
# After the last job of the same caller, and not before the next one of others.
FIND_TURN: Final = """SELECT max(
    ifnull((SELECT max(turn) FROM jobs WHERE state = 'running'), 0),
    ifnull((SELECT max(turn) + 1 FROM jobs WHERE owner = ? AND state IN ('queued', 'running')), 0))"""
# A process that looks for them has not lost its own. Leases end by the monotonic clock, which all processes
# share: the time of day may be set while jobs run.
HAS_LAPSED: Final = "state = 'running' AND lease_until < ? AND worker != ?"
HAS_KEY: Final = "owner = ? AND idempotency_key = ? AND idempotency_key != ''"
IS_CALLBACK_DUE: Final = (
    "callback_host = ? AND 0 < callback_due_at AND callback_due_at <= ? ORDER BY callback_due_at"
)
# The conditions of jobs that ended, and of others; those that run are outdated only if they cannot be read.
OUTDATED: Final = (
    "0 < ended_at AND ended_at < ?",
    "state = 'queued' AND created_at < ?",
    "state = 'running' AND created_at < ?",
)
COUNT_UNFINISHED: Final = (
    "SELECT count(*) FROM jobs WHERE owner = ? AND state IN ('queued', 'running')"
)


class FoundJobs(NamedTuple):
    jobs: list[Job]
    unreadable: list[int]  # the numbers of rows that were passed over


class SqliteJobStore(BlockingCalls):
    """`SqliteJobs` in one thread, and its files in others."""

    def __init__(self, folder: Path, lease_s: float) -> None:
        jobs = SqliteJobs(folder, lease_s)
        super().__init__(jobs)
        self.reader = jobs.reader
        self.files = BlockingCalls(FolderFiles(folder / FILES), FILE_THREADS)

    async def close(self) -> None:
        await self.files.close()
        await self.__getattr__("close")()
        await super().close()


class SqliteJobs:
    """The store of jobs, whose methods block.

    A process holds the lock of a file as long as it lives. So the others see at once that it ended.
    """

    def __init__(self, folder: Path, lease_s: float) -> None:
        self._folder = folder
        self._lease_s = lease_s
        self._worker = secrets.token_hex(8)
        self.reader = JobReader()
        self._locks = folder / "workers"
        self._lock_file = -1

    def open(self) -> None:
        """Open the database, and create it. Raises `CommandError`."""
        try:
            with describe_failures():
                self._open()
        except (JobsFull, JobsUnavailable) as exc:
            raise CommandError(
                f"GATEWAY_JOBS: {self._folder} cannot be used: {exc.detail}"
            ) from None

    def _open(self) -> None:
        for each in (self._folder, self._folder / FILES, self._locks):
            each.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        self._database = open_database(self._folder / "jobs.db", SCHEMA, BUSY_TIMEOUT_S)
        self._database.text_factory = partial(str, encoding="utf-8", errors="replace")
        self._database.execute("PRAGMA synchronous = FULL")  # what is committed survives a crash
        # A record lock, which is not inherited by the processes that this one forks.
        self._lock_file = os.open(self._locks / self._worker, os.O_RDWR | os.O_CREAT, FILE_MODE)
        fcntl.lockf(self._lock_file, fcntl.LOCK_EX)
        self._take_back_leases()

    def _take_back_leases(self) -> None:
        """End the leases of processes that live no longer."""
        for path in self._locks.iterdir():
            if path.name == self._worker:
                continue
            file = os.open(path, os.O_RDWR)
            with suppress(BlockingIOError):
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with transaction(self._database):
                    self._database.execute(
                        "UPDATE jobs SET lease_until = 0 WHERE worker = ?", (path.name,)
                    )
                path.unlink()
            os.close(file)

    def close(self) -> None:
        self._database.close()
        (self._locks / self._worker).unlink(missing_ok=True)
        os.close(self._lock_file)

    def add(self, job: Job, limits: JobLimits) -> Job:
        with transaction(self._database):
            if (known := self.find_by_key(job.owner, job.idempotency_key)) is not None:
                return known
            if self._read_number(COUNT_UNFINISHED, job.owner) >= limits.max_per_owner:
                raise TooManyJobs(limits.max_per_owner)
            size_bytes = self._read_number("SELECT total(size_bytes) FROM totals")
            if size_bytes + job.size_bytes > limits.max_bytes:
                raise JobBytesExceeded(limits.max_bytes)
            turn = self._read_number(FIND_TURN, job.owner)
            self._database.execute(INSERT, {**list_columns(job), "turn": turn})
        return job

    def find(self, job_id: str) -> Job | None:
        return next(iter(self._select("id = ?", job_id)), None)

    def find_by_key(self, owner: str, idempotency_key: str) -> Job | None:
        return next(iter(self._select(HAS_KEY, owner, idempotency_key)), None)

    def replace(self, job: Job, seen_token: int) -> bool:
        with transaction(self._database):
            return self._update(job, seen_token)

    def _update(self, job: Job, seen_token: int) -> bool:
        columns = {**list_columns(job), "seen_token": seen_token}
        return self._database.execute(UPDATE, columns).rowcount == 1

    def delete(self, job: Job) -> None:
        with transaction(self._database):
            self._database.execute("DELETE FROM jobs WHERE id = ?", (job.id,))

    def find_unknown(self, job_ids: Sequence[str]) -> Set[str]:
        statement = "SELECT id FROM jobs WHERE id IN (SELECT value FROM json_each(?))"
        known = self._database.execute(statement, (orjson.dumps(job_ids).decode(),))
        return set(job_ids) - {job_id for (job_id,) in known}

    def list_jobs(self, query: JobQuery) -> Sequence[Job]:
        conditions = ["1"]
        arguments: list[Any] = []
        for condition, value in (
            ("owner = ?", query.owner),
            ("state = ?", query.state and query.state.value),
            ("model = ?", query.model or None),
            ("number < (SELECT number FROM jobs WHERE id = ?)", query.after or None),
        ):
            if value is not None:
                conditions.append(condition)
                arguments.append(value)
        where = " AND ".join(conditions) + " ORDER BY number DESC"
        return self._select(where, *arguments, limit=query.limit)

    def find_position(self, job: Job) -> int:
        statement = (
            "SELECT count(*) FROM jobs WHERE state = 'queued' "
            "AND (turn, number) < (SELECT turn, number FROM jobs WHERE id = ?)"
        )
        return self._read_number(statement, job.id)

    def claim(self, count: int, now: float, running: Collection[Job] = ()) -> Sequence[Job]:
        has_lapsed = (HAS_LAPSED, time.monotonic(), self._worker)
        places = FreePlaces(count, running)
        if not (self._select(*has_lapsed) or self._find_next(now, places)):
            return ()
        claimed = []
        with transaction(self._database):
            for job in self._select(*has_lapsed, limit=MAX_LAPSED):
                self._update(job.lose_worker(now, self._lease_s), job.token)
            while places.count and (waiting := self._find_next(now, places)) is not None:
                started = waiting.start(now)
                self._update(started, waiting.token)
                places.take(started)
                claimed.append(started)
            self._renew(claimed)
        return claimed

    def _find_next(self, now: float, places: FreePlaces) -> Job | None:
        full = (places.list_full_owners(), places.list_full_models())
        names = (orjson.dumps(each).decode() for each in full)
        return next(iter(self._select(IS_NEXT, now, *names)), None)

    def renew(self, jobs: Sequence[Job]) -> Sequence[Job]:
        with transaction(self._database):
            return self._renew(jobs)

    def _renew(self, jobs: Sequence[Job]) -> Sequence[Job]:
        statement = "UPDATE jobs SET worker = ?, lease_until = ? WHERE id = ? AND token = ?"
        lease_until = time.monotonic() + self._lease_s
        lost = []
        for job in jobs:
            arguments = (self._worker, lease_until, job.id, job.token)
            if not self._database.execute(statement, arguments).rowcount:
                lost.append(job)
        return lost

    def count_jobs(self) -> JobCounts:
        rows = self._database.execute("SELECT state, jobs, size_bytes FROM totals").fetchall()
        oldest = self._database.execute("SELECT min(created_at) FROM jobs WHERE state = 'queued'")
        by_state = {JobState(state): count for state, count, _ in rows}
        return JobCounts(by_state, oldest.fetchone()[0], sum(size for _, _, size in rows))

    def find_outdated(self, when: float, limit: int) -> Sequence[Job]:
        found = [self._search(condition, when, limit=limit) for condition in OUTDATED]
        if unreadable := [(number,) for each in found for number in each.unreadable]:
            with transaction(self._database):
                self._database.executemany("DELETE FROM jobs WHERE number = ?", unreadable)
        return [job for each in found for job in each.jobs if job.state is not JobState.running]

    def find_due_deliveries(
        self, host: str, now: float, lease_s: float, limit: int
    ) -> Sequence[Job]:
        if not self._select(IS_CALLBACK_DUE, host, now):
            return ()
        with transaction(self._database):
            due = self._select(IS_CALLBACK_DUE, host, now, limit=limit)
            for job in due:
                self._database.execute(
                    "UPDATE jobs SET callback_due_at = ? WHERE id = ?", (now + lease_s, job.id)
                )
        return due

    def keep_secret(self, name: str, value: str) -> str:
        with transaction(self._database):
            self._database.execute("INSERT OR IGNORE INTO secrets VALUES (?, ?)", (name, value))
            rows = self._database.execute("SELECT value FROM secrets WHERE name = ?", (name,))
            return str(rows.fetchone()[0])

    def _select(self, condition: str, *arguments: Any, limit: int = 1) -> list[Job]:
        """Return the first jobs that can be read."""
        return self._search(condition, *arguments, limit=limit).jobs

    def _search(self, condition: str, *arguments: Any, limit: int) -> FoundJobs:
        found = FoundJobs([], [])
        position = 0
        page_rows = limit
        while len(found.jobs) < limit:
            page = (*arguments, page_rows, position)
            rows = self._database.execute(f"{SELECT}{condition} LIMIT ? OFFSET ?", page).fetchall()
            for number, *columns in rows:
                job = self._read_row(columns)
                if job is None:
                    found.unreadable.append(number)
                elif len(found.jobs) < limit:
                    found.jobs.append(job)
            if len(rows) < page_rows:
                break
            position += page_rows
            page_rows = PAGE_ROWS
        return found

    def _read_row(self, columns: Sequence[Any]) -> Job | None:
        """Return the job of a row, whose document must say the same as its columns."""
        *found_by, document = columns
        for job in self.reader.read([StoredJob(str(found_by[0]).encode(), document)]):
            if found_by == [job.id, job.owner, job.model, job.state, job.token]:
                return job
            self.reader.unreadable += 1
        return None

    def _read_number(self, statement: str, *arguments: Any) -> int:
        return int(self._database.execute(statement, arguments).fetchone()[0])


def list_columns(job: Job) -> dict[str, Any]:
    return {**vars(job), "size_bytes": job.size_bytes, "document": encode_job(job)}
