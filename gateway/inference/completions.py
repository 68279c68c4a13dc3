"""Completions in OpenAI's format: which model is asked for, and the relayed response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Final, NamedTuple

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.http_client.client import UpstreamResponse
from gateway.http_client.connection import Headers
from gateway.media_types import JSON
from gateway.tensors.text_vectors import parse_object, read_model_name
from gateway.tracing import TRACE_CONTEXT_HEADERS

FORWARDED_HEADERS: Final = frozenset((b"accept", *TRACE_CONTEXT_HEADERS))
RELAYED_HEADERS: Final = (b"content-type", b"retry-after")


class CompletionRequest(NamedTuple):
    """The model of a request for a completion, and the body as it was received."""

    model: str
    body: bytes


def parse_completion_request(body: bytes) -> CompletionRequest:
    """Raises `MalformedRequest`."""
    return CompletionRequest(read_model_name(parse_object(body)), body)


def build_completion_headers(headers: Headers, length: int) -> Headers:
    """Return the headers for the server: the body's framing, and the client's trace context."""
    forwarded = [pair for pair in headers if pair[0] in FORWARDED_HEADERS]
    framing = [(b"content-length", b"%d" % length), (b"content-type", JSON.encode())]
    return [*framing, *forwarded]


class RelayedResponse(StreamingResponse):
    """The response of a server, as it arrives. A client disconnect closes the server's connection."""

    def __init__(
        self, response: UpstreamResponse, timeout_s: float, release: Callable[[], None]
    ) -> None:
        headers = {
            name.decode(): value.decode("latin-1")
            for name in RELAYED_HEADERS
            if (value := response.header(name))
        }
        self._response = response
        self._release = release
        super().__init__(relay_chunks(response, timeout_s), response.status, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._response.close()
            self._release()


async def relay_chunks(response: UpstreamResponse, timeout_s: float) -> AsyncIterator[bytes]:
    """Yield the body; the timeout applies to each chunk."""
    while True:
        response.set_timeout(timeout_s)
        chunk = await response.next_chunk()
        yield chunk
        if response.is_complete:
            return
