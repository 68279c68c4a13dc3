"""The bodies of inference requests: what the user passes as inputs, in the format that fits it."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
# Modes of Pillow that a PNG file can have.
PNG_MODES: Final = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")


@dataclass(frozen=True)
class Body:
    """A request body that is sent as it is, or the bytes of a file with their type."""

    content: bytes
    content_type: str = OCTET_STREAM


@dataclass(frozen=True)
class FormField:
    """A field of a `multipart/form-data` body."""

    name: str
    body: Body


@dataclass(frozen=True)
class Form:
    """A `multipart/form-data` body, which httpx encodes."""

    fields: Sequence[FormField]


@dataclass(frozen=True)
class CallInputs:
    """The inputs of a request: one value for the only required input, or values by input name."""

    value: Any = None
    by_name: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)


def encode_inputs(inputs: CallInputs) -> Body | Form:
    """Return texts, numbers and lists as JSON, one file or array as it is, arrays as `.npz`, else a form.

    Raises `GatewayError` if a file cannot be read, and `TypeError` for a value of another type.
    """
    if inputs.by_name:
        return encode_named_values(inputs.by_name, inputs.parameters)
    value = inputs.value
    if not inputs.parameters:
        if isinstance(value, Body):
            return value
        if is_file(value) or is_array(value):
            return encode_file(value)
        if isinstance(value, str):
            return Body(value.encode(), UTF8_TEXT)
        if is_list_of_arrays(value):
            return encode_arrays_as_batch(value)
    if contains_files(value):
        return encode_form({SINGLE_FIELD: value}, inputs.parameters)
    return encode_document(value, inputs.parameters)


def encode_named_values(values: Mapping[str, Any], parameters: Mapping[str, Any]) -> Body | Form:
    if not any(contains_files(value) or is_array(value) for value in values.values()):
        return encode_document(values, parameters)
    if not parameters and all(is_array(value) for value in values.values()):
        return encode_arrays(values)
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
    if isinstance(value, Body):
        return {"b64": base64.b64encode(value.content).decode()}
    if is_file(value):
        return encode_json_value(encode_file(value))
    if is_array(value):
        return value.tolist()
    raise TypeError(
        f"an input cannot be a {type(value).__name__}; pass a text, numbers, bytes, a path, an image of "
        "Pillow, an array, or lists of them"
    )


def encode_form(values: Mapping[str, Any], parameters: Mapping[str, Any]) -> Form:
    """Return a form with a field for each value; for a list of files, with a field for each file."""
    fields = []
    for name, value in values.items():
        is_batch = isinstance(value, (list, tuple)) and contains_files(value)
        items = value if is_batch else [value]
        fields += [FormField(name, encode_form_value(item)) for item in items]
    if parameters:
        fields.append(FormField(PARAMETERS_FIELD, encode_json(dict(parameters))))
    return Form(fields)


def encode_form_value(value: Any) -> Body:
    if isinstance(value, Body):
        return value
    if is_file(value) or is_array(value):
        return encode_file(value)
    return encode_json(value)


def is_image(value: Any) -> bool:
    return hasattr(value, "save") and hasattr(value, "getbands")


def is_array(value: Any) -> bool:
    """Return whether a value is an array of NumPy, or of a library that converts to it."""
    return hasattr(value, "__array__") and not is_image(value)


def is_file(value: Any) -> bool:
    return isinstance(value, (bytes, bytearray, memoryview, os.PathLike)) or is_image(value)


def contains_files(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(contains_files(item) for item in value)
    return isinstance(value, Body) or is_file(value)


def is_list_of_arrays(value: Any) -> bool:
    is_list = isinstance(value, (list, tuple)) and bool(value)
    return is_list and all(is_array(item) and item.ndim for item in value)


def encode_file(value: Any) -> Body:
    if isinstance(value, os.PathLike):
        return read_file(value)
    if is_image(value):
        file = io.BytesIO()
        image = value if value.mode in PNG_MODES else value.convert("RGB")
        image.save(file, "PNG")
        return Body(file.getvalue(), "image/png")
    if is_array(value):
        return encode_array(value)
    content = bytes(value)
    return Body(content, detect_media_type(content))


def encode_array(array: Any) -> Body:
    from gateway.client.arrays import encode_npy

    return Body(encode_npy(array), NPY)


def encode_arrays(arrays: Mapping[str, Any]) -> Body:
    from gateway.client.arrays import encode_npz

    return Body(encode_npz(arrays), NPZ)


def encode_arrays_as_batch(arrays: Sequence[Any]) -> Body:
    from gateway.client.arrays import stack_arrays

    return encode_array(stack_arrays(arrays))


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
