"""The chunks of bodies: their length is limited, they are decompressed, and joined to larger ones."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator

from gateway.errors import BodyTooLarge, MalformedRequest

# zlib's window sizes: 16 more means gzip's header; deflate is zlib's (RFC 9110, section 8.4.1).
ZLIB_WBITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
INFLATE_INPUT_BYTES = 16 << 10
INLINE_INFLATE_BYTES = 64 << 10
INFLATE_STEP_BYTES = 1 << 20
BODY_FRAMING_HEADERS = frozenset((b"content-length", b"transfer-encoding", b"content-encoding"))


async def inflate_chunks(chunks: AsyncIterator[bytes], wbits: int) -> AsyncIterator[bytes]:
    """Yield the decompressed body in chunks of at most 1 MiB, so that limits apply early.

    Several gzip members are one body (RFC 1952, section 2.2). Other data after the end is an error.
    Raises `MalformedRequest`.
    """
    inflater = zlib.decompressobj(wbits)
    async for chunk in chunks:
        # zlib copies its unconsumed input at each step and member: without slices, the cost of thousands of
        # small members would be quadratic.
        for start in range(0, len(chunk), INFLATE_INPUT_BYTES):
            compressed = chunk[start : start + INFLATE_INPUT_BYTES]
            inline_bytes = INLINE_INFLATE_BYTES
            while compressed:
                if inflater.eof:
                    inflater = zlib.decompressobj(wbits)
                try:
                    if inline_bytes > 0:
                        piece = inflater.decompress(compressed, inline_bytes)
                        inline_bytes -= len(piece)
                    else:  # a large output would block the event loop
                        step = compressed, INFLATE_STEP_BYTES
                        piece = await asyncio.to_thread(inflater.decompress, *step)
                        inline_bytes = INLINE_INFLATE_BYTES
                except zlib.error:
                    raise MalformedRequest("the body does not match its Content-Encoding") from None
                if piece:
                    yield piece
                compressed = inflater.unconsumed_tail or inflater.unused_data
    if not inflater.eof:
        raise MalformedRequest("the compressed body is truncated")


async def iterate_once(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def limit_length(chunks: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """Yield the chunks of a body up to this length. Raises `BodyTooLarge`."""
    length = 0
    async for chunk in chunks:
        length += len(chunk)
        if length > max_bytes:
            raise BodyTooLarge(max_bytes)
        yield chunk


async def coalesce_chunks(chunks: AsyncIterator[bytes], min_bytes: int) -> AsyncIterator[bytes]:
    """Yield the chunks joined to larger ones, except at the end."""
    small: list[bytes] = []
    size = 0
    async for chunk in chunks:
        small.append(chunk)
        size += len(chunk)
        if size >= min_bytes:
            yield b"".join(small) if len(small) > 1 else chunk
            small.clear()
            size = 0
    if size:
        yield b"".join(small)
