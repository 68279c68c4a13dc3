"""Streaming responses of `/infer`: server-sent events, or one line of JSON per result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from functools import lru_cache
from typing import Final

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.capacity.admission import Slot
from gateway.errors import GatewayError, serialize_error
from gateway.media_types import EVENT_STREAM, NDJSON
from gateway.tensors.outputs import InferResult, encode_json_result, list_accepted_types

# The second one tells proxies not to buffer.
STREAM_HEADERS: Final = {"cache-control": "no-store", "x-accel-buffering": "no"}


@lru_cache(128)
def choose_stream_type(accept: str) -> str:
    """Return the stream's media type if `Accept` prefers one, else an empty string."""
    preferred = next(iter(list_accepted_types(accept)), "")
    return preferred if preferred in (EVENT_STREAM, NDJSON) else ""


class InferStreamResponse(StreamingResponse):
    """A stream that releases its resources when it ends. Client disconnects cancel the inference."""

    def __init__(
        self,
        results: AsyncGenerator[InferResult, None],
        stream_type: str,
        request_id: str,
        slot: Slot,
    ) -> None:
        self._results = results
        self._slot = slot
        encode = stream_events if stream_type == EVENT_STREAM else stream_json_lines
        pieces = encode(results, request_id)
        super().__init__(pieces, headers=STREAM_HEADERS, media_type=stream_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._slot.release()
            await self._results.aclose()


async def encode_stream_item(result: InferResult) -> bytes:
    if result.is_large:
        return (await asyncio.to_thread(encode_json_result, result)).body
    return encode_json_result(result).body


async def stream_events(
    results: AsyncIterator[InferResult], request_id: str
) -> AsyncIterator[bytes]:
    """Yield server-sent events (WHATWG HTML, section 9.2): one per result with its number as ID, then
    `error` if the inference failed, then `end`.
    """
    number = 0
    try:
        async for result in results:
            number += 1
            yield b"id: %d\ndata: %b\n\n" % (number, await encode_stream_item(result))
    except GatewayError as exc:
        yield b"event: error\ndata: %b\n\n" % serialize_error(exc.detail, exc.code, request_id)
    yield b"event: end\ndata: {}\n\n"


async def stream_json_lines(
    results: AsyncIterator[InferResult], request_id: str
) -> AsyncIterator[bytes]:
    try:
        async for result in results:
            yield await encode_stream_item(result) + b"\n"
    except GatewayError as exc:
        yield serialize_error(exc.detail, exc.code, request_id) + b"\n"
