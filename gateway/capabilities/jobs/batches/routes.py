"""The route that accepts batches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from fastapi import APIRouter, Request, Response

from gateway.capabilities.jobs.acceptance import (
    HEADER_PARAMETERS,
    JobAcceptance,
    StoredBody,
    build_job,
    find_callback,
    keep_job,
    respond_with_job,
)
from gateway.capabilities.jobs.batches.rows import (
    ARCHIVE_TYPES,
    ArchiveWriter,
    FormWriter,
    RowWriter,
)
from gateway.capabilities.jobs.job import BODY_SUFFIX, JobKind, create_job_id
from gateway.capabilities.jobs.routes import JOB_SCHEMA
from gateway.capabilities.jobs.service import ArrivingBody, Jobs
from gateway.errors import MalformedRequest, UnsupportedBody
from gateway.inference.body import RequestBody
from gateway.media_types import MULTIPART, NDJSON
from gateway.memory import MemoryCharge
from gateway.routes.dependencies import ServicesForInference
from gateway.routes.infer import choose_stream_format
from gateway.routes.openapi import BINARY_CONTENT, build_responses
from gateway.services import Services
from gateway.tensors.codecs import STRING_SCHEMA
from gateway.tensors.media_type import parse_content_type

BATCH_TYPES: Final = (NDJSON, MULTIPART, *ARCHIVE_TYPES)
BATCH_RESPONSES: Final = build_responses(JOB_SCHEMA, "The job.", 404, 409, 413, 415, 422, 429, 503)
BATCH_RESPONSES[202] = BATCH_RESPONSES.pop(200)
BATCH_OPENAPI: Final = {
    "requestBody": {
        "required": True,
        "description": "Rows: documents for `/infer`, one per line, or the files of a form or an archive.",
        "content": {
            NDJSON: {"schema": STRING_SCHEMA},
            MULTIPART: {"schema": {"type": "object"}},
            **dict.fromkeys(ARCHIVE_TYPES, BINARY_CONTENT),
        },
    },
    "parameters": [HEADER_PARAMETERS[1]],
}

router = APIRouter(tags=["jobs"])


@router.post(
    "/v1/models/{model}/jobs",
    status_code=202,
    operation_id="create_batch",
    summary="Run many inferences as one job",
    responses=BATCH_RESPONSES,
    openapi_extra=BATCH_OPENAPI,
)
async def create_batch(request: Request, services: ServicesForInference, model: str) -> Response:
    """Keep the rows, and run them without a connection. Each row succeeds or fails alone."""
    await check_served_model(request, services, model)
    jobs = services.get(Jobs)
    charge = services.get_charge(request.scope["request_info"])
    accept = partial(accept_batch, jobs, request, model, charge)
    max_bytes = jobs.settings.max_batch_bytes
    return await services.get(JobAcceptance).accept_once(jobs, request, accept, max_bytes)


async def check_served_model(request: Request, services: Services, model: str) -> None:
    """Raises `UnknownModel`, unless a model of this name can be loaded later."""
    services.record_model(request.scope["request_info"], model)
    if not services.pool.is_awaited(model):
        await services.signatures.get_signature(model, "")


async def accept_batch(
    jobs: Jobs, request: Request, model: str, charge: MemoryCharge, key: str
) -> Response:
    scope = request.scope
    if choose_stream_format(request.headers.get("accept", "")) is not None:
        raise MalformedRequest("a stream cannot be a row of a batch; accept another type")
    callback = find_callback(jobs, scope)
    max_bytes = jobs.settings.max_batch_bytes
    received = StoredBody(scope, request.receive, max_bytes)
    body = RequestBody(scope, received.receive)
    media_type, _ = parse_content_type(body.content_type)
    if media_type not in BATCH_TYPES:
        raise UnsupportedBody(body.content_type, BATCH_TYPES)
    job_id = create_job_id()
    limits = (jobs.settings.max_batch_rows, charge)
    async with (
        ArrivingBody(jobs, f"{job_id}{BODY_SUFFIX}") as file,
        ArrivingBody(jobs, f"{job_id}.archive{BODY_SUFFIX}") as archive,
    ):
        writer = RowWriter(file, *limits)
        if media_type == MULTIPART:
            writer = FormWriter(file, *limits, body.content_type)
        elif media_type != NDJSON:
            writer = ArchiveWriter(file, *limits, archive=archive, jobs=jobs)
        async for chunk in body.stream(max_bytes):
            await writer.feed(chunk)
        await writer.finish()
        if not writer.rows:
            raise MalformedRequest(
                "the batch has no rows; send one document per line, or files in a form or an archive"
            )
        job = build_job(job_id, scope)
        fields = {**received.describe(key), "body_bytes": writer.size_bytes, **callback}
        job = replace(
            job,
            kind=JobKind.batch,
            model=model,
            path=f"/v1/models/{model}/infer",
            headers=[pair for pair in job.headers if pair[0] != "content-encoding"],
            total_rows=writer.rows,
            **fields,
        )
        return respond_with_job(await keep_job(jobs, job, file))
