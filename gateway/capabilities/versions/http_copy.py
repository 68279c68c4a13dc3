"""The copy of a request of `/v2` for a label's shadow, whose body and response pass in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import orjson
from starlette.types import Message, Send

from gateway.capabilities.versions.label_router import ActiveLabel
from gateway.capabilities.versions.labels import Shadow
from gateway.capabilities.versions.output_comparison import Arrays
from gateway.capabilities.versions.shadows import (
    MAX_INLINE_BYTES,
    TOO_LARGE,
    ShadowCopy,
    ShadowRunner,
)
from gateway.capacity.body_chunks import (
    BODY_FRAMING_HEADERS,
    ZLIB_WBITS,
    inflate_chunks,
    iterate_once,
    limit_length,
)
from gateway.errors import BadUpstream
from gateway.fleet.replica import Replica
from gateway.fleet.transports import HttpCall
from gateway.http_client.client import CompleteResponse
from gateway.http_client.connection import Headers
from gateway.telemetry.tracing import TRACE_CONTEXT_HEADERS
from gateway.triton.inference import decode_http_response
from gateway.triton.json_guard import SEQUENCE_ID_KEY

STREAM_PATH: Final = b"generate_stream"
NOT_COPIED: Final = frozenset((*BODY_FRAMING_HEADERS, *TRACE_CONTEXT_HEADERS, b"accept-encoding"))
# Fields of a response of `generate` that are not outputs.
GENERATE_FIELDS: Final = frozenset(("model_name", "model_version", "id"))


class HttpCopy:
    """The body of a request and its response, collected while both are sent."""

    def __init__(
        self,
        label: ActiveLabel,
        shadow: Shadow,
        runner: ShadowRunner,
        call: HttpCall,
        has_tensors: bool,
    ) -> None:
        self._label = label
        self._shadow = shadow
        self._runner = runner
        self._call = call
        self._has_tensors = has_tensors  # true for `infer`, false for `generate`
        self._chunks: list[bytes] = []
        self.is_dropped = False
        self.call = call  # the call to send instead of the original
        if isinstance(call.body, AsyncIterator):
            self.call = replace(call, body=self._copy_chunks(call.body))
        else:
            chunks = call.body if isinstance(call.body, list) else [call.body]
            self._chunks = [bytes(chunk) for chunk in chunks]

    async def _copy_chunks(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        remaining_bytes = self._runner.max_bytes
        async for chunk in body:
            remaining_bytes -= len(chunk)
            if remaining_bytes >= 0:
                self._chunks.append(chunk)
            elif not self.is_dropped:
                self.is_dropped = True
                self._chunks = []
                self._runner.drop(self._label, self._shadow, TOO_LARGE)
            yield chunk

    def watch_response(self, send: Send, request_id: str) -> Send:
        received: list[bytes] = []
        headers: Headers = []
        size_bytes = 0

        async def send_watched(message: Message) -> None:
            nonlocal size_bytes
            await send(message)
            if message["type"] == "http.response.start":
                headers.extend(message["headers"])
                return
            body: bytes = message.get("body", b"")
            size_bytes += len(body)
            if size_bytes <= self._runner.max_bytes:
                received.append(body)
            if not message.get("more_body", False):
                reply = CompleteResponse(200, headers, b"".join(received))
                copy = self._build_copy(reply, size_bytes, request_id)
                if copy is not None:  # when the slot of the request is free
                    asyncio.get_running_loop().call_soon(self._runner.start, copy)

        return send_watched

    def _build_copy(
        self, response: CompleteResponse, size_bytes: int, request_id: str
    ) -> ShadowCopy | None:
        body = b"".join(self._chunks)
        # Sequences of `generate`, or of a body that was not received at once.
        if self.is_dropped or SEQUENCE_ID_KEY in body:
            return None
        call = self._call.with_version(self._shadow.version)
        timeout_s = self._call.target.timeout_s
        headers = [header for header in call.headers if header[0] not in NOT_COPIED]
        headers.append((b"content-length", b"%d" % len(body)))
        call = replace(call, headers=headers, body=body)

        async def send(replica: Replica) -> Arrays:
            upstream = await call.send(replica, timeout_s, None)
            return await self._read_outputs(await upstream.read_complete(self._runner.max_bytes))

        async def read_response() -> Arrays:
            return await self._read_outputs(response)

        size_bytes = max(size_bytes, len(body))
        return ShadowCopy(
            self._label,
            self._shadow,
            request_id,
            size_bytes=size_bytes,
            send=send,
            read_response=read_response,
        )

    async def _read_outputs(self, reply: CompleteResponse) -> Arrays:
        encoding = reply.header(b"content-encoding").decode("latin-1")
        if encoding in ZLIB_WBITS:
            chunks = inflate_chunks(iterate_once(reply.body), ZLIB_WBITS[encoding])
            pieces = [piece async for piece in limit_length(chunks, self._runner.max_bytes)]
            reply = reply._replace(body=b"".join(pieces))
        if self._has_tensors:
            return (await decode_http_response(reply)).outputs
        if len(reply.body) <= MAX_INLINE_BYTES:
            return parse_generate_outputs(reply.body)
        return await asyncio.to_thread(parse_generate_outputs, reply.body)


def can_copy(call: HttpCall) -> bool:
    path = call.path.partition(b"?")[0]
    return call.target.sequence_step is None and not path.endswith(STREAM_PATH)


def parse_generate_outputs(body: bytes) -> Arrays:
    """Return the outputs of a response of `generate` as flat arrays. Raises `BadUpstream`."""
    try:
        document = orjson.loads(body)
        return {
            name: build_flat_array(value if isinstance(value, list) else [value])
            for name, value in document.items()
            if name not in GENERATE_FIELDS
        }
    except (AttributeError, TypeError, ValueError, OverflowError) as exc:
        raise BadUpstream("the response of generate is not a JSON object") from exc


def build_flat_array(values: list[Any]) -> np.ndarray:
    """Return numbers as such and all else as objects: NumPy's own strings are padded to the longest one."""
    if all(isinstance(value, (int, float)) for value in values):
        return np.array(values)
    texts = (value if isinstance(value, str) else orjson.dumps(value) for value in values)
    return np.fromiter(texts, object, len(values))
