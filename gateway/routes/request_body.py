"""Reading and decompressing request bodies within their limits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from fastapi import Request

from gateway.decoding.executor import DecodeExecutor
from gateway.errors import BodyTooLarge, UnsupportedEncoding
from gateway.inflate import ZLIB_WBITS, inflate_chunks
from gateway.memory import MemoryCharge
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
