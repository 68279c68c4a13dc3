"""The outermost ASGI layer: request IDs, authentication, rate limits, metrics, access log and traces."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Final, NamedTuple

from fastapi import APIRouter, FastAPI, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
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
from gateway.errors import GatewayError, Unavailable
from gateway.http_client.connection import Headers
from gateway.routes.error_responses import (
    ERROR_SERIALIZER,
    ErrorSerializer,
    build_own_headers,
    render_error,
    send_response,
)
from gateway.routes.passthrough.handler import pass_through
from gateway.routes.passthrough.rules import is_passthrough
from gateway.services import INTERNAL_REQUEST, Deferral, Services
from gateway.telemetry.logs import ACCESS_LOGGER, READING_METHODS, log_fields
from gateway.telemetry.metrics import CLIENT_CLOSED_REQUEST, V1_ROUTE, V2_ROUTE
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
# Browsers must not run a model's output as a page of the gateway's origin.
SANDBOX_HEADER = (b"content-security-policy", b"sandbox; default-src 'none'")


class InferenceCall(NamedTuple):
    """The handler for a path of an inference, and the values of the path's parameters."""

    template: str
    handler: Callable[..., Awaitable[Response]]
    parameters: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RequestHead:
    """Facts in the request line and the headers, which repeated requests share."""

    request_id: str  # "" if the client sent none
    route_group: str
    inference: InferenceCall | None  # None if the request needs the framework
    is_limited: bool  # counts at the rate of its key
    has_priority: bool


def parse_head(
    inference_routes: Sequence[APIRoute],
    deferral: Deferral | None,
    unlimited_paths: Set[str],
    scope: Scope,
) -> RequestHead:
    is_v2 = is_passthrough(scope["raw_path"])
    is_plain_post = scope["method"] == "POST" and not scope["query_string"]
    is_limited = scope["path"] not in unlimited_paths
    inference = None
    if deferral is not None and deferral.matches(scope):
        inference = InferenceCall("", deferral.handle, {})
    elif is_plain_post and not is_v2:
        inference = find_inference(inference_routes, scope["path"])
    return RequestHead(
        find_request_id(scope["headers"]),
        V2_ROUTE if is_v2 else V1_ROUTE,
        inference,
        is_limited,
        is_limited and any(name == PRIORITY_HEADER for name, _ in scope["headers"]),
    )


def find_inference(routes: Sequence[APIRoute], path: str) -> InferenceCall | None:
    for route in routes:
        if match := route.path_regex.match(path):
            return InferenceCall(route.path, route.endpoint, match.groupdict())
    return None


class GatewayMiddleware:
    """The ASGI application.

    Requests to `/v2` go to Triton, and inferences to the handlers of their routers, without the framework;
    FastAPI serves the rest.
    """

    def __init__(
        self,
        framework: FastAPI,
        inference_routers: Iterable[APIRouter],
        paths: PathRules,
        error_serializers: Mapping[str, ErrorSerializer],
        deferral: Deferral | None = None,
    ) -> None:
        self.framework = framework
        self._error_serializers = error_serializers
        self.paths = paths
        routes = [route for router in inference_routers for route in router.routes]
        self.inference_routes = [route for route in routes if isinstance(route, APIRoute)]
        self._parse_head = partial(parse_head, self.inference_routes, deferral, paths.unlimited)
        self.services: Services | None = None  # set during the application's lifespan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        internal = scope.get(INTERNAL_REQUEST)
        services = self.services if internal is None else internal.services
        if scope["type"] != "http" or services is None:
            await self.framework(scope, receive, send)
            return
        started = perf_counter()
        head = read_head(scope, self._parse_head)
        route_group = head.route_group
        inference = head.inference
        info = RequestInfo(head.request_id or create_request_id())
        current_request_info.set(info)
        scope["request_id"] = info.request_id
        scope["request_info"] = info
        request_scope: RequestScope = scope  # type: ignore[assignment]  # typing.cast costs a call
        if services.tracer is not None and scope["path"] not in self.paths.probes:
            info.trace = services.tracer.start_trace(scope["method"], scope["headers"])
        in_flight = services.metrics.in_flight
        in_flight[route_group] += 1
        status = CLIENT_CLOSED_REQUEST
        recorders = services.recorders if internal is None else ()
        recordings = [recorder.start(request_scope) for recorder in recorders]
        for recording in filter(None, recordings):
            receive = record_received(recording.request, receive)
            send = record_sent(recording.response, send)
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
            if route_group is V2_ROUTE:
                status = await pass_through(services, scope, receive, send)
            elif inference is not None:
                status = await serve_inference(services, inference, scope, receive, send)
            else:
                status = await self._call_framework(services, scope, receive, send)
        except (*REFUSALS, LimitExceeded, UnknownPriority) as exc:
            status = await self._send_refusal(scope, receive, send, exc)
        finally:
            in_flight[route_group] -= 1
            self._end_request(services, request_scope, status, perf_counter() - started)
            for recorder, recording in zip(recorders, recordings, strict=True):
                recorder.end(request_scope, recording, status)

    def _end_request(
        self, services: Services, scope: RequestScope, status: int, duration_s: float
    ) -> None:
        """Release what the request holds, and record it in the metrics, the log and its trace."""
        info = scope["request_info"]
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
        return is_expected and not log.isEnabledFor(logging.DEBUG) and self.paths.is_routine(path)

    async def _call_framework(
        self, services: Services, scope: Scope, receive: Receive, send: Send
    ) -> int:
        info: RequestInfo = scope["request_info"]
        status = CLIENT_CLOSED_REQUEST
        self.choose_error_serializer(scope)
        extra_headers = [*build_own_headers(scope), *self._find_output_headers(scope)]
        # The server omits the body of a response to HEAD (RFC 9110, section 9.3.2).
        framework_scope = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *extra_headers]
            elif framework_scope is scope:
                info.bytes_out += len(message.get("body", b""))
            await send(message)

        try:
            await self.framework(framework_scope, receive, send_with_id)
        finally:
            # The label is the route's template: a client's path would be unbounded.
            info.route = get_route(framework_scope)
        return status

    def choose_error_serializer(self, scope: Scope) -> None:
        for path, serialize in self._error_serializers.items():
            if scope["path"] == path or (path[-1] == "/" and scope["path"].startswith(path)):
                scope[ERROR_SERIALIZER] = serialize

    def _find_output_headers(self, scope: Scope) -> Headers:
        return [SANDBOX_HEADER] if scope["path"].startswith(self.paths.output_prefixes) else []

    async def _send_refusal(
        self, scope: Scope, receive: Receive, send: Send, exc: GatewayError
    ) -> int:
        # The request is answered before any handler sees it.
        self.choose_error_serializer(scope)
        response = await render_error(Request(scope), exc)
        response.raw_headers += self._find_output_headers(scope)
        return await send_response(response, scope, receive, send)


async def serve_inference(
    services: Services, inference: InferenceCall, scope: Scope, receive: Receive, send: Send
) -> int:
    """Call a handler without the framework, whose routing and dependencies cost more than all the rest.

    The framework calls the same handler for a request with a query.
    """
    info: RequestInfo = scope["request_info"]
    info.route = inference.template
    request = Request(scope, receive)
    try:
        response = await inference.handler(request, services, **inference.parameters)
    except ClientDisconnect:
        return CLIENT_CLOSED_REQUEST
    except Exception as exc:  # noqa: BLE001 - the border of the process: every request gets a response
        response = await render_error(request, exc)
    response.raw_headers.append(SANDBOX_HEADER)
    return await send_response(response, scope, receive, send)


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


def get_route(scope: Scope) -> str:
    return getattr(scope.get("route"), "path", "")


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
