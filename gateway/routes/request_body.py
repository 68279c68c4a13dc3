"""Reading and decompressing request bodies within their limits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from fastapi import Request

from gateway.decoding.executor import DecodeExecutor
from gateway.errors import BodyTooLarge, UnsupportedEncoding
from gateway.inflate import ZLIB_WBITS, inflate_chunks
from gateway.media_types import MULTIPART
from gateway.memory import MemoryCharge
from gateway.tensors.codecs import CODECS_BY_TYPE, DEFAULT_CODEC, JSON_CODEC, find_codec
from gateway.tensors.decode import read_payload
from gateway.tensors.form import MultipartForm
from gateway.tensors.media_type import parse_content_type
from gateway.tensors.payload import Payload, PayloadLimits


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
    media_type, _ = parse_content_type(content_type)
    codec = find_codec(media_type)
    if media_type == MULTIPART:
        return await receive_form(request, content_type, limits, decoders, charge)
    body = await read_request_body(request, limits.max_bytes, charge)
    read = partial(read_payload, body, content_type, limits)
    if codec is None or len(body) <= codec.max_inline_bytes:
        return read()  # or the error of an unsupported type
    if len(body) > codec.max_thread_bytes:
        return LargeBody(body, content_type)
    return await decoders.run_in_thread(0, read)


async def receive_form(
    request: Request,
    content_type: str,
    limits: PayloadLimits,
    decoders: DecodeExecutor,
    charge: MemoryCharge,
) -> Payload | MultipartForm:
    form = MultipartForm(content_type, limits)
    async for chunk in stream_charged_body(request, limits.max_bytes, charge):
        form.feed(chunk)
    if form.size_bytes <= JSON_CODEC.max_inline_bytes:
        return form.build_payload()
    if form.json_size_bytes > JSON_CODEC.max_thread_bytes:
        return form
    return await decoders.run_in_thread(0, form.build_payload)


async def read_request_body(request: Request, max_bytes: int, charge: MemoryCharge) -> bytes:
    """Return the decompressed body. Raises `BodyTooLarge`, `TooLarge` or `MemoryBudgetExceeded`."""
    chunks = [chunk async for chunk in stream_charged_body(request, max_bytes, charge)]
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def stream_charged_body(
    request: Request, max_bytes: int, charge: MemoryCharge
) -> AsyncIterator[bytes]:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    factor = CODECS_BY_TYPE.get(media_type, DEFAULT_CODEC).memory_factor
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
