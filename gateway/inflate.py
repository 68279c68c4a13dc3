"""Decompression of bodies, in steps that block the event loop only briefly."""

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


async def inflate_chunks(chunks: AsyncIterator[bytes], wbits: int) -> AsyncIterator[bytes]:
    """Yield the decompressed body in chunks of at most 1 MiB, so that limits apply early."""
    inflater = Inflater(wbits)
    async for chunk in chunks:
        async for piece in inflater.feed(chunk):
            yield piece
    inflater.end()


async def limit_length(chunks: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """Raises `BodyTooLarge`."""
    length = 0
    async for chunk in chunks:
        length += len(chunk)
        if length > max_bytes:
            raise BodyTooLarge(max_bytes)
        yield chunk


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
                remaining_bytes -= len(piece)
            else:
                piece = await asyncio.to_thread(self._inflate, compressed, INFLATE_STEP_BYTES)
                remaining_bytes = INLINE_INFLATE_BYTES
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
