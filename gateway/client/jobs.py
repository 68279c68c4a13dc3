"""Jobs, and the batches of rows that are one job."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from urllib.parse import quote

from gateway.client.bodies import Body, StreamedBody, encode_document, encode_inputs
from gateway.client.errors import GatewayError
from gateway.client.models import ModelInfo
from gateway.client.replies import Reply, make_wrong_server_error
from gateway.client.results import DECODING_ERRORS, InferResult, decode_result, parse_result

JOBS_PATH: Final = "/v1/jobs"
ENDED_STATES: Final = ("done", "failed", "cancelled", "expired")
LINE_BREAKS: Final = re.compile(r"[\r\n]+")
QUOTED_CHARACTERS: Final = re.compile(r'(["\\])')
ROW_HEAD: Final = (
    '--{}\r\nContent-Disposition: form-data; name="row"; filename="{}"\r\nContent-Type: {}\r\n\r\n'
)

# The `custom_id` of a row, with its value or its outcome.
BatchRow: TypeAlias = "tuple[str, Any]"
BatchOutcome: TypeAlias = "tuple[str, InferResult | GatewayError]"


@dataclass(frozen=True)
class Job:
    """A job. `document` has every field of the gateway.

    Of the `total` rows of a batch, or the only one of a request, some are `done` and some have `failed`.
    `error` says why the job failed.
    """

    id: str
    state: str  # queued, running, done, failed, cancelled or expired
    model: str
    kind: str  # request or batch
    total: int
    done: int
    failed: int
    error: str = ""
    document: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED_STATES


def parse_job(document: Mapping[str, Any]) -> Job:
    return Job(
        **{name: document[name] for name in ("id", "state", "model", "kind")},
        **{name: document["progress"][name] for name in ("total", "done", "failed")},
        error=document.get("error", {}).get("message", ""),
        document=document,
    )


def build_job_path(job: Job | str) -> str:
    return f"{JOBS_PATH}/{quote(job.id if isinstance(job, Job) else job, safe='')}"


def create_batch_body(rows: Iterable[BatchRow] | AsyncIterable[BatchRow]) -> StreamedBody:
    """Return a form with a file for each row, which is encoded while it is sent."""
    boundary = uuid.uuid4().hex
    return StreamedBody(
        encode_rows_async(rows, boundary)
        if isinstance(rows, AsyncIterable)
        else encode_rows(rows, boundary),
        {"content-type": f"multipart/form-data; boundary={boundary}"},
    )


def encode_rows(rows: Iterable[BatchRow], boundary: str) -> Iterator[bytes]:
    for row in rows:
        yield encode_row(row, boundary)
    yield encode_end(boundary)


async def encode_rows_async(rows: AsyncIterable[BatchRow], boundary: str) -> AsyncIterator[bytes]:
    async for row in rows:
        yield await asyncio.to_thread(encode_row, row, boundary)
    yield encode_end(boundary)


def encode_row(row: BatchRow, boundary: str) -> bytes:
    custom_id, value = row
    name = QUOTED_CHARACTERS.sub(r"\\\1", LINE_BREAKS.sub(" ", custom_id))
    body = encode_inputs(None, value, {}) if isinstance(value, Mapping) else encode_inputs(value)
    if not isinstance(body, Body):
        body = encode_document(value, {})
    head = ROW_HEAD.format(boundary, name, body.content_type).encode("utf-8", "replace")
    return b"".join((head, body.content, b"\r\n"))


def encode_end(boundary: str) -> bytes:
    return f"--{boundary}--\r\n".encode()


def decode_row(line: bytes, path: str, info: ModelInfo | None) -> BatchOutcome:
    """Return the outcome of a line of a batch's result. Raises `GatewayError` if it is damaged."""
    try:
        row = json.loads(line)
        name = str(row.get("custom_id", row.get("row")))
        if "error" in row:
            error = row["error"]
            return name, GatewayError(error["message"], error["code"], row["status"])
        if "response" in row:
            return name, parse_result(row["response"], info)
        content = base64.b64decode(row["base64"])
        headers = {"content-type": row["content_type"]}
        return name, decode_result(Reply(path, 200, headers, content), info)
    except DECODING_ERRORS as exc:
        raise make_wrong_server_error(path, f"a row of its result is damaged: {exc!r}") from None


def is_batch_read(job: Job, rows: int) -> bool:
    """Return whether a batch is done and its rows are read. Raises `GatewayError` if it ended otherwise."""
    if job.kind != "batch":
        raise GatewayError(f"job {job.id} is of the kind {job.kind}, whose result has no rows")
    is_read = rows >= job.done + job.failed
    if is_read and job.has_ended and job.state != "done":
        code = job.document.get("error", {}).get("code", "")
        raise GatewayError(f"job {job.id} is {job.state}: {job.error}", code)
    return is_read and job.state == "done"
