"""The responses that the gateway builds itself: errors, and how each response is finished and sent."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Match
from starlette.types import Message, Receive, Scope, Send

from gateway.errors import (
    GatewayError,
    InternalError,
    MalformedRequest,
    MethodNotAllowed,
    NotEnoughMemory,
    NotFound,
    TooLarge,
    serialize_error,
    serialize_problem,
)
from gateway.headers import MAX_ACCEPT_CHARS, list_accepted_types
from gateway.media_types import JSON, PROBLEM_JSON
from gateway.messages import quote_text

log = logging.getLogger(__name__)

# Returns the body of an error in the shape of another API, from its message, code and status.
ErrorSerializer = Callable[[str, str, int], bytes]
# The key of a scope with such errors.
ERROR_SERIALIZER: Final = "error_serializer"

NOSNIFF_HEADER: Final = (b"x-content-type-options", b"nosniff")

# The type of an error in OpenAI's API, by status.
OPENAI_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}

# Errors that the framework raises itself, by status; its own message is only the status phrase.
FRAMEWORK_ERRORS: Final[dict[int, tuple[type[GatewayError], str]]] = {
    400: (MalformedRequest, "the request is malformed"),
    404: (NotFound, "path not found; GET /docs shows the API"),
    413: (TooLarge, "the request is too large"),
}

# Pydantic's name for a value that is no boolean.
BOOLEAN_ERROR: Final = "bool_parsing"


def to_gateway_error(exc: Exception, request_id: str) -> GatewayError:
    """Return the error of any exception. An unexpected one is logged, and reported without its cause."""
    if isinstance(exc, GatewayError):
        release_frames(exc)
        return exc
    if isinstance(exc, MemoryError):
        log.warning("out of memory", extra={"request_id": request_id})
        return NotEnoughMemory()
    log.error("unhandled exception", exc_info=exc, extra={"request_id": request_id})
    return InternalError()


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
    request_id = str(request.scope.get("request_id", ""))
    error = to_gateway_error(translate_framework_error(request, exc), request_id)
    if (info := request.scope.get("request_info")) is not None:
        info.error_code = error.code
        info.error_reason = error.detail
    if serialize := request.scope.get(ERROR_SERIALIZER):
        body = serialize(error.detail, error.code, error.status)
    # A longer header is an error itself.
    elif PROBLEM_JSON in list_accepted_types(request.headers.get("accept", "")[:MAX_ACCEPT_CHARS]):
        body = serialize_problem(error, request_id)
        return Response(body, error.status, error.headers, PROBLEM_JSON)
    else:
        body = serialize_error(error.detail, error.code, request_id, error.report)
    return Response(body, error.status, error.headers, JSON)


def translate_framework_error(request: Request, exc: Exception) -> Exception:
    if isinstance(exc, RequestValidationError):
        error = exc.errors()[0]
        location = error["loc"]
        reason = "send true or false" if error["type"] == BOOLEAN_ERROR else error["msg"]
        name = quote_text(str(location[-1]))
        return MalformedRequest(f"invalid {location[0]} parameter {name}: {reason}")
    if not isinstance(exc, HTTPException) or isinstance(exc, GatewayError):
        return exc
    if exc.status_code == MethodNotAllowed.status:  # its error names the methods of one route
        if verb := find_model_verb(request):
            return NotFound(
                f"{quote_text(verb)} is not a verb of models; for the available paths, see GET /docs"
            )
        return MethodNotAllowed(find_allowed_methods(request))
    if exc.status_code not in FRAMEWORK_ERRORS:
        return exc
    kind, message = FRAMEWORK_ERRORS[exc.status_code]
    if exc.status_code == NotFound.status and request.scope["path"].endswith("/"):
        message = f"{message}; paths do not end with a slash"
    return kind(message)


def find_model_verb(request: Request) -> str:
    """Return the verb of `POST /v1/models/NAME:VERB`, which the routes take for a part of the name, or ""."""
    name, colon, verb = request.scope["path"].rpartition(":")
    is_verb = request.method == "POST" and name.startswith("/v1/models/") and "/" not in verb
    return colon + verb if is_verb else ""


def find_allowed_methods(request: Request) -> set[str]:
    """Return the methods of all routes of the path's template.

    The first matching template counts; `/v1/models/{model}` matches `m:predict` as well.
    """
    routes: list[BaseRoute] = request.app.routes
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    path = getattr(matching[0], "path", None)
    same = (route for route in matching if getattr(route, "path", None) == path)
    methods = {method for route in same for method in getattr(route, "methods", None) or ()}
    return methods | {"HEAD"} if "GET" in methods else methods  # the middleware serves HEAD as GET


def serialize_openai_error(message: str, code: str, status: int) -> bytes:
    kind = OPENAI_ERROR_TYPES.get(
        status, "server_error" if status >= 500 else "invalid_request_error"
    )
    error = {"message": message, "type": kind, "param": None, "code": code}
    return orjson.dumps({"error": error})


def build_own_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the headers of every response that the gateway builds."""
    return [(b"x-request-id", scope["request_id"].encode()), NOSNIFF_HEADER]


async def send_response(response: Response, scope: Scope, receive: Receive, send: Send) -> int:
    """Send a response with the headers that each has, and count its bytes. Returns the status."""
    status = response.status_code
    headers = response.raw_headers
    headers.extend(build_own_headers(scope))
    if isinstance(response, StreamingResponse):
        await response(scope, receive, count_sent_bytes(send, scope))
        return status
    scope["request_info"].bytes_out = len(response.body)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})
    return status


def count_sent_bytes(send: Send, scope: Scope) -> Send:
    info = scope["request_info"]

    async def send_counted(message: Message) -> None:
        info.bytes_out += len(message.get("body", b""))
        await send(message)

    return send_counted
