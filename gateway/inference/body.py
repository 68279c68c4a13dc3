"""Bodies of requests within their limits: reading and decompression."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Mapping
from time import perf_counter
from typing import NamedTuple, TypeVar

import anyio
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from gateway.capacity.body_chunks import ZLIB_WBITS, inflate_chunks, limit_length
from gateway.errors import BodyTooLarge, DeadlinePassed, UnsupportedEncoding
from gateway.headers import MAX_CONTENT_TYPE_CHARS
from gateway.memory import MemoryCharge
from gateway.telemetry.request_info import RequestInfo, read_head
from gateway.tensors.codecs import DEFAULT_CODEC, parse_body_type
from gateway.tensors.multipart import Form, PartReader, RawPart
from gateway.tensors.payload import PayloadLimits

T = TypeVar("T")


class Deadline(NamedTuple):
    """The time at which a request must have ended, on the event loop's clock."""

    at: float
    timeout_s: float  # the timeout of the whole request

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        return cls(asyncio.get_running_loop().time() + timeout_s, timeout_s)

    @property
    def remaining_s(self) -> float:
        return max(self.at - asyncio.get_running_loop().time(), 0.0)

    async def limit(self, work: Awaitable[T]) -> T:
        """Await work that may take long, and cancel it at the deadline. Raises `DeadlinePassed`."""
        try:
            # `fail_after` would read the clock again.
            with anyio.CancelScope(deadline=self.at):
                return await work
        except TimeoutError as exc:
            raise DeadlinePassed(self.timeout_s) from exc
        raise DeadlinePassed(self.timeout_s)


class BodyHeaders(NamedTuple):
    """The headers of a request that describe its body, and all headers by name."""

    fields: Mapping[bytes, bytes]  # the first of each name
    content_type: str
    content_length: int | None


def read_body_headers(scope: Scope) -> BodyHeaders:
    fields = dict(reversed(scope["headers"]))
    declared = fields.get(b"content-length", b"")
    return BodyHeaders(
        fields,
        fields.get(b"content-type", b"").decode("latin-1"),
        int(declared) if declared.isdigit() else None,
    )


class RequestBody:
    """The body of a request and the headers that describe it, by their names in lower case."""

    __slots__ = (
        "_encoding",
        "_first_chunk",
        "_has_more",
        "_info",
        "_is_started",
        "_receive",
        "content_length",
        "content_type",
        "headers",
    )

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.headers, self.content_type, self.content_length = read_head(scope, read_body_headers)
        self._info: RequestInfo = scope["request_info"]
        self._receive = receive
        self._is_started = False
        self._encoding = ""
        self._first_chunk = b""
        self._has_more = True

    def get_header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    @property
    def has_content(self) -> bool:
        """Return whether the request has a body, which may be empty if it is chunked."""
        return bool(self.content_length) or b"transfer-encoding" in self.headers

    async def receive_start(self, max_bytes: int) -> bool:
        """Receive what has arrived; return whether `read` and `stream` then take no time.

        The whole body is there when the application starts (`server/protocol/`), unless it is large, or the
        client waits for 100 Continue. Raises `BodyTooLarge` or `UnsupportedEncoding`.
        """
        if b"expect" in self.headers:
            return False
        await self._receive_first(max_bytes)
        return not self._has_more and not self._encoding

    async def _receive_first(self, max_bytes: int) -> None:
        self._is_started = True
        self._encoding = self._check_headers(max_bytes)
        started_at = perf_counter()
        self._first_chunk, self._has_more = await self._receive_chunk()
        if self._has_more or b"expect" in self.headers:  # otherwise it was there
            self._info.add_phase("receive", perf_counter() - started_at)

    async def read(self, max_bytes: int, charge: MemoryCharge) -> bytes:
        """Return the decompressed body. Raises `BodyTooLarge`, `TooLarge` or `MemoryBudgetExceeded`."""
        factor = find_memory_factor(self.content_type)
        if not self._is_started:
            await self._receive_first(max_bytes)
        if not self._has_more and not self._encoding:  # as nearly all bodies
            data = self._first_chunk
            self._first_chunk = b""
            check_length(len(data), max_bytes)
            charge.add(factor * len(data))
            return data
        # Joining the chunks of a large body at its end would hold the event loop.
        file = io.BytesIO()
        chunks = self.stream(max_bytes) if self._encoding else self._receive_chunks()
        async for chunk in chunks:
            check_length(file.tell() + len(chunk), max_bytes)
            charge.add(factor * len(chunk))
            file.write(chunk)
        return file.getvalue()

    async def stream(self, max_bytes: int) -> AsyncIterator[bytes]:
        """Yield the decompressed body as it arrives, up to `max_bytes`. Raises `BodyTooLarge`."""
        if not self._is_started:
            await self._receive_first(max_bytes)
        chunks = self._receive_chunks()
        if self._encoding:
            chunks = inflate_chunks(chunks, ZLIB_WBITS[self._encoding])
        async for chunk in limit_length(chunks, max_bytes):
            if chunk:
                yield chunk

    def _check_headers(self, max_bytes: int) -> str:
        """Return the compression of the body, or "". Raises `BodyTooLarge` or `UnsupportedEncoding`."""
        check_length(self.content_length or 0, max_bytes)
        if b"content-encoding" not in self.headers:
            return ""
        encoding = self.headers[b"content-encoding"].decode("latin-1").strip().lower()
        if encoding in ("identity", ""):
            return ""
        if encoding not in ZLIB_WBITS:
            raise UnsupportedEncoding(encoding)
        return encoding

    async def _receive_chunks(self) -> AsyncIterator[bytes]:
        data, self._first_chunk = self._first_chunk, b""
        yield data
        while self._has_more:
            started_at = perf_counter()
            data, self._has_more = await self._receive_chunk()
            self._info.add_phase("receive", perf_counter() - started_at)
            yield data

    async def _receive_chunk(self) -> tuple[bytes, bool]:
        """Return a part of the body, and whether there is more. Raises `ClientDisconnect`."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        data: bytes = message.get("body", b"")
        self._info.bytes_in += len(data)
        return data, message.get("more_body", False)


async def read_form_body(body: RequestBody, limits: PayloadLimits, charge: MemoryCharge) -> Form:
    """Return a complete form, which is split into its parts as it arrives.

    Raises `BodyTooLarge`, `TooLarge`, `MalformedRequest` or `MemoryBudgetExceeded`.
    """
    reader = PartReader(body.content_type, limits.max_parts)
    parts: list[RawPart] = []
    factor = find_memory_factor(body.content_type)
    async for chunk in body.stream(limits.max_bytes):
        charge.add(factor * len(chunk))
        parts += reader.feed(chunk)
    reader.finish()
    return Form(parts)


def find_memory_factor(content_type: str) -> int:
    # A longer type is refused where the body is decoded.
    codec = parse_body_type(content_type[:MAX_CONTENT_TYPE_CHARS]).codec
    return (codec or DEFAULT_CODEC).memory_factor


def check_length(length: int, max_bytes: int) -> None:
    if length > max_bytes:
        raise BodyTooLarge(max_bytes)
