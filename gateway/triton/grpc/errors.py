"""Errors of gRPC calls, as errors of the gateway."""

from __future__ import annotations

import re
from typing import Final

import orjson

from gateway.errors import BadUpstream, DeadlinePassed, GatewayError, UpstreamResponseTooLarge
from gateway.http_client.connection import RequestNotSent
from gateway.triton.error_mapping import map_triton_error
from gateway.triton.request_target import RequestTarget

# The status that Triton's HTTP API returns for each code; all other codes are 400.
HTTP_STATUS_BY_GRPC_CODE: Final = {
    "INTERNAL": 500,
    "NOT_FOUND": 404,
    "UNAVAILABLE": 503,
    "UNIMPLEMENTED": 501,
}
NO_RESPONSE: Final = (
    "no response from the replica's gRPC port, which ?grpc=PORT in GATEWAY_TRITON_URLS sets"
)
# Prefixes of gRPC's own messages, because a model's messages may contain the same words.
NOT_SENT_MESSAGE: Final = re.compile(
    r"failed to connect|connections to all backends|errors resolving |dns resolution|"
    r"name resolution|empty address",
    re.I,
)
TOO_LARGE_MESSAGE: Final = re.compile(
    r"(?:stream removed \()?(?:client: )?(?:received|decompressed) message larger than max", re.I
)
CUT_OFF_MESSAGE: Final = re.compile(
    r"stream removed|socket closed|recvmsg|endpoint|connection (?:reset|closed)|broken pipe|goaway",
    re.I,
)


class GrpcUnreachable(RequestNotSent):
    """The gRPC port does not respond."""


def map_grpc_error(
    code: str, details: str, target: RequestTarget, max_answer_bytes: int
) -> GatewayError:
    if code == "RESOURCE_EXHAUSTED" and TOO_LARGE_MESSAGE.match(details):
        return UpstreamResponseTooLarge(max_answer_bytes)
    if code == "DEADLINE_EXCEEDED":
        return DeadlinePassed(target.timeout_s)
    if code == "UNAVAILABLE" and NOT_SENT_MESSAGE.match(details):
        return GrpcUnreachable(NO_RESPONSE, is_refused=False)
    if code == "UNAVAILABLE" and CUT_OFF_MESSAGE.match(details):
        return BadUpstream(
            "the replica closed its gRPC connection before its response was complete"
        )
    return map_triton_error(
        HTTP_STATUS_BY_GRPC_CODE.get(code, 400), encode_triton_error(details), target
    )


def encode_triton_error(message: str) -> bytes:
    return orjson.dumps({"error": message})
