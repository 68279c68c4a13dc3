"""Limits of HTTP responses of Triton, and the errors in them."""

from __future__ import annotations

from typing import Final

from gateway.errors import GatewayError
from gateway.http_client.client import UpstreamResponse
from gateway.triton.error_mapping import map_triton_error
from gateway.triton.request_target import RequestTarget

MAX_ERROR_BODY_BYTES: Final = 1 << 20
MAX_METADATA_BYTES: Final = 4 << 20  # of a repository's index or a model's metadata


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
