"""Decoders from a request body to named parts, by content type. Pure.

The value of a part is `bytes`, `str`, a NumPy array or a JSON value (a number, a boolean, or nested lists of
these, of strings and of bytes).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from encodings import normalize_encoding
from encodings.aliases import aliases
from typing import Any

import numpy as np
import orjson

from gateway.errors import MalformedRequest, TooLarge, UnsupportedBody
from gateway.messages import quote_text
from gateway.tensors.data_uri import decode_base64_text
from gateway.tensors.media_type import parse_content_type, parse_header_parameters
from gateway.tensors.multipart import MultipartParser, RawPart
from gateway.tensors.npy import read_npy
from gateway.tensors.npz import read_npz

JSON = "application/json"
NPY = "application/x-npy"
NPZ = "application/x-npz"
OCTET_STREAM = "application/octet-stream"
EVENT_STREAM = "text/event-stream"
NDJSON = "application/x-ndjson"
MULTIPART = "multipart/form-data"
SUPPORTED_CONTENT_TYPES = ("image/*", OCTET_STREAM, "text/plain", MULTIPART, JSON, NPY, NPZ)
# The encodings of the WHATWG Encoding Standard by their Python names, and ASCII, UTF-16 and UTF-32. Python's
# other codecs include binary transforms, produce invalid Unicode, or cache every unknown name.
SUPPORTED_CODECS = frozenset({
    "ascii", "big5", "cp1250", "cp1251", "cp1252", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257",
    "cp1258", "cp866", "cp874", "euc_jp", "euc_kr", "gb18030", "gb2312", "gbk", "iso2022_jp",
    "iso8859_10", "iso8859_13", "iso8859_14", "iso8859_15", "iso8859_16", "iso8859_2", "iso8859_3",
    "iso8859_4", "iso8859_5", "iso8859_6", "iso8859_7", "iso8859_8", "iso8859_9", "koi8_r", "koi8_u",
    "latin_1", "mac_cyrillic", "mac_roman", "shift_jis", "tis_620", "utf_16", "utf_16_be", "utf_16_le",
    "utf_32", "utf_32_be", "utf_32_le", "utf_8", "utf_8_sig",
})  # fmt: skip
# The average memory of a Python list or dict, and of a number with its entries in two lists and an array.
CONTAINER_BYTES = 160
VALUE_BYTES = 40
# A decoder holds the GIL, which the event loop needs several times per request. The slowest decoder needs
# less than a millisecond for a chunk.
TEXT_CHUNK_BYTES = 64 << 10
# These are fast enough without chunks, and their incremental decoders reject text without a BOM.
BOM_CODECS = frozenset({"utf_16", "utf_32"})
FEED_CHUNK_BYTES = 64 << 10


@dataclass(frozen=True)
class PayloadLimits:
    """The limits of a request body."""

    max_bytes: int = 64 << 20
    max_json_depth: int = 64
    max_parts: int = 128
    max_json_memory_bytes: int = 1 << 30


@dataclass(frozen=True)
class Part:
    """One value with its metadata."""

    value: Any
    content_type: str = ""
    file_name: str = ""


@dataclass(frozen=True)
class Payload:
    """The content of a request: lists of parts by name, several if a form field is repeated.

    The name is "" for a value without a name, which is valid if the model has one required input.
    """

    parts: Mapping[str, list[Part]]
    outputs: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    is_stacked: bool = False  # each part is one item of a batch, even if there is only one


def read_payload(body: bytes, content_type: str, limits: PayloadLimits) -> Payload:
    """Decode a complete body. Raises `MalformedRequest`, `UnsupportedBody` or `TooLarge`."""
    name, parameters = parse_content_type(content_type)
    if name == MULTIPART:
        form = MultipartForm(content_type, limits)
        for start in range(0, len(body), FEED_CHUNK_BYTES):
            form.feed(body[start : start + FEED_CHUNK_BYTES])
        return form.build_payload()
    if name == JSON:
        return read_json_payload(body, limits)
    if name == NPZ:
        return Payload(read_npz_parts(body, limits))
    return Payload({"": [Part(read_single_value(body, name, parameters, content_type), name)]})


def read_single_value(
    body: bytes, media_type: str, parameters: Mapping[str, str], content_type: str
) -> Any:
    if media_type.startswith("image/") or media_type == OCTET_STREAM:
        return body
    reader = VALUE_READERS.get(media_type)
    if reader is None:
        raise UnsupportedBody(content_type, SUPPORTED_CONTENT_TYPES)
    return reader(body, parameters)


def decode_text(body: bytes, parameters: Mapping[str, str]) -> str:
    charset = parameters.get("charset", "utf-8")
    codec = normalize_encoding(charset.lower())
    codec = aliases.get(codec, codec)
    if codec not in SUPPORTED_CODECS:
        raise MalformedRequest(f"unknown charset {quote_text(charset)}; send UTF-8")
    if len(body) > TEXT_CHUNK_BYTES and codec not in BOM_CODECS:
        return decode_text_chunks(body, codec, charset)
    try:
        return body.decode(codec)
    except UnicodeDecodeError as exc:
        raise build_charset_error(charset, exc.start) from None


def decode_text_chunks(body: bytes, codec: str, charset: str) -> str:
    decoder = codecs.getincrementaldecoder(codec)()
    chunks: list[str] = []
    for start in range(0, len(body), TEXT_CHUNK_BYTES):
        end = start + TEXT_CHUNK_BYTES
        try:
            chunks.append(decoder.decode(body[start:end], end >= len(body)))
        except UnicodeDecodeError as exc:  # the object also has the rest of the previous chunk
            raise build_charset_error(
                charset, min(end, len(body)) - len(exc.object) + exc.start
            ) from None
        except UnicodeError:  # an unterminated escape sequence
            raise build_charset_error(charset, min(end, len(body))) from None
    return "".join(chunks)


def build_charset_error(charset: str, position: int) -> MalformedRequest:
    return MalformedRequest(f"the text is not valid {charset} at byte {position}")


def read_npy_value(body: bytes, parameters: Mapping[str, str]) -> np.ndarray:
    return read_npy(body)


def read_json_value(body: bytes, parameters: Mapping[str, str]) -> Any:
    return decode_b64_objects(parse_json_body(body), PayloadLimits().max_json_depth)


VALUE_READERS: Mapping[str, Callable[[bytes, Mapping[str, str]], Any]] = {
    "text/plain": decode_text,
    NPY: read_npy_value,
    JSON: read_json_value,
}


def read_npz_parts(body: bytes, limits: PayloadLimits) -> dict[str, list[Part]]:
    # The inflated size has the same limit as a body.
    arrays = read_npz(body, limits.max_bytes, limits.max_parts)
    return {name: [Part(array, NPY)] for name, array in arrays.items()}


def parse_json_body(body: bytes) -> Any:
    """Parse strict JSON (RFC 8259). Raises `MalformedRequest`; orjson limits the recursion."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        if str(exc).startswith("Not enough memory"):
            raise MemoryError from None
        raise MalformedRequest(f"the body is not valid JSON: {exc}") from None


def check_json_memory(body: bytes | bytearray, limits: PayloadLimits) -> None:
    """Estimate the memory that the JSON values need. Raises `TooLarge` if it exceeds the limit."""
    containers = body.count(b"[") + body.count(b"{")
    needed_bytes = len(body) + CONTAINER_BYTES * containers + VALUE_BYTES * body.count(b",")
    if needed_bytes > limits.max_json_memory_bytes:
        raise TooLarge(
            f"the values of the JSON need about {needed_bytes >> 20} MiB of memory; the limit is "
            f"{limits.max_json_memory_bytes >> 20} MiB; send numbers as {NPY}, or fewer values per request"
        )


def read_json_payload(body: bytes, limits: PayloadLimits) -> Payload:
    """Decode `{"inputs": value or {name: value}, "outputs": [name]?, "parameters": {}?, "id": ""?}`."""
    document = parse_json_body(body)
    if not isinstance(document, dict) or "inputs" not in document:
        raise MalformedRequest('the JSON body must be an object with "inputs", e.g. {"inputs": …}')
    unknown = document.keys() - {"inputs", "outputs", "parameters", "id"}
    if unknown:
        raise MalformedRequest(
            f"unknown key {quote_text(min(unknown))} in the JSON body; "
            'valid keys are "inputs", "outputs", "parameters" and "id"'
        )
    inputs = decode_b64_objects(document["inputs"], limits.max_json_depth)
    if not isinstance(inputs, dict):
        inputs = {"": inputs}
    return Payload(
        {name: [Part(value, JSON)] for name, value in inputs.items()},
        outputs=validate_output_names(document.get("outputs")),
        parameters=validate_parameters(document.get("parameters")),
        id=validate_request_id(document.get("id", "")),
    )


def validate_output_names(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise MalformedRequest('"outputs" must be a list of output names')
    return tuple(dict.fromkeys(value))


def validate_parameters(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    scalars = (str, int, float, bool)
    if not isinstance(value, dict) or not all(isinstance(item, scalars) for item in value.values()):
        raise MalformedRequest('"parameters" must be an object of strings, numbers and booleans')
    return value


def validate_request_id(value: Any) -> str:
    if not isinstance(value, str):
        raise MalformedRequest('"id" must be a string')
    return value


def decode_b64_objects(value: Any, max_depth: int) -> Any:
    """Replace each `{"b64": …}` by its bytes. Raises `MalformedRequest` below `max_depth` levels."""
    if not isinstance(value, (list, dict)):
        return value
    if max_depth == 0:
        raise MalformedRequest("the JSON is nested too deeply")
    if isinstance(value, list):
        # A list of numbers needs no Python call per element.
        is_nested = not {list, dict}.isdisjoint(map(type, value))
        return [decode_b64_objects(item, max_depth - 1) for item in value] if is_nested else value
    if value.keys() == {"b64"} and isinstance(value["b64"], str):
        return decode_base64_text(value["b64"])
    return {key: decode_b64_objects(item, max_depth - 1) for key, item in value.items()}


class MultipartForm:
    """A multipart body (RFC 7578) that is fed in chunks and kept in memory, within the limits."""

    def __init__(self, content_type: str, limits: PayloadLimits) -> None:
        boundary = parse_content_type(content_type)[1].get("boundary", "")
        if not boundary:
            raise MalformedRequest("the Content-Type of the multipart body has no boundary")
        self._parser = MultipartParser(boundary, limits.max_parts)
        self._parts: list[RawPart] = []

    @property
    def size_bytes(self) -> int:
        return sum(len(part.content) for part in self._parts)

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
        if not self._parser.is_complete:
            raise MalformedRequest("the multipart body ends before its closing boundary")
        parts: dict[str, list[Part]] = {}
        parameters: dict[str, Any] = {}
        while self._parts:  # each part is released after it is copied
            name, part = read_form_field(self._parts.pop(0))
            if name == "parameters":
                parameters = validate_parameters(parse_form_parameters(part.value))
            else:
                parts.setdefault(name, []).append(part)
        return Payload(parts, parameters=parameters)


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
    is_file, data = "filename" in options, bytes(raw_part.content)
    content_type = raw_part.headers.get("content-type", OCTET_STREAM if is_file else "text/plain")
    kind, parameters = parse_content_type(content_type)
    if is_file and (kind not in VALUE_READERS or kind == "text/plain"):
        return name, Part(data, kind)
    return name, Part(read_single_value(data, kind, parameters, content_type), kind)


def parse_form_parameters(value: Any) -> Any:
    if isinstance(value, str):
        value = value.encode()
    return parse_json_body(value) if isinstance(value, bytes) else value
