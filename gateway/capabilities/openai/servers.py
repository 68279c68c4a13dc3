"""Servers of OpenAI's API (vLLM, Triton's OpenAI frontend), to which completions are forwarded."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Sequence
from operator import attrgetter
from typing import Final

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.capacity.admission import Slot
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.fleet.replica import ReplicaAddress, create_http_client
from gateway.http_client.client import UpstreamResponse
from gateway.http_client.connection import RequestNotSent
from gateway.inference.body import Deadline
from gateway.inference.pipeline import ATTACHMENT_HEADERS, is_active_content
from gateway.media_types import JSON
from gateway.routes.passthrough.sse import LineSeparatorEscaper
from gateway.telemetry.request_info import RequestScope, measure_upstream_time
from gateway.telemetry.tracing import TRACE_CONTEXT_HEADERS

log = logging.getLogger(__name__)

MAX_LABELLED_MODELS: Final = 64
OTHER_MODELS: Final = "other"
FORWARDED_HEADERS: Final = frozenset((b"accept", *TRACE_CONTEXT_HEADERS))
RELAYED_HEADERS: Final = (b"content-type", b"retry-after")


class OpenAIServers:
    """Sends each request to the server with the fewest outstanding ones."""

    def __init__(
        self, addresses: Sequence[ReplicaAddress], settings: Settings, tls: ssl.SSLContext | None
    ) -> None:
        self._clients = [create_http_client(address, settings, tls) for address in addresses]
        self._labelled_models: set[str] = set()

    def get_model_label(self, model: str) -> str:
        """Return the name for metrics, or `OTHER_MODELS`: some servers accept every name."""
        if len(self._labelled_models) < MAX_LABELLED_MODELS:
            self._labelled_models.add(model)
        return model if model in self._labelled_models else OTHER_MODELS

    def close(self) -> None:
        for client in self._clients:
            client.close()

    async def send(self, scope: RequestScope, body: bytes, deadline: Deadline) -> UpstreamResponse:
        """Return the response of the first server that accepts a connection.

        Raises `RequestNotSent` if none does, `BadUpstream` or `DeadlinePassed`.
        """
        framing = [(b"content-length", b"%d" % len(body)), (b"content-type", JSON.encode())]
        forwarded = [pair for pair in scope["headers"] if pair[0] in FORWARDED_HEADERS]
        for client in sorted(self._clients, key=attrgetter("outstanding")):
            sending = client.send(
                b"POST",
                scope["path"].encode(),
                headers=framing + forwarded,
                body=body,
                timeout_s=deadline.timeout_s,
                outlives_client=False,
            )
            try:
                return await deadline.limit(sending)
            except RequestNotSent:
                log.warning("OpenAI server %s cannot be reached", client.authority)
        raise RequestNotSent("no OpenAI server can be reached")


class RelayedResponse(StreamingResponse):
    """The response of a server, as it arrives. A client disconnect closes the server's connection."""

    def __init__(self, response: UpstreamResponse, timeout_s: float, slot: Slot) -> None:
        relayed = {
            name.decode(): response.header(name).decode("latin-1") for name in RELAYED_HEADERS
        }
        headers = {name: value for name, value in relayed.items() if value}
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
    escaper = LineSeparatorEscaper() if response.is_event_stream else None
    while True:
        response.set_timeout(timeout_s)
        with measure_upstream_time():
            chunk = await response.next_chunk()
        if escaper is not None:
            chunk = escaper.feed(chunk, is_last=response.is_complete)
        yield chunk
        if response.is_complete:
            return
        # A task group does not cancel a task whose next piece is there already, in each pass of the loop.
        await asyncio.sleep(0)
