"""The error classes, each with a status and a stable code.

The classes build their messages from facts, so that one error has one wording. They derive from Starlette's
`HTTPException`, so that an error raised while a body is read keeps its status on its way through FastAPI.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, ClassVar, Final
from urllib.parse import quote

import orjson
from starlette.exceptions import HTTPException

from gateway.media_types import JSON
from gateway.messages import join_names, normalize_version, quote_text

ERRORS_PAGE: Final = "/guide/reference/errors"

# The Content-Type that curl -d sends by default.
CURL_DEFAULT_TYPE = "application/x-www-form-urlencoded"


class GatewayError(HTTPException):
    """An error response. `detail` is the message; it never contains a path, a traceback or a secret."""

    status: ClassVar[int] = 500
    triton_status: ClassVar[int] = 0  # on Triton's own paths, if Triton has another one
    code: ClassVar[str] = "INTERNAL"
    message: ClassVar[str] = ""  # the default of `detail`
    retry_after_s: ClassVar[int | None] = None
    report: Mapping[str, Any] | None = None  # results of a management call, by replica
    is_from_triton: bool = False  # Triton returned it

    def __init__(self, detail: str = "", *, headers: dict[str, str] | None = None) -> None:
        headers = headers or {}
        if self.retry_after_s is not None:
            headers.setdefault("Retry-After", str(self.retry_after_s))
        super().__init__(self.status, detail or self.message, headers)

    def add_context(self, context: str) -> None:
        self.detail = f"{context}: {self.detail}"


class MalformedRequest(GatewayError):
    status = 400
    code = "MALFORMED_REQUEST"


class Unauthenticated(GatewayError):
    """The request has no key, or an unknown one."""

    status = 401
    code = "UNAUTHENTICATED"
    challenge: ClassVar[str] = "Bearer"

    def __init__(self, detail: str = "") -> None:
        super().__init__(detail, headers={"WWW-Authenticate": self.challenge})


class Forbidden(GatewayError):
    status = 403
    code = "FORBIDDEN"


class NotFound(GatewayError):
    status = 404
    code = "NOT_FOUND"


class UnknownModel(GatewayError):
    """The message begins like Triton's, which existing clients compare."""

    status = 404
    code = "MODEL_NOT_FOUND"

    def __init__(self, model: str, version: str = "") -> None:
        super().__init__(f"{self.describe(model, version)}; GET /v1/models lists the models")

    def describe(self, model: str, version: str) -> str:
        suffix = f" version {normalize_version(version) or quote_text(version)}" if version else ""
        return f"Request for unknown model: {quote_text(model)}{suffix} is not found"


class InvalidVersion(MalformedRequest):
    """A version that Triton cannot read. The message is Triton's, which existing clients compare."""

    def __init__(self, version: str, *, is_negative: bool = False) -> None:
        text = quote_text(version)
        problem = (
            f"invalid model version specified {text} "
            if is_negative
            else f"failed to get model version from specified version string {text} (details: stol)"
        )
        super().__init__(f"{problem}, version should be an integral value > 0")


class UnknownModelToLoad(UnknownModel):
    def describe(self, model: str, version: str) -> str:
        return f"failed to load {quote_text(model)}: {super().describe(model, version)}"


class UnknownModelToTrace(UnknownModel):
    """The trace settings API of Triton has a slightly different message."""

    def describe(self, model: str, version: str) -> str:
        return f"Request for unknown model : {quote_text(model)[1:-1]}"


class MethodNotAllowed(GatewayError):
    status = 405
    code = "METHOD_NOT_ALLOWED"

    def __init__(self, methods: Iterable[str]) -> None:
        allowed = sorted(methods)
        super().__init__(
            f"this path supports only {join_names(allowed)}", headers={"Allow": ", ".join(allowed)}
        )


class NotAcceptable(GatewayError):
    status = 406
    code = "NOT_ACCEPTABLE"

    def __init__(self, accept: str, offered: Iterable[str]) -> None:
        super().__init__(
            f"the response is not available as {quote_text(accept)}, but as {join_names(offered)}"
        )


class UnrepresentableResponse(NotAcceptable):
    """The content type is supported, but cannot represent this response."""

    def __init__(self, description: str) -> None:
        GatewayError.__init__(self, f"the response is {description}; it is available as {JSON}")


class RequestTooSlow(GatewayError):
    """The client sends its request too slowly."""

    status = 408
    code = "REQUEST_TOO_SLOW"
    message = "the request was not received in time"


class Conflict(GatewayError):
    status = 409
    code = "CONFLICT"


class ChangeInProgress(Conflict):
    """Another call is changing the model, or has just changed it."""

    code = "CHANGE_IN_PROGRESS"

    def __init__(self, model: str, change: str) -> None:
        super().__init__(
            f"another call changes model {quote_text(model)}, or has changed it meanwhile: {change}; "
            "try again when that has ended"
        )


class ModelControlModeConflict(Conflict):
    """Triton's message is the same for modes poll and none, so this one names both."""

    code = "MODEL_CONTROL_MODE"
    message = (
        "the replica's Triton runs in model control mode poll or none, in which its repository decides which "
        "models it serves; loads and unloads require mode explicit"
    )


class SequenceNotRunning(GatewayError):
    """A request continues a sequence whose state does not exist."""

    status = 409
    code = "SEQUENCE_NOT_RUNNING"

    def __init__(
        self,
        model: str,
        sequence_id: int | str | None,
        reason: str = "it was not started, has ended or was idle for too long",
    ) -> None:
        super().__init__(
            f"{describe_sequence(sequence_id)} of model {quote_text(model)} is not running: {reason}; "
            "start it again with sequence_start"
        )


class TooLarge(GatewayError):
    status = 413
    code = "TOO_LARGE"


class BodyTooLarge(TooLarge):
    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the body exceeds the limit of {limit_bytes} bytes")


class UrlTooLong(GatewayError):
    status = 414
    code = "URL_TOO_LONG"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the URL exceeds the limit of {limit_bytes} bytes")


class UnsupportedBody(GatewayError):
    status = 415
    code = "UNSUPPORTED_BODY"

    def __init__(self, content_type: str, supported: Iterable[str]) -> None:
        problem = "Content-Type is missing"
        if content_type:
            problem = f"Content-Type {quote_text(content_type)} is not supported here"
        choices = list(supported)
        message = f"{problem}; send {'one of ' if len(choices) > 1 else ''}{join_names(choices)}"
        if content_type.startswith(CURL_DEFAULT_TYPE):
            message += " (with curl -d, add -H 'Content-Type: …')"
        super().__init__(message)


class UnsupportedEncoding(GatewayError):
    """The content coding of the body is not supported (RFC 9110, section 15.5.16)."""

    status = UnsupportedBody.status
    code = UnsupportedBody.code

    def __init__(self, encoding: str) -> None:
        super().__init__(
            f"Content-Encoding {quote_text(encoding)} is not supported; send gzip, deflate or identity",
            headers={"Accept-Encoding": "gzip, deflate"},
        )


class InputMismatch(GatewayError):
    """The request is well-formed, but does not match the model's metadata."""

    status = 422
    triton_status = 400
    code = "DOES_NOT_FIT_MODEL"


class BadImage(InputMismatch):
    code = "BAD_IMAGE"


class RefusedByModel(GatewayError):
    """Triton or the model rejected the request as invalid."""

    status = 422
    triton_status = 400
    code = "REFUSED_BY_MODEL"


class Overloaded(GatewayError):
    status = 429
    code = "OVERLOADED"
    retry_after_s = 1


class HeaderTooLarge(GatewayError):
    status = 431
    code = "HEADER_TOO_LARGE"

    def __init__(self, limit_bytes: int, limit_fields: int) -> None:
        super().__init__(
            f"the header exceeds the limit of {limit_bytes} bytes or {limit_fields} fields"
        )


class InternalError(GatewayError):
    """An unexpected exception."""

    message = "internal error; the gateway's log contains the cause under this request id"


class ModelFault(GatewayError):
    status = 500
    code = "MODEL_FAULT"


class BadUpstream(GatewayError):
    """A replica sent an invalid or incomplete response."""

    status = 502
    code = "BAD_UPSTREAM"


class UpstreamResponseTooLarge(GatewayError):
    """A response is too large to buffer. It does not count against the replica's health."""

    status = 502
    code = "BAD_UPSTREAM"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"the replica's response exceeds the limit of {limit_bytes} bytes; request less at a time, or "
            "use /v2, which passes the responses of inferences of any size"
        )


class Unavailable(GatewayError):
    status = 503
    code = "UNAVAILABLE"
    retry_after_s = 1


class NotEnoughMemory(GatewayError):
    status = 503
    code = "OUT_OF_MEMORY"
    retry_after_s = 1
    message = "not enough memory for this request; try again later, or send less at a time"


class TooManyConnections(GatewayError):
    status = 503
    code = "TOO_MANY_CONNECTIONS"
    retry_after_s = 1
    message = "the gateway has reached its connection limit; try again later"


class ModelNotReady(GatewayError):
    status = 503
    code = "MODEL_NOT_READY"
    retry_after_s = 1

    def __init__(self, model: str, version: str = "") -> None:
        prefix = f"version {quote_text(version)} of " if version else ""
        super().__init__(
            f"{prefix}model {quote_text(model)} is not ready; load it with POST "
            f"/v2/repository/models/{quote(model, safe='')}/load, or try again when it is loaded"
        )


class StateUnavailable(GatewayError):
    """The desired state cannot be read or written; the stored one is unchanged."""

    status = 503
    code = "STATE_UNAVAILABLE"
    retry_after_s = 1

    def __init__(self, action: str, reason: str) -> None:
        super().__init__(f"the desired state cannot be {action}: {reason}")
        self.action = action
        self.reason = reason


class DeadlinePassed(GatewayError):
    status = 504
    code = "DEADLINE_PASSED"
    # Done when the server, which still works on the request, has answered it or is given up.
    work_ended: Future[None] | None = None

    def __init__(self, limit_s: float) -> None:
        super().__init__(
            f"no response within {limit_s:g} s; set a longer timeout with X-Request-Timeout, in seconds"
        )


def describe_sequence(sequence_id: int | str | None) -> str:
    if sequence_id is None:
        return "this sequence"
    return f"sequence {quote_text(sequence_id) if isinstance(sequence_id, str) else sequence_id}"


def serialize_error(
    detail: str, code: str, request_id: str, report: Mapping[str, Any] | None = None
) -> bytes:
    """Return the body of an error response. `error` is a string, as Triton's clients expect."""
    return orjson.dumps({"error": detail, "code": code, "request_id": request_id, **(report or {})})


def serialize_problem(error: GatewayError, request_id: str) -> bytes:
    """Return the body of an error response as a problem document (RFC 9457)."""
    problem = {
        "type": f"{ERRORS_PAGE}#{error.code}",
        "title": HTTPStatus(error.status).phrase,
        "status": error.status,
        "detail": error.detail,
        "code": error.code,
        "request_id": request_id,
    }
    return orjson.dumps({**problem, **(error.report or {})})
