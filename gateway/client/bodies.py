"""The bodies of inference requests: what the user passes as inputs, in the format that fits it."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Final

from gateway.client.errors import UNREADABLE, GatewayError
from gateway.media_types import (
    JSON,
    NPY,
    NPZ,
    OCTET_STREAM,
    TYPES_BY_SUFFIX,
    UTF8_TEXT,
    detect_media_type,
)

PARAMETERS_FIELD: Final = "parameters"
# The gateway gives the only required input of a model the only field of a form, whatever its name.
SINGLE_FIELD: Final = "input"
FILE_NAME: Final = "file"
# Modes of Pillow that a PNG file can have.
PNG_MODES: Final = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")


@dataclass(frozen=True)
class Body:
    """A request body that is sent as it is, or the bytes of a file with their type."""

    content: bytes
    content_type: str = OCTET_STREAM


@dataclass(frozen=True)
class Form:
    """A `multipart/form-data` body: the names of its parts, with the parts as httpx encodes them."""

    parts: Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class StreamedBody:
    """A body that is read while it is sent."""

    pieces: Iterable[bytes] | AsyncIterable[bytes]
    headers: Mapping[str, str]


def encode_inputs(
    value: Any,
    by_name: Mapping[str, Any] | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> Body | Form:
    """Return texts, numbers and lists as JSON, one file or array as it is, arrays as `.npz`, else a form.

    The inputs are values by name, or one value for the only required input. Raises `GatewayError` if a file
    cannot be read, and `TypeError` for a value of another type.
    """
    parameters = parameters or {}
    if by_name:
        return encode_named_values(by_name, parameters)
    if not parameters:
        if is_file(value) or is_array(value):
            return encode_file(value)
        if isinstance(value, str):
            return Body(value.encode(), UTF8_TEXT)
        if is_list_of_arrays(value):
            from gateway.client.arrays import stack_arrays

            return encode_file(stack_arrays(value))
    if contains_files(value):
        return encode_form({SINGLE_FIELD: value}, parameters)
    return encode_document(value, parameters)


def encode_named_values(values: Mapping[str, Any], parameters: Mapping[str, Any]) -> Body | Form:
    if not any(contains_files(value) or is_array(value) for value in values.values()):
        return encode_document(values, parameters)
    if not parameters and all(is_array(value) for value in values.values()):
        from gateway.client.arrays import encode_npz

        return Body(encode_npz(values), NPZ)
    return encode_form(values, parameters)


def encode_document(inputs: Any, parameters: Mapping[str, Any]) -> Body:
    document = {"inputs": dict(inputs) if isinstance(inputs, Mapping) else inputs}
    if parameters:
        document[PARAMETERS_FIELD] = dict(parameters)
    return encode_json(document)


def encode_json(document: Any) -> Body:
    text = json.dumps(document, default=encode_json_value, separators=(",", ":"))
    return Body(text.encode(), JSON)


def encode_json_value(value: Any) -> Any:
    """Return what `json` cannot encode itself. Raises `TypeError` for a value that no input takes."""
    if is_file(value):
        return {"b64": base64.b64encode(encode_file(value).content).decode()}
    if is_array(value):
        return value.tolist()
    raise TypeError(
        f"an input cannot be a {type(value).__name__}; pass a text, numbers, bytes, a path, an image of "
        "Pillow, an array, or lists of them"
    )


def encode_form(values: Mapping[str, Any], parameters: Mapping[str, Any]) -> Form:
    """Return a form with a part for each value; for a list of files, with a part for each file."""
    parts = []
    for name, value in values.items():
        is_batch = isinstance(value, (list, tuple)) and contains_files(value)
        items = value if is_batch else [value]
        parts += [(name, encode_part(item)) for item in items]
    if parameters:
        parts.append((PARAMETERS_FIELD, encode_part(dict(parameters))))
    return Form(parts)


def encode_part(value: Any) -> tuple[str | None, bytes, str]:
    """Return a part for httpx. A file has a name, so that the gateway accepts any type of it."""
    body = encode_file(value) if is_file(value) or is_array(value) else encode_json(value)
    file_name = None if body.content_type == JSON else FILE_NAME
    return file_name, body.content, body.content_type


def is_image(value: Any) -> bool:
    return hasattr(value, "save") and hasattr(value, "getbands")


def is_array(value: Any) -> bool:
    """Return whether a value is an array of NumPy, or of a library that converts to it."""
    return hasattr(value, "__array__") and not is_image(value)


def is_file(value: Any) -> bool:
    types = (Body, bytes, bytearray, memoryview, os.PathLike)
    return isinstance(value, types) or is_image(value)


def contains_files(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(contains_files(item) for item in value)
    return is_file(value)


def is_list_of_arrays(value: Any) -> bool:
    is_list = isinstance(value, (list, tuple)) and bool(value)
    return is_list and all(is_array(item) and item.ndim for item in value)


def encode_file(value: Any) -> Body:
    if isinstance(value, Body):
        return value
    if isinstance(value, os.PathLike):
        return read_file(value)
    if is_image(value):
        file = io.BytesIO()
        image = value if value.mode in PNG_MODES else value.convert("RGB")
        image.save(file, "PNG")
        return Body(file.getvalue(), "image/png")
    if is_array(value):
        from gateway.client.arrays import encode_npy

        return Body(encode_npy(value), NPY)
    content = bytes(value)
    return Body(content, detect_media_type(content))


def read_file(path: os.PathLike[Any]) -> Body:
    """Return a file with the type of its suffix, or of its first bytes. Raises `GatewayError`."""
    try:
        content = Path(path).read_bytes()
    except OSError as exc:
        raise GatewayError(f"{os.fspath(path)} cannot be read: {exc.strerror}", UNREADABLE) from exc
    return Body(content, guess_content_type(os.fspath(path), content))


def guess_content_type(path: str, content: bytes) -> str:
    by_suffix = TYPES_BY_SUFFIX.get(PurePath(path).suffix.lower())
    return by_suffix or detect_media_type(content)
