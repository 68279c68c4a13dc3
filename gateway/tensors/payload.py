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

from gateway.errors import Malformed, TooLarge, UnsupportedBody
from gateway.tensors.data_uri import from_base64
from gateway.tensors.media_type import media_type, split_parameters
from gateway.tensors.multipart import MultipartParser, RawPart
from gateway.tensors.npy import read_npy
from gateway.tensors.npz import read_npz
from gateway.words import quoted

JSON = "application/json"
NPY = "application/x-npy"
NPZ = "application/x-npz"
OCTETS = "application/octet-stream"
EVENT_STREAM = "text/event-stream"
NDJSON = "application/x-ndjson"
MULTIPART = "multipart/form-data"
TAKEN = ("image/*", OCTETS, "text/plain", MULTIPART, JSON, NPY, NPZ)
# Those of the WHATWG's Encoding Standard, by Python's names, and ASCII, UTF-16 and UTF-32. Python's other
# codecs may be no character encodings, make what is no Unicode, or keep each name that they do not know.
CHARSETS = frozenset({
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
DECODED_AT_A_TIME = 64 << 10
# Fast enough in one piece; and in several they refuse what has no mark.
BYTE_ORDER_MARKED = frozenset({"utf_16", "utf_32"})
FED_AT_A_TIME = 64 << 10


@dataclass(frozen=True)
class Limits:
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
    stacked: bool = False  # every part is one element of a batch, even when there is only one


def read_payload(body: bytes, content_type: str, limits: Limits) -> Payload:
    """Read a whole body. Raises `Malformed`, `UnsupportedBody` or `TooLarge`."""
    name, parameters = media_type(content_type)
    if name == MULTIPART:
        form = Form(content_type, limits)
        for start in range(0, len(body), FED_AT_A_TIME):
            form.feed(body[start : start + FED_AT_A_TIME])
        return form.payload()
    if name == JSON:
        return from_json(body, limits)
    if name == NPZ:
        return Payload(from_npz(body, limits))
    return Payload({"": [Part(read_value(body, name, parameters, content_type), name)]})


def read_value(body: bytes, name: str, parameters: Mapping[str, str], content_type: str) -> Any:
    """A body, or a field of a form, that holds one value."""
    if name.startswith("image/") or name == OCTETS:
        return body
    reader = VALUES.get(name)
    if reader is None:
        raise UnsupportedBody(content_type, TAKEN)
    return reader(body, parameters)


def text(body: bytes, parameters: Mapping[str, str]) -> str:
    charset = parameters.get("charset", "utf-8")
    codec = normalize_encoding(charset.lower())
    codec = aliases.get(codec, codec)
    if codec not in CHARSETS:
        raise Malformed(f"the text's charset {quoted(charset)} is not known; send UTF-8")
    if len(body) > DECODED_AT_A_TIME and codec not in BYTE_ORDER_MARKED:
        return decode_in_pieces(body, codec, charset)
    try:
        return body.decode(codec)
    except UnicodeDecodeError as exc:
        raise undecodable(charset, exc.start) from None


def decode_in_pieces(body: bytes, codec: str, charset: str) -> str:
    decoder = codecs.getincrementaldecoder(codec)()
    pieces: list[str] = []
    for start in range(0, len(body), DECODED_AT_A_TIME):
        end = start + DECODED_AT_A_TIME
        try:
            pieces.append(decoder.decode(body[start:end], end >= len(body)))
        except UnicodeDecodeError as exc:  # of the piece, and what the last one left over
            raise undecodable(charset, min(end, len(body)) - len(exc.object) + exc.start) from None
        except UnicodeError:  # of a sequence that has no end
            raise undecodable(charset, min(end, len(body))) from None
    return "".join(pieces)


def undecodable(charset: str, position: int) -> Malformed:
    return Malformed(f"the text is not valid {charset}: byte {position} does not fit")


def npy(body: bytes, parameters: Mapping[str, str]) -> np.ndarray:
    return read_npy(body)


def json_value(body: bytes, parameters: Mapping[str, str]) -> Any:
    return decoded(loads(body), Limits().max_json_depth)


VALUES: Mapping[str, Callable[[bytes, Mapping[str, str]], Any]] = {
    "text/plain": text,
    NPY: npy,
    JSON: json_value,
}


def from_npz(body: bytes, limits: Limits) -> dict[str, list[Part]]:
    """NumPy's own archive: arrays by name. What it inflates to is bounded like a body."""
    arrays = read_npz(body, limits.max_bytes, limits.max_parts)
    return {name: [Part(array, NPY)] for name, array in arrays.items()}


def loads(body: bytes) -> Any:
    """JSON, as strict as RFC 8259; orjson itself bounds the recursion."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        if str(exc).startswith("Not enough memory"):
            raise MemoryError from None
        raise Malformed(f"the body is not JSON: {exc}") from None


def check_json_memory(body: bytes | bytearray, limits: Limits) -> None:
    """Refuse JSON whose values need more memory than the limit, by a rough count. Raises `TooLarge`."""
    containers = body.count(b"[") + body.count(b"{")
    needed = len(body) + CONTAINER_BYTES * containers + VALUE_BYTES * body.count(b",")
    if needed > limits.max_json_memory_bytes:
        raise TooLarge(
            f"the JSON holds so many values that they need about {needed >> 20} MiB of memory; the limit is "
            f"{limits.max_json_memory_bytes >> 20} MiB: send numbers as {NPY}, or less at a time"
        )


def from_json(body: bytes, limits: Limits) -> Payload:
    """`{"inputs": value or {name: value}, "outputs": [name]?, "parameters": {}?, "id": ""?}`."""
    document = loads(body)
    if not isinstance(document, dict) or "inputs" not in document:
        raise Malformed('the JSON body must be an object with "inputs", as in {"inputs": …}')
    unknown = document.keys() - {"inputs", "outputs", "parameters", "id"}
    if unknown:
        raise Malformed(
            f"the JSON body has the unknown key {quoted(min(unknown))}; "
            'known are "inputs", "outputs", "parameters" and "id"'
        )
    inputs = decoded(document["inputs"], limits.max_json_depth)
    if not isinstance(inputs, dict):
        inputs = {"": inputs}
    return Payload(
        {name: [Part(value, JSON)] for name, value in inputs.items()},
        outputs=names(document.get("outputs")),
        parameters=parameters_of(document.get("parameters")),
        id=identifier(document.get("id", "")),
    )


def names(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise Malformed('"outputs" must be a list of output names')
    return tuple(dict.fromkeys(value))


def parameters_of(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    scalars = (str, int, float, bool)
    if not isinstance(value, dict) or not all(isinstance(item, scalars) for item in value.values()):
        raise Malformed('"parameters" must be an object of texts, numbers and booleans')
    return value


def identifier(value: Any) -> str:
    if not isinstance(value, str):
        raise Malformed('"id" must be a text')
    return value


def decoded(value: Any, depth: int) -> Any:
    """The same value with every `{"b64": …}` turned into bytes, down to `depth` levels."""
    if not isinstance(value, (list, dict)):
        return value
    if depth == 0:
        raise Malformed("the JSON is nested too deeply")
    if isinstance(value, list):
        # Long lists of numbers pass without a Python call per element.
        nested = not {list, dict}.isdisjoint(map(type, value))
        return [decoded(item, depth - 1) for item in value] if nested else value
    if value.keys() == {"b64"} and isinstance(value["b64"], str):
        return from_base64(value["b64"])
    return {key: decoded(item, depth - 1) for key, item in value.items()}


class Form:
    """A multipart body (RFC 7578), fed as it comes; it is held in memory, under the limits."""

    def __init__(self, content_type: str, limits: Limits) -> None:
        boundary = media_type(content_type)[1].get("boundary", "")
        if not boundary:
            raise Malformed("the multipart body's Content-Type names no boundary")
        self._parser = MultipartParser(boundary, limits.max_parts)
        self._parts: list[RawPart] = []

    @property
    def size(self) -> int:
        """The bytes of its parts so far."""
        return sum(len(part.content) for part in self._parts)

    @property
    def json_size(self) -> int:
        """The bytes of its parts so far that are to be read as JSON."""
        return sum(len(part.content) for part in self._parts if is_json(part))

    def feed(self, data: bytes) -> None:
        self._parts += self._parser.feed(data)

    def check_json_memory(self, limits: Limits) -> None:
        """Raises `TooLarge` for a part whose values need more memory than the limit."""
        for part in self._parts:
            if is_json(part):
                check_json_memory(part.content, limits)

    def payload(self) -> Payload:
        """The form, when all of it was fed."""
        if not self._parser.is_complete:
            raise Malformed("the multipart body ends before its last boundary")
        parts: dict[str, list[Part]] = {}
        parameters: dict[str, Any] = {}
        while self._parts:  # each is copied, and then no longer held
            name, part = read_field(self._parts.pop(0))
            if name == "parameters":
                parameters = parameters_of(form_parameters(part.value))
            else:
                parts.setdefault(name, []).append(part)
        return Payload(parts, parameters=parameters)


def is_json(raw: RawPart) -> bool:
    """Whether a part is JSON, or the field `parameters`."""
    is_parameters = "parameters" in raw.headers.get("content-disposition", "")
    return is_parameters or JSON in raw.headers.get("content-type", "").lower()


def read_field(raw: RawPart) -> tuple[str, Part]:
    """Name and value. One without a type is a text; a file without one that we read is bytes."""
    disposition, options = split_parameters(raw.headers.get("content-disposition", ""))
    if disposition != "form-data" or "name" not in options:
        raise Malformed("a part of the multipart body has no name")
    try:
        name = options["name"].encode("latin-1").decode()
    except UnicodeDecodeError:
        raise Malformed("a part of the multipart body has a name that is not UTF-8") from None
    is_file, data = "filename" in options, bytes(raw.content)
    content_type = raw.headers.get("content-type", OCTETS if is_file else "text/plain")
    kind, parameters = media_type(content_type)
    if is_file and (kind not in VALUES or kind == "text/plain"):
        return name, Part(data, kind)
    return name, Part(read_value(data, kind, parameters, content_type), kind)


def form_parameters(value: Any) -> Any:
    """The field `parameters`, which is JSON whatever its type says."""
    if isinstance(value, str):
        value = value.encode()
    return loads(value) if isinstance(value, bytes) else value
