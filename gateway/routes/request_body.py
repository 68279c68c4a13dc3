"""Reading and decompressing request bodies within their limits, and the OpenAPI schemas of errors."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from fastapi import Request
from pydantic import BaseModel, Field

from gateway.decoding.executor import DecodeExecutor
from gateway.errors import BodyTooLarge, MalformedRequest, UnsupportedEncoding
from gateway.memory import MemoryCharge
from gateway.tensors import schema
from gateway.tensors.media_type import parse_content_type
from gateway.tensors.payload import (
    JSON,
    MULTIPART,
    NPZ,
    OCTET_STREAM,
    MultipartForm,
    Payload,
    PayloadLimits,
    read_payload,
)

# zlib's window sizes: 16 more means gzip's header; deflate is zlib's (RFC 9110, section 8.4.1).
ZLIB_WBITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
INFLATE_INPUT_BYTES = 16 << 10
INLINE_INFLATE_BYTES = 64 << 10
INFLATE_STEP_BYTES = 1 << 20
# Larger bodies are parsed in a thread, large JSON and archives in a process: the JSON parser holds the GIL,
# and archives are compressed.
MAX_INLINE_DECODE_BYTES = 16 << 10
MAX_THREAD_JSON_BYTES = 256 << 10
MAX_THREAD_BYTES = {JSON: MAX_THREAD_JSON_BYTES, NPZ: 16 << 10}
# Bytes of memory per byte of the body: the body, its tensors, and the request to Triton. Numbers can be
# shorter in JSON than as tensors.
DEFAULT_MEMORY_FACTOR = 3
MEMORY_FACTORS = {JSON: 6}


@dataclass(frozen=True)
class LargeBody:
    """A body that is decoded in a process, because decoding may take much time or memory."""

    data: bytes
    content_type: str


async def receive_payload(
    request: Request, limits: PayloadLimits, decoders: DecodeExecutor, charge: MemoryCharge
) -> Payload | MultipartForm | LargeBody:
    """Return the body's parts, or the raw body if it must be decoded in a process.

    A multipart body is split into parts as it arrives.
    """
    content_type = request.headers.get("content-type", "")
    name, _ = parse_content_type(content_type)
    if name == MULTIPART:
        form = MultipartForm(content_type, limits)
        async for chunk in stream_charged_body(request, limits.max_bytes, charge):
            form.feed(chunk)
        if form.size_bytes <= MAX_INLINE_DECODE_BYTES:
            return form.build_payload()
        return (
            form
            if form.json_size_bytes > MAX_THREAD_JSON_BYTES
            else await decoders.run_in_thread(0, form.build_payload)
        )
    body = await read_request_body(request, limits.max_bytes, charge)
    read = partial(read_payload, body, content_type, limits)
    if is_raw_media_type(name) or (len(body) <= MAX_INLINE_DECODE_BYTES and name != NPZ):
        return read()
    if len(body) > MAX_THREAD_BYTES.get(name, limits.max_bytes):
        return LargeBody(body, content_type)
    return await decoders.run_in_thread(0, read)


def is_raw_media_type(media_type_name: str) -> bool:
    return media_type_name == OCTET_STREAM or media_type_name.startswith("image/")


async def read_request_body(request: Request, max_bytes: int, charge: MemoryCharge) -> bytes:
    """Return the decompressed body. Raises `BodyTooLarge`, `TooLarge` or `MemoryBudgetExceeded`."""
    chunks = [chunk async for chunk in stream_charged_body(request, max_bytes, charge)]
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def stream_charged_body(
    request: Request, max_bytes: int, charge: MemoryCharge
) -> AsyncIterator[bytes]:
    name = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    factor = MEMORY_FACTORS.get(name, DEFAULT_MEMORY_FACTOR)
    async for chunk in stream_request_body(request, max_bytes):
        charge.add(factor * len(chunk))
        yield chunk


async def stream_request_body(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    """Yield the decompressed body as it arrives, up to `max_bytes`. Raises `BodyTooLarge`."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise BodyTooLarge(max_bytes)
    if encoding not in ("identity", "", *ZLIB_WBITS):
        raise UnsupportedEncoding(encoding)
    chunks: AsyncIterator[bytes] = request.stream()
    if encoding in ZLIB_WBITS:
        chunks = inflate_chunks(chunks, ZLIB_WBITS[encoding])
    length = 0
    async for chunk in chunks:
        length += len(chunk)
        if length > max_bytes:
            raise BodyTooLarge(max_bytes)
        if chunk:
            yield chunk


async def inflate_chunks(chunks: AsyncIterator[bytes], wbits: int) -> AsyncIterator[bytes]:
    """Yield the decompressed body in chunks of at most 1 MiB, so that limits apply early."""
    inflater = Inflater(wbits)
    async for chunk in chunks:
        async for piece in inflater.feed(chunk):
            yield piece
    inflater.end()


class Inflater:
    """A decompressor of gzip and deflate. Raises `MalformedRequest`.

    Several gzip members are one body (RFC 1952, section 2.2). Other data after the end is an error.
    """

    def __init__(self, wbits: int) -> None:
        self._wbits = wbits
        self._inflater = zlib.decompressobj(wbits)
        self._has_input = False

    async def feed(self, compressed: bytes) -> AsyncIterator[bytes]:
        # zlib copies its unconsumed input at each step and member: without slices, the cost of thousands of
        # small members would be quadratic.
        for start in range(0, len(compressed), INFLATE_INPUT_BYTES):
            async for piece in self._feed_slice(compressed[start : start + INFLATE_INPUT_BYTES]):
                yield piece

    async def _feed_slice(self, compressed: bytes) -> AsyncIterator[bytes]:
        # Large outputs are inflated in a thread, because they would block the event loop.
        remaining_bytes = INLINE_INFLATE_BYTES
        while compressed:
            if self._inflater.eof:
                self._inflater = zlib.decompressobj(self._wbits)
            self._has_input = True
            if remaining_bytes > 0:
                piece = self._inflate(compressed, remaining_bytes)
            else:
                piece = await asyncio.to_thread(self._inflate, compressed, INFLATE_STEP_BYTES)
            remaining_bytes = (
                remaining_bytes - len(piece) if remaining_bytes > 0 else INLINE_INFLATE_BYTES
            )
            if piece:
                yield piece
            compressed = self._inflater.unconsumed_tail or self._inflater.unused_data

    def _inflate(self, compressed: bytes, max_bytes: int) -> bytes:
        try:
            return self._inflater.decompress(compressed, max_bytes)
        except zlib.error:
            raise MalformedRequest("the body does not match its Content-Encoding") from None

    def end(self) -> None:
        if not (self._has_input and self._inflater.eof):
            raise MalformedRequest("the compressed body is truncated")


# The API's description of responses.


class Error(BaseModel):
    """The body of every error."""

    error: str = Field(description="The error in one sentence.")
    code: str = Field(description="Stable name of the error.")
    request_id: str


class ReplicaState(BaseModel):
    """The state of a model on a replica."""

    state: str
    reason: str | None = None


class ManagementError(Error):
    """The body of an error of a load or unload, with the result on each replica."""

    model: str | None = None
    state: str | None = None
    replicas: dict[str, ReplicaState] | None = None


ERROR_DESCRIPTIONS: Final = {
    int(status): text for status, text in schema.STATUS_DESCRIPTIONS.items()
}
# Any request can result in these errors.
COMMON_ERROR_STATUSES: Final = (400, 401, 403, 408, 413, 414, 422, 429, 431, 500, 503)
REQUEST_ID_HEADER: Final = {
    "X-Request-ID": {
        "description": "The request's X-Request-ID, or a generated one.",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
    }
}
RETRY_AFTER_HEADER: Final = {
    "Retry-After": {
        "description": "Seconds to wait before a retry.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1},
    }
}
CHALLENGE_HEADER: Final = {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}}
EXTRA_ERROR_HEADERS: Final[dict[int, dict[str, Any]]] = {
    401: CHALLENGE_HEADER,
    429: RETRY_AFTER_HEADER,
    503: RETRY_AFTER_HEADER,
}

OpenApiResponses = dict[int | str, dict[str, Any]]


def build_error_responses(
    *statuses: int, model: type[Error] = Error, descriptions: dict[int, str] | None = None
) -> OpenApiResponses:
    texts = ERROR_DESCRIPTIONS | (descriptions or {})
    return {
        status: {
            "model": model,
            "description": texts[status],
            "headers": REQUEST_ID_HEADER | EXTRA_ERROR_HEADERS.get(status, {}),
        }
        for status in sorted({*COMMON_ERROR_STATUSES, *statuses})
    }


def build_success_response(
    body_schema: dict[str, Any],
    description: str,
    *,
    status: int = 200,
    headers: dict[str, Any] | None = None,
) -> OpenApiResponses:
    return {
        status: {
            "description": description,
            "headers": REQUEST_ID_HEADER | (headers or {}),
            "content": {JSON: {"schema": body_schema}},
        }
    }
