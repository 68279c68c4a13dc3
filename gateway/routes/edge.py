"""The outermost layer: every request gets an id, a place in the metrics and a line in the log."""

from __future__ import annotations

import asyncio
import logging
from time import perf_counter

from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from gateway.context import current_request_id
from gateway.routes.services import Services
from gateway.routes.v2 import CLIENT_LEFT, is_passed, pass_through
from gateway.tracing import request_id_of

log = logging.getLogger(__name__)


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
        request_id = scope["request_id"] = request_id_of(scope["headers"])
        current_request_id.set(request_id)
        status = CLIENT_LEFT
        try:
            if is_passed(scope["raw_path"]):
                scope["route_name"] = "/v2"
                status = await pass_through(services, scope, receive, send)
            else:
                status = await self._framed(scope, receive, send)
        except asyncio.CancelledError:
            log.debug("the client left")  # the server cancels us then; there is nobody to answer
        finally:
            observe(services, scope, status, perf_counter() - began)

    async def _framed(self, scope: Scope, receive: Receive, send: Send) -> int:
        status = CLIENT_LEFT
        header = (b"x-request-id", scope["request_id"].encode())

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        await self._framework(scope, receive, send_with_id)
        return status


def observe(services: Services, scope: Scope, status: int, duration_s: float) -> None:
    """Only what Triton confirmed is a label: a path and a name of a client's making are not."""
    route = str(scope.get("route_name") or getattr(scope.get("route"), "path", ""))
    model = scope.get("model", "")
    services.metrics.observe(route, model, status, duration_s)
    if log.isEnabledFor(logging.INFO):
        log.info(
            "%s %s %d",
            scope["method"],
            scope["path"],
            status,
            extra={"model": model, "duration_ms": round(duration_s * 1000, 2)},
        )
