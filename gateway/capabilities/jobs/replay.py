"""A stored request as a call of the application, and the response to it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, Final, cast

from starlette.responses import Response
from starlette.types import Message, Receive

from gateway.access.auth import check_key_period
from gateway.access.keys import find_end
from gateway.callers import Caller, Priority
from gateway.capabilities.jobs.errors import JobNotTrusted
from gateway.capabilities.jobs.job import Job, JobKind
from gateway.capabilities.jobs.service import read_piece, read_pieces
from gateway.capabilities.jobs.store import JobFiles
from gateway.errors import GatewayError, Unauthenticated
from gateway.routes.middleware import GatewayMiddleware
from gateway.services import INTERNAL_REQUEST, InternalRequest, Services
from gateway.telemetry.request_info import RequestInfo

# The fleet cannot run it now: over a limit, or not ready.
BUSY_STATUSES: Final = (429, 503)
MAX_POSTPONE_S: Final = 30.0
NO_ROOM_PAUSE_S: Final = 10.0
# Every response gets these headers when it is sent.
COMMON_HEADERS: Final = frozenset(
    (b"x-request-id", b"x-content-type-options", b"content-security-policy", b"content-length")
)
# Returns the next piece of a body, whose position it gets.
ReadPiece = Callable[[int], Awaitable[bytes]]


class ResponseCapture:
    """Keeps the response of an ASGI application."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = message.get("headers", ())
            self.headers = [pair for pair in headers if pair[0] not in COMMON_HEADERS]
        elif body := message.get("body", b""):
            self.body = self.body + body if self.body else body

    def build_response(self) -> Response:
        response = Response(self.body, self.status)
        length = [pair for pair in response.raw_headers if pair[0] == b"content-length"]
        response.raw_headers = [*self.headers, *length]
        return response


class BodyReader:
    """Reads the body of a job, and compares it with the one that was sent."""

    def __init__(self, files: JobFiles, job: Job) -> None:
        self._files = files
        self._job = job
        self._hash = hashlib.sha256()
        self._missing_bytes = job.body_bytes
        self.failure: GatewayError | None = None

    async def check(self) -> None:
        """Read the whole body. Raises `JobNotTrusted` or `JobFileLost`."""
        async for piece in read_pieces(self._files, self._job.body_file, self._job.body_bytes):
            self._add(piece)

    async def read(self, position: int) -> bytes:
        """Return the next piece; what it raises is kept, because the application answers it."""
        job = self._job
        try:
            piece = await read_piece(self._files, job.body_file, position, job.body_bytes)
            self._add(piece)
        except GatewayError as exc:
            self.failure = exc
            raise
        return piece

    def _add(self, piece: bytes) -> None:
        self._hash.update(piece)
        self._missing_bytes -= len(piece)
        if not self._missing_bytes and self._hash.hexdigest() != self._job.body_digest:
            raise JobNotTrusted("its body was changed in the store")


def build_receive(read: ReadPiece, size_bytes: int) -> Receive:
    """Return what gives a body to the application, as if a client sent it and waited."""
    position = 0
    is_complete = False

    async def receive() -> Message:
        nonlocal position, is_complete
        if is_complete:
            await asyncio.Event().wait()  # the client never leaves
        data = await read(position)
        position += len(data)
        is_complete = position == size_bytes
        return {"type": "http.request", "body": data, "more_body": not is_complete}

    return receive


class RequestReplay:
    """Runs stored requests: the gateway sends them to itself, with the rights that their callers have now."""

    def __init__(self, services: Services, max_run_s: float) -> None:
        settings = services.settings.model_copy(
            update={"request_timeout_s": max_run_s, "max_request_timeout_s": max_run_s}
        )
        self.services = replace(services, settings=settings)

    async def call(self, job: Job, read: ReadPiece) -> tuple[ResponseCapture, RequestInfo]:
        """Return the response to the request of a job. Raises `JobNotTrusted`."""
        scope = build_scope(job)
        caller = replace(self.find_caller(job), priority=Priority.background)
        # A request was counted at the rate of the key when it was accepted; at its quotas it is now.
        is_rate_counted = job.kind is JobKind.request and job.is_rate_counted
        if is_rate_counted and caller.limits is not None:
            limits = replace(caller.limits, requests_per_second=None)
            caller = replace(caller, limits=limits)
        scope[INTERNAL_REQUEST] = InternalRequest(self.services, caller)
        capture = ResponseCapture()
        receive = build_receive(read, job.body_bytes)
        await self.services.get(GatewayMiddleware)(scope, receive, capture.send)
        return capture, scope["request_info"]

    def find_caller(self, job: Job) -> Caller:
        """Return the caller with the rights that it has now. Raises `JobNotTrusted` if it has none."""
        access = self.services.access
        file = access.keys_file
        if file is None and not job.caller_id:
            return cast(Caller, access.authenticate(build_scope(job)))  # type: ignore[arg-type]  # a typed dict
        callers = [] if file is None else file.value.list_callers()
        owners = [caller for caller in callers if caller.id == job.caller_id]
        now = datetime.now(timezone.utc)
        # After a rotation, the last key to expire is the new one.
        for caller in sorted(owners, key=find_end, reverse=True):
            with suppress(Unauthenticated):
                check_key_period(caller, now)
                return caller
        raise JobNotTrusted(
            "the key that sent it, or the rule that admitted it, was revoked or has expired"
        )


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
