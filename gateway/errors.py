"""The error family: one sentence, one stable code, one status; and the one handler that renders it.

Every class states its status and code once and builds its sentence from facts, so that callers pass
what was wrong and never how to say it. The family derives from Starlette's `HTTPException`: what is
raised while a body is being read then keeps its status on its way through FastAPI.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gateway.messages import join_names, quote_text
from gateway.names import normalize_version

log = logging.getLogger(__name__)


# What curl -d says of a body when it is told nothing else.
CURL_DEFAULT_TYPE = "application/x-www-form-urlencoded"


class GatewayError(HTTPException):
    """What a caller is told. `detail` is the sentence; it never holds a path, a stack or a secret."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "INTERNAL"
    retry_after_s: ClassVar[int | None] = None
    report: Mapping[str, Any] | None = None  # management tells what came of it on each replica
    is_event: bool = False  # Triton answered it as the first event of a stream

    def __init__(self, detail: str, *, headers: dict[str, str] | None = None) -> None:
        headers = headers or {}
        if self.retry_after_s is not None:
            headers.setdefault("Retry-After", str(self.retry_after_s))
        super().__init__(self.status, detail, headers)


class MalformedRequest(GatewayError):
    status, code = 400, "MALFORMED_REQUEST"


class Unauthenticated(GatewayError):
    """Without a key, or with one that nobody has."""

    status, code = 401, "UNAUTHENTICATED"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, headers={"WWW-Authenticate": "Bearer"})


class Forbidden(GatewayError):
    status, code = 403, "FORBIDDEN"


class NotFound(GatewayError):
    status, code = 404, "NOT_FOUND"


class UnknownModel(GatewayError):
    """The sentence begins as Triton's own does: its clients compare the words."""

    status, code = 404, "MODEL_NOT_FOUND"

    def __init__(self, model: str, version: str = "") -> None:
        super().__init__(f"{self.describe(model, version)}; GET /v1/models lists the models")

    def describe(self, model: str, version: str) -> str:
        which = f" version {normalize_version(version) or quote_text(version)}" if version else ""
        return f"Request for unknown model: {quote_text(model)}{which} is not found"


class UnknownModelToLoad(UnknownModel):
    def describe(self, model: str, version: str) -> str:
        return f"failed to load {quote_text(model)}: {super().describe(model, version)}"


class UnknownModelToTrace(UnknownModel):
    """Triton words this one differently when asked for trace settings."""

    def describe(self, model: str, version: str) -> str:
        return f"Request for unknown model : {quote_text(model)[1:-1]}"


class NotAcceptable(GatewayError):
    status, code = 406, "NOT_ACCEPTABLE"

    def __init__(self, accept: str, offered: Iterable[str]) -> None:
        super().__init__(
            f"this answer cannot be given as {quote_text(accept)}; it can be had as {join_names(offered)}"
        )


class UnrepresentableResponse(NotAcceptable):
    """The form can be had in general, but not of this answer."""

    def __init__(self, description: str, offered: Iterable[str]) -> None:
        GatewayError.__init__(
            self, f"the answer is {description}; it can be had as {join_names(offered)}"
        )


class RequestTooSlow(GatewayError):
    """The client sends its request too slowly."""

    status, code = 408, "REQUEST_TOO_SLOW"

    def __init__(self) -> None:
        super().__init__("the request did not come in time")


class Conflict(GatewayError):
    status, code = 409, "CONFLICT"


class ModelControlModeConflict(Conflict):
    """Triton's words are the same for both of its modes that take no calls."""

    code = "MODEL_CONTROL_MODE"

    def __init__(self) -> None:
        super().__init__(
            "the replica's Triton runs in model control mode poll or none: what its repository holds "
            "decides which models it serves; it takes loads and unloads in mode explicit"
        )


class SequenceNotRunning(GatewayError):
    """A request goes on with a sequence whose state is nowhere."""

    status, code = 409, "SEQUENCE_NOT_RUNNING"

    def __init__(
        self,
        model: str,
        sequence_id: int | str | None,
        reason: str = "it was not started, has ended or was idle for too long",
    ) -> None:
        which = (
            "this sequence"
            if sequence_id is None
            else f"sequence {format_sequence_id(sequence_id)}"
        )
        super().__init__(
            f"{which} of model {quote_text(model)} is not running: {reason}; begin it again with "
            "sequence_start"
        )


class TooLarge(GatewayError):
    status, code = 413, "TOO_LARGE"


class BodyTooLarge(TooLarge):
    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the body is larger than the limit of {limit_bytes} bytes")


class UrlTooLong(GatewayError):
    status, code = 414, "URL_TOO_LONG"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the URL is longer than the limit of {limit_bytes} bytes")


class UnsupportedBody(GatewayError):
    status, code = 415, "UNSUPPORTED_BODY"

    def __init__(self, content_type: str, supported: Iterable[str]) -> None:
        what = (
            f"a body of type {quote_text(content_type)}"
            if content_type
            else "a body without a type"
        )
        sentence = f"{what} is not taken here; send {join_names(supported)}"
        if content_type == CURL_DEFAULT_TYPE:
            sentence += " (curl -d needs a -H 'Content-Type: …' beside it)"
        super().__init__(sentence)


class UnsupportedEncoding(GatewayError):
    """The body is compressed in a way that is not taken (RFC 9110, section 15.5.16)."""

    status, code = UnsupportedBody.status, UnsupportedBody.code

    def __init__(self, encoding: str) -> None:
        super().__init__(
            f"Content-Encoding {quote_text(encoding)} is not supported; send gzip, deflate or identity",
            headers={"Accept-Encoding": "gzip, deflate"},
        )


class InputMismatch(GatewayError):
    """Well-formed, but not what the model's metadata asks for."""

    status, code = 422, "DOES_NOT_FIT_MODEL"


class BadImage(InputMismatch):
    code = "BAD_IMAGE"


class RefusedByModel(GatewayError):
    """Triton or the model itself found the request invalid."""

    status, code = 422, "REFUSED_BY_MODEL"


class Overloaded(GatewayError):
    status, code, retry_after_s = 429, "OVERLOADED", 1


class HeaderTooLarge(GatewayError):
    status, code = 431, "HEADER_TOO_LARGE"

    def __init__(self, limit_bytes: int, limit_fields: int) -> None:
        super().__init__(
            f"the header is over the limit of {limit_bytes} bytes and {limit_fields} fields"
        )


class ModelFault(GatewayError):
    status, code = 500, "MODEL_FAULT"


class BadUpstream(GatewayError):
    """A replica answered what no Triton answers, or stopped in the middle."""

    status, code = 502, "BAD_UPSTREAM"


class UpstreamResponseTooLarge(GatewayError):
    """An answer of a replica that would be held as a whole. It says nothing of the replica's health."""

    status, code = 502, "BAD_UPSTREAM"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"the replica's answer is larger than the limit of {limit_bytes} bytes; ask for less at a time, "
            "or through /v2, which passes answers of any size"
        )


class Unavailable(GatewayError):
    status, code, retry_after_s = 503, "UNAVAILABLE", 1


class NotEnoughMemory(GatewayError):
    status, code, retry_after_s = 503, "OUT_OF_MEMORY", 1

    def __init__(self) -> None:
        super().__init__(
            "there is not enough memory for this request now; try again, or send less at a time"
        )


class TooManyConnections(GatewayError):
    status, code, retry_after_s = 503, "TOO_MANY_CONNECTIONS", 1

    def __init__(self) -> None:
        super().__init__("the gateway has as many connections as it takes; try again")


class ModelNotReady(GatewayError):
    status, code, retry_after_s = 503, "MODEL_NOT_READY", 1

    def __init__(self, model: str, version: str = "") -> None:
        what = (
            f"version {quote_text(version)} of model {quote_text(model)}"
            if version
            else f"model {quote_text(model)}"
        )
        super().__init__(f"{what} is not ready; load it, or try again when it has loaded")


class StateUnavailable(GatewayError):
    """What the API asked of models cannot be read or kept; what was kept before is as it was."""

    status, code, retry_after_s = 503, "STATE_UNAVAILABLE", 1

    def __init__(self, action: str, reason: str) -> None:
        super().__init__(f"what the API asked of models cannot be {action} now: {reason}")


class DeadlinePassed(GatewayError):
    status, code = 504, "DEADLINE_PASSED"

    def __init__(self, limit_s: float) -> None:
        super().__init__(
            f"no answer within {limit_s:g} s; ask for more time with X-Request-Timeout, in seconds"
        )


# What the framework raises itself, by status; the sentence is ours, for its own is a bare phrase.
FRAMEWORK_ERRORS = {
    400: ("MALFORMED_REQUEST", "the request is malformed"),
    404: ("NOT_FOUND", "there is nothing at this path; GET /docs shows the API"),
    405: ("METHOD_NOT_ALLOWED", "this path does not take this method; see the Allow header"),
    413: ("TOO_LARGE", "the request is too large"),
}


def format_sequence_id(sequence_id: int | str) -> str:
    return quote_text(sequence_id) if isinstance(sequence_id, str) else str(sequence_id)


def serialize_error(
    detail: str, code: str, request_id: str, report: Mapping[str, Any] | None = None
) -> bytes:
    """The body of every error: exactly these keys, `error` a string, as Triton's clients read it.

    Those of model management have their report as well.
    """
    return orjson.dumps({"error": detail, "code": code, "request_id": request_id, **(report or {})})


def release_frames(exc: BaseException) -> None:
    """Drop the tracebacks of an error that was handled, and of those that it was raised for.

    Their frames hold the request's body and refer back to the error, so that both would be held until
    the garbage collector looks at old objects, thousands of requests later.
    """
    error: BaseException | None = exc
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


async def render_error(request: Request, exc: Exception) -> Response:
    """The one handler. What is not of the family is a fault of ours: logged in full, told in brief."""
    # Whoever gets here has it already; the family is for those too who do without FastAPI.
    from fastapi.exceptions import RequestValidationError  # noqa: PLC0415

    request_id = str(request.scope.get("request_id", ""))
    if isinstance(exc, MemoryError):
        log.warning("out of memory", extra={"request_id": request_id})
        exc = NotEnoughMemory()
    if isinstance(exc, GatewayError):
        status, code, sentence = exc.status, exc.code, exc.detail
        release_frames(exc)
    elif isinstance(exc, HTTPException):
        status = exc.status_code
        code, sentence = FRAMEWORK_ERRORS.get(status, (f"HTTP_{status}", str(exc.detail)))
    elif isinstance(exc, RequestValidationError):
        status, code = MalformedRequest.status, MalformedRequest.code
        where, told = exc.errors()[0]["loc"], exc.errors()[0]["msg"]
        sentence = f"the {where[0]} parameter {quote_text(str(where[-1]))} cannot be taken: {told}"
    else:
        log.error("a fault in the gateway", exc_info=exc, extra={"request_id": request_id})
        status, code = 500, "INTERNAL"
        sentence = "the gateway failed; its log has the reason under this request id"
    headers = getattr(exc, "headers", None)
    body = serialize_error(sentence, code, request_id, getattr(exc, "report", None))
    if getattr(exc, "is_event", False):
        return Response(b"data: %b\n\n" % body, status, headers, "text/event-stream")
    return Response(body, status, headers, "application/json")
