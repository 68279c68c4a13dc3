"""The application around the gateway's own, which records a share of its requests."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.capabilities.samples.delivery import EventQueue
from gateway.capabilities.samples.events import (
    EVENT_BYTES,
    REQUEST_TYPE,
    RESPONSE_TYPE,
    SampleEvent,
    select_headers,
)
from gateway.http_client.connection import Headers
from gateway.names import quote_path_segment
from gateway.services import Services
from gateway.telemetry.metrics import CLIENT_CLOSED_REQUEST
from gateway.telemetry.request_info import RequestInfo
from gateway.telemetry.tracing import TRACEPARENT, create_request_id

OPT_OUT_HEADER: Final = b"x-no-sample"
MAX_BODY_BYTES: Final = 1 << 20
# The memory of a piece besides its data.
CHUNK_BYTES: Final = 64
MAX_INLINE_BYTES: Final = 64 << 10  # a larger piece of a body is hashed in a thread
MAX_TRACEPARENT_BYTES: Final = 256
# They say nothing of an inference: a job was accepted, or the caller may not use the model.
UNSAMPLED_STATUSES: Final = (202, 401, 403)
Attributes = dict[str, str | int]


class RecordedBody:
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

    async def add(self, message: Message) -> None:
        data: bytes = message.get("body", b"")
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
        self._is_complete = not message.get("more_body", False)

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


class Recording:
    """A request that is sampled if the rate of its model is above `draw`."""

    def __init__(self, queue: EventQueue, scope: Scope, draw: float) -> None:
        self.draw = draw
        self.started_at = format_time()
        self.status = CLIENT_CLOSED_REQUEST
        self.request = RecordedBody(queue, scope["headers"])
        self.response = RecordedBody(queue, [])

    @property
    def is_dropped(self) -> bool:
        return self.request.is_dropped or self.response.is_dropped

    def watch_receive(self, receive: Receive) -> Receive:
        async def receive_watched() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                await self.request.add(message)
            return message

        return receive_watched

    def watch_send(self, send: Send) -> Send:
        async def send_watched(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.response.headers = message["headers"]
            else:
                await self.response.add(message)

        return send_watched


class SampledApplication:
    """Decides which requests are sampled, and queues their events."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        # The highest rate of a model so far: a request is recorded before its model is known.
        self._highest_rate = rate
        self._services: Services | None = None
        self._queue: EventQueue

    def open(self, services: Services, queue: EventQueue) -> None:
        self._queue = queue
        self._services = services

    def wrap(self, application: ASGIApp) -> ASGIApp:
        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            services = self._services
            if services is None or scope["type"] != "http" or scope["method"] != "POST":
                await application(scope, receive, send)
                return
            recording = self._start_recording(scope)
            try:
                if recording is None:
                    await application(scope, receive, send)
                else:
                    receive = recording.watch_receive(receive)
                    await application(scope, receive, recording.watch_send(send))
            finally:
                self._finish(services, scope, recording)

        return serve

    def _start_recording(self, scope: Scope) -> Recording | None:
        draw = random.random()  # noqa: S311 - no secret
        opts_out = any(name == OPT_OUT_HEADER for name, _ in scope["headers"])
        if opts_out or draw >= self._highest_rate:
            return None
        return Recording(self._queue, scope, draw)

    def _finish(self, services: Services, scope: Scope, recording: Recording | None) -> None:
        info: RequestInfo = scope["request_info"]
        is_inference = info.model and info.management_call is None
        rate = self._find_rate(services, info.model) if is_inference else 0.0
        self._highest_rate = max(self._highest_rate, rate)
        if recording is None:
            return
        queue = self._queue
        if recording.draw < rate and recording.status not in UNSAMPLED_STATUSES:
            if not recording.is_dropped and queue.reserve(2 * EVENT_BYTES):
                queue.put(build_events(scope, info, recording))
                return
            queue.drop(2)
        recording.request.release()
        recording.response.release()

    def _find_rate(self, services: Services, model: str) -> float:
        """Return the rate of a model; 0 until its config was read, which may say so."""
        if not services.pool.is_listed(model):  # a model of another server
            return self._rate
        signature = services.signatures.find_or_start_reading(model)
        return 0.0 if signature is None else parse_rate(signature.parameters, self._rate)


def parse_rate(parameters: Mapping[str, str], default: float) -> float:
    """Return the rate of a model by its config; 0 if that has an invalid one."""
    try:
        return float(parameters.get("gateway.sample_rate", default))
    except ValueError:
        return 0.0


def build_events(
    scope: Scope, info: RequestInfo, recording: Recording
) -> tuple[SampleEvent, SampleEvent]:
    source = f"/models/{quote_path_segment(info.model)}"
    attributes: Attributes = {
        "specversion": "1.0",
        "id": create_request_id(),
        "inferenceservicename": info.model,
        "model": info.model,
        "modelversion": info.version,
        "statuscode": recording.status,
        "requestid": info.request_id,
        "caller": info.caller_name,
        # A token can contain half of a pair of surrogates, which no event can.
        "callersubject": info.subject.encode(errors="replace").decode(),
        "traceparent": find_traceparent(scope, info),
        "path": scope["raw_path"].decode("latin-1"),
    }
    attributes = {name: value for name, value in attributes.items() if value != ""}
    # The events of a request have one ID, as those of KServe, and differ in their sources.
    first: Attributes = {"type": REQUEST_TYPE, "source": source, "time": recording.started_at}
    last: Attributes = {
        "type": RESPONSE_TYPE,
        "source": f"{source}#response",
        "time": format_time(),
    }
    request = recording.request.build_event(attributes | first)
    return request, recording.response.build_event(attributes | last)


def find_traceparent(scope: Scope, info: RequestInfo) -> str:
    """Return the trace context of the request, or the client's (W3C Trace Context)."""
    if info.trace is not None:
        return info.trace.traceparent
    sent = (value for name, value in scope["headers"] if name == TRACEPARENT)
    return str(next(sent, b"")[:MAX_TRACEPARENT_BYTES].decode("latin-1"))


def format_time() -> str:
    return datetime.now(timezone.utc).isoformat()
