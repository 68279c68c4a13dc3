"""JSON documents of the state, which others can have written: unreadable ones cost only their own reading."""

from __future__ import annotations

from typing import Any, Final

import orjson

from gateway.errors import MalformedRequest, TooLarge

MAX_VALUES: Final = (
    100_000  # values of one document: small ones take many times their bytes in memory
)
MAX_LEVELS: Final = 100
# What precedes the values of arrays and objects. Texts can contain these too, but not files in base64.
DELIMITERS: Final = (b",", b"[", b"{")


class UnreadableState(ValueError):
    """Stored data that no gateway of this version has written."""


def decode_document(raw: object, max_bytes: int) -> Any:
    """Return the value of a stored document. Raises `UnreadableState`."""
    if not isinstance(raw, bytes) or len(raw) > max_bytes:
        raise UnreadableState(f"it is not a text of at most {max_bytes} bytes")
    if sum(map(raw.count, DELIMITERS)) > MAX_VALUES:
        raise UnreadableState(f"it has more than {MAX_VALUES} values")
    document = parse_json(raw)
    check_levels(document, MAX_LEVELS)
    return document


def parse_json(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise UnreadableState("invalid JSON") from None


def check_levels(value: Any, levels: int) -> None:
    """Check that a value can be written as JSON again. Raises `UnreadableState`."""
    if isinstance(value, dict | list):
        if not levels:
            raise UnreadableState(f"it has more than {MAX_LEVELS} levels")
        for each in value.values() if isinstance(value, dict) else value:
            check_levels(each, levels - 1)


def check_form(value: Any, form: Any) -> None:
    """Check that a value has a form. Raises `UnreadableState`.

    A form is the type of a value; [form] is a list of those, {str: form} an object of those, and {name: form}
    an object whose values of these names have these forms, if there are any.
    """
    expected: type[Any] = form if isinstance(form, type) else type(form)
    if not isinstance(value, expected):
        raise UnreadableState(f"a {expected.__name__} is expected, not a {type(value).__name__}")
    if isinstance(form, list):
        for each in value:
            check_form(each, form[0])
    elif isinstance(form, dict):
        for name, each in value.items():
            if (inner := form.get(name, form.get(str))) is not None:
                check_form(each, inner)


def encode_stored_document(document: Any, max_bytes: int) -> bytes:
    """Return a document to store, which every gateway can read. Raises `TooLarge` or `MalformedRequest`."""
    try:
        raw = orjson.dumps(document)
        if len(raw) > max_bytes:
            raise TooLarge(f"what is to be stored exceeds the limit of {max_bytes} bytes")
        decode_document(raw, max_bytes)
    except (TypeError, UnreadableState) as exc:  # such as more levels than orjson writes
        raise MalformedRequest(f"the state cannot store it: {exc}") from None
    return raw
