"""The version that a label chose for one request, and the copy of the request for the label's shadow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import orjson
from starlette.types import Message, Send

from gateway.capabilities.versions.label_router import ActiveLabel
from gateway.capabilities.versions.labels import Shadow
from gateway.capabilities.versions.output_comparison import Arrays
from gateway.capabilities.versions.shadows import (
    IN_PIECES,
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
from gateway.errors import BadUpstream, UpstreamResponseTooLarge
from gateway.fleet.replica import Replica
from gateway.fleet.transports import GrpcBytesCall, HttpCall, prepare_http_infer
from gateway.http_client.client import CompleteResponse
from gateway.http_client.connection import Headers
from gateway.repository.resolver import StartCopy
from gateway.telemetry.request_info import RequestScope
from gateway.telemetry.tracing import TRACE_CONTEXT_HEADERS
from gateway.tensors.outputs import InferResult
from gateway.tensors.sequence import SequenceStep
from gateway.triton.grpc.byte_channel import Metadata
from gateway.triton.grpc.messages import decode_grpc_response
from gateway.triton.inference import InferRequest, decode_http_response
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


TRACE_METADATA = frozenset(name.decode() for name in TRACE_CONTEXT_HEADERS)


class LabelChoice:
    """A `VersionChoice` by a label. Sequences and streams are never copied for its shadow."""

    def __init__(self, label: ActiveLabel, scope: RequestScope, runner: ShadowRunner) -> None:
        self.version = label.choose_version(scope)
        self._label = label
        self._scope = scope
        self._runner = runner
        self._http_copy: HttpCopy | None = None

    def choose_sequence_version(self, step: SequenceStep) -> str:
        self.version = self._label.choose_sequence_version(self._scope, self.version, step)
        return self.version

    def choose_other_version(self, refused: str, step: SequenceStep | None) -> str:
        if step is not None or not self._label.value.is_split:
            return ""
        version = self._label.redirect(refused)
        self.version = version or self.version
        return version

    def copy_inference(self, request: InferRequest, result: InferResult) -> StartCopy | None:
        label = self._label
        target = request.target
        if target.sequence_step is not None or not (shadow := self._runner.choose_shadow(label)):
            return None
        if request.inputs.exceeds(request.signature.max_batch_size):  # it was sent in pieces
            self._runner.drop(label, shadow, IN_PIECES)
            return None

        async def send(replica: Replica) -> Arrays:
            deadline = asyncio.get_running_loop().time() + target.timeout_s
            copied = replace(
                request, target=target._replace(version=shadow.version), deadline=deadline
            )
            call = await prepare_http_infer(copied, [])
            response = await call.send(replica, target.timeout_s, None)
            reply = await response.read_complete(self._runner.max_bytes)
            return (await decode_http_response(reply)).outputs

        async def read_response() -> Arrays:
            return result.arrays

        input_bytes = sum(array.nbytes for array in request.inputs.arrays.values())
        size_bytes = max(input_bytes, result.size_bytes)
        copy = ShadowCopy(
            label,
            shadow,
            request.request_id,
            size_bytes=size_bytes,
            send=send,
            read_response=read_response,
        )
        return partial(self._runner.start, copy)

    def copy_grpc_call(
        self, call: GrpcBytesCall, response: bytes, request_id: str
    ) -> StartCopy | None:
        label = self._label
        target = call.target
        if target.sequence_step is not None or not (shadow := self._runner.choose_shadow(label)):
            return None

        async def send(replica: Replica) -> Arrays:
            copied = build_grpc_copy(call, shadow)
            reply = await copied.send(replica, target.timeout_s, None)
            if len(reply) > self._runner.max_bytes:
                raise UpstreamResponseTooLarge(self._runner.max_bytes)
            return (await decode_grpc_response(reply)).outputs

        async def read_response() -> Arrays:
            return (await decode_grpc_response(response)).outputs

        size_bytes = max(len(call.message), len(response))
        copy = ShadowCopy(
            label, shadow, request_id, size_bytes=size_bytes, send=send, read_response=read_response
        )
        return partial(self._runner.start, copy)

    def copy_http_call(self, call: HttpCall, *, has_tensors: bool) -> HttpCall:
        if self._label.value.shadow is None or not can_copy(call):
            return call
        shadow = self._runner.choose_shadow(self._label)
        if shadow is None:
            return call
        self._http_copy = HttpCopy(
            self._label, shadow, self._runner, call=call, has_tensors=has_tensors
        )
        return self._http_copy.call

    def watch_response(self, send: Send, request_id: str) -> Send:
        copy = self._http_copy
        if copy is None or copy.is_dropped:
            return send
        return copy.watch_response(send, request_id)


def build_grpc_copy(call: GrpcBytesCall, shadow: Shadow) -> GrpcBytesCall:
    metadata: Metadata = tuple(pair for pair in call.metadata if pair[0] not in TRACE_METADATA)
    return replace(call.with_version(shadow.version), metadata=metadata)
