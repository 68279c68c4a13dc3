"""The routes of jobs: `/v1/jobs`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, Final, cast

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask
from starlette.types import Receive, Scope, Send

from gateway.access.auth import authorize_all_models
from gateway.callers import Right
from gateway.capabilities.jobs.errors import JobConflict, JobFileLost, JobNotFound
from gateway.capabilities.jobs.job import DELIVERED, MAX_TIME_S, Job, JobKind, JobState
from gateway.capabilities.jobs.runner import JobRunner
from gateway.capabilities.jobs.service import (
    POLL_S,
    Jobs,
    find_listed_owner,
    find_owner,
    may_use,
    read_piece,
    read_pieces,
)
from gateway.capabilities.jobs.store import JobQuery
from gateway.errors import serialize_error
from gateway.media_types import JSON, NDJSON
from gateway.messages import format_utc_time, quote_text
from gateway.process_exit import Drain
from gateway.routes.dependencies import ServicesForAnyCaller, ServicesForInference
from gateway.routes.openapi import (
    BINARY_CONTENT,
    COUNT_SCHEMA,
    STRING_SCHEMA,
    build_list_schema,
    build_object_schema,
    build_responses,
)
from gateway.services import Services
from gateway.telemetry.request_info import RequestInfo, RequestScope

MAX_WAIT_S: Final = 60
DEFAULT_LIMIT: Final = 100
MAX_LIMIT: Final = 1000
MAX_ROWS: Final = 1 << 31
MAX_CANCEL_ATTEMPTS: Final = 10
TIME_SCHEMA: Final = {"type": "string", "format": "date-time"}
OPTIONAL_FIELDS: Final = {
    "started": TIME_SCHEMA,
    "ended": TIME_SCHEMA,
    "position": {**COUNT_SCHEMA, "description": "Jobs before this one in the queue."},
    "status": {**COUNT_SCHEMA, "description": "Status of the result."},
    "error": build_object_schema({"code": STRING_SCHEMA, "message": STRING_SCHEMA}),
    "callback": build_object_schema(
        {
            "state": {"enum": ["waiting", "due", DELIVERED, "failed"]},
            "attempts": COUNT_SCHEMA,
            "problem": {**STRING_SCHEMA, "description": "Why the last attempt failed."},
            "next_attempt": TIME_SCHEMA,
        },
        optional=("problem", "next_attempt"),
    ),
}
PROGRESS_SCHEMA: Final = build_object_schema(
    {
        **dict.fromkeys(("total", "done", "failed"), COUNT_SCHEMA),
        "rows_per_second": {"type": "number"},
        "estimated_end": TIME_SCHEMA,
    },
    optional=("rows_per_second", "estimated_end"),
    title="JobProgress",
)
JOB_SCHEMA: Final = build_object_schema(
    {
        "id": STRING_SCHEMA,
        "state": {"enum": [state.value for state in JobState]},
        "model": STRING_SCHEMA,
        "kind": {"enum": [kind.value for kind in JobKind]},
        "caller": STRING_SCHEMA,
        "request_id": STRING_SCHEMA,
        "created": TIME_SCHEMA,
        "starts": {**COUNT_SCHEMA, "description": "Times that the job was started."},
        "progress": PROGRESS_SCHEMA,
        **OPTIONAL_FIELDS,
    },
    optional=OPTIONAL_FIELDS.keys(),
    description="A request that runs without a connection.",
    title="Job",
)
JOB_RESPONSES: Final = build_responses(JOB_SCHEMA, "The job.", 404, 503)
RESULT_RESPONSES: Final = build_responses(
    {}, "What the request would have answered.", 404, 409, 503
)
RESULT_RESPONSES[200]["content"] = {"*/*": BINARY_CONTENT}
LIST_RESPONSES: Final = build_responses(
    build_object_schema(
        {"jobs": build_list_schema(JOB_SCHEMA, "The newest first.")}, title="JobList"
    ),
    "The jobs.",
    503,
)
ERASED_RESPONSES: Final = build_responses(
    build_object_schema({"deleted": COUNT_SCHEMA}), "The number of deleted jobs.", 403, 503
)

router = APIRouter(tags=["jobs"])


def render_time(when: float) -> str | None:
    return format_utc_time(min(when, MAX_TIME_S), "milliseconds") if when else None


def omit_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def describe_job(job: Job, position: int | None = None) -> dict[str, Any]:
    return omit_none(
        id=job.id,
        state=job.state.value,
        model=job.model,
        kind=job.kind.value,
        caller=job.caller,
        request_id=job.request_id,
        created=render_time(job.created_at),
        starts=job.starts,
        progress=describe_progress(job),
        position=position,
        started=render_time(job.started_at),
        ended=render_time(job.ended_at),
        status=job.status or None,
        error={"code": job.error_code, "message": job.error} if job.error else None,
        callback=describe_callback(job) if job.callback_url else None,
    )


def describe_progress(job: Job) -> dict[str, Any]:
    speed = job.rows_per_second
    end_at = 0.0
    if speed and job.state is JobState.running:
        end_at = time.time() + (job.total_rows - job.done_rows - job.failed_rows) / speed
    return omit_none(
        total=job.total_rows,
        done=job.done_rows,
        failed=job.failed_rows,
        rows_per_second=round(speed, 1) if speed else None,
        estimated_end=render_time(end_at),
    )


def describe_callback(job: Job) -> dict[str, Any]:
    is_delivered = job.callback_outcome == DELIVERED
    state = DELIVERED if is_delivered else "due" if job.callback_due_at else "failed"
    return omit_none(
        state=state if job.has_ended else "waiting",
        attempts=job.callback_attempts,
        problem=None if is_delivered else job.callback_outcome or None,
        next_attempt=render_time(job.callback_due_at),
    )


async def respond_with_state(jobs: Jobs, job: Job) -> Response:
    position = await jobs.store.find_position(job) if job.state is JobState.queued else None
    return Response(orjson.dumps(describe_job(job, position)), media_type=JSON)


async def respond_with_result(jobs: Jobs, job: Job, *, deletes_job: bool = False) -> Response:
    """Return the stored response of a request. Raises `JobFileLost` before anything is sent."""
    pieces = read_pieces(jobs.store.files, job.result_file, job.result_bytes)
    first = await anext(pieces)

    async def yield_pieces() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    deletion = BackgroundTask(jobs.delete, job) if deletes_job else None
    response = StreamingResponse(yield_pieces(), job.status, background=deletion)
    headers = [*job.response_headers, ("content-length", str(job.result_bytes))]
    response.raw_headers = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return response


async def stream_rows(jobs: Jobs, job: Job, after: int, drain: Drain) -> AsyncIterator[bytes]:
    """Yield the lines of the result after the first `after` ones, until the batch has ended."""
    position = 0
    current: Job | None = job
    change = jobs.watch(job)
    seen = change.count
    while current is not None:
        while position < current.result_bytes:
            size_bytes = current.result_bytes
            try:
                piece = await read_piece(
                    jobs.store.files, current.result_file, position, size_bytes
                )
            except JobFileLost:
                if current.has_ended:
                    raise
                break  # another process continues the batch with a copy
            position += len(piece)
            *lines, rest = piece.split(b"\n", after)
            after -= len(lines)
            if not after:
                yield rest
        if drain.is_draining or (current.has_ended and position >= current.result_bytes):
            return
        seen = await change.wait(seen, POLL_S)
        current = await jobs.store.find(job.id)


class RowsResponse(StreamingResponse):
    """The rows of a batch, for a caller that has a limit of such responses."""

    def __init__(self, jobs: Jobs, job: Job, rows: AsyncIterator[bytes]) -> None:
        super().__init__(rows, media_type=NDJSON)
        self._waiter = jobs.wait_as(job.owner)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._waiter:
            await super().__call__(scope, receive, send)


async def find_job(request: Request, services: ServicesForInference, job: str) -> Job:
    """Return a job that the caller may read. Raises `JobNotFound`."""
    found = await services.get(Jobs).store.find(job)
    if found is None or not may_use(cast(RequestScope, request.scope), found):
        raise JobNotFound(job)
    services.record_model(request.scope["request_info"], found.model)
    return found


# The job whose ID is in the path.
JobInPath = Annotated[Job, Depends(find_job)]


@router.get("/v1/jobs", operation_id="list_jobs", summary="Jobs", responses=LIST_RESPONSES)
async def list_jobs(
    request: Request,
    services: ServicesForInference,
    state: Annotated[JobState | None, Query(description="Only jobs in this state.")] = None,
    model: Annotated[str, Query(description="Only jobs of this model.")] = "",
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT,
    after: Annotated[str, Query(description="The last ID of the page before.")] = "",
) -> Response:
    """Return the jobs of the caller, or with an admin key for all models those of all callers."""
    owner = find_listed_owner(cast(RequestScope, request.scope))
    query = JobQuery(owner, state, model=model, limit=limit, after=after)
    jobs = await services.get(Jobs).store.list_jobs(query)
    return Response(orjson.dumps({"jobs": list(map(describe_job, jobs))}), media_type=JSON)


@router.get(
    "/v1/jobs/{job}", operation_id="get_job", summary="A job and its state", responses=JOB_RESPONSES
)
async def get_job(
    services: ServicesForInference,
    job: JobInPath,
    wait: Annotated[
        int, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait until the job has ended.")
    ] = 0,
) -> Response:
    """Return the job when it has ended, or after the time to wait."""
    jobs = services.get(Jobs)
    current: Job | None = job
    if wait and not job.has_ended:
        with jobs.wait_as(job.owner):
            current = await jobs.wait_until_ended(job, wait)
    if current is None:
        raise JobNotFound(job.id)
    return await respond_with_state(jobs, current)


@router.get(
    "/v1/jobs/{job}/result",
    operation_id="get_job_result",
    summary="The response of a job",
    responses=RESULT_RESPONSES,
)
async def get_result(
    services: ServicesForInference,
    job: JobInPath,
    after: Annotated[
        int, Query(ge=0, le=MAX_ROWS, description="Of a batch, only the rows after this one.")
    ] = 0,
) -> Response:
    """Return what the request would have answered: status, content type and bytes.

    The rows of a batch come one per line, also while it runs.
    """
    jobs = services.get(Jobs)
    jobs.trust.check(job)
    if job.kind is JobKind.batch and (job.result_file or not job.has_ended):
        return RowsResponse(jobs, job, stream_rows(jobs, job, after, services.get(Drain)))
    if job.result_file:
        return await respond_with_result(jobs, job)
    if job.error:
        body = serialize_error(job.error, job.error_code, job.request_id)
        return Response(body, job.status, media_type=JSON)
    advice = "" if job.has_ended else f"; wait for it with GET /v1/jobs/{job.id}?wait=20"
    raise JobConflict(f"job {quote_text(job.id)} is {job.state.value} and has no result{advice}")


@router.delete(
    "/v1/jobs/{job}",
    operation_id="delete_job",
    summary="Cancel or delete a job",
    responses=JOB_RESPONSES,
)
async def delete_job(services: ServicesForInference, job: JobInPath) -> Response:
    """Cancel a job that has not ended, also in Triton; delete one that has, with its result."""
    if job.has_ended:
        await services.get(Jobs).delete(job)
    else:
        job = await cancel_job(services, job)
    return Response(orjson.dumps(describe_job(job)), media_type=JSON)


async def cancel_job(services: Services, job: Job) -> Job:
    """Cancel a job unless it ends at the same moment; return it. Raises `JobNotFound` or `JobConflict`."""
    jobs = services.get(Jobs)
    current: Job | None = job
    for _ in range(MAX_CANCEL_ATTEMPTS):
        if current is None:
            raise JobNotFound(job.id)
        if current.has_ended:
            return current
        cancelled = current.cancel(time.time())
        if await jobs.replace(cancelled, current.token):
            services.get(JobRunner).cancel(current)
            return cancelled
        current = await jobs.store.find(job.id)
    raise JobConflict(f"job {quote_text(job.id)} changes all the time; try again")


@router.delete(
    "/v1/jobs",
    operation_id="erase_jobs",
    summary="Erase a caller's jobs",
    responses=ERASED_RESPONSES,
)
async def erase_jobs(
    request: Request,
    services: ServicesForAnyCaller,
    caller: Annotated[
        str, Query(description="The name of a key, or RULE SUBJECT; it may be revoked.")
    ],
) -> Response:
    """Cancel and delete all jobs of a caller, with their bodies and results: one's own, or as an admin."""
    info: RequestInfo = request.scope["request_info"]
    if caller == info.caller.name:
        own = JobQuery(find_owner(info), limit=MAX_LIMIT)
        erased = [job.id async for job in find_all_jobs(services, own)]
    else:
        authorize_all_models(cast(RequestScope, request.scope), Right.manage)
        everybody = find_all_jobs(services, JobQuery(None, limit=MAX_LIMIT))
        erased = [
            job.id async for job in everybody if caller == f"{job.caller} {job.subject}".rstrip()
        ]
    jobs = services.get(Jobs)
    deleted = 0
    for job_id in erased:
        with suppress(JobNotFound, JobConflict):
            if (job := await jobs.store.find(job_id)) is not None:
                await jobs.delete(await cancel_job(services, job))
                deleted += 1
    return Response(orjson.dumps({"deleted": deleted}), media_type=JSON)


async def find_all_jobs(services: Services, query: JobQuery) -> AsyncIterator[Job]:
    """Yield the jobs of all pages of a list."""
    store = services.get(Jobs).store
    while page := await store.list_jobs(query):
        for job in page:
            yield job
        query = replace(query, after=page[-1].id)
