"""The answers of a model as they are made: events for browsers and curl, or a line of JSON each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from typing import Final

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.errors import GatewayError, body_of
from gateway.tensors.outputs import Result, as_json, preferences
from gateway.tensors.payload import EVENT_STREAM, NDJSON

ABOUT: Final = {
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}  # proxies are not to collect


def form_of(accept: str) -> str:
    """The kind of stream that is asked for before all else; empty for none."""
    wanted = preferences(accept)[:1]
    return wanted[0] if wanted and wanted[0] in (EVENT_STREAM, NDJSON) else ""


class Streamed(StreamingResponse):
    """Gives back what the stream holds however it ends: who leaves cancels the inference."""

    def __init__(
        self,
        results: AsyncGenerator[Result, None],
        form: str,
        request_id: str,
        held: AsyncExitStack,
    ) -> None:
        held.push_async_callback(results.aclose)
        self._held = held
        pieces = events(results, request_id) if form == EVENT_STREAM else lines(results, request_id)
        super().__init__(pieces, headers=ABOUT, media_type=form)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


async def write(result: Result) -> bytes:
    """Return a result as JSON, written in a thread if it is large."""
    rendered = await asyncio.to_thread(as_json, result) if result.is_large else as_json(result)
    return rendered.body


async def events(results: AsyncIterator[Result], request_id: str) -> AsyncIterator[bytes]:
    """Server-sent events (WHATWG HTML, section 9.2): an answer each, counted; `error`; `end`."""
    number = 0
    try:
        async for result in results:
            number += 1
            yield b"id: %d\ndata: %b\n\n" % (number, await write(result))
    except GatewayError as exc:
        yield b"event: error\ndata: %b\n\n" % body_of(exc.detail, exc.code, request_id)
    yield b"event: end\ndata: {}\n\n"


async def lines(results: AsyncIterator[Result], request_id: str) -> AsyncIterator[bytes]:
    """The same without a name for each; an error is the last line."""
    try:
        async for result in results:
            yield await write(result) + b"\n"
    except GatewayError as exc:
        yield body_of(exc.detail, exc.code, request_id) + b"\n"
