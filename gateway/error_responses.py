"""The responses of errors."""

from __future__ import annotations

import logging
from typing import Final

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match

from gateway.errors import (
    GatewayError,
    MalformedRequest,
    MethodNotAllowed,
    NotEnoughMemory,
    serialize_error,
)
from gateway.messages import quote_text

log = logging.getLogger(__name__)

# OpenAI's clients read errors in the shape of their API.
OPENAI_PATHS: Final = frozenset(("/v1/embeddings", "/v1/completions", "/v1/chat/completions"))
OPENAI_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
OPENAI_REQUEST_ERROR: Final = "invalid_request_error"
OPENAI_SERVER_ERROR: Final = "server_error"
# The key of a scope whose errors have the shape of another API; an ASGI layer for its paths sets it.
ERROR_SERIALIZER: Final = "error_serializer"

# Errors that the framework raises itself, by status; its own message is only the status phrase.
FRAMEWORK_ERRORS: Final = {
    400: ("MALFORMED_REQUEST", "the request is malformed"),
    404: ("NOT_FOUND", "path not found; GET /docs shows the API"),
    413: ("TOO_LARGE", "the request is too large"),
}


def release_frames(exc: BaseException) -> None:
    """Drop the tracebacks of a handled error and of its context.

    Their frames hold the request's body and refer back to the error, so that both would stay in memory until
    the garbage collector scans old objects, thousands of requests later.
    """
    error: BaseException | None = exc
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


async def render_error(request: Request, exc: Exception) -> Response:
    """Render any exception. An unexpected one is logged in full and reported without its cause."""
    request_id = str(request.scope.get("request_id", ""))
    if isinstance(exc, MemoryError):
        log.warning("out of memory", extra={"request_id": request_id})
        exc = NotEnoughMemory()
    elif is_wrong_method(exc):
        exc = MethodNotAllowed(find_allowed_methods(request))
    if isinstance(exc, GatewayError):
        status, code, message = exc.status, exc.code, exc.detail
        release_frames(exc)
    elif isinstance(exc, HTTPException):
        status = exc.status_code
        code, message = FRAMEWORK_ERRORS.get(status, (f"HTTP_{status}", str(exc.detail)))
    elif isinstance(exc, RequestValidationError):
        status, code = MalformedRequest.status, MalformedRequest.code
        location, reason = exc.errors()[0]["loc"], exc.errors()[0]["msg"]
        message = f"invalid {location[0]} parameter {quote_text(str(location[-1]))}: {reason}"
    else:
        log.error("unhandled exception", exc_info=exc, extra={"request_id": request_id})
        status, code = 500, "INTERNAL"
        message = "internal error; the gateway's log contains the cause under this request id"
    headers = getattr(exc, "headers", None)
    if request.scope["path"] in OPENAI_PATHS:
        body = serialize_openai_error(message, code, status)
    elif serialize := request.scope.get(ERROR_SERIALIZER):
        body = serialize(message, code, status)
    else:
        body = serialize_error(message, code, request_id, getattr(exc, "report", None))
    if getattr(exc, "is_event", False):
        return Response(b"data: %b\n\n" % body, status, headers, "text/event-stream")
    return Response(body, status, headers, "application/json")


def is_wrong_method(exc: Exception) -> bool:
    """Return whether the framework has no route for the method; its error names those of one route."""
    return (
        isinstance(exc, HTTPException)
        and not isinstance(exc, GatewayError)
        and exc.status_code == MethodNotAllowed.status
    )


def find_allowed_methods(request: Request) -> set[str]:
    """Return the methods of all routes of the path's template.

    The first template that matches counts: that of `/v1/models/{model}` matches `m:predict` as well.
    """
    routes: list[BaseRoute] = request.app.state.routes
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    same = (route for route in matching if has_same_template(route, matching[0]))
    methods = {method for route in same for method in getattr(route, "methods", None) or ()}
    return methods | {"HEAD"} if "GET" in methods else methods  # the middleware serves HEAD as GET


def has_same_template(route: BaseRoute, other: BaseRoute) -> bool:
    return getattr(route, "path", None) == getattr(other, "path", None)


def serialize_openai_error(message: str, code: str, status: int) -> bytes:
    default = OPENAI_SERVER_ERROR if status >= 500 else OPENAI_REQUEST_ERROR
    kind = OPENAI_ERROR_TYPES.get(status, default)
    error = {"message": message, "type": kind, "param": None, "code": code}
    return orjson.dumps({"error": error})
