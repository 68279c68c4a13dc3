"""The response of `/infer` as a stream: server-sent events, or lines of JSON."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.capacity.admission import Slot
from gateway.errors import GatewayError, serialize_error
from gateway.fleet.inference import ResultStream
from gateway.media_types import EVENT_STREAM, NDJSON
from gateway.tensors.outputs import list_accepted_types

# The second one tells proxies not to buffer.
STREAM_HEADERS: Final = {"cache-control": "no-store", "x-accel-buffering": "no"}
# After so many results that have arrived at once, other tasks run.
RESULTS_PER_PASS: Final = 32


@dataclass(frozen=True)
class StreamFormat:
    """The form of a stream of JSON documents: templates, and the end."""

    media_type: str
    result: bytes
    error: bytes
    end: bytes = b""


STREAM_FORMATS: Final = {
    EVENT_STREAM: StreamFormat(  # server-sent events (WHATWG HTML, section 9.2)
        EVENT_STREAM,
        b"id: %(number)d\ndata: %(result)b\n\n",
        b"event: error\ndata: %b\n\n",
        b"event: end\ndata: {}\n\n",
    ),
    NDJSON: StreamFormat(NDJSON, b"%(result)b\n", b"%b\n"),
}


@lru_cache(128)
def choose_stream_format(accept: str) -> StreamFormat | None:
    """Return the form of the stream that `Accept` prefers; None if it prefers no stream."""
    preferred = next(iter(list_accepted_types(accept)), "")
    return STREAM_FORMATS.get(preferred)


class InferStreamResponse(StreamingResponse):
    """A stream of results, each with its own timeout. Client disconnects cancel the inference.

    An error before the first result is an ordinary response. The body is sent without the tasks and
    iterators of Starlette, which cost more than making a result.
    """

    def __init__(
        self, results: ResultStream, stream_format: StreamFormat, request_id: str, slot: Slot
    ) -> None:
        super().__init__((), headers=STREAM_HEADERS, media_type=stream_format.media_type)
        self._results = results
        self._format = stream_format
        self._request_id = request_id
        self._slot = slot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watching = asyncio.create_task(self._close_at_disconnect(receive))
        try:
            await self.stream_response(send)
        finally:
            watching.cancel()
            self._slot.release()
            self._results.close()

    async def _close_at_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._results.close()

    async def stream_response(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        number = 0
        last = b""
        try:
            while (result := await self._results.read_json()) is not None:
                number += 1
                body = self._format.result % {b"number": number, b"result": result}
                await send({"type": "http.response.body", "body": body, "more_body": True})
                if not number % RESULTS_PER_PASS:
                    await asyncio.sleep(0)
        except GatewayError as exc:
            last = self._format.error % serialize_error(exc.detail, exc.code, self._request_id)
        await send({"type": "http.response.body", "body": last + self._format.end})
