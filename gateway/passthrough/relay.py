"""Responses of `/v2`: Triton's own, relayed as they arrive, and those of the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from time import perf_counter

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.http_client.client import UpstreamResponse
from gateway.passthrough.headers import filter_response_headers
from gateway.sse import EventStreamScrubber
from gateway.telemetry.request_info import RequestInfo
from gateway.triton.error_mapping import sanitize_event


def build_start_message(response: UpstreamResponse, scope: Scope) -> Message:
    headers = [
        *filter_response_headers(response.headers),
        (b"x-request-id", scope["request_id"].encode()),
    ]
    return {"type": "http.response.start", "status": response.status, "headers": headers}


async def relay_response(
    response: UpstreamResponse, start: Message, scope: Scope
) -> AsyncIterator[Message]:
    """Yield the response as it arrives. The timeout applies to each chunk.

    The head is sent with the first chunk, so that a failure before it can still be an error response.
    """
    if scope["method"] == "HEAD":
        yield start
        yield {"type": "http.response.body"}
        return
    events = None
    if response.is_event_stream:
        events = EventStreamScrubber(sanitize_event)
        yield start
        yield {"type": "http.response.body", "more_body": True}  # sends the head immediately
    is_started = events is not None
    last = False
    info: RequestInfo = scope["request_info"]
    while not last:
        response.set_timeout(info.timeout_s)
        started = perf_counter()
        chunk = await response.next_chunk()
        info.upstream_s += perf_counter() - started
        last = response.is_complete
        if events is not None:
            chunk = events.feed(chunk) + (events.end() if last else b"")
        if not is_started:
            is_started = True
            yield start
        info.bytes_out += len(chunk)
        yield {"type": "http.response.body", "body": chunk, "more_body": not last}


async def send_own_response(response: Response, scope: Scope, receive: Receive, send: Send) -> int:
    info: RequestInfo = scope["request_info"]
    info.bytes_out = len(response.body)
    response.headers["x-request-id"] = scope["request_id"]
    response.headers["x-content-type-options"] = "nosniff"
    await response(scope, receive, send)
    return response.status_code
