"""Reading a request's body under its limit, compressed or not, into a payload."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator

from fastapi import Request

from gateway.errors import BodyTooLarge, Malformed, UnsupportedBody
from gateway.limits import Decoders
from gateway.tensors.payload import (
    JSON,
    MULTIPART,
    NPZ,
    Form,
    Limits,
    Payload,
    media_type,
    read_payload,
)

# zlib's window sizes: 16 more means gzip's header; deflate is zlib's (RFC 9110, section 8.4.1).
WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
INFLATE_STEP_BYTES = 1 << 20
# Above this, parsing is worth a thread: the event loop would notice. Other types are taken as they are.
LARGE_BODY_BYTES = 256 * 1024
TO_BE_PARSED = (JSON, NPZ)


async def payload_of(request: Request, limits: Limits, decoders: Decoders) -> Payload:
    """The parts of a request's body. A multipart body is taken apart as it comes."""
    content_type = request.headers.get("content-type", "")
    if media_type(content_type)[0] == MULTIPART:
        form = Form(content_type, limits)
        async for chunk in body_of(request, limits.max_bytes):
            form.feed(chunk)
        return form.payload()
    chunks = [chunk async for chunk in body_of(request, limits.max_bytes)]
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if len(body) < LARGE_BODY_BYTES or media_type(content_type)[0] not in TO_BE_PARSED:
        return read_payload(body, content_type, limits)
    return await decoders.run(0, lambda: read_payload(body, content_type, limits))


async def whole_body(request: Request, max_bytes: int) -> bytes:
    return b"".join([chunk async for chunk in body_of(request, max_bytes)])


async def body_of(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    """The body as it comes, inflated; never more than `max_bytes` of it. Raises `BodyTooLarge`."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise BodyTooLarge(max_bytes)
    if encoding not in ("identity", "", *WINDOWS):
        raise UnsupportedBody(f"Content-Encoding {encoding}", ("gzip", "deflate", "identity"))
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
    """A compressed body in plain pieces of at most 1 MiB, so that the limit is met in time.

    Several gzip members one after the other are one body (RFC 1952, section 2.2); anything else after
    the end is an error.
    """
    inflater = zlib.decompressobj(window)
    fed = False
    try:
        async for chunk in chunks:
            compressed = chunk
            while compressed:
                if inflater.eof:
                    inflater = zlib.decompressobj(window)
                fed = True
                yield inflater.decompress(compressed, INFLATE_STEP_BYTES)
                compressed = inflater.unconsumed_tail or inflater.unused_data
    except zlib.error:
        raise Malformed("the body is not what its Content-Encoding says") from None
    if not (fed and inflater.eof):
        raise Malformed("the compressed body ends too early")
