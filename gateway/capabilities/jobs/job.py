"""A job as a value: its request, its state, and the changes between states, which are pure.

A stored job is untrusted input: `parse_job` checks its form, and `trust.py` who wrote it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Any, Final, NamedTuple

import orjson
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from gateway.errors import GatewayError, InternalError

# A job fails when so many runs have ended without a result: with their process, or because a file is lost.
MAX_LOSSES: Final = 3
MAX_RESULT_FILES: Final = 3 * MAX_LOSSES
MIN_ERROR_STATUS: Final = 400
MIN_RESULT_STATUS: Final = 200
DELIVERED: Final = "delivered"  # the outcome of a callback that was accepted
BODY_SUFFIX: Final = ".body"
# The requests that can be jobs. The rows of a batch are requests of the first kind.
PATHS: Final = re.compile(
    r"/v1/(models/[^/]+(/(versions|labels)/[^/]+)?(/infer|:predict)|embeddings)"
)
# The headers that a handler of an inference reads; no other is stored, because any could be a secret.
REQUEST_HEADERS: Final = (
    *("accept", "content-type", "content-encoding"),
    *("x-request-timeout", "x-priority", "x-split-key", "traceparent", "tracestate"),
)
RESPONSE_HEADERS: Final = ("content-type", "content-disposition", "x-model-version", "retry-after")
# Twice the headers of a request, whose characters can take two bytes each, with all other fields.
MAX_DOCUMENT_BYTES: Final = 256 << 10
MAX_TEXT_CHARS: Final = 64 << 10
MAX_ERROR_CHARS: Final = 4096
MAX_COUNT: Final = 1 << 53  # Lua's numbers are exact up to this one
MAX_TIME_S: Final = 253_402_300_799.0  # the end of the year 9999

JobId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
OwnerId = Annotated[str, Field(pattern=r"^[!-~]{1,200}$")]  # it is a part of keys in Redis
JobPath = Annotated[str, Field(pattern=f"^{PATHS.pattern}$", max_length=MAX_TEXT_CHARS)]
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Time = Annotated[float, Field(ge=0, le=MAX_TIME_S)]
HeaderValue = Annotated[str, Field(pattern=r"^[\t -~\u0080-\u00ff]*$", max_length=MAX_TEXT_CHARS)]
RequestHeader = Annotated[str, Field(pattern=f"^({'|'.join(REQUEST_HEADERS)})$")]
ResponseHeader = Annotated[str, Field(pattern=f"^({'|'.join(RESPONSE_HEADERS)})$")]


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


class BadJob(ValueError):
    """A stored job cannot be one that a gateway wrote."""


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

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    id: JobId
    owner: OwnerId  # the caller that may read it, see `find_owner`
    model: Text
    # The request: what the application gets when the job runs. Credentials are not stored.
    path: JobPath
    query: Text
    headers: tuple[tuple[RequestHeader, HeaderValue], ...]
    client: Text  # the address of the client
    request_id: HeaderValue
    # Who runs it: a key or a rule, whose rights hold when it runs; its name, and whom its token names.
    caller_id: Text
    caller: Text
    # Times are seconds since 1970; 0 means never or not yet.
    created_at: Time
    body_digest: Sha256
    request_digest: Sha256  # of all that makes the request the same as another one
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]*$")] = ""  # see `trust.py`
    subject: Text = ""
    body_bytes: Count = 0
    idempotency_key: Text = ""
    kind: JobKind = JobKind.request
    is_rate_counted: bool = True  # all its inferences were counted at the rate when it was accepted
    state: JobState = JobState.queued
    token: Count = 0
    starts: Count = 0
    losses: Count = 0  # runs that ended without a result
    due_at: Time = 0.0  # it starts later than this, because the fleet was busy
    started_at: Time = 0.0
    ended_at: Time = 0.0
    # The response. Its file has the token of the worker that wrote it; 0 means that there is none.
    status: Annotated[int, Field(ge=0, le=599)] = 0
    response_headers: tuple[tuple[ResponseHeader, HeaderValue], ...] = ()
    result_token: Count = 0
    result_bytes: Count = 0
    error: Text = ""  # why it failed, in words
    error_code: Text = ""
    # The rows of a batch; a request has one.
    total_rows: Count = 1
    done_rows: Count = 0
    failed_rows: Count = 0
    rows_per_second: Time = 0.0  # while it runs
    # The callback. `JobStore.find_due_deliveries` returns jobs whose next attempt is due.
    callback_url: Text = ""
    callback_host: Text = ""
    callback_attempts: Count = 0
    callback_due_at: Time = 0.0  # 0: none is to come
    callback_outcome: Text = ""  # `DELIVERED`, or why the last attempt failed

    @property
    def body_file(self) -> str:
        return f"{self.id}{BODY_SUFFIX}"

    @property
    def result_file(self) -> str:
        """Return the name of the file with the result; empty if there is none."""
        return self._name_result(self.result_token) if self.result_token else ""

    @property
    def own_result_file(self) -> str:
        """Return the name of the file to which the worker with this token writes."""
        return self._name_result(self.token)

    @property
    def files(self) -> Sequence[str]:
        """Return the names of all files that the job can have, also of workers that ended."""
        tokens = range(max(self.token - MAX_RESULT_FILES, 0), self.token + 1)
        return [self.body_file, *map(self._name_result, {self.result_token, *tokens})]

    def _name_result(self, token: int) -> str:
        return f"{self.id}.{token}.result"

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
        self, now: float, status: int, headers: Iterable[tuple[str, str]], result_bytes: int
    ) -> Job:
        """Return the job with its response, which is in `own_result_file`."""
        is_done = status < MIN_ERROR_STATUS
        return self._end(
            now,
            JobState.done if is_done else JobState.failed,
            done_rows=int(is_done),
            failed_rows=int(not is_done),
            status=status,
            response_headers=tuple(pair for pair in headers if pair[0] in RESPONSE_HEADERS),
            result_token=self.token,
            result_bytes=result_bytes,
        )

    def finish_batch(self, now: float) -> Job:
        """Return the batch with the rows that were reported as its progress."""
        return self._end(now, JobState.done, status=200)

    def fail(self, now: float, error: GatewayError) -> Job:
        """Return the job as failed without a response."""
        reason = error.detail[:MAX_ERROR_CHARS]
        values = {"status": error.status, "error_code": error.code, "error": reason}
        return self._end(now, JobState.failed, **values)

    def cancel(self, now: float) -> Job:
        return self._end(now, JobState.cancelled)

    def expire(self, now: float) -> Job:
        return self._end(now, JobState.expired)

    def postpone_callback(self, due_at: float) -> Job:
        return self._change(callback_due_at=due_at)

    def _end(self, now: float, state: JobState, **values: Any) -> Job:
        due_at = now if self.callback_url else 0.0
        return self._change(state=state, ended_at=now, callback_due_at=due_at, **values)

    def _change(self, **values: Any) -> Job:
        return replace(self, token=self.token + 1, **values)


JOB: Final = TypeAdapter(Job)


class StoredJob(NamedTuple):
    """A job as a store has it: None if it has none, and empty if the document is too large."""

    id: bytes
    document: bytes | None


class JobReader:
    """Reads stored jobs, and skips and counts those that cannot be read."""

    def __init__(self) -> None:
        self.unreadable = 0

    def read(self, stored: Iterable[StoredJob]) -> list[Job]:
        jobs = []
        for each in stored:
            if each.document is None:
                continue
            try:
                jobs.append(parse_job(each.id, each.document))
            except BadJob:
                self.unreadable += 1
        return jobs


def encode_job(job: Job) -> bytes:
    return orjson.dumps(job)


def parse_job(job_id: bytes, document: bytes) -> Job:
    """Return a job in the form in which gateways write it. Raises `BadJob`."""
    if len(document) > MAX_DOCUMENT_BYTES:
        raise BadJob("it is too large")
    try:
        job = JOB.validate_json(document)
    except ValidationError as exc:
        raise BadJob(f"it has another form: {exc.errors()[0]['type']}") from None
    has_response = job.result_token and job.has_ended and job.kind is JobKind.request
    if job.id.encode() != job_id:
        raise BadJob("its identifier is not the one under which it is stored")
    if job.done_rows + job.failed_rows > job.total_rows:
        raise BadJob("it has more results than rows")
    if has_response and job.status < MIN_RESULT_STATUS:
        raise BadJob("its response has no status")
    return job
