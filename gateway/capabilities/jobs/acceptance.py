"""Requests with `Prefer: respond-async`, and batches, which become jobs.

A request is checked by a dry run of its own handler, while its body is written to disk. What the handler
answers without the model, such as an error, is the answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import orjson
from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope

from gateway.capabilities.jobs.batches import FormWriter, RowWriter
from gateway.capabilities.jobs.errors import (
    JobBytesExceeded,
    JobsUnavailable,
    KeyReused,
    TooManyWaiters,
)
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
from gateway.capabilities.jobs.routes import JOB_SCHEMA, describe_job, respond_with_result
from gateway.capabilities.jobs.service import Jobs, decode_headers, find_owner
from gateway.errors import BodyTooLarge, GatewayError, MalformedRequest, UnsupportedBody
from gateway.headers import parse_content_type
from gateway.inference.body import RequestBody
from gateway.inference.pipeline import DryRun, DryRunPassed
from gateway.media_types import JSON, MULTIPART, NDJSON
from gateway.routes.dependencies import ServicesForInference
from gateway.routes.infer import choose_stream_format
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


class Submission:
    """A job while its request arrives.

    The body is written to the file of the job, or with `is_batch` only what is appended. Its bytes count at
    `GATEWAY_MAX_JOBS_BYTES`. At the end of its context the file is deleted, unless the job was kept.
    Raises `SubjectRequired`, `MalformedRequest` or `CallbackNotAllowed`.
    """

    def __init__(
        self, jobs: Jobs, request: Request, max_bytes: int, *, is_batch: bool = False
    ) -> None:
        scope = request.scope
        self._jobs = jobs
        self._scope = scope
        self._receive = request.receive
        self._max_bytes = max_bytes
        self._stores_received = not is_batch
        self.id = create_job_id()
        self._file = f"{self.id}{BODY_SUFFIX}"
        self._is_kept = False
        self._is_complete = False
        self._received_bytes = 0
        self._size_bytes = 0
        self._hash = hashlib.sha256()
        headers = (join_header_values(scope, name) for name in DISTINCTIVE_HEADERS)
        head = (scope["raw_path"], scope["query_string"], *headers)
        # Of all that makes the request the same as another one.
        self._request_hash = hashlib.sha256(b"\0".join(head) + b"\0")
        self._owner = find_owner(scope["request_info"])
        self._callback_url = join_header_values(scope, CALLBACK_URL).decode("latin-1")
        self._callback_host = ""
        if self._callback_url:
            self._callback_host = jobs.callback_urls.check_url(self._callback_url).netloc.decode()
        self._key = join_header_values(scope, IDEMPOTENCY_KEY).decode("latin-1").strip()
        if len(self._key) > MAX_KEY_CHARS:
            raise MalformedRequest(f"Idempotency-Key exceeds {MAX_KEY_CHARS} characters")

    @property
    def is_unknown(self) -> bool:
        """Return whether only its response tells the ID of the job."""
        return not (self._key or self._callback_url)

    async def find_known(self) -> Job | None:
        """Return the job that has the idempotency key of the request. Raises `KeyReused`.

        Of requests that arrive at the same time, the store keeps one.
        """
        known = await self._jobs.store.find_by_key(self._owner, self._key) if self._key else None
        if known is None or not self._jobs.trust.is_signed(known):
            return None
        self._stores_received = False
        await self.receive_rest()
        self._check_digest(known)
        return known

    def _check_digest(self, known: Job) -> None:
        if known.request_digest != self._request_hash.hexdigest():
            raise KeyReused

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            data = message.get("body", b"")
            self._is_complete = not message.get("more_body", False)
            self._request_hash.update(data)
            self._received_bytes += len(data)
            if self._received_bytes > self._max_bytes:
                raise BodyTooLarge(self._max_bytes)
            if data and self._stores_received:
                await self.append(data)
        return message

    async def receive_rest(self) -> None:
        """Receive what the handler left. Raises `ClientDisconnect`."""
        while not self._is_complete:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect

    async def append(self, data: bytes) -> None:
        """Append to the file, and create it. Raises `JobsFull`."""
        jobs = self._jobs
        self._size_bytes += len(data)
        jobs.incoming_bytes += len(data)
        if jobs.stored_bytes + jobs.incoming_bytes > jobs.settings.max_jobs_bytes:
            raise JobBytesExceeded(jobs.settings.max_jobs_bytes)
        self._hash.update(data)
        await jobs.store.files.append(self._file, data)

    async def keep(self, **values: Any) -> Job:
        """Keep the job, whose body is complete; return it, or the one that has its idempotency key.

        Raises `MalformedRequest`, `KeyReused`, `JobNotTrusted`, `TooManyJobs` or `JobsFull`.
        """
        jobs = self._jobs
        job = replace(self._build_job(), **values)
        try:
            parse_job(job.id.encode(), encode_job(job))
        except BadJob as exc:
            raise MalformedRequest(f"the request cannot be a job: {exc}") from None
        # A client that disconnects now cannot separate a job from its body.
        self._is_kept = True
        kept = await asyncio.shield(jobs.tasks.start(self._add(jobs.trust.sign(job))))
        jobs.changes.notify()
        jobs.trust.check(kept)
        self._check_digest(kept)
        return kept

    async def _add(self, job: Job) -> Job:
        jobs = self._jobs
        try:
            if job.body_bytes:
                await jobs.store.files.flush(self._file)
            kept = await jobs.store.add(job, jobs.settings.max_jobs_per_caller)
        except JobsUnavailable:
            raise  # the job may be kept: Redis answered too late
        except GatewayError:
            await self._discard()
            raise
        finally:
            jobs.incoming_bytes -= self._size_bytes
            self._size_bytes = 0
        if kept is job:
            jobs.stored_bytes += job.body_bytes
        else:
            await self._discard()
        return kept

    def _build_job(self) -> Job:
        scope = self._scope
        info: RequestInfo = scope["request_info"]
        names = {name.encode() for name in REQUEST_HEADERS}
        if not self._stores_received:  # the rows of a batch are decompressed
            names.remove(b"content-encoding")
        headers = [pair for pair in scope["headers"] if pair[0] in names]
        if info.trace is not None:  # the job belongs to the trace of its request
            others = (pair for pair in headers if pair[0] != TRACEPARENT)
            headers = [*others, (TRACEPARENT, info.trace.traceparent.encode())]
        client = scope["client"]
        return Job(
            self.id,
            self._owner,
            # A model that no replica has loaded is not in the info.
            info.model or scope["path_params"].get("model", ""),
            path=scope["path"],
            query=scope["query_string"].decode("latin-1"),
            headers=decode_headers(headers),
            client=client[0] if client else "",
            request_id=info.request_id,
            caller_id=info.caller.id,
            caller=info.caller.name,
            subject=info.subject,
            created_at=time.time(),
            body_bytes=self._size_bytes,
            body_digest=self._hash.hexdigest(),
            request_digest=self._request_hash.hexdigest(),
            idempotency_key=self._key,
            callback_url=self._callback_url,
            callback_host=self._callback_host,
        )

    async def _discard(self) -> None:
        self._jobs.incoming_bytes -= self._size_bytes
        self._size_bytes = 0
        await self._jobs.store.files.delete(self._file)

    async def __aenter__(self) -> Submission:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._size_bytes and not self._is_kept:
            await self._discard()


ACCEPTED: Final = 202


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
        jobs = services.get(Jobs)
        submission = Submission(jobs, request, jobs.max_body_bytes)
        if (known := await submission.find_known()) is not None:
            return respond_with_job(known)
        if scope["path"].endswith("/infer"):
            check_accept(scope, "job; send it without Prefer: respond-async")
        dry_run = DryRun()
        async with submission:
            answer = await check_request(services, scope, submission.receive, dry_run)
            if answer is not None:
                return answer
            await submission.receive_rest()
            # The inferences of a request cannot be counted before its model is loaded.
            kept = await submission.keep(is_rate_counted=dry_run.request is not None)
        wait = WAIT.search(find_preferences(scope))
        if wait is not None and kept.id == submission.id:
            # The body is in its file: it needs no memory while the client waits.
            services.get_charge(scope["request_info"]).release()
            with suppress(TooManyWaiters), jobs.wait_as(kept.owner):
                kept = await jobs.wait_until_ended(kept, min(int(wait[1]), MAX_WAIT_S)) or kept
            if kept.result_file and jobs.trust.is_signed(kept):
                return await respond_with_result(jobs, kept, deletes_job=submission.is_unknown)
        return respond_with_job(kept)


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
    max_bytes = jobs.settings.max_batch_bytes
    submission = Submission(jobs, request, max_bytes, is_batch=True)
    if (known := await submission.find_known()) is not None:
        return respond_with_job(known)
    check_accept(request.scope, "row of a batch; send it alone")
    body = RequestBody(request.scope, submission.receive)
    media_type, _ = parse_content_type(body.content_type)
    if media_type not in BATCH_TYPES:
        raise UnsupportedBody(body.content_type, BATCH_TYPES)
    limits = (jobs.settings.max_batch_rows, services.get_charge(info))
    writer = RowWriter(submission.append, *limits)
    if media_type == MULTIPART:
        writer = FormWriter(submission.append, *limits, body.content_type)
    async with submission:
        async for chunk in body.stream(max_bytes):
            await writer.feed(chunk)
        await writer.finish()
        if not writer.rows:
            raise MalformedRequest(
                "the batch has no rows; send one document per line, or files in a form"
            )
        kind = {"kind": JobKind.batch, "path": f"/v1/models/{model}/infer"}
        kept = await submission.keep(model=model, total_rows=writer.rows, **kind)
    return respond_with_job(kept)


async def check_request(
    services: Services, scope: Scope, receive: Receive, dry_run: DryRun
) -> Response | None:
    """Return what the request's handler answers without the model; None if the model would run.

    Raises `MalformedRequest` for a request that cannot be a job.
    """
    info: RequestInfo = scope["request_info"]
    capture = ResponseCapture()
    scope[INTERNAL_REQUEST] = InternalRequest(services, info.caller, dry_run)
    with suppress(DryRunPassed):
        await scope["app"].router(scope, receive, capture.send)
    if capture.status:
        return capture.build_response()
    if dry_run.request is not None and dry_run.request.target.sequence_step is not None:
        raise MalformedRequest(
            "a request of a sequence cannot be a job, because jobs have no order; send it without "
            "Prefer: respond-async"
        )
    return None


def respond_with_job(job: Job) -> Response:
    headers = {"Location": f"/v1/jobs/{job.id}", "Preference-Applied": "respond-async"}
    return Response(orjson.dumps(describe_job(job)), ACCEPTED, headers, JSON)


def check_accept(scope: Scope, place: str) -> None:
    """Raises `MalformedRequest` if the client prefers a stream."""
    if choose_stream_format(join_header_values(scope, b"accept").decode("latin-1")) is not None:
        raise MalformedRequest(f"a stream cannot be a {place}, or accept another type")


def find_preferences(scope: Scope) -> str:
    return join_header_values(scope, PREFER).decode("latin-1")


def join_header_values(scope: Scope, wanted: bytes) -> bytes:
    headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
    return b",".join(value for name, value in headers if name == wanted)
