"""Readers of complete HTTP responses of Triton, which always release the connection."""

from __future__ import annotations

from typing import Final

from gateway.errors import GatewayError
from gateway.triton.error_mapping import RequestTarget, map_triton_error
from gateway.triton.http.client import MAX_RESPONSE_BYTES, CompleteResponse, UpstreamResponse

MAX_ERROR_BODY_BYTES: Final = 1 << 20


async def read_complete_response(
    response: UpstreamResponse, max_bytes: int = MAX_RESPONSE_BYTES
) -> CompleteResponse:
    """Raises `UpstreamResponseTooLarge`."""
    try:
        return CompleteResponse(response.status, response.headers, await response.read(max_bytes))
    finally:
        response.close()


async def read_error_response(response: UpstreamResponse, target: RequestTarget) -> GatewayError:
    body = bytearray()
    try:
        while len(body) < MAX_ERROR_BODY_BYTES and (chunk := await response.next_chunk()):
            body += chunk
    finally:
        response.close()
    error = map_triton_error(response.status, bytes(body), target)
    error.is_event = response.is_event_stream
    return error
