"""A job as a value: its request, its state, and the changes between states, which are pure."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

import orjson

from gateway.errors import GatewayError, InternalError

# A job fails when so many runs have ended without a result: with their process, or because a file is lost.
MAX_LOSSES: Final = 3
MAX_RESULT_FILES: Final = 3 * MAX_LOSSES
MIN_ERROR_STATUS: Final = 400
DELIVERED: Final = "delivered"  # the outcome of a callback that was accepted
BODY_SUFFIX: Final = ".body"


class JobState(str, Enum):
    queued = "queued"
    running = "running"
    done = "done"
    failed = "failed"
    cancelled = "cancelled"
    expired = "expired"


class JobKind(str, Enum):
    request = "request"  # one request, whose result is its response
    batch = "batch"  # many rows, whose result grows while it runs


class JobLost(InternalError):
    code = "JOB_LOST"
    message = f"{MAX_LOSSES} runs of the job had no result, the last one because its process ended"


def create_job_id() -> str:
    """Return a name that cannot be guessed: without keys, whoever knows it may read the job."""
    return secrets.token_hex(16)


def find_job_id(file: str) -> str:
    return file.partition(".")[0]


@dataclass(frozen=True)
class Job:
    """A job. Every change of its state makes another value with the next token.

    The token is a fencing token: `JobStore.replace` refuses what was derived from an older one, so that a
    worker that was stopped and wakes up cannot overwrite a newer result.
    """

    id: str
    owner: str  # the caller that may read it, see `find_owner`
    model: str
    # The request: what the application gets when the job runs. Credentials are not stored.
    path: str
    query: str
    headers: Sequence[Sequence[str]]
    client: str  # the address of the client
    request_id: str
    # Who runs it: the name of the key or rule, and the hash of the key. They find its rights again.
    caller: str
    key_digest: str
    # Times are seconds since 1970; 0 means never or not yet.
    created_at: float
    body_bytes: int = 0
    body_digest: str = ""
    idempotency_key: str = ""
    kind: JobKind = JobKind.request
    state: JobState = JobState.queued
    token: int = 0
    starts: int = 0
    losses: int = 0  # runs that ended without a result
    due_at: float = 0.0  # it starts later than this, because the fleet was busy
    started_at: float = 0.0
    ended_at: float = 0.0
    # The response. The file is that of `result_file` with the token of the worker that wrote it.
    status: int = 0
    response_headers: Sequence[Sequence[str]] = ()
    result_file: str = ""
    result_bytes: int = 0
    error: str = ""  # why it failed, in words
    error_code: str = ""
    # The rows of a batch; a request has one.
    total_rows: int = 1
    done_rows: int = 0
    failed_rows: int = 0
    rows_per_second: float = 0.0  # while it runs
    # The callback. `JobStore.find_due_deliveries` returns jobs whose next attempt is due.
    callback_url: str = ""
    callback_host: str = ""
    callback_attempts: int = 0
    callback_due_at: float = 0.0  # 0: none is to come
    callback_outcome: str = ""  # `DELIVERED`, or why the last attempt failed

    @property
    def body_file(self) -> str:
        return f"{self.id}{BODY_SUFFIX}"

    @property
    def own_result_file(self) -> str:
        """Return the name of the file to which the worker with this token writes."""
        return f"{self.id}.{self.token}.result"

    @property
    def files(self) -> Sequence[str]:
        """Return the names of all files that the job can have, also of workers that ended."""
        tokens = range(max(self.token - MAX_RESULT_FILES, 0), self.token + 1)
        results = (f"{self.id}.{token}.result" for token in tokens)
        return [self.body_file, *results]

    @property
    def has_ended(self) -> bool:
        return self.state not in (JobState.queued, JobState.running)

    @property
    def size_bytes(self) -> int:
        return self.result_bytes if self.has_ended else self.body_bytes + self.result_bytes

    def start(self, now: float) -> Job:
        return self._change(state=JobState.running, starts=self.starts + 1, started_at=now)

    def lose_worker(self, now: float, lease_s: float) -> Job:
        return self.lose_run(now, lease_s, JobLost())

    def lose_run(self, now: float, lease_s: float, error: GatewayError) -> Job:
        """Return the job after a run without a result: queued again, or failed after the third time.

        After the second time it waits: another job may have ended the process, or it may end again and again.
        """
        losses = self.losses + 1
        if losses < MAX_LOSSES:
            due_at = now + lease_s * self.losses
            return self._change(state=JobState.queued, losses=losses, due_at=due_at)
        return replace(self, losses=losses).fail(now, error)

    def postpone(self, due_at: float) -> Job:
        return self._change(state=JobState.queued, due_at=due_at)

    def finish(
        self, now: float, status: int, headers: Sequence[Sequence[str]], result_bytes: int
    ) -> Job:
        """Return the job with its response, which is in `own_result_file`."""
        is_done = status < MIN_ERROR_STATUS
        return self._end(
            now,
            JobState.done if is_done else JobState.failed,
            done_rows=int(is_done),
            failed_rows=int(not is_done),
            status=status,
            response_headers=headers,
            result_file=self.own_result_file,
            result_bytes=result_bytes,
        )

    def finish_batch(self, now: float) -> Job:
        """Return the batch with the rows that were reported as its progress."""
        return self._end(now, JobState.done, status=200)

    def fail(self, now: float, error: GatewayError) -> Job:
        """Return the job as failed without a response."""
        values = {"status": error.status, "error_code": error.code, "error": error.detail}
        return self._end(now, JobState.failed, **values)

    def cancel(self, now: float) -> Job:
        return self._end(now, JobState.cancelled)

    def expire(self, now: float) -> Job:
        return self._end(now, JobState.expired)

    def _end(self, now: float, state: JobState, **values: Any) -> Job:
        due_at = now if self.callback_url else 0.0
        return self._change(state=state, ended_at=now, callback_due_at=due_at, **values)

    def _change(self, **values: Any) -> Job:
        return replace(self, token=self.token + 1, **values)


def encode_job(job: Job) -> bytes:
    return orjson.dumps(job)


def decode_job(document: bytes) -> Job:
    values = orjson.loads(document)
    return Job(**{**values, "kind": JobKind(values["kind"]), "state": JobState(values["state"])})


def decode_jobs(documents: Iterable[bytes | None]) -> list[Job]:
    """Return the jobs, without those that are missing or damaged."""
    jobs = []
    for document in documents:
        with suppress(ValueError, LookupError, TypeError, AttributeError):
            jobs.append(decode_job(document or b""))
    return jobs
