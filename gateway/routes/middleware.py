"""The outermost layer: every request gets an id, a place in the metrics and a line in the log."""

from __future__ import annotations

import asyncio
import logging
from time import perf_counter

from fastapi import FastAPI
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from gateway import audit
from gateway.errors import Forbidden, GatewayError, Unauthenticated, render_error
from gateway.metrics import CLIENT_CLOSED_REQUEST, V1_ROUTE, V2_ROUTE
from gateway.rate_limit import UNLIMITED_PATHS, RateLimitExceeded
from gateway.request_info import RequestInfo, current_request_info
from gateway.routes.dependencies import Services
from gateway.routes.proxy_headers import NOSNIFF_HEADER
from gateway.routes.v2 import is_passthrough, pass_through
from gateway.tracing import Trace, choose_request_id, is_probe

log = logging.getLogger("gateway.access")

# What a model answers is never taken for a page, nor runs as one where it says that it is one.
MODEL_PATH_PREFIX = "/v1/"
SANDBOX_HEADER = (b"content-security-policy", b"sandbox; default-src 'none'")
HTML_MEDIA_TYPE = b"text/html"
# The pages are the documentation's, whose scripts and styles come from there.
DOCS_CDN = "https://cdn.jsdelivr.net"
DOCS_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "connect-src 'self'",
        f"script-src 'self' 'unsafe-inline' {DOCS_CDN}",
        f"style-src 'self' 'unsafe-inline' {DOCS_CDN} https://fonts.googleapis.com",
        "font-src https://fonts.gstatic.com",
        "img-src 'self' data: https://fastapi.tiangolo.com https://cdn.redoc.ly",
        "worker-src blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HTML_SECURITY_HEADERS = (
    (b"content-security-policy", DOCS_SECURITY_POLICY.encode()),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
)


class GatewayMiddleware:
    """The ASGI application: `/v2` goes straight to Triton, ahead of the framework; the rest is its."""

    def __init__(self, framework: FastAPI) -> None:
        self._framework = framework
        self.services: Services | None = None  # set while the application's lifespan lasts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self.services
        if scope["type"] != "http" or services is None:
            await self._framework(scope, receive, send)
            return
        began = perf_counter()
        notes = RequestInfo(choose_request_id(scope["headers"]))
        current_request_info.set(notes)
        scope["request_id"] = notes.request_id
        scope["request_info"] = notes
        if services.tracer is not None and not is_probe(scope["path"]):
            notes.trace = services.tracer.start_trace(scope["method"], scope["headers"])
        way = V2_ROUTE if is_passthrough(scope["raw_path"]) else V1_ROUTE
        in_flight = services.metrics.in_flight
        in_flight[way] += 1
        status = CLIENT_CLOSED_REQUEST
        try:
            notes.caller = caller = services.access.authenticate(scope)
            notes.key = caller.name
            if caller.requests_per_second is not None and scope["path"] not in UNLIMITED_PATHS:
                await services.rate_limiter.count_request(caller.name, caller.requests_per_second)
            if way is V2_ROUTE:
                status = await pass_through(services, scope, receive, send)
            else:
                status = await self._call_framework(scope, receive, send, notes)
        except (Unauthenticated, Forbidden, RateLimitExceeded) as exc:
            status = await send_refusal(scope, receive, send, exc)
        except asyncio.CancelledError:
            log.debug("the client left")  # the server cancels us then; there is nobody to answer
        finally:
            if notes.charge is not None:
                notes.charge.release()
            in_flight[way] -= 1
            duration_s = perf_counter() - began
            services.metrics.observe(notes, status, duration_s)
            log_request(scope, notes, status, duration_s)
            if notes.trace is not None:
                end_trace(notes.trace, scope, notes, status)

    async def _call_framework(
        self, scope: Scope, receive: Receive, send: Send, info: RequestInfo
    ) -> int:
        status = CLIENT_CLOSED_REQUEST
        header = (b"x-request-id", info.request_id.encode())
        of_models = scope["path"].startswith(MODEL_PATH_PREFIX)
        # The server leaves out the answer's body (RFC 9110, section 9.3.2).
        asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope

        async def receive_counted() -> Message:
            message = await receive()
            info.bytes_in += len(message.get("body", b""))
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), header, NOSNIFF_HEADER]
                if of_models:
                    headers.append(SANDBOX_HEADER)
                elif any(
                    name == b"content-type" and HTML_MEDIA_TYPE in value for name, value in headers
                ):
                    given = {name for name, _ in headers}  # a page may have a stricter policy
                    headers += [pair for pair in HTML_SECURITY_HEADERS if pair[0] not in given]
                message["headers"] = headers
            elif asked is scope:
                info.bytes_out += len(message.get("body", b""))
            await send(message)

        try:
            await self._framework(asked, receive_counted, send_with_id)
        finally:
            # Only what a table of ours holds is a label: a path of a client's making is not.
            info.route = getattr(asked.get("route"), "path", "")
        return status


async def send_refusal(scope: Scope, receive: Receive, send: Send, exc: GatewayError) -> int:
    """Whoever cannot say who it is, or asks too often, hears nothing else."""
    response = await render_error(Request(scope), exc)
    response.headers["x-request-id"] = scope["request_id"]
    added = (
        [NOSNIFF_HEADER, SANDBOX_HEADER]
        if scope["path"].startswith(MODEL_PATH_PREFIX)
        else [NOSNIFF_HEADER]
    )
    response.raw_headers += added
    scope["request_info"].bytes_out = len(response.body)
    await response(scope, receive, send)
    return response.status_code


def client_address(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else ""


def log_request(scope: Scope, info: RequestInfo, status: int, duration_s: float) -> None:
    """Write the request's line in the log, and that of an administrative call in the audit log."""
    if info.management_call is not None:
        audit.log_call(info, scope["method"], scope["path"], client_address(scope), status)
    if not log.isEnabledFor(logging.INFO):
        return
    log.info(
        "%s %s %d",
        scope["method"],
        scope["path"],
        status,
        extra={
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
            "trace_id": info.trace.trace_id if info.trace is not None else "",
            "client": client_address(scope),
        },
    )


def end_trace(trace: Trace, scope: Scope, info: RequestInfo, status: int) -> None:
    """By the semantic conventions of OpenTelemetry for HTTP; no path of a client's making is a name."""
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
