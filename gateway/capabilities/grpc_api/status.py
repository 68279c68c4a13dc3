"""The gRPC status of each error. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import grpc

from gateway.capabilities.grpc_api.wire import encode_field, encode_number
from gateway.errors import GatewayError
from gateway.routes.error_responses import to_gateway_error
from gateway.triton.grpc.byte_channel import Metadata

MAX_DETAIL_CHARS: Final = 1024  # trailers may have 8 KiB, and contain the text twice
ERROR_DOMAIN: Final = b"triton-gateway"
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
    detail = str(error.detail)[:MAX_DETAIL_CHARS]
    trailers = build_trailers(error, detail, request_id)
    return CallStatus(error.status, GRPC_CODES[error.status], detail, trailers, error.code)


def build_trailers(error: GatewayError, detail: str, request_id: str) -> Metadata:
    """Return the trailing metadata of an error: its code, and google.rpc.Status with its details.

    `grpc-retry-pushback-ms` delays the retries of clients that have a retry policy (gRFC A6).
    """
    reason = encode_field(1, error.code.encode()) + encode_field(2, ERROR_DOMAIN)
    details = [encode_any(b"google.rpc.ErrorInfo", reason)]
    trailers: list[tuple[str, str | bytes]] = [
        ("x-request-id", request_id),
        ("gateway-error-code", error.code),
    ]
    if retry_after := (error.headers or {}).get("Retry-After"):
        seconds = int(retry_after)
        trailers.append(("grpc-retry-pushback-ms", str(seconds * 1000)))
        delay = encode_field(1, encode_number(1, seconds))  # Duration.seconds
        details.append(encode_any(b"google.rpc.RetryInfo", delay))
    number: int = GRPC_CODES[error.status].value[0]
    status = encode_number(1, number) + encode_field(2, detail.encode())
    status += b"".join(encode_field(3, each) for each in details)
    trailers.append(("grpc-status-details-bin", status))
    return tuple(trailers)


def encode_any(type_name: bytes, value: bytes) -> bytes:
    return encode_field(1, b"type.googleapis.com/" + type_name) + encode_field(2, value)
