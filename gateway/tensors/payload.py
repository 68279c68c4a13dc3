"""The content of a request: named parts. Pure.

The value of a part is `bytes`, `str`, a NumPy array or a JSON value (a number, a boolean, or nested lists of
these, of strings and of bytes).
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final, NamedTuple

import numpy as np

from gateway.errors import MalformedRequest
from gateway.tensors.images.header import find_header_reader
from gateway.tensors.signature import Signature

# tritonserver searches names one after the other, and takes minutes for many or long ones.
MAX_PARAMETERS: Final = 1000
MAX_PARAMETER_NAME_CHARS: Final = 256


@dataclass(frozen=True)
class PayloadLimits:
    """The limits of a request body, and of the images in it."""

    max_bytes: int = 64 << 20
    max_parts: int = 128
    max_json_memory_bytes: int = 1 << 30
    # The limit applies to one image, and to all decoded ones together.
    max_image_pixels: int = 25_000_000
    max_image_side: int = 16_384
    max_inferences: int = 2048


NO_PARAMETERS: Final[Mapping[str, Any]] = {}


class TooManyParameters(MalformedRequest):
    message = f"a request can have at most {MAX_PARAMETERS} parameters"


def check_parameter_limits(parameters: Mapping[str, Any]) -> None:
    """Check the number of parameters and the length of their names. Raises `MalformedRequest`."""
    if len(parameters) > MAX_PARAMETERS:
        raise TooManyParameters
    if parameters and max(map(len, parameters)) > MAX_PARAMETER_NAME_CHARS:
        raise MalformedRequest(
            f"a parameter name can have at most {MAX_PARAMETER_NAME_CHARS} characters"
        )


class Part(NamedTuple):
    """One value with its metadata."""

    value: Any
    content_type: str = ""


class PayloadOptions(NamedTuple):
    """The outputs, parameters and id that a body asks for."""

    outputs: tuple[str, ...] = ()  # empty means all
    parameters: Mapping[str, Any] = NO_PARAMETERS
    id: str = ""


class Payload(NamedTuple):
    """The content of a request: lists of parts by name, several if a form field is repeated.

    The name is "" for a value without a name, which is valid if the model has one required input.
    """

    parts: Mapping[str, list[Part]]
    options: PayloadOptions = PayloadOptions()
    # More than 0 if each part is one item of a batch, even if there is only one.
    instance_count: int = 0


# Larger values are converted in a thread, because they would block the event loop.
LARGE_ARRAY_BYTES: Final = 1 << 20
# Costs of a list's value and of a character, as the bytes of an array that take as long to convert.
BYTES_PER_LISTED_VALUE: Final = 32
BYTES_PER_CHARACTER: Final = 4
# Reading an image's header takes as long as converting an array of this size.
IMAGE_HEADER_COST_BYTES: Final = LARGE_ARRAY_BYTES // 4


def estimate_payload_bytes(payload: Payload, signature: Signature) -> int:
    """Return the approximate size, or any number above `LARGE_ARRAY_BYTES` for a large payload."""
    size = 0
    for parts in payload.parts.values():
        for part in parts:
            # A file is an element of BYTES as it is.
            if not (signature.accepts_only_bytes and isinstance(part.value, bytes)):
                size += estimate_value_bytes(part.value)
    return size


def estimate_value_bytes(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, bytes) and find_header_reader(value) is not None:
        return IMAGE_HEADER_COST_BYTES
    if not isinstance(value, list):
        return BYTES_PER_CHARACTER * len(value) if isinstance(value, (str, bytes)) else 0
    items = value
    size = BYTES_PER_LISTED_VALUE * len(value)
    while items and size <= LARGE_ARRAY_BYTES:
        types = set(map(type, items))
        if not types.isdisjoint((str, bytes)):
            size += sum(
                map(estimate_value_bytes, (item for item in items if not isinstance(item, list)))
            )
        if list not in types:
            break
        nested = chain.from_iterable(item for item in items if isinstance(item, list))
        items = list(islice(nested, LARGE_ARRAY_BYTES // BYTES_PER_LISTED_VALUE + 1))
        size += BYTES_PER_LISTED_VALUE * len(items)
    return size


# Copying this takes a millisecond or less, so that no copy holds the GIL, or the event loop, for long.
MAX_PIECE_BYTES: Final = 1 << 20


def copy_bytes(data: bytes | bytearray | memoryview) -> bytes:
    """Return the data as bytes. Other threads can run between its pieces."""
    if isinstance(data, bytes):
        return data
    if len(data) <= MAX_PIECE_BYTES:
        return bytes(data)
    file = io.BytesIO()
    view = memoryview(data)
    for start in range(0, len(data), MAX_PIECE_BYTES):
        file.write(view[start : start + MAX_PIECE_BYTES])
    return file.getvalue()  # this makes no copy
