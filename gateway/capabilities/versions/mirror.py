"""The mirror: copies of requests to the shadow version of their label, whose responses are forgotten.

A copy takes the steps of a request after the response to the original was sent, but has no slot, log line or
metrics of requests, is sent once, and does not count for the health of its replica: it holds up no request.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from dataclasses import replace
from random import random
from typing import Any, Final, TypeVar, cast
from urllib.parse import unquote

from starlette.types import Message, Receive, Scope

from gateway.capabilities.versions.label_router import CHOSEN_LABEL, ActiveLabel, LabelRouter
from gateway.capabilities.versions.labels import Shadow
from gateway.capabilities.versions.metrics import LabelMetrics
from gateway.capacity.admission import AdmissionQueue
from gateway.errors import GatewayError, ModelNotReady
from gateway.fleet.balancer import choose_less_loaded
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.inference import InferenceService
from gateway.fleet.transports import FailedResponse, GrpcBytesCall, UpstreamCall
from gateway.routes.error_responses import ErrorBoundary
from gateway.services import INTERNAL_REQUEST, InternalRequest, Services
from gateway.tasks import TaskSet, cancel_tasks
from gateway.telemetry.recording import RecordedBody, RecorderMemory, Recording
from gateway.telemetry.request_info import (
    HEADER_FACTS,
    RequestInfo,
    RequestScope,
    current_request_info,
)
from gateway.telemetry.tracing import TRACE_CONTEXT_HEADERS
from gateway.triton.grpc.byte_channel import INFER_METHOD
from gateway.triton.json_guard import SEQUENCE_ID_KEY
from gateway.triton.request_target import RequestTarget

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_COPIES: Final = 32  # copies in progress at the same time
OK_STATUS: Final = 200
GRPC_SCHEME: Final = "grpc"
# The model, its version or label, and the verb.
INFERENCE_PATH: Final = re.compile(
    rb"(/v[12]/models/[^/:]+)(?:/(?:versions|labels)/[^/:]+)?"
    rb"([/:](?:infer|predict|generate|generate_stream))"
)
NOT_COPIED: Final = frozenset(
    (b"content-length", b"transfer-encoding", b"expect", *TRACE_CONTEXT_HEADERS)
)
# Results of copies. All but the first two are reasons to send none.
SUCCEEDED: Final = "succeeded"
FAILED: Final = "failed"
BUSY: Final = "busy"  # requests wait, even if only in the background
TOO_MANY: Final = "too_many"
TOO_LARGE: Final = "too_large"
UNSUPPORTED: Final = "unsupported"  # no version can be replaced, or it is a part of a stream


class MirrorDispatcher(Dispatcher):
    """Sends each copy once, and records nothing."""

    async def send(self, call: UpstreamCall[T], timeout_s: float) -> T:
        target = call.target
        candidates = self._pool.find_candidates(target.model, target.version).serving
        if not candidates:
            raise ModelNotReady(target.model, target.version)
        try:
            return await call.send(choose_less_loaded(candidates), timeout_s, None)
        except FailedResponse as failed:
            failed.response.close()
            raise failed.error from None


class Mirror:
    """A recorder that sends the bodies of some requests to the shadow version of their label."""

    def __init__(self, services: Services, router: LabelRouter, metrics: LabelMetrics) -> None:
        self._admission = services.admission
        self._router = router
        self._metrics = metrics
        self._memory = RecorderMemory()
        self._tasks = TaskSet()
        dispatcher = MirrorDispatcher(services.pool)
        self._services = replace(
            services,
            dispatcher=dispatcher,
            inference=InferenceService(dispatcher, services.signatures),
            # It admits everything, because `MAX_COPIES` limits the copies.
            admission=AdmissionQueue(sys.maxsize, sys.maxsize, 0, services.metrics),
        )

    async def close(self) -> None:
        await cancel_tasks(self._tasks)

    def start(self, scope: RequestScope) -> Recording | None:
        draw = 100 * random()  # noqa: S311 - no secret
        if draw >= self._router.highest_shadow_percent or scope["method"] != "POST":
            return None
        recording = Recording(self._memory, scope, draw)
        recording.response = RecordedBody(RecorderMemory(0), [])  # keeps nothing
        return recording

    def end(self, scope: RequestScope, recording: Recording | None, status: int) -> None:
        """Send a copy of a request that succeeded, if its label has a shadow that is to get one."""
        if recording is None:
            return
        body = recording.request
        label: ActiveLabel | None = cast("dict[str, Any]", scope).get(CHOSEN_LABEL)
        shadow = None if label is None else label.value.shadow
        # The label of other steps of sequences is not known here; of `generate`, only the body tells.
        if (
            label is None
            or shadow is None
            or recording.draw >= shadow.percent
            or status != OK_STATUS
            or SEQUENCE_ID_KEY in body.data
        ):
            body.release()
        elif reason := self._find_drop_reason(scope, label, body):
            body.release()
            self._count_copy(label, shadow, reason)
        else:
            self._tasks.start(self._send_copy(scope, label, shadow, body))

    def _find_drop_reason(self, scope: RequestScope, label: ActiveLabel, body: RecordedBody) -> str:
        if not names_version(scope):
            return UNSUPPORTED
        if body.is_too_large:
            return TOO_LARGE
        if body.is_dropped or len(self._tasks) >= MAX_COPIES:
            return TOO_MANY
        return BUSY if self._admission.is_awaited(label.model) else ""

    def _count_copy(self, label: ActiveLabel, shadow: Shadow, result: str) -> None:
        copies = self._metrics.shadow_requests
        copies.labels(label.model, label.name, shadow.version, result).inc()

    async def _send_copy(
        self, scope: RequestScope, label: ActiveLabel, shadow: Shadow, body: RecordedBody
    ) -> None:
        original = scope["request_info"]
        info = RequestInfo(original.request_id, timeout_s=original.timeout_s)
        info.caller = replace(original.caller, limits=None)
        current_request_info.set(info)
        version = shadow.version
        try:
            if not self._services.pool.is_served(label.model, version):
                raise ModelNotReady(label.model, version)
            if scope["scheme"] == GRPC_SCHEME:
                await self._send_message(label.model, version, body.data, info.timeout_s)
            else:
                await self._send_request(cast(Scope, scope), version, body.data, info)
        except GatewayError as exc:
            info.error_reason = exc.detail
        finally:
            body.release()
            if info.charge is not None:
                info.charge.release()
        self._count_copy(label, shadow, FAILED if info.error_reason else SUCCEEDED)
        if info.error_reason:
            text = "shadow version %s of label %s of model %s failed: %s"
            more = {"request_id": info.request_id}
            log.info(text, version, label.name, label.model, info.error_reason, extra=more)

    async def _send_message(
        self, model: str, version: str, message: bytes, timeout_s: float
    ) -> None:
        call = GrpcBytesCall(RequestTarget(model, "", timeout_s), INFER_METHOD, message)
        await self._services.dispatcher.send(call.with_version(version), timeout_s)

    async def _send_request(
        self, scope: Scope, version: str, body: bytes, info: RequestInfo
    ) -> None:
        """Serve a copy of a request over HTTP; an error response leaves its reason in the facts."""
        path = INFERENCE_PATH.sub(rb"\1/versions/%b\2" % version.encode(), scope["raw_path"])
        headers = [pair for pair in scope["headers"] if pair[0] not in NOT_COPIED]
        copied = {
            **scope,
            HEADER_FACTS: {},
            INTERNAL_REQUEST: InternalRequest(self._services, info.caller),
            "path": unquote(path.decode("latin-1")),
            "raw_path": path,
            "headers": [*headers, (b"content-length", b"%d" % len(body))],
            "request_info": info,
        }
        receive = build_body_receiver(body)
        await self._services.get(ErrorBoundary)(copied, receive, forget)


def names_version(scope: RequestScope) -> bool:
    """Return whether the version can be replaced, because the path or the message has a field for it."""
    if scope["scheme"] == GRPC_SCHEME:
        return scope["path"] == INFER_METHOD
    return INFERENCE_PATH.fullmatch(scope["raw_path"]) is not None


def build_body_receiver(body: bytes) -> Receive:
    """Return what gives a body to the application, as if a client sent it and waited."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()  # the client never leaves
        return messages.pop()

    return receive


async def forget(message: Message) -> None:
    """Drop a part of a response."""
