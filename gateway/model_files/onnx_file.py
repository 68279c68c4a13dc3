"""The outer structure of ONNX files, which have no signature: a protobuf message `ModelProto`."""

from __future__ import annotations

from typing import BinaryIO, Final

MAX_TOP_LEVEL_FIELDS: Final = 5_000
MAX_FIELD_HEADER_BYTES: Final = 20  # two varints
VARINT, LENGTH_DELIMITED = 0, 2  # wire types
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


def is_onnx_file(file: BinaryIO, size: int) -> bool:
    """Return whether the file is a complete `ModelProto` with a graph; its fields are not read."""
    found = set()
    position = 0
    for _ in range(MAX_TOP_LEVEL_FIELDS):
        if position >= size:
            break
        file.seek(position)
        header = file.read(MAX_FIELD_HEADER_BYTES)
        try:
            tag, tag_bytes = read_varint(header, 0)
            value, header_bytes = read_varint(header, tag_bytes)
        except ValueError:
            return False
        number, wire_type = tag >> 3, tag & 7
        if MODEL_FIELDS.get(number) != wire_type:
            return False
        found.add(number)
        position += header_bytes + (value if wire_type == LENGTH_DELIMITED else 0)
    return position == size and found >= REQUIRED_FIELDS


def read_varint(data: bytes, start: int) -> tuple[int, int]:
    """Return the value and the position after it. Raises `ValueError` if it is incomplete."""
    value = 0
    for position in range(start, min(len(data), start + 10)):
        value |= (data[position] & 0x7F) << 7 * (position - start)
        if data[position] < 0x80:
            return value, position + 1
    raise ValueError
