"""Readers of complete HTTP responses of Triton, which always release the connection."""

from __future__ import annotations

from typing import Final

from gateway.errors import GatewayError
from gateway.http_client.client import MAX_RESPONSE_BYTES, CompleteResponse, UpstreamResponse
from gateway.triton.error_mapping import RequestTarget, map_triton_error

MAX_ERROR_BODY_BYTES: Final = 1 << 20
MAX_METADATA_BYTES: Final = 16 << 20  # of a repository's index or a model's metadata


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
