"""Records a share of the requests with their responses."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, Final

from gateway.capabilities.samples.delivery import EventQueue
from gateway.capabilities.samples.events import (
    CONTENT_TYPE_HEADER,
    EVENT_BYTES,
    MAX_INLINE_BYTES,
    REQUEST_TYPE,
    RESPONSE_TYPE,
    SampleEvent,
    select_headers,
)
from gateway.capabilities.samples.grpc_messages import REQUEST_MESSAGE, build_message_headers
from gateway.errors import serialize_error
from gateway.http_client.connection import Headers
from gateway.media_types import JSON
from gateway.messages import quote_path_segment
from gateway.services import Services
from gateway.telemetry.request_info import RequestInfo, RequestScope
from gateway.telemetry.tracing import TRACEPARENT, create_request_id

OPT_OUT_HEADER: Final = b"x-no-sample"
GRPC_SCHEME: Final = "grpc"
MAX_BODY_BYTES: Final = 1 << 20
# The memory of a piece besides its data.
CHUNK_BYTES: Final = 64
MAX_TRACEPARENT_BYTES: Final = 256
# Statuses without an inference: a job was accepted, or the caller may not use the model.
UNSAMPLED_STATUSES: Final = (202, 401, 403)
Attributes = dict[str, str | int]


class SampledBody:
    """A body, which passes in pieces. Of one above `MAX_BODY_BYTES`, only the length and hash are kept."""

    def __init__(self, queue: EventQueue, headers: Headers) -> None:
        self.headers = headers
        self.is_dropped = False  # the queue has no room
        self._queue = queue
        self._chunks: list[bytes] = []
        self._held_bytes = 0
        self._size_bytes = 0
        self._is_complete = False
        self._hash: Any = None

    async def add(self, data: bytes, *, is_last: bool = True) -> None:
        self._size_bytes += len(data)
        if self._hash is None and self._size_bytes > MAX_BODY_BYTES:
            self._hash = hashlib.sha256(b"".join(self._chunks))
            self.release()
        if self._hash is None:
            self._keep(data)
        elif len(data) <= MAX_INLINE_BYTES:
            self._hash.update(data)
        else:
            await asyncio.to_thread(self._hash.update, data)
        self._is_complete = is_last

    def replace(self, data: bytes, content_type: str) -> None:
        """Keep a short body in place of what has passed."""
        self.release()
        self.headers = [(CONTENT_TYPE_HEADER, content_type.encode())]
        self._size_bytes = len(data)
        self._is_complete = True
        self._hash = None
        self._keep(data)

    def _keep(self, data: bytes) -> None:
        held_bytes = len(data) + CHUNK_BYTES
        if self.is_dropped or not self._queue.reserve(held_bytes):
            self.is_dropped = True
            self.release()
        else:
            self._chunks.append(data)
            self._held_bytes += held_bytes

    def release(self) -> None:
        self._chunks = []
        self._queue.release(self._held_bytes)
        self._held_bytes = 0

    def build_event(self, attributes: Attributes) -> SampleEvent:
        """Return the event, which holds the memory of the body.

        A part of a body, whose client or model has failed, is not kept.
        """
        data = b"".join(self._chunks)
        self._queue.release(self._held_bytes - len(data))
        self._held_bytes = len(data)
        attributes |= select_headers(self.headers)
        if not self._is_complete:
            self.release()
            return SampleEvent(
                {**attributes, "datalength": self._size_bytes, "incomplete": "true"}, b""
            )
        if self._hash is None:
            return SampleEvent(attributes, data)
        digest = self._hash.hexdigest()
        return SampleEvent(
            {**attributes, "datalength": self._size_bytes, "datasha256": digest}, b""
        )


class SampledRequest:
    """A request that is sampled if the rate of its model is above `draw`."""

    def __init__(self, queue: EventQueue, scope: RequestScope, draw: float) -> None:
        self.draw = draw
        self.started_at = time.time()
        self.request = SampledBody(queue, scope["headers"])
        self.response = SampledBody(queue, [])
        if scope["scheme"] == GRPC_SCHEME:
            method = scope["path"].rpartition("/")[2]
            self.request.headers = build_message_headers(REQUEST_MESSAGE)
            self.response.headers = build_message_headers(f"{method}Response")

    @property
    def is_dropped(self) -> bool:
        return self.request.is_dropped or self.response.is_dropped

    def release(self) -> None:
        self.request.release()
        self.response.release()


class SampleRecorder:
    """Decides which requests are sampled, and queues their events."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        # The highest rate of a model so far: a request is recorded before its model is known.
        self._highest_rate = rate
        self._services: Services
        self._queue: EventQueue

    def open(self, services: Services, queue: EventQueue) -> None:
        self._queue = queue
        self._services = services

    def start(self, scope: RequestScope) -> SampledRequest | None:
        draw = random.random()  # noqa: S311 - no secret
        if draw >= self._highest_rate or scope["method"] != "POST":
            return None
        if any(name == OPT_OUT_HEADER for name, _ in scope["headers"]):
            return None
        return SampledRequest(self._queue, scope, draw)

    def end(self, scope: RequestScope, recording: SampledRequest | None, status: int) -> None:
        """Queue the events of a request, if it is sampled by the rate of its model."""
        info = scope["request_info"]
        is_inference = info.model and info.management_call is None and scope["method"] == "POST"
        rate = self._find_rate(info.model) if is_inference else 0.0
        self._highest_rate = max(self._highest_rate, rate)
        if recording is None:
            return
        queue = self._queue
        if recording.draw < rate and status not in UNSAMPLED_STATUSES:
            if scope["scheme"] == GRPC_SCHEME and info.error_reason:
                error = serialize_error(info.error_reason, info.error_code, info.request_id)
                recording.response.replace(error, JSON)
            if not recording.is_dropped and queue.reserve(2 * EVENT_BYTES):
                queue.put(build_events(scope, recording, status))
                return
            queue.drop(2)
        recording.release()

    def _find_rate(self, model: str) -> float:
        """Return the rate of a model; 0 until its config was read, which may say so."""
        services = self._services
        if not services.pool.is_listed(model):  # a model of another server
            return self._rate
        signature = services.signatures.find_or_start_reading(model)
        return 0.0 if signature is None else parse_rate(signature.parameters, self._rate)


def parse_rate(parameters: Mapping[str, str], default: float) -> float:
    try:
        return float(parameters.get("gateway.sample_rate", default))
    except ValueError:
        return 0.0


def build_events(
    scope: RequestScope, recording: SampledRequest, status: int
) -> tuple[SampleEvent, SampleEvent]:
    info = scope["request_info"]
    source = f"/models/{quote_path_segment(info.model)}"
    attributes: Attributes = {
        "specversion": "1.0",
        "id": create_request_id(),
        "inferenceservicename": info.model,
        "model": info.model,
        "modelversion": info.version,
        "statuscode": status,
        "requestid": info.request_id,
        "caller": info.caller_name,
        # A token can contain half of a pair of surrogates, which no event can.
        "callersubject": info.subject.encode(errors="replace").decode(),
        "traceparent": find_traceparent(scope, info),
        "path": scope["raw_path"].decode("latin-1"),
    }
    attributes = {name: value for name, value in attributes.items() if value != ""}
    # The events of a request have one ID, as those of KServe, and differ in their sources.
    first: Attributes = {
        "type": REQUEST_TYPE,
        "source": source,
        "time": format_time(recording.started_at),
    }
    last: Attributes = {
        "type": RESPONSE_TYPE,
        "source": f"{source}#response",
        "time": format_time(time.time()),
    }
    request = recording.request.build_event(attributes | first)
    return request, recording.response.build_event(attributes | last)


def find_traceparent(scope: RequestScope, info: RequestInfo) -> str:
    """Return the trace context of the request, or the client's (W3C Trace Context)."""
    if info.trace is not None:
        return info.trace.traceparent
    sent = (value for name, value in scope["headers"] if name == TRACEPARENT)
    return str(next(sent, b"")[:MAX_TRACEPARENT_BYTES].decode("latin-1"))


def format_time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, timezone.utc).isoformat()
