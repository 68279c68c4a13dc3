"""The outermost layer: every request gets an id, a place in the metrics and a line in the log."""

from __future__ import annotations

import logging
from time import perf_counter

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.context import current_request_id
from gateway.routes.services import Services
from gateway.tracing import request_id_of

log = logging.getLogger(__name__)
CLIENT_LEFT = 499


class Edge:
    """Wraps `app`, whose services are those of `framework`."""

    def __init__(self, app: ASGIApp, framework: FastAPI) -> None:
        self._app = app
        self._framework = framework

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = perf_counter()
        request_id = scope["request_id"] = request_id_of(scope["headers"])
        current_request_id.set(request_id)
        status = CLIENT_LEFT

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            observe(self._framework.state.services, scope, status, perf_counter() - began)


def observe(services: Services, scope: Scope, status: int, duration_s: float) -> None:
    """Only what Triton confirmed is a label: a path and a name of a client's making are not."""
    route = scope.get("route_name") or getattr(scope.get("route"), "path", "")
    model = scope.get("model", "")
    services.metrics.duration.labels(route, model, str(status)).observe(duration_s)
    if log.isEnabledFor(logging.INFO):
        log.info(
            "%s %s %d",
            scope["method"],
            scope["path"],
            status,
            extra={"model": model, "duration_ms": round(duration_s * 1000, 2)},
        )
