"""An incremental parser for multipart/form-data (RFC 7578; RFC 2046, section 5.1), and forms as payloads.

Each byte is searched once, at the speed of C. Parts are kept in memory, within the body size limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from gateway.errors import MalformedRequest, TooLarge
from gateway.media_types import JSON, OCTET_STREAM, TEXT
from gateway.tensors.codecs import parse_body_type, read_bytes
from gateway.tensors.json_body import check_json_memory, parse_json_body, validate_parameters
from gateway.tensors.media_type import parse_content_type, parse_header_parameters
from gateway.tensors.payload import Part, Payload, PayloadLimits, PayloadOptions, copy_bytes

MAX_BOUNDARY_CHARS: Final = 256
MAX_HEADER_BYTES: Final = 8 << 10
MAX_HEADER_FIELDS: Final = 16
# RFC 2046 allows spaces and tabs after the boundary of a delimiter.
MAX_DELIMITER_PADDING_BYTES: Final = 64
HEADER_FIELD: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):(.*)", re.DOTALL)
CRLF: Final = b"\r\n"
# A smaller part is copied out of the buffer; a larger one takes the buffer, and what follows it is copied.
MAX_COPIED_PART_BYTES: Final = 1 << 20
DELIMITER_TAIL: Final = re.compile(b"(?:(--)|[ \t]{0,%d}\r\n)" % MAX_DELIMITER_PADDING_BYTES)


@dataclass(frozen=True)
class RawPart:
    """A part with its header values, by name in lower case, and its undecoded content."""

    headers: Mapping[str, str]
    content: bytes | bytearray


class Delimiter(NamedTuple):
    start: int
    end: int
    is_last: bool


class MultipartParser:
    """A parser that is fed chunks of any size. `is_complete` is set after the closing delimiter."""

    def __init__(self, boundary: str, max_parts: int) -> None:
        if not boundary:
            raise MalformedRequest("the Content-Type of the multipart body has no boundary")
        if len(boundary) > MAX_BOUNDARY_CHARS:
            raise MalformedRequest(
                f"the multipart boundary is too long; the limit is {MAX_BOUNDARY_CHARS} characters"
            )
        dashes = b"\r\n--" + boundary.encode("latin-1")
        self._delimiter_prefix = dashes
        self._max_delimiter_bytes = len(dashes) + MAX_DELIMITER_PADDING_BYTES + len(CRLF)
        self._max_parts = max_parts
        self._part_count = 0
        self._buffer = bytearray(CRLF)  # the first delimiter may start the body
        self._search_start = 0  # no delimiter begins in the buffer before this position
        self._headers: Mapping[str, str] | None = None
        self._is_preamble = True
        self.is_complete = False

    def feed(self, data: bytes) -> Iterator[RawPart]:
        """Yield the parts that end within `data`. Raises `MalformedRequest` or `TooLarge`."""
        if self.is_complete:
            return  # the epilogue is ignored
        self._buffer += data
        while not self.is_complete:
            if self._headers is None and not self._is_preamble:
                self._headers = self._read_headers()
                if self._headers is None:
                    return
            delimiter = self._find_delimiter()
            if delimiter is None:
                return
            headers = self._headers
            content = self._cut_content(delimiter)
            self._begin_part(delimiter.is_last)
            if headers is not None:
                yield RawPart(headers, content)

    def finish(self) -> None:
        """Check that the body is complete. Raises `MalformedRequest`."""
        if not self.is_complete:
            raise MalformedRequest("the multipart body ends before its closing boundary")

    @property
    def part_headers(self) -> Mapping[str, str] | None:
        return None if self._is_preamble else self._headers

    def take_partial_content(self) -> bytes:
        """Remove and return the content of the begun part before a possible delimiter.

        A caller that takes contents keeps large parts out of memory; `feed` yields the rest.
        """
        content = bytes(self._buffer[: self._search_start])
        del self._buffer[: self._search_start]
        self._search_start = 0
        return content

    def _find_delimiter(self) -> Delimiter | None:
        start = self._buffer.find(self._delimiter_prefix, self._search_start)
        if start >= 0:
            tail = DELIMITER_TAIL.match(self._buffer, start + len(self._delimiter_prefix))
            if tail is None:
                # The pattern is compiled only if the content looks like a delimiter, because each body
                # has its own boundary.
                pattern = re.compile(re.escape(self._delimiter_prefix) + DELIMITER_TAIL.pattern)
                match = pattern.search(self._buffer, start)
                start, tail = (match.start(), match) if match else (-1, None)
            if tail is not None:
                return Delimiter(start, tail.end(), tail[1] is not None)
        self._search_start = max(0, len(self._buffer) - self._max_delimiter_bytes)
        if self._is_preamble:
            del self._buffer[: self._search_start]
            self._search_start = 0
        return None

    def _cut_content(self, delimiter: Delimiter) -> bytes | bytearray:
        buffer = self._buffer
        start = delimiter.start
        end = delimiter.end
        if start <= MAX_COPIED_PART_BYTES:
            content = bytes(memoryview(buffer)[:start])
            del buffer[:end]
            return content
        self._buffer = buffer[end:]
        del buffer[start:]
        return buffer

    def _begin_part(self, is_complete: bool) -> None:
        if is_complete:
            self._buffer = bytearray()
        self._search_start = 0
        self._headers = None
        self._is_preamble = False
        self.is_complete = is_complete
        self._part_count += not is_complete
        if self._part_count > self._max_parts:
            raise TooLarge(f"the multipart body has more than {self._max_parts} parts")

    def _read_headers(self) -> Mapping[str, str] | None:
        if self._buffer.startswith(CRLF):
            del self._buffer[: len(CRLF)]
            return {}
        end = self._buffer.find(CRLF + CRLF, 0, MAX_HEADER_BYTES)
        if end < 0:
            if len(self._buffer) >= MAX_HEADER_BYTES:
                raise TooLarge(
                    f"a part of the multipart body has a header of more than {MAX_HEADER_BYTES} bytes"
                )
            return None
        lines = bytes(self._buffer[:end]).split(CRLF, MAX_HEADER_FIELDS)
        del self._buffer[: end + 2 * len(CRLF)]
        if len(lines) > MAX_HEADER_FIELDS:
            raise TooLarge(
                f"a part of the multipart body has more than {MAX_HEADER_FIELDS} header fields"
            )
        return dict(map(parse_header_field, lines))


def parse_header_field(line: bytes) -> tuple[str, str]:
    field = HEADER_FIELD.fullmatch(line)
    if field is None:
        raise MalformedRequest("a part of the multipart body has a malformed header field")
    return field[1].decode("ascii").lower(), field[2].strip(b" \t").decode("latin-1")


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
            if is_json_part(raw_part):
                check_json_memory(raw_part.content, limits)
            name, part = read_form_field(raw_part)
            if name == "parameters":
                parameters = validate_parameters(parse_form_parameters(part.value))
            else:
                parts.setdefault(name, []).append(part)
        return Payload(parts, PayloadOptions(parameters=parameters))


class FormReader:
    """Splits a multipart body (RFC 7578), which is fed in chunks, into parts that are kept in memory."""

    def __init__(self, content_type: str, limits: PayloadLimits) -> None:
        boundary = parse_content_type(content_type)[1].get("boundary", "")
        self._parser = MultipartParser(boundary, limits.max_parts)
        self._parts: list[RawPart] = []

    def feed(self, data: bytes) -> None:
        self._parts += self._parser.feed(data)

    def finish(self) -> Form:
        """Return the complete form. Raises `MalformedRequest`."""
        self._parser.finish()
        return Form(self._parts)


def read_form(body: bytes, content_type: str, limits: PayloadLimits) -> Form:
    reader = FormReader(content_type, limits)
    reader.feed(body)
    return reader.finish()


def is_raw_file(raw_part: RawPart) -> bool:
    codec = parse_body_type(raw_part.headers.get("content-type", TEXT)).codec
    return codec is not None and codec.read_value is read_bytes and not is_json_part(raw_part)


def is_json_part(raw_part: RawPart) -> bool:
    # The field `parameters` is JSON even if its type says otherwise.
    is_parameters = "parameters" in raw_part.headers.get("content-disposition", "")
    return is_parameters or JSON in raw_part.headers.get("content-type", "").lower()


def read_form_field(raw_part: RawPart) -> tuple[str, Part]:
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
    data = copy_bytes(raw_part.content)
    content_type = raw_part.headers.get("content-type", OCTET_STREAM if is_file else TEXT)
    body_type = parse_body_type(content_type)
    kind = body_type.media_type
    codec = body_type.codec
    if is_file and (kind == TEXT or codec is None or codec.read_value is None):
        return name, Part(data, kind)
    return name, Part(body_type.read_value(data), kind)


def parse_form_parameters(value: Any) -> Any:
    if isinstance(value, str):
        value = value.encode()
    return parse_json_body(value) if isinstance(value, bytes) else value
