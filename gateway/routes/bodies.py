"""Reading a request's body under its limit, compressed or not, into a payload; and the API's own
description of the bodies that errors have."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from fastapi import Request
from pydantic import BaseModel, Field

from gateway.decoding.decoders import Decoders
from gateway.errors import BodyTooLarge, Malformed, UnsupportedEncoding
from gateway.memory import Charge
from gateway.tensors import schema
from gateway.tensors.media_type import media_type
from gateway.tensors.payload import (
    JSON,
    MULTIPART,
    NPZ,
    OCTETS,
    Form,
    Limits,
    Payload,
    read_payload,
)

# zlib's window sizes: 16 more means gzip's header; deflate is zlib's (RFC 9110, section 8.4.1).
WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
SLICE_BYTES = 16 << 10
FIRST_STEP_BYTES = 64 << 10
INFLATE_STEP_BYTES = 1 << 20
# Larger bodies are read in a thread, large JSON and archives in a process: the parser of JSON holds the GIL,
# and an archive may inflate.
MAX_INLINE_BYTES = 16 << 10
MAX_THREAD_JSON_BYTES = 256 << 10
MAX_THREAD_BYTES = {JSON: MAX_THREAD_JSON_BYTES, NPZ: 16 << 10}
# Bytes of memory for a byte of the body: the body itself, its tensors, and what is sent to Triton. Numbers
# take less room in JSON than as tensors.
USUAL_MEMORY_FACTOR = 3
MEMORY_FACTORS = {JSON: 6}


@dataclass(frozen=True)
class LargeBody:
    """A body that is decoded in a process: its size says nothing of the time and memory that takes."""

    data: bytes
    content_type: str


async def receive_payload(
    request: Request, limits: Limits, decoders: Decoders, charge: Charge
) -> Payload | Form | LargeBody:
    """Return the parts of a request's body, or what only a process may decode.

    A multipart body is taken apart as it arrives.
    """
    content_type = request.headers.get("content-type", "")
    name, _ = media_type(content_type)
    if name == MULTIPART:
        form = Form(content_type, limits)
        async for chunk in charged_body(request, limits.max_bytes, charge):
            form.feed(chunk)
        if form.size <= MAX_INLINE_BYTES:
            return form.payload()
        return (
            form if form.json_size > MAX_THREAD_JSON_BYTES else await decoders.run(0, form.payload)
        )
    body = await whole_body(request, limits.max_bytes, charge)
    read = partial(read_payload, body, content_type, limits)
    if is_taken_as_it_is(name) or (len(body) <= MAX_INLINE_BYTES and name != NPZ):
        return read()
    if len(body) > MAX_THREAD_BYTES.get(name, limits.max_bytes):
        return LargeBody(body, content_type)
    return await decoders.run(0, read)


def is_taken_as_it_is(media_type_name: str) -> bool:
    return media_type_name == OCTETS or media_type_name.startswith("image/")


async def whole_body(request: Request, max_bytes: int, charge: Charge) -> bytes:
    """Return the body, inflated. Raises `BodyTooLarge`, and `OutOfBudget` or `TooLarge` for its memory."""
    chunks = [chunk async for chunk in charged_body(request, max_bytes, charge)]
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def charged_body(request: Request, max_bytes: int, charge: Charge) -> AsyncIterator[bytes]:
    """Yield the body as it arrives, and charge the memory that it and what becomes of it will take."""
    name = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    factor = MEMORY_FACTORS.get(name, USUAL_MEMORY_FACTOR)
    async for chunk in body_of(request, max_bytes):
        charge.add(factor * len(chunk))
        yield chunk


async def body_of(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    """The body as it comes, inflated; never more than `max_bytes` of it. Raises `BodyTooLarge`."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise BodyTooLarge(max_bytes)
    if encoding not in ("identity", "", *WINDOWS):
        raise UnsupportedEncoding(encoding)
    chunks: AsyncIterator[bytes] = request.stream()
    if encoding in WINDOWS:
        chunks = inflated(chunks, WINDOWS[encoding])
    length = 0
    async for chunk in chunks:
        length += len(chunk)
        if length > max_bytes:
            raise BodyTooLarge(max_bytes)
        if chunk:
            yield chunk


async def inflated(chunks: AsyncIterator[bytes], window: int) -> AsyncIterator[bytes]:
    """A compressed body in plain pieces of at most 1 MiB, so that the limit is met in time."""
    inflater = Inflater(window)
    async for chunk in chunks:
        async for piece in inflater.feed(chunk):
            yield piece
    inflater.end()


class Inflater:
    """Several gzip members one after the other are one body (RFC 1952, section 2.2); anything else after
    the end is an error. Raises `Malformed`.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._inflater = zlib.decompressobj(window)
        self._fed = False

    async def feed(self, compressed: bytes) -> AsyncIterator[bytes]:
        """The plain pieces. A slice at a time, because zlib copies what it leaves of its input, for each
        step and each member: thousands of tiny members would be quadratic."""
        for start in range(0, len(compressed), SLICE_BYTES):
            async for piece in self._feed_slice(compressed[start : start + SLICE_BYTES]):
                yield piece

    async def _feed_slice(self, compressed: bytes) -> AsyncIterator[bytes]:
        """What inflates to much does so in a thread, step by step: the event loop would notice."""
        left = FIRST_STEP_BYTES
        while compressed:
            if self._inflater.eof:
                self._inflater = zlib.decompressobj(self._window)
            self._fed = True
            if left > 0:
                piece = self._inflate(compressed, left)
            else:
                piece = await asyncio.to_thread(self._inflate, compressed, INFLATE_STEP_BYTES)
            left = left - len(piece) if left > 0 else FIRST_STEP_BYTES
            if piece:
                yield piece
            compressed = self._inflater.unconsumed_tail or self._inflater.unused_data

    def _inflate(self, compressed: bytes, most_bytes: int) -> bytes:
        try:
            return self._inflater.decompress(compressed, most_bytes)
        except zlib.error:
            raise Malformed("the body is not what its Content-Encoding says") from None

    def end(self) -> None:
        if not (self._fed and self._inflater.eof):
            raise Malformed("the compressed body ends too early")


# What the API's description says of answers.


class Error(BaseModel):
    """The body of every error."""

    error: str = Field(description="one sentence")
    code: str = Field(description="a stable name")
    request_id: str


class ReplicaState(BaseModel):
    """What a replica says of a model."""

    state: str
    reason: str | None = None


class ManagementError(Error):
    """One of loading and unloading, with what came of it on each replica."""

    model: str | None = None
    state: str | None = None
    replicas: dict[str, ReplicaState] | None = None


REFUSALS: Final = {int(status): text for status, text in schema.ERRORS.items()}
# What any request can come to, whatever it asks for.
ANYWHERE: Final = (400, 401, 403, 408, 413, 414, 422, 429, 431, 500, 503)
REQUEST_ID: Final = {
    "X-Request-ID": {
        "description": "The request's own X-Request-ID, or one that was made for it.",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
    }
}
RETRY_AFTER: Final = {
    "Retry-After": {
        "description": "Seconds to wait before trying again.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1},
    }
}
CHALLENGE: Final = {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}}
TOLD_BESIDE: Final[dict[int, dict[str, Any]]] = {401: CHALLENGE, 429: RETRY_AFTER, 503: RETRY_AFTER}

Responses = dict[int | str, dict[str, Any]]


def refusals(
    *statuses: int, model: type[Error] = Error, texts: dict[int, str] | None = None
) -> Responses:
    """These errors and those that any request can come to, as a route declares them."""
    told = REFUSALS | (texts or {})
    return {
        status: {
            "model": model,
            "description": told[status],
            "headers": REQUEST_ID | TOLD_BESIDE.get(status, {}),
        }
        for status in sorted({*ANYWHERE, *statuses})
    }


def answers(
    answer: dict[str, Any], text: str, *, status: int = 200, headers: dict[str, Any] | None = None
) -> Responses:
    """A success in JSON, by its schema."""
    return {
        status: {
            "description": text,
            "headers": REQUEST_ID | (headers or {}),
            "content": {JSON: {"schema": answer}},
        }
    }
