"""A body becomes named parts: bytes, texts and arrays, whatever dress they came in. Pure.

The readers are a table by content type. A part's value is `bytes`, `str`, a NumPy array, or what JSON
holds (a number, a boolean, nested lists of these, of texts and of bytes).
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
# Those of the WHATWG's Encoding Standard, by Python's names, and ASCII, UTF-16 and UTF-32. Python's other
# codecs may be no character encodings, make what is no Unicode, or keep each name that they do not know.
SUPPORTED_CODECS = frozenset({
    "ascii", "big5", "cp1250", "cp1251", "cp1252", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257",
    "cp1258", "cp866", "cp874", "euc_jp", "euc_kr", "gb18030", "gb2312", "gbk", "iso2022_jp",
    "iso8859_10", "iso8859_13", "iso8859_14", "iso8859_15", "iso8859_16", "iso8859_2", "iso8859_3",
    "iso8859_4", "iso8859_5", "iso8859_6", "iso8859_7", "iso8859_8", "iso8859_9", "koi8_r", "koi8_u",
    "latin_1", "mac_cyrillic", "mac_roman", "shift_jis", "tis_620", "utf_16", "utf_16_be", "utf_16_le",
    "utf_32", "utf_32_be", "utf_32_le", "utf_8", "utf_8_sig",
})  # fmt: skip
# Of Python's objects, on average: a list or a dict; and a number with its places in two lists and an array.
CONTAINER_BYTES = 160
VALUE_BYTES = 40
# A decoder holds the interpreter's lock: this much takes the slowest of them less than a millisecond, and the
# event loop waits for the lock several times in a request.
TEXT_CHUNK_BYTES = 64 << 10
# Fast enough in one piece; and in several they refuse what has no mark.
BOM_CODECS = frozenset({"utf_16", "utf_32"})
FEED_CHUNK_BYTES = 64 << 10


@dataclass(frozen=True)
class PayloadLimits:
    """What a body may hold."""

    max_bytes: int = 64 << 20
    max_json_depth: int = 64
    max_parts: int = 128
    max_json_memory_bytes: int = 1 << 30


@dataclass(frozen=True)
class Part:
    """One value, and what is known about it."""

    value: Any
    content_type: str = ""
    file_name: str = ""


@dataclass(frozen=True)
class Payload:
    """What a request brings: parts by name, a list of parts where a field came several times.

    Parts without a name are under "", for a model whose only input needs none.
    """

    parts: Mapping[str, list[Part]]
    outputs: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    is_stacked: bool = False  # every part is one element of a batch, even when there is only one


def read_payload(body: bytes, content_type: str, limits: PayloadLimits) -> Payload:
    """Read a whole body. Raises `Malformed`, `UnsupportedBody` or `TooLarge`."""
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
    """A body, or a field of a form, that holds one value."""
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
        raise MalformedRequest(f"the text's charset {quote_text(charset)} is not known; send UTF-8")
    if len(body) > TEXT_CHUNK_BYTES and codec not in BOM_CODECS:
        return decode_text_chunks(body, codec, charset)
    try:
        return body.decode(codec)
    except UnicodeDecodeError as exc:
        raise build_charset_error(charset, exc.start) from None


def decode_text_chunks(body: bytes, codec: str, charset: str) -> str:
    decoder = codecs.getincrementaldecoder(codec)()
    pieces: list[str] = []
    for start in range(0, len(body), TEXT_CHUNK_BYTES):
        end = start + TEXT_CHUNK_BYTES
        try:
            pieces.append(decoder.decode(body[start:end], end >= len(body)))
        except UnicodeDecodeError as exc:  # of the piece, and what the last one left over
            raise build_charset_error(
                charset, min(end, len(body)) - len(exc.object) + exc.start
            ) from None
        except UnicodeError:  # of a sequence that has no end
            raise build_charset_error(charset, min(end, len(body))) from None
    return "".join(pieces)


def build_charset_error(charset: str, position: int) -> MalformedRequest:
    return MalformedRequest(f"the text is not valid {charset}: byte {position} does not fit")


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
    """NumPy's own archive: arrays by name. What it inflates to is bounded like a body."""
    arrays = read_npz(body, limits.max_bytes, limits.max_parts)
    return {name: [Part(array, NPY)] for name, array in arrays.items()}


def parse_json_body(body: bytes) -> Any:
    """JSON, as strict as RFC 8259; orjson itself bounds the recursion."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        if str(exc).startswith("Not enough memory"):
            raise MemoryError from None
        raise MalformedRequest(f"the body is not JSON: {exc}") from None


def check_json_memory(body: bytes | bytearray, limits: PayloadLimits) -> None:
    """Refuse JSON whose values need more memory than the limit, by a rough count. Raises `TooLarge`."""
    containers = body.count(b"[") + body.count(b"{")
    needed = len(body) + CONTAINER_BYTES * containers + VALUE_BYTES * body.count(b",")
    if needed > limits.max_json_memory_bytes:
        raise TooLarge(
            f"the JSON holds so many values that they need about {needed >> 20} MiB of memory; the limit is "
            f"{limits.max_json_memory_bytes >> 20} MiB: send numbers as {NPY}, or less at a time"
        )


def read_json_payload(body: bytes, limits: PayloadLimits) -> Payload:
    """`{"inputs": value or {name: value}, "outputs": [name]?, "parameters": {}?, "id": ""?}`."""
    document = parse_json_body(body)
    if not isinstance(document, dict) or "inputs" not in document:
        raise MalformedRequest('the JSON body must be an object with "inputs", as in {"inputs": …}')
    unknown = document.keys() - {"inputs", "outputs", "parameters", "id"}
    if unknown:
        raise MalformedRequest(
            f"the JSON body has the unknown key {quote_text(min(unknown))}; "
            'known are "inputs", "outputs", "parameters" and "id"'
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
        raise MalformedRequest('"parameters" must be an object of texts, numbers and booleans')
    return value


def validate_request_id(value: Any) -> str:
    if not isinstance(value, str):
        raise MalformedRequest('"id" must be a text')
    return value


def decode_b64_objects(value: Any, max_depth: int) -> Any:
    """The same value with every `{"b64": …}` turned into bytes, down to `depth` levels."""
    if not isinstance(value, (list, dict)):
        return value
    if max_depth == 0:
        raise MalformedRequest("the JSON is nested too deeply")
    if isinstance(value, list):
        # Long lists of numbers pass without a Python call per element.
        nested = not {list, dict}.isdisjoint(map(type, value))
        return [decode_b64_objects(item, max_depth - 1) for item in value] if nested else value
    if value.keys() == {"b64"} and isinstance(value["b64"], str):
        return decode_base64_text(value["b64"])
    return {key: decode_b64_objects(item, max_depth - 1) for key, item in value.items()}


class MultipartForm:
    """A multipart body (RFC 7578), fed as it comes; it is held in memory, under the limits."""

    def __init__(self, content_type: str, limits: PayloadLimits) -> None:
        boundary = parse_content_type(content_type)[1].get("boundary", "")
        if not boundary:
            raise MalformedRequest("the multipart body's Content-Type names no boundary")
        self._parser = MultipartParser(boundary, limits.max_parts)
        self._parts: list[RawPart] = []

    @property
    def size_bytes(self) -> int:
        """The bytes of its parts so far."""
        return sum(len(part.content) for part in self._parts)

    @property
    def json_size_bytes(self) -> int:
        """The bytes of its parts so far that are to be read as JSON."""
        return sum(len(part.content) for part in self._parts if is_json_part(part))

    def feed(self, data: bytes) -> None:
        self._parts += self._parser.feed(data)

    def check_json_memory(self, limits: PayloadLimits) -> None:
        """Raises `TooLarge` for a part whose values need more memory than the limit."""
        for part in self._parts:
            if is_json_part(part):
                check_json_memory(part.content, limits)

    def build_payload(self) -> Payload:
        """The form, when all of it was fed."""
        if not self._parser.is_complete:
            raise MalformedRequest("the multipart body ends before its last boundary")
        parts: dict[str, list[Part]] = {}
        parameters: dict[str, Any] = {}
        while self._parts:  # each is copied, and then no longer held
            name, part = read_form_field(self._parts.pop(0))
            if name == "parameters":
                parameters = validate_parameters(parse_form_parameters(part.value))
            else:
                parts.setdefault(name, []).append(part)
        return Payload(parts, parameters=parameters)


def is_json_part(raw_part: RawPart) -> bool:
    """Whether a part is JSON, or the field `parameters`."""
    is_parameters = "parameters" in raw_part.headers.get("content-disposition", "")
    return is_parameters or JSON in raw_part.headers.get("content-type", "").lower()


def read_form_field(raw_part: RawPart) -> tuple[str, Part]:
    """Name and value. One without a type is a text; a file without one that we read is bytes."""
    disposition, options = parse_header_parameters(raw_part.headers.get("content-disposition", ""))
    if disposition != "form-data" or "name" not in options:
        raise MalformedRequest("a part of the multipart body has no name")
    try:
        name = options["name"].encode("latin-1").decode()
    except UnicodeDecodeError:
        raise MalformedRequest(
            "a part of the multipart body has a name that is not UTF-8"
        ) from None
    is_file, data = "filename" in options, bytes(raw_part.content)
    content_type = raw_part.headers.get("content-type", OCTET_STREAM if is_file else "text/plain")
    kind, parameters = parse_content_type(content_type)
    if is_file and (kind not in VALUE_READERS or kind == "text/plain"):
        return name, Part(data, kind)
    return name, Part(read_single_value(data, kind, parameters, content_type), kind)


def parse_form_parameters(value: Any) -> Any:
    """The field `parameters`, which is JSON whatever its type says."""
    if isinstance(value, str):
        value = value.encode()
    return parse_json_body(value) if isinstance(value, bytes) else value
