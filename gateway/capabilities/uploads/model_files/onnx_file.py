"""The outer structure of ONNX files, which have no signature: a protobuf message `ModelProto`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

MAX_TOP_LEVEL_FIELDS: Final = 5_000
MAX_FIELD_HEADER_BYTES: Final = 20  # two varints
# Wire types.
VARINT = 0
LENGTH_DELIMITED = 2
FIXED_BYTES: Final = {1: 8, 5: 4}  # wire type → size of the value
# The fields of ModelProto (onnx.proto) by number, with their wire types.
MODEL_FIELDS: Final = {
    1: VARINT,  # ir_version
    2: LENGTH_DELIMITED,  # producer_name
    3: LENGTH_DELIMITED,  # producer_version
    4: LENGTH_DELIMITED,  # domain
    5: VARINT,  # model_version
    6: LENGTH_DELIMITED,  # doc_string
    7: LENGTH_DELIMITED,  # graph
    8: LENGTH_DELIMITED,  # opset_import
    14: LENGTH_DELIMITED,  # metadata_props
    20: LENGTH_DELIMITED,  # training_info
    25: LENGTH_DELIMITED,  # functions
    26: LENGTH_DELIMITED,  # configuration
}
REQUIRED_FIELDS: Final = frozenset((1, 7, 8))


@dataclass(frozen=True)
class WireField:
    """A field of a message: its number and type, and its value or the place of its content."""

    number: int
    wire_type: int
    value: int
    start: int
    end: int


def is_onnx_file(file: BinaryIO, size: int) -> bool:
    """Return whether the file is a complete `ModelProto` with a graph; its fields are not read."""
    found = set()
    try:
        for count, field in enumerate(walk_message(file, 0, size)):
            if count == MAX_TOP_LEVEL_FIELDS or MODEL_FIELDS.get(field.number) != field.wire_type:
                return False
            found.add(field.number)
    except ValueError:
        return False
    return found >= REQUIRED_FIELDS


def walk_message(file: BinaryIO, start: int, end: int) -> Iterator[WireField]:
    """Yield the fields of the message at this place of a file. Raises `ValueError` if it is malformed."""
    while start < end:
        file.seek(start)
        header = file.read(MAX_FIELD_HEADER_BYTES)
        tag, length = parse_varint(header, 0)
        number = tag >> 3
        wire_type = tag & 7
        value = 0
        if wire_type not in FIXED_BYTES:
            value, length = parse_varint(header, length)
        sizes = {VARINT: 0, LENGTH_DELIMITED: value, **FIXED_BYTES}
        content = start + length
        if wire_type not in sizes or content + sizes[wire_type] > end:
            raise ValueError
        start = content + sizes[wire_type]
        yield WireField(number, wire_type, value, start=content, end=start)


def parse_varint(data: bytes, start: int) -> tuple[int, int]:
    """Return the value and the position after it. Raises `ValueError` if it is incomplete."""
    value = 0
    for position in range(start, min(len(data), start + 10)):
        value |= (data[position] & 0x7F) << 7 * (position - start)
        if data[position] < 0x80:
            return value, position + 1
    raise ValueError
