"""The responses that the gateway builds itself: errors, and how each response is finished and sent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
from gateway.routes.passthrough.rules import is_passthrough
from gateway.telemetry.request_info import CLIENT_CLOSED_REQUEST, RequestInfo

log = logging.getLogger(__name__)

# Returns the body of an error in the shape of another API, from its message, code and status.
ErrorSerializer = Callable[[str, str, int], bytes]

NOSNIFF_HEADER: Final = (b"x-content-type-options", b"nosniff")
# Browsers must not run a model's output as a page of the gateway's origin.
SANDBOX_HEADER: Final = (b"content-security-policy", b"sandbox; default-src 'none'")

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


def render_error(
    request: Request, exc: Exception, serialize: ErrorSerializer | None = None
) -> Response:
    request_id = str(request.scope.get("request_id", ""))
    error = to_gateway_error(translate_framework_error(request, exc), request_id)
    if (info := request.scope.get("request_info")) is not None:
        info.error_code = error.code
        info.error_reason = error.detail
    if serialize is not None:
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
    return methods | {"HEAD"} if "GET" in methods else methods  # `ErrorBoundary` serves HEAD as GET


def serialize_openai_error(message: str, code: str, status: int) -> bytes:
    kind = OPENAI_ERROR_TYPES.get(
        status, "server_error" if status >= 500 else "invalid_request_error"
    )
    error = {"message": message, "type": kind, "param": None, "code": code}
    return orjson.dumps({"error": error})


class ErrorBoundary:
    """The ASGI application around the routes, in which every exception becomes a response.

    It adds the headers that all responses of the gateway have. Their status and length go to `RequestInfo`.
    """

    def __init__(
        self,
        routes: ASGIApp,
        output_prefixes: tuple[str, ...],
        serializers: Mapping[str, ErrorSerializer],
    ) -> None:
        self._routes = routes
        self._output_prefixes = output_prefixes
        self._serializers = serializers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        info: RequestInfo = scope["request_info"]
        send = self._complete(scope, send)
        if scope["method"] == "HEAD":
            # The server omits the body of the response (RFC 9110, section 9.3.2).
            scope = {**scope, "method": "GET"}
        try:
            await self._routes(scope, receive, send)
        except ClientDisconnect:
            return
        except Exception as exc:  # noqa: BLE001 - the border of the process: every request gets a response
            if info.status != CLIENT_CLOSED_REQUEST:
                # The response has started: the server closes the connection, so that clients see the error.
                log.warning("the response was aborted: %s", exc)
                return
            await self._send_error(scope, receive, send, exc)
        finally:
            # The label is the route's template: a client's path would be unbounded.
            info.route = info.route or get_route(scope)

    async def refuse(self, scope: Scope, receive: Receive, send: Send, exc: GatewayError) -> None:
        """Answer a request that no route sees."""
        await self._send_error(scope, receive, self._complete(scope, send), exc)

    async def _send_error(self, scope: Scope, receive: Receive, send: Send, exc: Exception) -> None:
        request = Request(scope)
        serialize = next(
            (each for path, each in self._serializers.items() if covers(path, scope["path"])), None
        )
        response = render_error(request, exc, serialize)
        if is_passthrough(scope["raw_path"]) and isinstance(exc, GatewayError):
            response.status_code = exc.triton_status or exc.status
        await response(scope, receive, send)

    def _complete(self, scope: Scope, send: Send) -> Send:
        """Return a `send` that completes the response, and records it."""
        info: RequestInfo = scope["request_info"]
        headers = [(b"x-request-id", info.request_id.encode()), NOSNIFF_HEADER]
        if scope["path"].startswith(self._output_prefixes):
            headers.append(SANDBOX_HEADER)

        async def send_completed(message: Message) -> None:
            if message["type"] == "http.response.start":
                info.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *headers]
            elif scope["method"] != "HEAD":
                info.bytes_out += len(message.get("body", b""))
            await send(message)

        return send_completed


def covers(path: str, requested: str) -> bool:
    """Return whether a path is the requested one, or ends with a slash and is its beginning."""
    return requested == path or (path[-1] == "/" and requested.startswith(path))


def get_route(scope: Scope) -> str:
    return getattr(scope.get("route"), "path", "")
