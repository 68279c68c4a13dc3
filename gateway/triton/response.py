"""Limits of HTTP responses of Triton, and the errors in them."""

from __future__ import annotations

from typing import Final

from gateway.errors import GatewayError
from gateway.http_client.client import UpstreamResponse
from gateway.media_types import EVENT_END
from gateway.triton.error_mapping import map_triton_error
from gateway.triton.request_target import RequestTarget

MAX_ERROR_BODY_BYTES: Final = 1 << 20
MAX_ERROR_EVENT_BYTES: Final = 64 << 10
# The size of a repository's index, and of a model's metadata.
MAX_METADATA_BYTES: Final = 4 << 20


async def read_error_response(response: UpstreamResponse, target: RequestTarget) -> GatewayError:
    body = bytearray()
    try:
        while len(body) < MAX_ERROR_BODY_BYTES and (chunk := await response.next_chunk()):
            body += chunk
    finally:
        response.close()
    return map_triton_error(response.status, bytes(body), target)


async def read_error_event(response: UpstreamResponse, target: RequestTarget) -> GatewayError:
    """Return the error in the first event of a stream. What follows it stays unread.

    A stream with a longer first event is closed.
    """
    received = b""
    try:
        while EVENT_END not in received and len(received) < MAX_ERROR_EVENT_BYTES:
            chunk = await response.next_chunk()
            if not chunk:
                break
            received += chunk
    except BaseException:
        response.close()
        raise
    event, end, following = received.partition(EVENT_END)
    if end:
        response.unread(following)
    else:
        response.close()
    return map_triton_error(response.status, event, target)
