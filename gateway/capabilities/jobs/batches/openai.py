"""Files and batches of OpenAI's API.

An uploaded file is a job that is stored and does not run; its lines become the rows of a batch. The files of
the results are views of what the batch has written: the lines of requests that succeeded, and the others.
"""

from __future__ import annotations

import io
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple, cast

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse

from gateway.callers import Right
from gateway.capabilities.jobs.acceptance import build_job, check_served_model, keep_job
from gateway.capabilities.jobs.batches.rows import CUSTOM_ID, RowWriter
from gateway.capabilities.jobs.errors import JobConflict, JobNotFound
from gateway.capabilities.jobs.job import MIN_ERROR_STATUS, Job, JobKind, JobState, create_job_id
from gateway.capabilities.jobs.replay import read_all_pieces
from gateway.capabilities.jobs.routes import MAX_LIMIT, JobResultResponse, cancel_job, find_job
from gateway.capabilities.jobs.service import ArrivingBody, Jobs, find_listed_owner
from gateway.capabilities.jobs.storage.store import JobFiles, JobQuery, JobStore
from gateway.errors import MalformedRequest, UnsupportedBody
from gateway.inference.body import RequestBody
from gateway.media_types import JSON, MULTIPART, NDJSON
from gateway.memory import MemoryCharge
from gateway.messages import is_model_name, quote_text
from gateway.routes.dependencies import ServicesForInference
from gateway.routes.openapi import (
    BINARY_CONTENT,
    OPENAI_ERROR_REFERENCE,
    build_json_body,
    build_responses,
)
from gateway.routes.repository import read_management_body
from gateway.telemetry.request_info import RequestScope
from gateway.tensors.media_type import (
    decode_header_text,
    parse_content_type,
    parse_header_parameters,
)
from gateway.tensors.multipart import PartReader

ENDPOINT: Final = "/v1/embeddings"
LINE_FORM: Final = (
    f'{{"custom_id": "…", "method": "POST", "url": "{ENDPOINT}", "body": {{"model": "…", …}}}}'
)
WINDOW: Final = "24h"
PURPOSE: Final = "batch"
MAX_FIELDS: Final = 16
# The limits of OpenAI's API.
MAX_METADATA_PAIRS: Final = 16
MAX_METADATA_NAME_CHARS: Final = 64
MAX_METADATA_VALUE_CHARS: Final = 512
FILE_PREFIX: Final = "file-"
BATCH_PREFIX: Final = "batch_"
# The results of a batch that are files, and the key of `Job.details` under which the deleted ones are.
OUTPUT: Final = "output"
ERRORS: Final = "errors"
DELETED: Final = "deleted"
# The states of jobs that have another name in OpenAI's API.
STATUSES: Final = {"queued": "validating", "running": "in_progress", "done": "completed"}
# The first match in a line is the status of its response: in the strings before it, quotes are escaped.
STATUS_CODE: Final = re.compile(rb'"status_code":(\d+),')
OBJECT: Final = {"type": "object", "description": "An object of OpenAI's API."}
RESPONSES: Final = build_responses(
    OBJECT, "Success.", 404, 409, 415, error_schema=OPENAI_ERROR_REFERENCE
)
CONTENT_RESPONSES = RESPONSES | {200: {**RESPONSES[200], "content": {NDJSON: BINARY_CONTENT}}}
UPLOAD: Final = {"required": True, "content": {MULTIPART: {"schema": OBJECT}}}

router = APIRouter(tags=["batches"])
route_get = partial(router.get, responses=RESPONSES)
route_post = partial(router.post, responses=RESPONSES)


class BatchFile(NamedTuple):
    """An uploaded file, which has no part, or a part of the results of a batch."""

    job: Job
    part: str
    size_bytes: int

    @property
    def id(self) -> str:
        stem = self.job.id.removeprefix(BATCH_PREFIX)
        return f"{FILE_PREFIX}{stem}-{self.part}" if self.part else self.job.id


def list_job_files(job: Job) -> list[BatchFile]:
    """Return the files of a job, without the results that its caller has deleted."""
    if job.kind is JobKind.file:
        return [BatchFile(job, "", job.result_bytes)]
    sizes = {OUTPUT: job.result_bytes - job.failed_bytes, ERRORS: job.failed_bytes}
    files = [BatchFile(job, part, size_bytes) for part, size_bytes in sizes.items() if size_bytes]
    return [file for file in files if job.has_ended and file.part not in job.details[DELETED]]


async def find_file(request: Request, services: ServicesForInference, file: str) -> BatchFile:
    """Return a file that the caller may read. Raises `JobNotFound`."""
    stem, is_part, _ = file.removeprefix(FILE_PREFIX).partition("-")
    prefix = BATCH_PREFIX if is_part else FILE_PREFIX
    with suppress(JobNotFound):
        job = await find_job(request, services, f"{prefix}{stem}")
        for found in list_job_files(job):
            if found.id == file:
                return found
    raise JobNotFound(file, "file", "/v1/files")


async def find_batch(request: Request, services: ServicesForInference, batch: str) -> Job:
    """Return a batch that the caller may read. Raises `JobNotFound`."""
    with suppress(JobNotFound):
        job = await find_job(request, services, batch)
        if job.kind is JobKind.openai_batch:
            return job
    raise JobNotFound(batch, "batch", "/v1/batches")


FileInPath = Annotated[BatchFile, Depends(find_file)]
BatchInPath = Annotated[Job, Depends(find_batch)]


def describe_batch_file(jobs: Jobs, file: BatchFile) -> dict[str, Any]:
    job, part, size_bytes = file
    return {
        "id": file.id,
        "object": "file",
        "bytes": size_bytes,
        "created_at": int(job.ended_at),
        "expires_at": int(job.ended_at + jobs.settings.job_retention_s),
        "filename": f"{job.id}_{part}.jsonl" if part else job.details["filename"],
        "purpose": "batch_output" if part else PURPOSE,
        "status": "processed",
    }


def describe_upload(jobs: Jobs, job: Job) -> dict[str, Any]:
    (file,) = list_job_files(job)
    return describe_batch_file(jobs, file)


def describe_batch(jobs: Jobs, job: Job) -> dict[str, Any]:
    waits_again = job.state is JobState.queued and job.started_at
    state = JobState.running if waits_again else job.state
    status = STATUSES.get(state.value, state.value)
    files = {file.part: file.id for file in list_job_files(job)}
    error = {"code": job.error_code, "message": job.error, "param": None, "line": None}
    document = {
        "id": job.id,
        "object": "batch",
        "endpoint": job.path,
        "model": job.model,
        "errors": {"object": "list", "data": [error]} if job.error else None,
        "input_file_id": job.details["input_file_id"],
        "completion_window": WINDOW,
        "status": status,
        "output_file_id": files.get(OUTPUT),
        "error_file_id": files.get(ERRORS),
        "created_at": int(job.created_at),
        "in_progress_at": int(job.started_at) or None,
        "expires_at": int(job.created_at + jobs.settings.job_retention_s),
        "request_counts": {
            "total": job.total_rows,
            "completed": job.done_rows,
            "failed": job.failed_rows,
        },
        "metadata": job.details["metadata"],
    }
    return {**document, f"{status}_at": int(job.ended_at)} if job.has_ended else document


def respond(document: Any) -> Response:
    return Response(orjson.dumps(document), media_type=JSON)


async def list_page(
    request: Request, jobs: Jobs, query: JobQuery, describe: Callable[[Jobs, Job], dict[str, Any]]
) -> Response:
    owner = find_listed_owner(cast(RequestScope, request.scope))
    query = replace(query, owner=owner, limit=query.limit + 1)
    found = await jobs.store.list_jobs(query)
    has_more = len(found) == query.limit
    data = [describe(jobs, job) for job in found[: query.limit - 1]]
    return respond({"object": "list", "data": data, "has_more": has_more})


class FileWriter(RowWriter):
    """Writes the file of a form, whose lines are requests for one model."""

    def __init__(
        self, file: ArrivingBody, max_rows: int, charge: MemoryCharge, content_type: str
    ) -> None:
        super().__init__(file, max_rows, charge)
        media_type, _ = parse_content_type(content_type)
        if media_type != MULTIPART:
            raise UnsupportedBody(content_type, (MULTIPART,))
        self._parser = PartReader(content_type, MAX_FIELDS)
        self._purpose = b""
        self._files = 0
        self.name = ""
        self.model = ""

    async def feed(self, data: bytes) -> None:
        for part in self._parser.feed(data):
            self._files += await self._extend(part.headers, part.content)
        if (headers := self._parser.part_headers) is not None:
            await self._extend(headers, self._parser.take_partial_content())

    async def _extend(self, headers: Mapping[str, str], content: bytes) -> bool:
        """Keep a piece of a field; return whether the field is the file."""
        _, options = parse_header_parameters(headers.get("content-disposition", ""))
        if options.get("name") == "purpose":
            self._purpose = (self._purpose + content)[: len(PURPOSE) + 1]
        if options.get("name") != "file":
            return False
        self.name = decode_header_text(options.get("filename", ""))
        await super().feed(content)
        return True

    async def finish(self) -> None:
        self._parser.finish()
        await super().finish()
        if self._files != 1 or not self.rows or self._purpose != PURPOSE.encode():
            raise MalformedRequest(
                f'the form must have the fields "purpose", which is "{PURPOSE}", and "file", which is '
                "one file with a request on each line"
            )

    async def _write(self, lines: Sequence[bytes | bytearray], rows: int | None = None) -> None:
        for number, line in enumerate(lines, self.rows + 1):
            self._check(number, line)
        await super()._write(lines, rows)

    def _check(self, number: int, line: bytes | bytearray) -> None:
        try:
            request = orjson.loads(line)
            model = request["body"]["model"]
            orjson.dumps(request["body"])  # orjson can read more levels than it can write
            is_valid = (
                type(model) is type(request[CUSTOM_ID]) is str
                and is_model_name(model)
                and (request["method"], request["url"]) == ("POST", ENDPOINT)
            )
        except (KeyError, TypeError, ValueError):
            is_valid = False
        if not is_valid:
            raise MalformedRequest(f"request {number} of the file is not of the form {LINE_FORM}")
        self.model = self.model or model
        if model != self.model:
            raise MalformedRequest(
                f"request {number} of the file is for another model than those before it; make a file "
                "for each model"
            )


@route_post(
    "/v1/files",
    operation_id="create_file",
    summary="Upload the requests of a batch",
    openapi_extra={"requestBody": UPLOAD},
)
async def create_file(request: Request, services: ServicesForInference) -> Response:
    """Check and keep a file with a request on each line, all for one model."""
    jobs = services.get(Jobs)
    max_bytes = jobs.settings.max_batch_bytes
    body = RequestBody(request.scope, request.receive)
    job = build_job(f"{FILE_PREFIX}{create_job_id()}", request.scope)
    charge = services.get_charge(request.scope["request_info"])
    async with ArrivingBody(jobs, job.body_file) as file:
        writer = FileWriter(file, jobs.settings.max_batch_rows, charge, body.content_type)
        async for chunk in body.stream(max_bytes):
            await writer.feed(chunk)
        await writer.finish()
        job = replace(
            job,
            kind=JobKind.file,
            state=JobState.stored,
            model=writer.model,
            ended_at=job.created_at,
            total_rows=writer.rows,
            body_bytes=writer.size_bytes,
            status=200,
            response_headers=[("content-type", NDJSON)],
            result_file=job.body_file,
            result_bytes=writer.size_bytes,
            details={"filename": writer.name},
        )
        await keep_job(jobs, job, file)
    return respond(describe_upload(jobs, job))


@route_get("/v1/files", operation_id="list_files", summary="Uploaded files")
async def list_uploads(
    request: Request,
    services: ServicesForInference,
    limit: Annotated[int, Query(ge=1, le=10_000)] = MAX_LIMIT,
    after: str = "",
    purpose: Literal["batch"] = "batch",
    order: Literal["desc"] = "desc",
) -> Response:
    """Return the uploaded files of the caller. Batches have the IDs of their results."""
    query = JobQuery(None, id_prefix=FILE_PREFIX, limit=min(limit, MAX_LIMIT), after=after)
    return await list_page(request, services.get(Jobs), query, describe_upload)


@route_get("/v1/files/{file}", operation_id="get_file", summary="A file")
async def get_file(services: ServicesForInference, file: FileInPath) -> Response:
    """Return the size and the times of a file."""
    return respond(describe_batch_file(services.get(Jobs), file))


@router.get(
    "/v1/files/{file}/content",
    operation_id="get_file_content",
    summary="The lines of a file",
    responses=CONTENT_RESPONSES,
)
async def get_file_content(services: ServicesForInference, file: FileInPath) -> Response:
    """Return the requests of an uploaded file, or the responses of a batch in their order."""
    jobs = services.get(Jobs)
    if not file.part:
        return JobResultResponse(jobs, file.job)
    headers = {"content-length": str(file.size_bytes)}
    return StreamingResponse(
        stream_lines(jobs.store.files, file), headers=headers, media_type=NDJSON
    )


async def stream_lines(files: JobFiles, file: BatchFile) -> AsyncIterator[bytes]:
    job = file.job
    start = b""
    is_wanted: bool | None = None  # unknown until the status in a line was read
    async for piece in read_all_pieces(files, job.result_file, job.result_bytes):
        lines = io.BytesIO(start + piece)
        start = b""
        wanted = []
        for line in lines:
            if is_wanted is None and (status := STATUS_CODE.search(line)):
                is_wanted = (int(status[1]) >= MIN_ERROR_STATUS) == (file.part == ERRORS)
            if is_wanted is None:
                start = line
            elif is_wanted:
                wanted.append(line)
            if line.endswith(b"\n"):
                is_wanted = None
        yield b"".join(wanted)


@router.delete(
    "/v1/files/{file}", operation_id="delete_file", summary="Delete a file", responses=RESPONSES
)
async def delete_file(services: ServicesForInference, file: FileInPath) -> Response:
    """Delete an uploaded file, whose batches go on, or a result of a batch."""
    jobs = services.get(Jobs)
    if file.part:
        await delete_result(jobs.store, file)
    else:
        await jobs.delete(file.job)
    return respond({"id": file.id, "object": "file", "deleted": True})


async def delete_result(store: JobStore, file: BatchFile) -> None:
    """Delete a result of a batch, of which another one may be deleted at the same time."""
    job: Job | None = file.job
    while job is not None:
        details = {**job.details, DELETED: [*job.details[DELETED], file.part]}
        changed = replace(job, token=job.token + 1, details=details)
        has_others = bool(list_job_files(changed))
        if not has_others:
            changed = replace(changed, result_file="", result_bytes=0, failed_bytes=0)
        if await store.replace(changed, job.token):
            if not has_others:
                await store.files.delete(job.result_file)
            return
        job = await store.find(job.id)


@route_post(
    "/v1/batches",
    operation_id="create_openai_batch",
    summary="Run the requests of a file",
    openapi_extra=build_json_body(OBJECT),
)
async def create_openai_batch(request: Request, services: ServicesForInference) -> Response:
    """Keep the requests of an uploaded file, and run them without a connection."""
    jobs = services.get(Jobs)
    scope = request.scope
    wanted = await read_management_body(request, services)
    metadata = wanted.get("metadata")
    if wanted.get("endpoint") != ENDPOINT or wanted.get("completion_window") != WINDOW:
        raise MalformedRequest(
            f'"endpoint" must be "{ENDPOINT}", and "completion_window" must be "{WINDOW}"'
        )
    if metadata is not None:
        check_metadata(metadata)
    file, part, _ = await find_file(request, services, str(wanted.get("input_file_id")))
    if part:
        raise MalformedRequest('"input_file_id" must be the ID of an uploaded file')
    services.resolver.check_access(cast(RequestScope, scope), Right.infer, file.model)
    await check_served_model(request, services, file.model)
    job = build_job(f"{BATCH_PREFIX}{create_job_id()}", scope)
    headers = [pair for pair in job.headers if not pair[0].startswith(("accept", "content-"))]
    job = replace(
        job,
        kind=JobKind.openai_batch,
        model=file.model,
        path=ENDPOINT,
        headers=[("content-type", NDJSON), *headers],
        body_bytes=file.result_bytes,
        total_rows=file.total_rows,
        details={"input_file_id": file.id, "metadata": metadata, DELETED: []},
    )

    async with ArrivingBody(jobs, job.body_file) as copy:
        async for piece in read_all_pieces(jobs.store.files, file.result_file, file.result_bytes):
            await copy.append(piece)
        await keep_job(jobs, job, copy)
    return respond(describe_batch(jobs, job))


def check_metadata(metadata: Any) -> None:
    """Raises `MalformedRequest`: metadata is a part of the job, which is written at each report."""
    if not (
        isinstance(metadata, dict)
        and len(metadata) <= MAX_METADATA_PAIRS
        and all(len(name) <= MAX_METADATA_NAME_CHARS for name in metadata)
        and all(isinstance(value, str) for value in metadata.values())
        and all(len(value) <= MAX_METADATA_VALUE_CHARS for value in metadata.values())
    ):
        raise MalformedRequest(
            f'"metadata" must be a JSON object with at most {MAX_METADATA_PAIRS} strings, of at most '
            f"{MAX_METADATA_VALUE_CHARS} characters, and with names of at most {MAX_METADATA_NAME_CHARS}"
        )


@route_get("/v1/batches", operation_id="list_batches", summary="Batches of files")
async def list_batches(
    request: Request,
    services: ServicesForInference,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str = "",
) -> Response:
    """Return the batches of the caller."""
    query = JobQuery(None, id_prefix=BATCH_PREFIX, limit=limit, after=after)
    return await list_page(request, services.get(Jobs), query, describe_batch)


@route_get("/v1/batches/{batch}", operation_id="get_batch", summary="A batch and its status")
async def get_batch(services: ServicesForInference, batch: BatchInPath) -> Response:
    """Return the batch, with the IDs of its results when it has ended."""
    return respond(describe_batch(services.get(Jobs), batch))


@route_post("/v1/batches/{batch}/cancel", operation_id="cancel_batch", summary="Cancel a batch")
async def cancel_batch(services: ServicesForInference, batch: BatchInPath) -> Response:
    """Cancel a batch that has not ended. It keeps the results of the requests that have run."""
    if batch.has_ended:
        raise JobConflict(f"batch {quote_text(batch.id)} has ended already")
    job = await cancel_job(services, batch)
    return respond(describe_batch(services.get(Jobs), job))
