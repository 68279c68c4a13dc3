"""Fields of protobuf messages, found without decoding the rest. No I/O.

The bytes of tensors make up nearly all of a large request, and Triton reads them from the same message. The
fields that the gateway needs are decoded by protobuf itself, so that it and Triton read the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from gateway.errors import MalformedRequest

VARINT = 0
FIXED64 = 1
LENGTH_DELIMITED = 2
FIXED32 = 5
FIXED_SIZES: Final = {FIXED64: 8, FIXED32: 4}
MAX_VARINT_BYTES: Final = 10
# The fields of a message that is not decoded completely.
MAX_FIELDS: Final = 4096
MAX_FIELD_NUMBER: Final = (1 << 29) - 1


class FieldSpan(NamedTuple):
    """A field of a message: its number and type, and where it and its value begin and end."""

    number: int
    wire_type: int
    start: int
    value_start: int
    end: int


def decode_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the number and the position after it. Raises `MalformedRequest`."""
    value = shift = 0
    for offset in range(MAX_VARINT_BYTES):
        if position + offset >= len(data):
            break
        byte = data[position + offset]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + offset + 1
        shift += 7
    raise invalid_message()


def encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encode_field(number: int, value: bytes) -> bytes:
    """Return a length-delimited field: a string, bytes or a message."""
    return b"%b%b%b" % (
        encode_varint(number << 3 | LENGTH_DELIMITED),
        encode_varint(len(value)),
        value,
    )


def iterate_fields(data: bytes, start: int, end: int) -> Iterator[FieldSpan]:
    """Yield the fields of the message between two positions. Raises `MalformedRequest`."""
    position = start
    while position < end:
        tag, value_start = decode_varint(data, position)
        number = tag >> 3
        wire_type = tag & 7
        if wire_type == LENGTH_DELIMITED:
            length, value_start = decode_varint(data, value_start)
            next_position = value_start + length
        elif wire_type == VARINT:
            _, next_position = decode_varint(data, value_start)
        elif wire_type in FIXED_SIZES:
            next_position = value_start + FIXED_SIZES[wire_type]
        else:  # groups, which no message of Triton has
            raise invalid_message()
        if not 0 < number <= MAX_FIELD_NUMBER or next_position > end:
            raise invalid_message()
        yield FieldSpan(number, wire_type, position, value_start, next_position)
        position = next_position


def remove_fields(
    data: bytes, removed: frozenset[int], nested: Mapping[int, frozenset[int]], max_bytes: int
) -> bytes:
    """Return the message without its fields `removed`, and its messages without those of `nested`.

    Raises `MalformedRequest` for an invalid message, one with more than `MAX_FIELDS` fields, or one of which
    more than `max_bytes` would remain.
    """
    kept: list[bytes] = []
    budget = FieldBudget(max_bytes)
    for field in budget.limit(iterate_fields(data, 0, len(data))):
        if field.number in removed:
            continue
        inner = nested.get(field.number)
        if inner is None or field.wire_type != LENGTH_DELIMITED:
            kept.append(budget.copy(data, field))
            continue
        spans = budget.limit(iterate_fields(data, field.value_start, field.end))
        parts = [budget.copy(data, span) for span in spans if span.number not in inner]
        kept.append(encode_field(field.number, b"".join(parts)))
    return b"".join(kept)


class FieldBudget:
    """Counts the fields of a message and of the messages in it, and the bytes that are copied of them."""

    def __init__(self, max_bytes: int) -> None:
        self._remaining = MAX_FIELDS
        self._max_bytes = self._remaining_bytes = max_bytes

    def limit(self, fields: Iterable[FieldSpan]) -> Iterator[FieldSpan]:
        """Yield the fields. Raises `MalformedRequest` for too many."""
        for field in fields:
            self._remaining -= 1
            if self._remaining < 0:
                raise MalformedRequest(f"the message has more than {MAX_FIELDS} fields")
            yield field

    def copy(self, data: bytes, field: FieldSpan) -> bytes:
        """Count bytes. Raises `MalformedRequest` for too many."""
        self._remaining_bytes -= field.end - field.start
        if self._remaining_bytes < 0:
            raise MalformedRequest(
                f"the names, shapes and parameters take more than {self._max_bytes} bytes"
            )
        return data[field.start : field.end]


def invalid_message() -> MalformedRequest:
    return MalformedRequest("the request is not a valid protobuf message of this method")
