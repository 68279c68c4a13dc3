"""A multipart form, which is split into its fields as it arrives. Pure."""

from __future__ import annotations

from typing import Any

from gateway.errors import MalformedRequest
from gateway.media_types import JSON, OCTET_STREAM, TEXT
from gateway.tensors.codecs import parse_body_type, read_bytes
from gateway.tensors.copying import copy_bytes
from gateway.tensors.json_body import check_json_memory, parse_json_body, validate_parameters
from gateway.tensors.media_type import parse_content_type, parse_header_parameters
from gateway.tensors.multipart import MultipartParser, RawPart
from gateway.tensors.payload import Part, Payload, PayloadLimits, PayloadOptions


class MultipartForm:
    """A multipart body (RFC 7578) that is fed in chunks and kept in memory, within the limits."""

    def __init__(self, content_type: str, limits: PayloadLimits) -> None:
        boundary = parse_content_type(content_type)[1].get("boundary", "")
        self._parser = MultipartParser(boundary, limits.max_parts)
        self._parts: list[RawPart] = []

    @property
    def size_bytes(self) -> int:
        return sum(len(part.content) for part in self._parts)

    @property
    def decoded_size_bytes(self) -> int:
        """The size of the parts that are decoded; the others are files that are used as they are."""
        return sum(len(part.content) for part in self._parts if not is_raw_file(part))

    @property
    def json_size_bytes(self) -> int:
        return sum(len(part.content) for part in self._parts if is_json_part(part))

    def feed(self, data: bytes) -> None:
        self._parts += self._parser.feed(data)

    def check_json_memory(self, limits: PayloadLimits) -> None:
        for part in self._parts:
            if is_json_part(part):
                check_json_memory(part.content, limits)

    def build_payload(self) -> Payload:
        """Decode the parts of a complete form. Raises `MalformedRequest` or `UnsupportedBody`."""
        self._parser.finish()
        parts: dict[str, list[Part]] = {}
        parameters: dict[str, Any] = {}
        while self._parts:  # each part is released after it is copied
            name, part = read_form_field(self._parts.pop(0))
            if name == "parameters":
                parameters = validate_parameters(parse_form_parameters(part.value))
            else:
                parts.setdefault(name, []).append(part)
        return Payload(parts, PayloadOptions(parameters=parameters))


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
