"""Requests of `/v2` whose version a label decided, and their copies for a shadow version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final

import numpy as np
import orjson
from starlette.types import Message, Send

from gateway.capacity.body_chunks import ZLIB_WBITS, inflate_chunks, limit_length
from gateway.errors import BadUpstream, ModelNotReady, UnknownModel
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.transports import HttpCall
from gateway.http_client.client import CompleteResponse, UpstreamResponse
from gateway.http_client.connection import Headers
from gateway.passthrough.body import BODY_FRAMING_HEADERS, iterate_once
from gateway.passthrough.rules import Forwarding, MatchedRoute, change_version_cached
from gateway.repository.versions.output_comparison import Arrays
from gateway.repository.versions.resolver import LabelledTarget
from gateway.repository.versions.shadows import DROPPED, MAX_INLINE_BYTES, ShadowCopy, ShadowRunner
from gateway.telemetry.tracing import TRACE_CONTEXT_HEADERS
from gateway.tensors.sequence import SequenceStep
from gateway.triton.inference import decode_http_response
from gateway.triton.json_guard import SEQUENCE_ID_KEY
from gateway.version_labels import Shadow

VERSION_HEADER: Final = b"x-model-version"
STREAM_PATH: Final = b"generate_stream"
NOT_COPIED: Final = frozenset((*BODY_FRAMING_HEADERS, *TRACE_CONTEXT_HEADERS, b"accept-encoding"))
# Fields of a response of `generate` that are not outputs.
GENERATE_FIELDS: Final = frozenset(("model_name", "model_version", "id"))


class LabelledRequest:
    """A request with the version that its label decided on in the path."""

    _shadow: Shadow | None = None
    _call: HttpCall | None = None
    _chunks: list[bytes]

    def __init__(self, route: MatchedRoute, target: LabelledTarget, runner: ShadowRunner) -> None:
        self._target = target
        self._requested = route
        self._runner = runner
        self.route = route
        if route.version or route.rule.has_default_version:
            self.route = change_version_cached(route, target.version)

    def set_sequence(self, step: SequenceStep) -> MatchedRoute:
        """Return the route with the version of the sequence."""
        version = self._target.choose_sequence_version(step)
        self.route = change_version_cached(self._requested, version)
        return self.route

    @property
    def response_header(self) -> tuple[bytes, bytes]:
        return VERSION_HEADER, self.route.version.encode()

    async def send(
        self, dispatcher: Dispatcher, call: HttpCall, timeout_s: float, *, is_inference: bool
    ) -> UpstreamResponse:
        """Send the request; if Triton refuses a version of a split that was unloaded, to another one."""
        if is_inference:
            call = self.copy_call(call)
        try:
            return await dispatcher.send(call, timeout_s)
        except (ModelNotReady, UnknownModel):
            step = call.target.sequence_step
            version = self._target.choose_other_version(step) if call.is_resendable else ""
            if not version:
                raise
        self.route = change_version_cached(self._requested, version)
        return await dispatcher.send(self._change_version(call, version), timeout_s)

    def _change_version(self, call: HttpCall, version: str) -> HttpCall:
        path = change_version_cached(self._requested, version).path
        if query := call.path.partition(b"?")[2]:
            path = b"%b?%b" % (path, query)
        return call._replace(target=call.target._replace(version=version), path=path)

    # Shadow traffic.

    def copy_call(self, call: HttpCall) -> HttpCall:
        """Return the call to send, and keep a copy if it is one that the label's shadow gets.

        The body of a large request is copied while it is sent. Streams and sequences are never copied.
        """
        label = self._target.label
        if label.value.shadow is None or not can_copy(call):
            return call
        self._shadow = self._runner.choose_shadow(label)
        if self._shadow is None:
            return call
        self._call, self._chunks = call, []
        if isinstance(call.body, AsyncIterator):
            return call._replace(body=self._copy_chunks(call.body))
        self._chunks = [bytes(chunk) for chunk in as_list(call.body)]
        return call

    async def _copy_chunks(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        remaining_bytes = self._runner.max_bytes
        async for chunk in body:
            remaining_bytes -= len(chunk)
            if remaining_bytes >= 0:
                self._chunks.append(chunk)
            else:
                self._drop_copy()
            yield chunk

    def _drop_copy(self) -> None:
        if self._shadow is not None:
            self._runner.count_result(self._target.label, self._shadow, DROPPED)
        self._shadow = self._call = None
        self._chunks = []

    def watch_response(self, send: Send, request_id: str, timeout_s: float) -> Send:
        """Return the function that sends the response, after which the copy of the request is sent."""
        if self._shadow is None:
            return send
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
                copy = self._build_copy(reply, size_bytes, request_id, timeout_s)
                if copy is not None:  # when the slot of the request is free
                    asyncio.get_running_loop().call_soon(self._runner.start, copy)

        return send_watched

    def _build_copy(
        self, reply: CompleteResponse, size_bytes: int, request_id: str, timeout_s: float
    ) -> ShadowCopy | None:
        shadow, call = self._shadow, self._call
        if shadow is None or call is None:
            return None
        body = b"".join(self._chunks)
        if SEQUENCE_ID_KEY in body:  # of `generate`, or of a body that was not received at once
            return None
        read = partial(read_outputs, self._requested, max_bytes=self._runner.max_bytes)
        return ShadowCopy(
            self._target.label,
            shadow,
            request_id,
            timeout_s,
            max(size_bytes, len(body)),
            partial(self._build_call, call, shadow, body),
            partial(read, reply),
            read,
        )

    async def _build_call(self, call: HttpCall, shadow: Shadow, body: bytes) -> HttpCall:
        headers = [header for header in call.headers if header[0] not in NOT_COPIED]
        headers.append((b"content-length", b"%d" % len(body)))
        return self._change_version(call, shadow.version)._replace(headers=headers, body=body)


def can_copy(call: HttpCall) -> bool:
    path = call.path.partition(b"?")[0]
    return call.target.sequence_step is None and not path.endswith(STREAM_PATH)


def as_list(body: Any) -> list[Any]:
    return body if isinstance(body, list) else [body]


async def read_outputs(route: MatchedRoute, reply: CompleteResponse, *, max_bytes: int) -> Arrays:
    """Return the outputs of a response of `infer` or `generate`. Raises `BadUpstream`."""
    encoding = reply.header(b"content-encoding").decode("latin-1")
    if encoding in ZLIB_WBITS:
        chunks = inflate_chunks(iterate_once(reply.body), ZLIB_WBITS[encoding])
        pieces = [piece async for piece in limit_length(chunks, max_bytes)]
        reply = reply._replace(body=b"".join(pieces))
    if isinstance(route.action, Forwarding) and route.action.json_rules.has_tensors:
        return (await decode_http_response(reply)).outputs
    if len(reply.body) <= MAX_INLINE_BYTES:
        return parse_generate_outputs(reply.body)
    return await asyncio.to_thread(parse_generate_outputs, reply.body)


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
