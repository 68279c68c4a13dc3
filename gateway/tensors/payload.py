"""A body becomes named parts: bytes, texts and arrays, whatever dress they came in. Pure.

The readers are a table by content type. A part's value is `bytes`, `str`, a NumPy array, or what JSON
holds (a number, a boolean, nested lists of these, of texts and of bytes).
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from encodings import normalize_encoding
from encodings.aliases import aliases
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
import orjson
from python_multipart.exceptions import FormParserError, MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.errors import Malformed, TooLarge, UnsupportedBody
from gateway.words import quoted

JSON = "application/json"
NPY = "application/x-npy"
NPY_MAGIC = b"\x93NUMPY"
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
DATA_URI = re.compile(r"data:(?P<type>[^,;]*)(?P<parameters>(?:;[^,;]*)*),", re.I)


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


def media_type(content_type: str) -> tuple[str, dict[str, str]]:
    """`text/plain; charset=utf-8` → ("text/plain", {"charset": "utf-8"})."""
    name, _, _ = content_type.partition(";")
    message = Message()
    message["content-type"] = content_type
    parameters = {key.lower(): str(value) for key, value in message.get_params(failobj=[])[1:]}
    return name.strip().lower(), parameters


def read_payload(body: bytes, content_type: str, limits: Limits) -> Payload:
    """Read a whole body. Raises `Malformed`, `UnsupportedBody` or `TooLarge`."""
    name, parameters = media_type(content_type)
    if name == MULTIPART:
        form = Form(content_type, limits)
        form.feed(body)
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
    try:
        return body.decode(codec)
    except UnicodeDecodeError as exc:
        raise Malformed(f"the text is not valid {charset}: byte {exc.start} does not fit") from None


def npy(body: bytes, parameters: Mapping[str, str]) -> np.ndarray:
    """NumPy's own file of one array, looked at before anything is allocated for it (NEP 1)."""
    file = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        shape, fortran, dtype = read[version](file)
    except (ValueError, KeyError, EOFError, SyntaxError, TypeError, RecursionError):
        raise Malformed("the body is not a .npy file of version 1 or 2") from None
    if dtype.hasobject:
        raise Malformed("the .npy file holds pickled objects, which are not taken")
    count = 1
    for size in shape:
        count *= size
    have = len(body) - file.tell()
    if min(shape, default=0) < 0 or count * dtype.itemsize != have:
        raise Malformed(
            f"the .npy file's header claims {count} × {dtype.itemsize} bytes, and {have} came"
        )
    if count == 0 or dtype.itemsize == 0:
        return np.zeros(shape, dtype)
    array = np.frombuffer(body, dtype, count, file.tell())
    return array.reshape(shape, order="F" if fortran else "C")


def json_value(body: bytes, parameters: Mapping[str, str]) -> Any:
    return decoded(loads(body), Limits().max_json_depth)


VALUES: Mapping[str, Callable[[bytes, Mapping[str, str]], Any]] = {
    "text/plain": text,
    NPY: npy,
    JSON: json_value,
}


def from_npz(body: bytes, limits: Limits) -> dict[str, list[Part]]:
    """NumPy's own archive: arrays by name. What it inflates to is bounded like a body."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(body))
        entries = archive.infolist()
        if len(entries) > limits.max_parts:
            raise TooLarge(f"the .npz file holds more than {limits.max_parts} arrays")
        if sum(entry.file_size for entry in entries) > limits.max_bytes:
            raise TooLarge(f"the .npz file inflates to more than {limits.max_bytes} bytes")
        return {
            entry.filename.removesuffix(".npy"): [Part(npy(archive.read(entry), {}), NPY)]
            for entry in entries
        }
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, OSError):
        raise Malformed("the body is not a whole .npz file") from None


def loads(body: bytes) -> Any:
    """JSON, as strict as RFC 8259; orjson itself bounds the recursion."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        if str(exc).startswith("Not enough memory"):
            raise MemoryError from None
        raise Malformed(f"the body is not JSON: {exc}") from None


def check_json_memory(body: bytes, limits: Limits) -> None:
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


def from_base64(text: str) -> bytes:
    """Strict base64 (RFC 4648, section 4; the URL-safe alphabet too), or a `data:` URI (RFC 2397)."""
    uri = DATA_URI.match(text)
    if uri is None and text[:5].lower() == "data:":
        raise Malformed("the data: URI has no comma, and so no data")
    data = text[uri.end() :] if uri else text
    if uri and not uri["parameters"].lower().endswith(";base64"):
        return unquote_to_bytes(data)
    try:
        encoded = "".join(data.split()).replace("-", "+").replace("_", "/")
        return base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise Malformed('the value of "b64" is not base64') from None


class Form:
    """A multipart body (RFC 7578), fed as it comes; it is held in memory, under the limits."""

    def __init__(self, content_type: str, limits: Limits) -> None:
        boundary = parse_options_header(content_type)[1].get(b"boundary")
        if not boundary:
            raise Malformed("the multipart body's Content-Type names no boundary")
        self._limits = limits
        self._fields: list[tuple[str, Part]] = []
        self._headers: dict[str, str] = {}
        self._data = bytearray()
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_part_data": lambda data, start, end: self._data.extend(data[start:end]),
                    "on_part_end": self._end_part,
                    "on_header_field": lambda data, start, end: self._header[0].extend(
                        data[start:end]
                    ),
                    "on_header_value": lambda data, start, end: self._header[1].extend(
                        data[start:end]
                    ),
                    "on_header_end": self._end_header,
                    "on_end": self._end,
                },
            )
        except FormParserError:
            raise Malformed("the multipart body's boundary is too long") from None

    def feed(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except MultipartParseError:
            raise Malformed("the multipart body is malformed") from None

    def payload(self) -> Payload:
        """The form, when all of it was fed."""
        if not self._ended:
            raise Malformed("the multipart body ends before its last boundary")
        parts: dict[str, list[Part]] = {}
        parameters: dict[str, Any] = {}
        for name, part in self._fields:
            if name == "parameters":
                parameters = parameters_of(self._json(part))
            else:
                parts.setdefault(name, []).append(part)
        return Payload(parts, parameters=parameters)

    def _json(self, part: Part) -> Any:
        if isinstance(part.value, (str, bytes)):
            return loads(part.value.encode() if isinstance(part.value, str) else part.value)
        return part.value

    def _begin(self) -> None:
        if len(self._fields) >= self._limits.max_parts:
            raise TooLarge(f"the multipart body has more than {self._limits.max_parts} parts")
        self._headers = {}
        self._data = bytearray()

    def _end_header(self) -> None:
        name, value = (bytes(part).decode("latin-1") for part in self._header)
        self._headers[name.lower()] = value
        self._header = (bytearray(), bytearray())

    def _end_part(self) -> None:
        disposition, options = parse_options_header(self._headers.get("content-disposition", ""))
        if disposition != b"form-data" or b"name" not in options:
            raise Malformed("a part of the multipart body has no name")
        try:
            name = options[b"name"].decode()
        except UnicodeDecodeError:
            raise Malformed("a part of the multipart body has a name that is not UTF-8") from None
        self._fields.append((name, self._part(bytes(self._data), b"filename" in options)))

    def _part(self, data: bytes, is_file: bool) -> Part:
        """A field without a type is a text; a file without one that we read is bytes."""
        content_type = self._headers.get("content-type", OCTETS if is_file else "text/plain")
        name, parameters = media_type(content_type)
        if is_file and name not in VALUES:
            return Part(data, name)
        if is_file and name == "text/plain":
            return Part(data, name)
        return Part(read_value(data, name, parameters, content_type), name)

    def _end(self) -> None:
        self._ended = True
