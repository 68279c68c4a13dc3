"""A stored request as a call of the application, and the response to it."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Message

from gateway.capabilities.jobs.errors import JobFileLost
from gateway.capabilities.jobs.job import Job
from gateway.capabilities.jobs.storage.store import JobFiles

# Bodies and results are read from the store in pieces of this size.
READ_BYTES: Final = 1 << 20
# The fleet cannot run it now: over a limit, or not ready.
BUSY_STATUSES: Final = (429, 503)
MAX_POSTPONE_S: Final = 30.0
NO_ROOM_PAUSE_S: Final = 10.0
# Every response gets these headers when it is sent.
COMMON_HEADERS: Final = frozenset(
    (b"x-request-id", b"x-content-type-options", b"content-security-policy", b"content-length")
)


class ResponseCapture:
    """Keeps the response of an ASGI application."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.chunks: list[bytes] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = message.get("headers", ())
            self.headers = [pair for pair in headers if pair[0] not in COMMON_HEADERS]
        elif body := message.get("body", b""):
            self.chunks.append(body)

    @property
    def body(self) -> bytes:
        return self.chunks[0] if len(self.chunks) == 1 else b"".join(self.chunks)

    def build_response(self) -> Response:
        response = Response(self.body, self.status)
        length = [pair for pair in response.raw_headers if pair[0] == b"content-length"]
        response.raw_headers = [*self.headers, *length]
        return response


async def read_piece(files: JobFiles, file: str, start: int, size_bytes: int) -> bytes:
    """Return the next piece of a file. Raises `JobFileLost` if it ends before its size."""
    length = min(size_bytes - start, READ_BYTES)
    piece = await files.read(file, start, length) if length else b""
    if len(piece) < length:
        raise JobFileLost
    return piece


class BodyReader:
    """Gives the body of a job to the application, as if a client sent it and waited."""

    def __init__(self, files: JobFiles, job: Job) -> None:
        self._files = files
        self._job = job
        self._position = 0
        self._is_complete = False

    async def receive(self) -> Message:
        if self._is_complete:
            await asyncio.Event().wait()  # the client never leaves
        job = self._job
        data = await read_piece(self._files, job.body_file, self._position, job.body_bytes)
        self._position += len(data)
        self._is_complete = self._position == self._job.body_bytes
        return {"type": "http.request", "body": data, "more_body": not self._is_complete}


def build_scope(job: Job) -> MutableMapping[str, Any]:
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in job.headers]
    headers += [
        (b"content-length", b"%d" % job.body_bytes),
        (b"x-request-id", job.request_id.encode()),
    ]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": job.path,
        "raw_path": job.path.encode(),
        "query_string": job.query.encode("latin-1"),
        "root_path": "",
        "headers": headers,
        "client": (job.client, 0),
        "server": None,
        "certificate_names": (),
        "certificate_expires_at": None,
    }


def find_retry_after_s(capture: ResponseCapture) -> float:
    written = dict(capture.headers).get(b"retry-after", b"1")
    return float(written) if written.isdigit() else 1.0


def find_delay_s(capture: ResponseCapture, starts: int) -> float:
    """Return the time after which a busy fleet is asked again, which grows with the starts."""
    return min(max(find_retry_after_s(capture), 2.0 ** min(starts, 8) / 2), MAX_POSTPONE_S)
