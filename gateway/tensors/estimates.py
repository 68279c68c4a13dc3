"""Estimates of what the conversion of a payload costs. Pure."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any, Final

import numpy as np

from gateway.tensors.image_header import find_header_reader
from gateway.tensors.payload import Payload
from gateway.tensors.signature import Signature

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
    items, size = value, BYTES_PER_LISTED_VALUE * len(value)
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
