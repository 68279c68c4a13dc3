"""The gRPC status of each error. No I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from gateway.errors import GatewayError
from gateway.routes.error_responses import to_gateway_error
from gateway.triton.grpc.byte_channel import Metadata

MAX_DETAIL_CHARS: Final = 1024  # trailers may have 8 KiB, and contain the text twice
ERROR_DOMAIN: Final = "triton-gateway"
# The advice to users of the HTTP API, and the same for those of this one.
GRPC_HINTS: Final = {
    "; GET /v1/models lists the models": "",
    r" with POST /v2/repository/models/\S+/load": "",
    "send Authorization: Bearer KEY or X-API-Key: KEY": "send the metadata authorization: Bearer KEY or "
    "x-api-key: KEY",
}
Code = grpc.StatusCode
# By the HTTP status of the error class, so that both APIs have one table of errors.
GRPC_CODES: Final = {
    400: Code.INVALID_ARGUMENT,
    401: Code.UNAUTHENTICATED,
    403: Code.PERMISSION_DENIED,
    404: Code.NOT_FOUND,
    405: Code.UNIMPLEMENTED,
    406: Code.INVALID_ARGUMENT,
    408: Code.DEADLINE_EXCEEDED,
    409: Code.FAILED_PRECONDITION,
    413: Code.RESOURCE_EXHAUSTED,
    414: Code.INVALID_ARGUMENT,
    415: Code.INVALID_ARGUMENT,
    422: Code.INVALID_ARGUMENT,
    429: Code.RESOURCE_EXHAUSTED,
    431: Code.RESOURCE_EXHAUSTED,
    500: Code.INTERNAL,
    501: Code.UNIMPLEMENTED,
    502: Code.UNAVAILABLE,
    503: Code.UNAVAILABLE,
    504: Code.DEADLINE_EXCEEDED,
    507: Code.RESOURCE_EXHAUSTED,
}


@dataclass(frozen=True)
class CallStatus:
    """The status with which a call ends."""

    http_status: int  # the status in the log and the metrics
    code: grpc.StatusCode
    detail: str
    trailers: Metadata
    error_code: str


def describe_failure(exc: Exception, request_id: str) -> CallStatus:
    error = to_gateway_error(exc, request_id)
    detail = str(error.detail)
    for hint, grpc_hint in GRPC_HINTS.items():
        detail = re.sub(hint, grpc_hint, detail)
    detail = detail[:MAX_DETAIL_CHARS]
    trailers = build_trailers(error, detail, request_id)
    return CallStatus(error.status, GRPC_CODES[error.status], detail, trailers, error.code)


def build_trailers(error: GatewayError, detail: str, request_id: str) -> Metadata:
    """Return the trailing metadata of an error: its code, and google.rpc.Status with its details.

    `grpc-retry-pushback-ms` delays the retries of clients that have a retry policy (gRFC A6).
    """
    code: int = GRPC_CODES[error.status].value[0]
    status = Status(code=code, message=detail)
    status.details.add().Pack(ErrorInfo(reason=error.code, domain=ERROR_DOMAIN))
    trailers: list[tuple[str, str | bytes]] = [
        ("x-request-id", request_id),
        ("gateway-error-code", error.code),
    ]
    if retry_after := (error.headers or {}).get("Retry-After"):
        seconds = int(retry_after)
        trailers.append(("grpc-retry-pushback-ms", str(seconds * 1000)))
        status.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=seconds)))
    return (*trailers, *rpc_status.to_status(status).trailing_metadata)
