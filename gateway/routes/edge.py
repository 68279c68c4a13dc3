"""The outermost layer: every request gets an id, a place in the metrics and a line in the log."""

from __future__ import annotations

import asyncio
import logging
from time import perf_counter

from fastapi import FastAPI
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from gateway import audit
from gateway.context import Notes, current
from gateway.errors import Forbidden, GatewayError, Unauthenticated, render
from gateway.metrics import CLIENT_LEFT, FRAMED, PASSED
from gateway.rates import UNCOUNTED, TooFast
from gateway.routes.forwarding import NO_GUESSING
from gateway.routes.services import Services
from gateway.routes.v2 import is_passed, pass_through
from gateway.tracing import Trace, is_probe, request_id_of

log = logging.getLogger(__name__)

# What a model answers is never taken for a page, nor runs as one where it says that it is one.
OF_MODELS = "/v1/"
SANDBOX = (b"content-security-policy", b"sandbox; default-src 'none'")
HTML = b"text/html"
# The pages are the documentation's, whose scripts and styles come from there.
SOURCES = "https://cdn.jsdelivr.net"
POLICY = "; ".join(
    (
        "default-src 'none'",
        "connect-src 'self'",
        f"script-src 'self' 'unsafe-inline' {SOURCES}",
        f"style-src 'self' 'unsafe-inline' {SOURCES} https://fonts.googleapis.com",
        "font-src https://fonts.gstatic.com",
        "img-src 'self' data: https://fastapi.tiangolo.com https://cdn.redoc.ly",
        "worker-src blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
OF_PAGES = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
)


class Edge:
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
        notes = Notes(request_id_of(scope["headers"]))
        current.set(notes)
        scope["request_id"] = notes.request_id
        scope["notes"] = notes
        if services.tracer is not None and not is_probe(scope["path"]):
            notes.trace = services.tracer.begin(scope["method"], scope["headers"])
        way = PASSED if is_passed(scope["raw_path"]) else FRAMED
        in_flight = services.metrics.in_flight
        in_flight[way] += 1
        status = CLIENT_LEFT
        try:
            notes.caller = caller = services.access.caller(scope)
            notes.key = caller.name
            if caller.requests_per_second is not None and scope["path"] not in UNCOUNTED:
                await services.rates.count(caller.name, caller.requests_per_second)
            if way is PASSED:
                status = await pass_through(services, scope, receive, send)
            else:
                status = await self._framed(scope, receive, send, notes)
        except (Unauthenticated, Forbidden, TooFast) as exc:
            status = await refused(scope, receive, send, exc)
        except asyncio.CancelledError:
            log.debug("the client left")  # the server cancels us then; there is nobody to answer
        finally:
            if notes.charge is not None:
                notes.charge.release()
            in_flight[way] -= 1
            duration_s = perf_counter() - began
            services.metrics.observe(notes, status, duration_s)
            tell(scope, notes, status, duration_s)
            if notes.trace is not None:
                end_trace(notes.trace, scope, notes, status)

    async def _framed(self, scope: Scope, receive: Receive, send: Send, notes: Notes) -> int:
        status = CLIENT_LEFT
        header = (b"x-request-id", notes.request_id.encode())
        of_models = scope["path"].startswith(OF_MODELS)
        # The server leaves out the answer's body (RFC 9110, section 9.3.2).
        asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope

        async def receive_counted() -> Message:
            message = await receive()
            notes.bytes_in += len(message.get("body", b""))
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), header, NO_GUESSING]
                if of_models:
                    headers.append(SANDBOX)
                elif any(name == b"content-type" and HTML in value for name, value in headers):
                    given = {name for name, _ in headers}  # a page may have a stricter policy
                    headers += [pair for pair in OF_PAGES if pair[0] not in given]
                message["headers"] = headers
            elif asked is scope:
                notes.bytes_out += len(message.get("body", b""))
            await send(message)

        try:
            await self._framework(asked, receive_counted, send_with_id)
        finally:
            # Only what a table of ours holds is a label: a path of a client's making is not.
            notes.route = getattr(asked.get("route"), "path", "")
        return status


async def refused(scope: Scope, receive: Receive, send: Send, exc: GatewayError) -> int:
    """Whoever cannot say who it is, or asks too often, hears nothing else."""
    response = await render(Request(scope), exc)
    response.headers["x-request-id"] = scope["request_id"]
    added = [NO_GUESSING, SANDBOX] if scope["path"].startswith(OF_MODELS) else [NO_GUESSING]
    response.raw_headers += added
    scope["notes"].bytes_out = len(response.body)
    await response(scope, receive, send)
    return response.status_code


def client_of(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else ""


def tell(scope: Scope, notes: Notes, status: int, duration_s: float) -> None:
    """Write the request's line in the log, and that of an administrative call in the audit log."""
    if notes.managed is not None:
        audit.log_call(notes, scope["method"], scope["path"], client_of(scope), status)
    if not log.isEnabledFor(logging.INFO):
        return
    log.info(
        "%s %s %d",
        scope["method"],
        scope["path"],
        status,
        extra={
            "route": notes.route,
            "model": notes.model,
            "version": notes.version,
            "replica": notes.replica,
            "attempts": notes.attempts,
            "duration_ms": round(duration_s * 1000, 2),
            "upstream_ms": round(notes.upstream_s * 1000, 2),
            "bytes_in": notes.bytes_in,
            "bytes_out": notes.bytes_out,
            "key": notes.key,
            "trace_id": notes.trace.trace_id if notes.trace is not None else "",
            "client": client_of(scope),
        },
    )


def end_trace(trace: Trace, scope: Scope, notes: Notes, status: int) -> None:
    """By the semantic conventions of OpenTelemetry for HTTP; no path of a client's making is a name."""
    host, port = scope.get("server") or ("", "")
    trace.end(
        f"{scope['method']} {notes.route}".rstrip(),
        status,
        {
            "http.request.method": scope["method"],
            "http.route": notes.route,
            "url.path": scope["path"],
            "url.scheme": scope["scheme"],
            "server.address": host,
            "server.port": port or "",
            "client.address": client_of(scope),
            "triton.model": notes.model,
            "triton.version": notes.version,
            "triton.replica": notes.replica,
            "request.id": notes.request_id,
        },
    )
