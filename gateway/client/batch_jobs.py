"""Batches of rows as jobs: the form that submits the rows, and the lines of the result."""

from __future__ import annotations

import asyncio
import base64
import re
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast

from gateway.client.batches import InferOutcome, iterate
from gateway.client.bodies import Body, CallInputs, encode_document, encode_inputs
from gateway.client.calls import ENDED_STATES, ApiRequest, build_job_path, build_model_path
from gateway.client.errors import GatewayError
from gateway.client.models import ModelInfo
from gateway.client.replies import Reply, parse_json_object
from gateway.client.results import decode_result, parse_result
from gateway.client.uploads import StreamedBody

# The `custom_id` of a row with its value, or with its outcome.
BatchRow: TypeAlias = "tuple[str, Any]"
BatchOutcome: TypeAlias = "tuple[str, InferOutcome]"

LINE_BREAKS: Final = re.compile(r"[\r\n]+")
QUOTED_CHARACTERS: Final = re.compile(r'(["\\])')
ROW_HEAD: Final = (
    '--{}\r\nContent-Disposition: form-data; name="row"; filename="{}"\r\nContent-Type: {}\r\n\r\n'
)


@dataclass(frozen=True)
class BatchBody(StreamedBody):
    """A form with a file for each row, which is encoded while it is sent."""

    rows: Iterable[BatchRow] | AsyncIterable[BatchRow]
    boundary: str = field(default_factory=lambda: uuid.uuid4().hex)

    def create_options(self) -> dict[str, Any]:
        return {"content": self._encode(), "headers": self._create_headers()}

    def create_async_options(self) -> dict[str, Any]:
        return {"content": self._encode_async(), "headers": self._create_headers()}

    def _create_headers(self) -> dict[str, str]:
        return {"content-type": f"multipart/form-data; boundary={self.boundary}"}

    def _encode(self) -> Iterator[bytes]:
        for row in cast("Iterable[BatchRow]", self.rows):
            yield self._encode_row(row)
        yield self._encode_end()

    async def _encode_async(self) -> AsyncIterator[bytes]:
        async for row in iterate(self.rows):
            yield await asyncio.to_thread(self._encode_row, row)
        yield self._encode_end()

    def _encode_row(self, row: BatchRow) -> bytes:
        custom_id, value = row
        name = QUOTED_CHARACTERS.sub(r"\\\1", LINE_BREAKS.sub(" ", custom_id))
        body = encode_row_value(value)
        head = ROW_HEAD.format(self.boundary, name, body.content_type).encode("utf-8", "replace")
        return b"".join((head, body.content, b"\r\n"))

    def _encode_end(self) -> bytes:
        return f"--{self.boundary}--\r\n".encode()


def encode_row_value(value: Any) -> Body:
    inputs = CallInputs(by_name=value) if isinstance(value, Mapping) else CallInputs(value)
    body = encode_inputs(inputs)
    return body if isinstance(body, Body) else encode_document(value, {})


def build_batch_request(
    model: str, rows: Iterable[BatchRow] | AsyncIterable[BatchRow], callback_url: str
) -> ApiRequest:
    return ApiRequest(
        "POST",
        f"{build_model_path(model)}/jobs",
        headers={"x-callback-url": callback_url} if callback_url else {},
        body=BatchBody(rows),
        is_repeatable=False,
    )


class BatchReader:
    """Reads the result of a batch while it grows, over as many connections as it takes."""

    def __init__(self, job: str, info: ModelInfo | None) -> None:
        self._job = job
        self._info = info
        self._has_ended = False
        self._rows = 0
        self._rows_at_connect = 0
        self._partial = b""

    def start_connection(self) -> str:
        """Return the path of the rows that were not read yet."""
        self._rows_at_connect = self._rows
        self._partial = b""
        return f"{build_job_path(self._job)}/result?after={self._rows}"

    def feed(self, data: bytes) -> Iterator[BatchOutcome]:
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._rows += 1
            yield self._decode(parse_json_object(line) or {})

    def _decode(self, row: Mapping[str, Any]) -> BatchOutcome:
        name = str(row.get("custom_id", row.get("row")))
        if "error" in row:
            error = row["error"]
            return name, GatewayError(error["message"], error["code"], row["status"])
        headers = {"content-type": row.get("content_type", "")}
        content = base64.b64decode(row.get("base64", ""))
        reply = Reply(build_job_path(self._job), row.get("status", 0), headers, content)
        if "response" in row:
            return name, parse_result(row["response"], reply, self._info)
        return name, decode_result(reply, self._info)

    def is_complete(self, job: Mapping[str, Any]) -> bool:
        """Return whether the job is done and read. Raises `GatewayError` if it ended otherwise."""
        kind = job.get("kind", "batch")
        if kind != "batch":
            raise GatewayError(f"job {self._job} is of the kind {kind}, whose result has no rows")
        had_ended = self._has_ended
        self._has_ended = job["state"] in ENDED_STATES
        progress = job["progress"]
        is_read = self._rows >= progress["done"] + progress["failed"]
        if job["state"] == "done" and is_read:
            return True
        error = job.get("error") or {"message": "its result has no more rows", "code": ""}
        if self._has_ended and (is_read or (had_ended and self._rows == self._rows_at_connect)):
            message = f"job {self._job} is {job['state']}: {error['message']}"
            raise GatewayError(message, error["code"])
        return False
