"""The outermost ASGI layer: request IDs, authentication, rate limits, metrics, access log and traces."""

from __future__ import annotations

import logging
from collections.abc import Set
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Final

from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from gateway.access.auth import (
    PRIORITY_HEADER,
    REFUSALS,
    PathRules,
    UnknownPriority,
    name_caller,
    read_priority,
)
from gateway.access.limits import LimitExceeded
from gateway.access.peers import client_network
from gateway.errors import Unavailable
from gateway.routes.error_responses import ErrorBoundary
from gateway.routes.passthrough.rules import is_passthrough
from gateway.services import INTERNAL_REQUEST, InternalRequest, Services
from gateway.telemetry.logs import ACCESS_LOGGER, READING_METHODS, log_fields
from gateway.telemetry.metrics import V1_ROUTE, V2_ROUTE
from gateway.telemetry.recording import RecordedBody
from gateway.telemetry.refusals import REFUSED_STATUSES, RefusalKey
from gateway.telemetry.request_info import (
    RequestInfo,
    RequestScope,
    current_request_info,
    read_head,
)
from gateway.telemetry.tracing import Trace, create_request_id, find_request_id

log = logging.getLogger(ACCESS_LOGGER)

# Their 503 says nothing else than the line that `ReadinessMonitor` logs.
READINESS_PATHS: Final = frozenset(("/readyz", "/v2/health/ready"))


@dataclass(frozen=True, slots=True)
class RequestHead:
    """Facts in the request line and the headers, which repeated requests share."""

    request_id: str  # "" if the client sent none
    route_group: str
    is_limited: bool  # counts at the rate of its key
    has_priority: bool


def parse_head(unlimited_paths: Set[str], scope: Scope) -> RequestHead:
    is_limited = scope["path"] not in unlimited_paths
    return RequestHead(
        find_request_id(scope["headers"]),
        V2_ROUTE if is_passthrough(scope["raw_path"]) else V1_ROUTE,
        is_limited,
        is_limited and any(name == PRIORITY_HEADER for name, _ in scope["headers"]),
    )


class GatewayMiddleware:
    """The outermost ASGI application: identifies the caller of a request, limits and logs it."""

    def __init__(self, framework: FastAPI, application: ErrorBoundary, paths: PathRules) -> None:
        self.framework = framework
        self.services: Services | None = None  # set during the application's lifespan
        self._application = application
        self._paths = paths
        self._parse_head = partial(parse_head, paths.unlimited)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        internal: InternalRequest | None = scope.get(INTERNAL_REQUEST)
        services = self.services if internal is None else internal.services
        if scope["type"] != "http" or services is None:
            await self.framework(scope, receive, send)
            return
        scope["app"] = self.framework
        scope["services"] = services
        started = perf_counter()
        head = read_head(scope, self._parse_head)
        route_group = head.route_group
        info = RequestInfo(head.request_id or create_request_id())
        current_request_info.set(info)
        scope["request_id"] = info.request_id
        scope["request_info"] = info
        request_scope: RequestScope = scope  # type: ignore[assignment]  # typing.cast costs a call
        if services.tracer is not None and scope["path"] not in self._paths.probes:
            info.trace = services.tracer.start_trace(scope["method"], scope["headers"])
        in_flight = services.metrics.in_flight
        in_flight[route_group] += 1
        recorders = services.recorders if internal is None else ()
        recordings = [recorder.start(request_scope) for recorder in recorders]
        for started_recording in filter(None, recordings):
            receive = record_received(started_recording.request, receive)
            send = record_sent(started_recording.response, send)
        try:
            access = services.access
            caller = (
                access.authenticate(request_scope) or await access.verify(request_scope)
                if internal is None
                else internal.caller
            )
            info.caller = caller
            info.key = caller.name
            info.caller_name = name_caller(caller, request_scope["client"])
            info.wanted_priority = read_priority(request_scope) if head.has_priority else None
            if head.is_limited and caller.limits is not None:
                await services.limiter.admit(info, caller.limits)
            await self._application(scope, receive, send)
        except (*REFUSALS, LimitExceeded, UnknownPriority) as exc:
            await self._application.refuse(scope, receive, send, exc)
        finally:
            in_flight[route_group] -= 1
            self._end_request(services, request_scope, perf_counter() - started)
            for recorder, recording in zip(recorders, recordings, strict=True):
                recorder.end(request_scope, recording, info.status)

    def _end_request(self, services: Services, scope: RequestScope, duration_s: float) -> None:
        """Release what the request holds, and record it in the metrics, the log and its trace."""
        info = scope["request_info"]
        status = info.status
        if info.charge is not None or info.reservation is not None:
            release_resources(services, info)
        services.metrics.observe(info, status, duration_s)
        is_read = scope["method"] in READING_METHODS
        if not (is_read and self._is_routine(scope["path"], status)):
            log_request(services, scope, info, status, duration_s)
        if info.trace is not None:
            end_trace(info.trace, scope, info, status)

    def _is_routine(self, path: str, status: int) -> bool:
        """Return whether only a detailed log has this read: a probe, or a successful read of the page."""
        is_expected = status < 400 or (status == Unavailable.status and path in READINESS_PATHS)
        return is_expected and not log.isEnabledFor(logging.DEBUG) and self._paths.is_routine(path)


def record_received(body: RecordedBody, receive: Receive) -> Receive:
    async def receive_recorded() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            is_last = not message.get("more_body", False)
            body.add(message.get("body", b""), is_last=is_last)
        return message

    return receive_recorded


def record_sent(body: RecordedBody, send: Send) -> Send:
    async def send_recorded(message: Message) -> None:
        await send(message)
        if message["type"] == "http.response.start":
            body.headers = message["headers"]
        else:
            is_last = not message.get("more_body", False)
            body.add(message.get("body", b""), is_last=is_last)

    return send_recorded


def release_resources(services: Services, info: RequestInfo) -> None:
    if info.charge is not None:
        info.charge.release()
    if info.reservation is not None:
        services.limiter.end(info)


def client_address(scope: RequestScope) -> str:
    client = scope["client"]
    return client[0] if client else ""


def log_request(
    services: Services, scope: RequestScope, info: RequestInfo, status: int, duration_s: float
) -> None:
    is_repeated = status in REFUSED_STATUSES and not log_refusal(services, scope, info, status)
    if info.management_call is not None:
        services.repository.state.events.record_call(scope, status, is_repeated=is_repeated)
    if not log.isEnabledFor(logging.INFO):
        return
    fields = {
        "route": info.route,
        "model": info.model,
        "version": info.version,
        "replica": info.replica,
        "attempts": info.attempts,
        "duration_ms": round(duration_s * 1000, 2),
        "upstream_ms": round(info.upstream_s * 1000, 2),
        "bytes_in": info.bytes_in,
        "bytes_out": info.bytes_out,
        "key": info.key,
        "trace_id": "",
        "client": client_address(scope),
    }
    if info.subject:
        fields["subject"] = info.subject
    if info.trace is not None:
        fields |= {"trace_id": info.trace.trace_id, "span_id": info.trace.span_id}
    path = scope["path"].replace(" ", "%20")  # one word: it must not look like other fields
    message = f"{scope['method']} {path} {status}"
    log_fields(log, message, info.request_id, fields)


def log_refusal(services: Services, scope: RequestScope, info: RequestInfo, status: int) -> bool:
    """Log a refused request, or only count it; return whether it was logged."""
    client = client_address(scope)
    key = RefusalKey(
        info.caller_name or client_network(client),
        info.error_code,
        info.route if info.management_call is not None else "",
    )
    fields = {"status": status, "client": client, "route": info.route}
    return services.refusals.record(key, info.error_reason, **fields)


def end_trace(trace: Trace, scope: RequestScope, info: RequestInfo, status: int) -> None:
    host, port = scope.get("server") or ("", "")
    trace.end(
        f"{scope['method']} {info.route}".rstrip(),
        status,
        {
            "http.request.method": scope["method"],
            "http.route": info.route,
            "url.path": scope["path"],
            "url.scheme": scope["scheme"],
            "server.address": host,
            "server.port": port or "",
            "client.address": client_address(scope),
            "triton.model": info.model,
            "triton.version": info.version,
            "triton.replica": info.replica,
            "request.id": info.request_id,
        },
    )
