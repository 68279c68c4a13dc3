"""Completions of an OpenAI server: the headers of the request, and the relayed response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Final

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.capacity.admission import Slot
from gateway.errors import GatewayError
from gateway.http_client.client import UpstreamResponse
from gateway.http_client.connection import Headers
from gateway.inference.pipeline import ATTACHMENT_HEADERS, is_active_content
from gateway.media_types import JSON
from gateway.telemetry.tracing import TRACE_CONTEXT_HEADERS

log = logging.getLogger(__name__)

FORWARDED_HEADERS: Final = frozenset((b"accept", *TRACE_CONTEXT_HEADERS))
RELAYED_HEADERS: Final = (b"content-type", b"retry-after")


def build_completion_headers(headers: Headers, length: int) -> Headers:
    """Return the headers for the server: the body's framing, and the client's trace context."""
    forwarded = [pair for pair in headers if pair[0] in FORWARDED_HEADERS]
    framing = [(b"content-length", b"%d" % length), (b"content-type", JSON.encode())]
    return [*framing, *forwarded]


class RelayedResponse(StreamingResponse):
    """The response of a server, as it arrives. A client disconnect closes the server's connection."""

    def __init__(self, response: UpstreamResponse, timeout_s: float, slot: Slot) -> None:
        headers = {
            name.decode(): value.decode("latin-1")
            for name in RELAYED_HEADERS
            if (value := response.header(name))
        }
        if is_active_content(headers.get("content-type", "")):
            headers |= ATTACHMENT_HEADERS
        self._response = response
        self._slot = slot
        super().__init__(relay_chunks(response, timeout_s), response.status, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except GatewayError as exc:
            # The response has started: the server closes the connection, so that clients see the error.
            log.warning("the response was aborted: %s", exc.detail)
        finally:
            self._response.close()
            self._slot.release()


async def relay_chunks(response: UpstreamResponse, timeout_s: float) -> AsyncIterator[bytes]:
    """Yield the body; the timeout applies to each chunk."""
    while True:
        response.set_timeout(timeout_s)
        chunk = await response.next_chunk()
        yield chunk
        if response.is_complete:
            return
        # A task group does not cancel a task whose next piece is there already, in each pass of the loop.
        await asyncio.sleep(0)
