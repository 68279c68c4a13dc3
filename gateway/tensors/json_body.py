"""The JSON body of an inference request, and the base64 in it. Pure."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar
from urllib.parse import unquote_to_bytes

import orjson

from gateway.errors import InputMismatch, MalformedRequest, TooLarge
from gateway.media_types import JSON, NPY
from gateway.messages import quote_text
from gateway.tensors.payload import (
    Part,
    Payload,
    PayloadLimits,
    PayloadOptions,
    check_parameter_limits,
)

T = TypeVar("T")
# Python's json.dumps writes these, and many parsers do not read them.
UNQUOTED_NUMBER: Final = re.compile("-?(NaN|Infinity)")
UNQUOTED_NUMBER_HINT: Final = '; write "NaN", "Infinity" and "-Infinity" in quotes'
NOT_UTF8: Final = (
    "the JSON is not valid UTF-8; name its charset in Content-Type, as in "
    "application/json; charset=iso-8859-1"
)
V2_KEYS: Final = frozenset(("shape", "datatype", "data"))
MAX_JSON_DEPTH = 64
MAX_OUTPUT_NAMES = 1000
# The average memory of a Python list or dict, and of a number with its entries in two lists and an array.
CONTAINER_BYTES = 160
VALUE_BYTES = 40


def parse_json_body(body: bytes) -> Any:
    """Parse strict JSON (RFC 8259). Raises `MalformedRequest`; orjson limits the recursion."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        if str(exc).startswith("Not enough memory"):
            raise MemoryError from None
        if "UTF-8" in str(exc):
            raise MalformedRequest(NOT_UTF8) from None
        hint = UNQUOTED_NUMBER_HINT if UNQUOTED_NUMBER.match(exc.doc, exc.pos) else ""
        raise MalformedRequest(f"the body is not valid JSON: {exc}{hint}") from None


def check_json_memory(body: bytes | bytearray, limits: PayloadLimits) -> None:
    """Estimate the memory that the JSON values need. Raises `TooLarge` if it exceeds the limit."""
    containers = body.count(b"[") + body.count(b"{")
    needed_bytes = len(body) + CONTAINER_BYTES * containers + VALUE_BYTES * body.count(b",")
    if needed_bytes > limits.max_json_memory_bytes:
        raise TooLarge(
            f"the values of the JSON need about {needed_bytes >> 20} MiB of memory; the limit is "
            f"{limits.max_json_memory_bytes >> 20} MiB; send numbers as {NPY}, or fewer values per request"
        )


def parse_large_json(parse: Callable[[bytes], T], data: bytes, limits: PayloadLimits) -> T:
    """Run `parse` in a process, which imports this module and not the application."""
    check_json_memory(data, limits)
    return parse(data)


def read_json_payload(body: bytes, limits: PayloadLimits) -> Payload:
    """Decode `{"inputs": value or {name: value}, "outputs": [name]?, "parameters": {}?, "id": ""?}`."""
    check_json_memory(body, limits)
    document = parse_json_body(body)
    if not isinstance(document, dict) or "inputs" not in document:
        raise MalformedRequest('the JSON body must be an object with "inputs", e.g. {"inputs": …}')
    unknown = document.keys() - {"inputs", "outputs", "parameters", "id"}
    if unknown:
        raise MalformedRequest(
            f"unknown key {quote_text(min(unknown))} in the JSON body; "
            'valid keys are "inputs", "outputs", "parameters" and "id"'
        )
    values = decode_b64_objects(document["inputs"])
    if isinstance(values, list):
        check_for_records(values)
    parts = list_json_parts(values)
    options = PayloadOptions(
        outputs=validate_output_names(document.get("outputs")),
        parameters=validate_parameters(document.get("parameters")),
        id=validate_request_id(document.get("id")),
    )
    return Payload(parts, options)


def list_json_parts(value: Any) -> dict[str, list[Part]]:
    """Return the parts of `{name: value, …}`, or of a value for the only input."""
    values = value if isinstance(value, dict) else {"": value}
    return {name: [Part(each, JSON)] for name, each in values.items()}


def validate_output_names(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise MalformedRequest('"outputs" must be a list of output names')
    if len(value) > MAX_OUTPUT_NAMES:
        raise MalformedRequest(f'"outputs" can have at most {MAX_OUTPUT_NAMES} names')
    return tuple(dict.fromkeys(value))


def check_for_records(values: list[Any]) -> None:
    """Check that a list has no objects, as the bodies of other APIs have. Raises `InputMismatch`."""
    record = next((value for value in values if isinstance(value, dict)), None)
    if record is None:
        return
    if "name" in record and not V2_KEYS.isdisjoint(record):
        raise InputMismatch(
            "the body is in the format of the V2 API: send it to /v2/models/MODEL/infer, or send the value "
            'of each input by its name, as in {"inputs": {"X": [1, 2]}}'
        )
    raise InputMismatch(
        "the inputs are a list of objects; send the values of all items by the name of the input, as in "
        '{"inputs": {"X": [1, 2], "Y": [3, 4]}}'
    )


def validate_parameters(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    scalars = (str, int, float, bool, type(None))
    if not isinstance(value, dict) or not all(isinstance(item, scalars) for item in value.values()):
        raise MalformedRequest('"parameters" must be an object of strings, numbers and booleans')
    # Here, because a process that decodes a large body must not return what the event loop would hold.
    check_parameter_limits(value)
    return {name: item for name, item in value.items() if item is not None}


def validate_request_id(value: Any) -> str:
    if not isinstance(value, str | None):
        raise MalformedRequest('"id" must be a string')
    return value or ""


def decode_b64_objects(value: Any, max_depth: int = MAX_JSON_DEPTH) -> Any:
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


# Base64 (RFC 4648, section 4, and the URL-safe alphabet) and `data:` URIs (RFC 2397).

# The media type before the comma of a data: URI is much shorter than this.
MAX_DATA_URI_PREFIX_CHARS: Final = 1024
# Files are sent as base64. Each escape costs as much as a hundred characters of it.
MAX_ESCAPED_CHARS: Final = 1 << 20
STANDARD_ALPHABET: Final = bytes.maketrans(b"-_", b"+/")
BASE64_WHITESPACE: Final = b" \t\n\r\x0b\x0c"


def is_data_uri(text: str) -> bool:
    return text[:5].lower() == "data:"


def decode_base64_text(text: str) -> bytes:
    """Return the decoded bytes of base64 or of a `data:` URI. Raises `MalformedRequest`."""
    if not is_data_uri(text):
        return decode_base64(text)
    comma = text.find(",", 0, MAX_DATA_URI_PREFIX_CHARS)
    if comma < 0:
        raise MalformedRequest(
            f"the data: URI has no comma in its first {MAX_DATA_URI_PREFIX_CHARS} characters"
        )
    if text[:comma].lower().endswith(";base64"):
        return decode_base64(text[comma + 1 :])
    if len(text) > MAX_ESCAPED_CHARS:
        raise MalformedRequest("the data: URI is too long without base64; send data:…;base64,…")
    return unquote_to_bytes(text[comma + 1 :])


def decode_base64(text: str) -> bytes:
    # Whitespace is skipped, and padding may be missing.
    try:
        encoded = text.encode("ascii").translate(STANDARD_ALPHABET, BASE64_WHITESPACE)
        digits = encoded.rstrip(b"=")
        missing = -len(digits) % 4
        if len(encoded) - len(digits) > missing:
            raise ValueError("too much padding")
        return base64.b64decode(digits + b"=" * missing, validate=True)
    except (binascii.Error, ValueError):
        raise MalformedRequest('the value of "b64" is not valid base64') from None
