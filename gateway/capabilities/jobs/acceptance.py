"""Requests with `Prefer: respond-async`, and batches, which become jobs.

A request is checked by a dry run of its own handler, while its body is written to disk. What the handler
answers without the model, such as an error, is the answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import orjson
from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope

from gateway.capabilities.jobs.errors import JobsUnavailable, KeyReused, TooManyWaiters
from gateway.capabilities.jobs.job import (
    BODY_SUFFIX,
    PATHS,
    REQUEST_HEADERS,
    BadJob,
    Job,
    JobKind,
    create_job_id,
    encode_job,
    parse_job,
)
from gateway.capabilities.jobs.replay import ResponseCapture
from gateway.capabilities.jobs.routes import JOB_SCHEMA, JobResultResponse, describe_job
from gateway.capabilities.jobs.rows import FormWriter, RowWriter
from gateway.capabilities.jobs.service import ArrivingBody, Jobs, find_owner
from gateway.errors import BodyTooLarge, GatewayError, MalformedRequest, UnsupportedBody
from gateway.headers import parse_content_type
from gateway.inference.body import RequestBody
from gateway.inference.pipeline import DryRun, DryRunPassed
from gateway.media_types import JSON, MULTIPART, NDJSON
from gateway.memory import MemoryCharge
from gateway.routes.dependencies import ServicesForInference
from gateway.routes.infer import choose_stream_format
from gateway.routes.middleware import GatewayMiddleware
from gateway.routes.openapi import STRING_SCHEMA, build_header_parameter, build_responses
from gateway.services import INTERNAL_REQUEST, InternalRequest, Services
from gateway.telemetry.request_info import RequestInfo
from gateway.telemetry.tracing import TRACEPARENT

PREFER: Final = b"prefer"
IDEMPOTENCY_KEY: Final = b"idempotency-key"
CALLBACK_URL: Final = b"x-callback-url"
RESPOND_ASYNC: Final = re.compile(r"(?:^|[,;\s])respond-async(?:$|[,;\s])", re.IGNORECASE)
WAIT: Final = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,5})\"?(?:$|[,;\s])", re.IGNORECASE)
MAX_WAIT_S: Final = 60
MAX_KEY_CHARS: Final = 255
# Two requests with the same Idempotency-Key must have the same of these.
DISTINCTIVE_HEADERS: Final = (
    *(b"content-type", b"content-encoding", b"accept", b"x-request-timeout"),
    CALLBACK_URL,
)

HEADER_PARAMETERS: Final = (
    build_header_parameter(
        "Prefer",
        "Run the request as a job; with wait=N, answer with its result if it ends within N seconds.",
        {"type": "string", "examples": ["respond-async", "respond-async, wait=5"]},
    ),
    build_header_parameter(
        "Idempotency-Key",
        "Repeated requests with the same key are one job.",
        {"type": "string", "maxLength": MAX_KEY_CHARS},
    ),
)
ACCEPTED_RESPONSE: Final = {
    "description": "The job, if the request prefers `respond-async`.",
    "headers": {"Location": {"description": "Path of the job.", "schema": STRING_SCHEMA}},
    "content": {JSON: {"schema": JOB_SCHEMA}},
}

BATCH_TYPES: Final = (NDJSON, MULTIPART)
BATCH_RESPONSES: Final = build_responses(JOB_SCHEMA, "The job.", 404, 409, 413, 415, 422, 429, 503)
BATCH_RESPONSES[202] = BATCH_RESPONSES.pop(200)
BATCH_OPENAPI: Final = {
    "requestBody": {
        "required": True,
        "description": "Rows: documents for `/infer`, one per line, or the files of a form.",
        "content": {
            NDJSON: {"schema": STRING_SCHEMA},
            MULTIPART: {"schema": {"type": "object"}},
        },
    },
    "parameters": [HEADER_PARAMETERS[1]],
}

router = APIRouter(tags=["jobs"])


class StoredBody:
    """The body of a request, written to a file while a handler receives it; without a file, only counted."""

    def __init__(
        self, scope: Scope, receive: Receive, max_bytes: int, file: ArrivingBody | None = None
    ) -> None:
        self._file = file
        self._receive = receive
        self._max_bytes = max_bytes
        self._is_complete = False
        self._size_bytes = 0
        headers = (join_header_values(scope, name) for name in DISTINCTIVE_HEADERS)
        head = (scope["raw_path"], scope["query_string"], *headers)
        self._hash = hashlib.sha256(b"\0".join(head) + b"\0")

    @property
    def digest(self) -> str:
        """Return a digest of all that makes the request the same as another one."""
        return self._hash.hexdigest()

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            data = message.get("body", b"")
            self._is_complete = not message.get("more_body", False)
            self._hash.update(data)
            self._size_bytes += len(data)
            if self._size_bytes > self._max_bytes:
                raise BodyTooLarge(self._max_bytes)
            if data and self._file is not None:
                await self._file.append(data)
        return message

    async def receive_rest(self) -> None:
        """Receive what the handler left. Raises `ClientDisconnect`."""
        while not self._is_complete:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect


class JobAcceptance:
    """The deferral of requests with `Prefer: respond-async`."""

    def matches(self, scope: Scope) -> bool:
        is_path = scope["method"] == "POST" and PATHS.fullmatch(scope["path"]) is not None
        return is_path and RESPOND_ASYNC.search(find_preferences(scope)) is not None

    def describe(self, document: dict[str, Any]) -> None:
        for path, operations in document["paths"].items():
            if PATHS.fullmatch(path) is not None:
                operation = operations["post"]
                operation["responses"]["202"] = ACCEPTED_RESPONSE
                operation["parameters"] = [*operation.get("parameters", ()), *HEADER_PARAMETERS]

    async def handle(self, request: Request, services: Services) -> Response:
        scope = request.scope
        services.get(GatewayMiddleware).choose_error_serializer(scope)
        jobs = services.get(Jobs)
        accept = partial(self._accept, jobs, services, scope, request.receive)
        return await accept_once(jobs, request, accept, jobs.max_body_bytes)

    async def _accept(
        self, jobs: Jobs, services: Services, scope: Scope, receive: Receive, key: str
    ) -> Response:
        if scope["path"].endswith("/infer"):
            check_accept(scope, "job; send it without Prefer: respond-async")
        job_id = create_job_id()
        callback = find_callback(jobs, scope)
        dry_run = DryRun()
        async with ArrivingBody(jobs, f"{job_id}{BODY_SUFFIX}") as file:
            body = StoredBody(scope, receive, jobs.max_body_bytes, file)
            answer = await check_request(services, scope, body.receive, dry_run)
            if answer is not None:
                return answer
            await body.receive_rest()
            job = build_job(job_id, scope, body.digest, file, idempotency_key=key, **callback)
            # The inferences of a request cannot be counted before its model is loaded.
            job = replace(job, is_rate_counted=dry_run.request is not None)
            kept = await keep_job(jobs, job, file)
        wait = WAIT.search(find_preferences(scope))
        if wait is not None and kept.id == job_id:
            # The body is in its file: it needs no memory while the client waits.
            services.get_charge(scope["request_info"]).release()
            with suppress(TooManyWaiters), jobs.wait_as(kept.owner):
                kept = await jobs.wait_until_ended(kept, min(int(wait[1]), MAX_WAIT_S)) or kept
            if kept.result_file and jobs.trust.is_signed(kept):
                is_unknown = not (key or callback)  # nobody knows its ID
                return JobResultResponse(jobs, kept, deletes_job=is_unknown)
        return respond_with_job(kept)


async def accept_once(
    jobs: Jobs, request: Request, accept: Callable[[str], Awaitable[Response]], max_bytes: int
) -> Response:
    """Return the answer of `accept`, or the job that has the idempotency key of the request.

    Of requests that arrive at the same time, the store keeps one. Raises `SubjectRequired`.
    """
    scope = request.scope
    owner = find_owner(scope["request_info"])
    key = join_header_values(scope, IDEMPOTENCY_KEY).decode("latin-1").strip()
    if len(key) > MAX_KEY_CHARS:
        raise MalformedRequest(f"Idempotency-Key exceeds {MAX_KEY_CHARS} characters")
    known = await jobs.store.find_by_key(owner, key) if key else None
    if known is None or not jobs.trust.is_signed(known):
        return await accept(key)
    body = StoredBody(scope, request.receive, max_bytes)
    await body.receive_rest()
    check_digest(known, body.digest)
    return respond_with_job(known)


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
    info: RequestInfo = request.scope["request_info"]
    services.record_model(info, model)
    if not services.pool.is_awaited(model):  # it cannot be loaded later
        await services.signatures.get_signature(model, "")
    jobs = services.get(Jobs)
    accept = partial(accept_batch, jobs, request, model, services.get_charge(info))
    return await accept_once(jobs, request, accept, jobs.settings.max_batch_bytes)


async def accept_batch(
    jobs: Jobs, request: Request, model: str, charge: MemoryCharge, key: str
) -> Response:
    scope = request.scope
    check_accept(scope, "row of a batch; send it alone")
    callback = find_callback(jobs, scope)
    max_bytes = jobs.settings.max_batch_bytes
    received = StoredBody(scope, request.receive, max_bytes)
    body = RequestBody(scope, received.receive)
    media_type, _ = parse_content_type(body.content_type)
    if media_type not in BATCH_TYPES:
        raise UnsupportedBody(body.content_type, BATCH_TYPES)
    job_id = create_job_id()
    limits = (jobs.settings.max_batch_rows, charge)
    async with ArrivingBody(jobs, f"{job_id}{BODY_SUFFIX}") as file:
        writer = RowWriter(file, *limits)
        if media_type == MULTIPART:
            writer = FormWriter(file, *limits, body.content_type)
        async for chunk in body.stream(max_bytes):
            await writer.feed(chunk)
        await writer.finish()
        if not writer.rows:
            raise MalformedRequest(
                "the batch has no rows; send one document per line, or files in a form"
            )
        job = build_job(job_id, scope, received.digest, file, idempotency_key=key, **callback)
        job = replace(
            job,
            kind=JobKind.batch,
            model=model,
            path=f"/v1/models/{model}/infer",
            headers=tuple(pair for pair in job.headers if pair[0] != "content-encoding"),
            total_rows=writer.rows,
        )
        return respond_with_job(await keep_job(jobs, job, file))


async def keep_job(jobs: Jobs, job: Job, file: ArrivingBody) -> Job:
    """Keep a job whose body is complete; return it, or the one that has its idempotency key.

    Raises `KeyReused`, `JobNotTrusted`, `TooManyJobs` or `JobsFull`.
    """
    try:
        parse_job(job.id.encode(), encode_job(job))
    except BadJob as exc:
        raise MalformedRequest(f"the request cannot be a job: {exc}") from None
    job = jobs.trust.sign(job)
    file.is_kept = True
    # A client that disconnects now cannot separate a job from its body.
    kept = await asyncio.shield(jobs.tasks.start(add_job(jobs, job, file)))
    jobs.changes.notify()
    jobs.trust.check(kept)
    check_digest(kept, job.request_digest)
    return kept


async def add_job(jobs: Jobs, job: Job, file: ArrivingBody) -> Job:
    try:
        if job.body_bytes:
            await jobs.store.files.flush(file.file)
        kept = await jobs.store.add(job, jobs.settings.max_jobs_per_caller)
    except JobsUnavailable:
        raise  # the job may be kept: Redis answered too late
    except GatewayError:
        await file.discard()
        raise
    finally:
        file.release()
    if kept is not job:
        await file.discard()
    else:
        jobs.stored_bytes += job.body_bytes
    return kept


def check_digest(job: Job, digest: str) -> None:
    """Raises `KeyReused` if the job was made by another request."""
    if job.request_digest != digest:
        raise KeyReused


async def check_request(
    services: Services, scope: Scope, receive: Receive, dry_run: DryRun
) -> Response | None:
    """Return what the request's handler answers without the model; None if the model would run.

    Raises `MalformedRequest` for a request that cannot be a job.
    """
    info: RequestInfo = scope["request_info"]
    capture = ResponseCapture()
    inner = {**scope, INTERNAL_REQUEST: InternalRequest(services, info.caller, dry_run)}
    await services.get(GatewayMiddleware).framework(inner, receive, capture.send)
    info.route = getattr(inner.get("route"), "path", "")
    scope["path_params"] = inner.get("path_params", {})
    if capture.status != DryRunPassed.status:
        return capture.build_response()
    info.error_code = info.error_reason = ""
    if dry_run.request is not None and dry_run.request.target.sequence_step is not None:
        raise MalformedRequest(
            "a request of a sequence cannot be a job, because jobs have no order; send it without "
            "Prefer: respond-async"
        )
    return None


def respond_with_job(job: Job) -> Response:
    headers = {"Location": f"/v1/jobs/{job.id}", "Preference-Applied": "respond-async"}
    return Response(orjson.dumps(describe_job(job)), DryRunPassed.status, headers, JSON)


def build_job(
    job_id: str, scope: Scope, request_digest: str, body: ArrivingBody, **values: Any
) -> Job:
    """Return a job that sends the request of a scope."""
    info: RequestInfo = scope["request_info"]
    headers = [pair for pair in scope["headers"] if pair[0].decode("latin-1") in REQUEST_HEADERS]
    if info.trace is not None:  # the job belongs to the trace of its request
        others = (pair for pair in headers if pair[0] != TRACEPARENT)
        headers = [*others, (TRACEPARENT, info.trace.traceparent.encode())]
    client = scope["client"]
    return Job(
        job_id,
        find_owner(info),
        # A model that no replica has loaded is not in the info.
        info.model or scope["path_params"].get("model", ""),
        path=scope["path"],
        query=scope["query_string"].decode("latin-1"),
        headers=tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers),
        client=client[0] if client else "",
        request_id=info.request_id,
        caller_id=info.caller.id,
        caller=info.caller.name,
        subject=info.subject,
        created_at=time.time(),
        body_bytes=body.size_bytes,
        body_digest=body.hash.hexdigest(),
        request_digest=request_digest,
        **values,
    )


def find_callback(jobs: Jobs, scope: Scope) -> dict[str, Any]:
    """Return the fields of the job's callback. Raises `CallbackNotAllowed` or `MalformedRequest`."""
    text = join_header_values(scope, CALLBACK_URL).decode("latin-1")
    if not text:
        return {}
    url = jobs.callback_urls.check_url(text)
    return {"callback_url": text, "callback_host": url.authority}


def check_accept(scope: Scope, place: str) -> None:
    """Raises `MalformedRequest` if the client prefers a stream."""
    if choose_stream_format(join_header_values(scope, b"accept").decode("latin-1")) is not None:
        raise MalformedRequest(f"a stream cannot be a {place}, or accept another type")


def find_preferences(scope: Scope) -> str:
    return join_header_values(scope, PREFER).decode("latin-1")


def join_header_values(scope: Scope, wanted: bytes) -> bytes:
    headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
    return b",".join(value for name, value in headers if name == wanted)
