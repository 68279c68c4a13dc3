"""Reading and decompressing request bodies within their limits."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Final, NamedTuple

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from gateway.capacity.body_chunks import ZLIB_WBITS, inflate_chunks, limit_length
from gateway.errors import BodyTooLarge, UnsupportedEncoding
from gateway.media_types import MULTIPART
from gateway.memory import MemoryCharge
from gateway.telemetry.request_info import RequestInfo, read_head
from gateway.tensors.codecs import DEFAULT_CODEC, JSON_CODEC, find_codec
from gateway.tensors.form import MultipartForm
from gateway.tensors.inputs import InferInputs, decode_body, decode_form, read_payload
from gateway.tensors.media_type import MAX_CONTENT_TYPE_CHARS, parse_content_type
from gateway.tensors.payload import Payload, PayloadLimits

# The files of a form are copied once.
MAX_INLINE_FORM_BYTES: Final = 4 << 20
MIN_PEEKED_BYTES: Final = 16  # enough to recognize the type of a file


class LargePayload(partial[tuple[Payload, InferInputs]]):
    """The decoding of a body in a process, without its last arguments, the signature and the limits.

    It may take much time or memory.
    """


class DeferredPayload(partial[Payload]):
    """The decoding of a body that takes too long for the event loop, but not for a thread."""


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

    async def peek(self) -> bytes:
        """Return the first bytes of the body as they are sent; `read` and `stream` return them again."""
        receive, beginning, has_more = self._receive, b"", True
        while has_more and len(beginning) < MIN_PEEKED_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            beginning += message.get("body", b"")
            has_more = message.get("more_body", False)
        messages = [{"type": "http.request", "body": beginning, "more_body": has_more}]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        self._receive = receive_again
        return beginning

    async def receive_start(self, max_bytes: int) -> bool:
        """Receive what has arrived; return whether `read` and `stream` then take no time.

        Raises `BodyTooLarge` or `UnsupportedEncoding`.
        """
        self._is_started = True
        self._encoding = self._check_headers(max_bytes)
        self._first_chunk, self._has_more = await self._receive_chunk()
        return not self._has_more and not self._encoding

    async def read(self, max_bytes: int, charge: MemoryCharge) -> bytes:
        """Return the decompressed body. Raises `BodyTooLarge`, `TooLarge` or `MemoryBudgetExceeded`."""
        factor = find_memory_factor(self.content_type)
        if not self._is_started:
            await self.receive_start(max_bytes)
        if not self._has_more and not self._encoding:  # as nearly all bodies
            data, self._first_chunk = self._first_chunk, b""
            check_length(len(data), max_bytes)
            charge.add(factor * len(data))
            return data
        # Joining the chunks of a large body at its end would hold the event loop.
        file = io.BytesIO()
        async for chunk in self.stream(max_bytes):
            charge.add(factor * len(chunk))
            file.write(chunk)
        return file.getvalue()

    async def stream(self, max_bytes: int) -> AsyncIterator[bytes]:
        """Yield the decompressed body as it arrives, up to `max_bytes`. Raises `BodyTooLarge`."""
        if not self._is_started:
            await self.receive_start(max_bytes)
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
            data, self._has_more = await self._receive_chunk()
            yield data

    async def _receive_chunk(self) -> tuple[bytes, bool]:
        """Return a part of the body, and whether there is more. Raises `ClientDisconnect`."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        data: bytes = message.get("body", b"")
        self._info.bytes_in += len(data)
        return data, message.get("more_body", False)


async def receive_payload(
    body: RequestBody, limits: PayloadLimits, charge: MemoryCharge
) -> Payload | DeferredPayload | LargePayload:
    """Return the body's parts, or what a thread or a process must decode.

    A multipart body is split into parts as it arrives.
    """
    content_type = body.content_type
    media_type, _ = parse_content_type(content_type)
    codec = find_codec(media_type)
    if media_type == MULTIPART:
        return await receive_form(body, limits, charge)
    data = await body.read(limits.max_bytes, charge)
    if codec is None or len(data) <= codec.max_inline_bytes:
        return read_payload(data, content_type, limits)  # or the error of an unsupported type
    if len(data) > codec.max_thread_bytes:
        return LargePayload(decode_body, data, content_type)
    return DeferredPayload(read_payload, data, content_type, limits)


async def receive_form(
    body: RequestBody, limits: PayloadLimits, charge: MemoryCharge
) -> Payload | DeferredPayload | LargePayload:
    form = MultipartForm(body.content_type, limits)
    factor = find_memory_factor(body.content_type)
    async for chunk in body.stream(limits.max_bytes):
        charge.add(factor * len(chunk))
        form.feed(chunk)
    if (
        form.decoded_size_bytes <= JSON_CODEC.max_inline_bytes
        and form.size_bytes <= MAX_INLINE_FORM_BYTES
    ):
        return form.build_payload()
    if form.json_size_bytes > JSON_CODEC.max_thread_bytes:
        return LargePayload(decode_form, form)
    return DeferredPayload(form.build_payload)


def find_memory_factor(content_type: str) -> int:
    # Cut, because `find_codec` keeps its arguments.
    media_type = content_type[:MAX_CONTENT_TYPE_CHARS].partition(";")[0].strip().lower()
    return (find_codec(media_type) or DEFAULT_CODEC).memory_factor


def check_length(length: int, max_bytes: int) -> None:
    if length > max_bytes:
        raise BodyTooLarge(max_bytes)
