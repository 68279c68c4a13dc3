"""Forms (multipart/form-data, RFC 7578): their parts while they arrive, and forms as payloads."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from gateway.errors import MalformedRequest, TooLarge
from gateway.headers import parse_content_type, parse_header_parameters
from gateway.media_types import OCTET_STREAM, TEXT
from gateway.tensors.codecs import JSON_CODEC, parse_body_type, read_bytes
from gateway.tensors.json_body import check_json_memory, parse_json_body, validate_parameters
from gateway.tensors.payload import Part, Payload, PayloadLimits, PayloadOptions

MAX_HEADER_BYTES: Final = 4 << 10
MAX_HEADER_FIELDS: Final = 16
# Line ends before the first part and blanks behind a boundary belong to no part.
MAX_UNUSED_BYTES: Final = 1 << 10
# The parser steps through what looks like a delimiter in Python, so each call gets this much.
FEED_BYTES: Final = 64 << 10

# The client is told what is wrong with its form.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


@dataclass(frozen=True)
class RawPart:
    """A part with its header values, by name in lower case, and its undecoded content."""

    headers: Mapping[str, str]
    content: bytes


class PartReader:
    """Splits a body, which is fed in chunks of any size, into its parts, within limits."""

    def __init__(self, content_type: str, max_parts: int) -> None:
        boundary = parse_content_type(content_type)[1].get("boundary", "").encode("latin-1")
        if not boundary:
            raise MalformedRequest("the Content-Type of the multipart body has no boundary")
        callbacks = {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_name,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add_content,
            "on_part_end": self._end_part,
            "on_end": self._end_body,
        }
        try:
            self._parser = MultipartParser(
                boundary,
                callbacks,  # type: ignore[arg-type]  # the keys of a TypedDict
                max_header_count=MAX_HEADER_FIELDS,
                max_header_size=MAX_HEADER_BYTES,
            )
        except FormParserError as exc:
            raise MalformedRequest(f"the multipart boundary is not valid: {exc}") from None
        self._delimiter = b"--" + boundary
        self._delimiter_count = 0
        self._max_parts = max_parts
        self._part_count = 0
        self._unused_bytes = 0
        self._is_complete = False
        self._parts: list[RawPart] = []
        self._name = bytearray()
        self._value = bytearray()
        self._headers: dict[str, str] = {}
        self._content = io.BytesIO()
        # The headers of the part whose content arrives.
        self.part_headers: Mapping[str, str] | None = None

    def feed(self, data: bytes) -> Sequence[RawPart]:
        """Return the parts that end within `data`. Raises `MalformedRequest` or `TooLarge`."""
        for start in range(0, len(data), FEED_BYTES):
            self._feed_piece(data[start : start + FEED_BYTES])
        parts, self._parts = self._parts, []
        return parts

    def _feed_piece(self, piece: bytes) -> None:
        # A content may have the delimiter within a line, but hardly by chance.
        self._delimiter_count += piece.count(self._delimiter)
        if self._delimiter_count > 2 * self._max_parts:
            raise TooLarge(f"the multipart body has more than {self._max_parts} parts")
        self._unused_bytes += len(piece)
        try:
            self._parser.write(piece)
        except FormParserError as exc:
            raise MalformedRequest(f"the multipart body is malformed: {exc}") from None
        if self._unused_bytes > MAX_UNUSED_BYTES and not self._is_complete:
            raise MalformedRequest("the multipart body has long blanks between its parts")

    def finish(self) -> None:
        """Check that the body is complete. Raises `MalformedRequest`."""
        if not self._is_complete:
            raise MalformedRequest("the multipart body ends before its closing boundary")

    def take_partial_content(self) -> bytes:
        """Remove and return what has arrived of the content of the begun part.

        A caller that takes contents keeps large parts out of memory; `feed` returns the rest.
        """
        content = self._content.getvalue()  # this makes no copy
        self._content = io.BytesIO()
        return content

    def _begin_part(self) -> None:
        self._part_count += 1
        if self._part_count > self._max_parts:
            raise TooLarge(f"the multipart body has more than {self._max_parts} parts")
        self._headers = {}

    def _add_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._unused_bytes = 0

    def _end_header(self) -> None:
        value = self._value.strip(b" \t").decode("latin-1")
        self._headers[self._name.decode("ascii").lower()] = value
        self._name.clear()
        self._value.clear()

    def _end_headers(self) -> None:
        self.part_headers = self._headers

    def _add_content(self, data: bytes, start: int, end: int) -> None:
        self._content.write(memoryview(data)[start:end])
        self._unused_bytes = 0

    def _end_part(self) -> None:
        self._parts.append(RawPart(self._headers, self.take_partial_content()))
        self.part_headers = None

    def _end_body(self) -> None:
        self._is_complete = True


@dataclass(frozen=True)
class Form:
    """The parts of a complete form."""

    raw_parts: Sequence[RawPart]

    @property
    def file_bytes(self) -> int:
        """The size of the parts that are used as they are."""
        return sum(len(part.content) for part in self.raw_parts if is_raw_file(part))

    @property
    def decoded_bytes(self) -> int:
        """The size of the parts that are decoded: texts, JSON and archives."""
        return sum(len(part.content) for part in self.raw_parts if not is_raw_file(part))

    def build_payload(self, limits: PayloadLimits) -> Payload:
        """Decode the parts. Raises `MalformedRequest`, `UnsupportedBody` or `TooLarge`."""
        parts: dict[str, list[Part]] = {}
        parameters: dict[str, Any] = {}
        for raw_part in self.raw_parts:
            name, part = read_form_field(raw_part, limits)
            if name == "parameters":
                parameters = validate_parameters(parse_form_parameters(part.value, limits))
            else:
                parts.setdefault(name, []).append(part)
        return Payload(parts, PayloadOptions(parameters=parameters))


def is_raw_file(raw_part: RawPart) -> bool:
    codec = parse_body_type(raw_part.headers.get("content-type", TEXT)).codec
    # The field `parameters` is JSON even if its type says otherwise.
    is_parameters = "parameters" in raw_part.headers.get("content-disposition", "")
    return codec is not None and codec.read_value is read_bytes and not is_parameters


def read_form_field(raw_part: RawPart, limits: PayloadLimits) -> tuple[str, Part]:
    """Return name and value. A field without a type is text; a file without a supported type is bytes."""
    disposition, options = parse_header_parameters(raw_part.headers.get("content-disposition", ""))
    if disposition != "form-data" or "name" not in options:
        raise MalformedRequest("a part of the multipart body has no name")
    try:
        name = options["name"].encode("latin-1").decode()
    except UnicodeDecodeError:
        raise MalformedRequest(
            "a part of the multipart body has a name that is not valid UTF-8"
        ) from None
    is_file = "filename" in options
    data = raw_part.content
    content_type = raw_part.headers.get("content-type", OCTET_STREAM if is_file else TEXT)
    body_type = parse_body_type(content_type)
    kind = body_type.media_type
    codec = body_type.codec
    if is_file and (kind == TEXT or codec is None or codec.read_value is None):
        return name, Part(data, kind)
    if codec is JSON_CODEC:
        check_json_memory(data, limits)
    return name, Part(body_type.read_value(data), kind)


def parse_form_parameters(value: Any, limits: PayloadLimits) -> Any:
    if isinstance(value, str):
        value = value.encode()
    if not isinstance(value, bytes):
        return value
    check_json_memory(value, limits)
    return parse_json_body(value)
