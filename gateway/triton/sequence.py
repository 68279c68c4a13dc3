"""The parameters and headers that assign a request to a sequence of a stateful model.

A sequence id is a 64-bit number or a string; 0 and the empty string mean no sequence (Triton's Model
Configuration, Sequence Batcher; Sequence Extension).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.errors import InputMismatch, MalformedRequest
from gateway.messages import quote_text

ID_KEY, START_KEY, END_KEY = SEQUENCE_KEYS = ("sequence_id", "sequence_start", "sequence_end")
MAX_SEQUENCE_ID_BYTES: Final = 128  # the limit of Triton's control inputs
SEQUENCE_ID_LIMIT: Final = 1 << 64
SEQUENCE_FLAGS: Final = ("start", "end")


@dataclass(frozen=True)
class SequenceStep:
    sequence_id: int | str
    is_start: bool = False
    is_end: bool = False

    @property
    def values(self) -> tuple[int | str, bool, bool]:
        return self.sequence_id, self.is_start, self.is_end


def parse_sequence_parameters(parameters: Mapping[str, Any]) -> SequenceStep | None:
    """Return the step for a request's parameters, if any. Raises `InputMismatch`."""
    if parameters.keys().isdisjoint(SEQUENCE_KEYS):
        return None
    sequence_id = parameters.get(ID_KEY, 0)
    flags = [parameters.get(key, False) for key in (START_KEY, END_KEY)]
    for key, flag in zip((START_KEY, END_KEY), flags, strict=True):
        if not isinstance(flag, bool):
            raise InputMismatch(f"parameter '{key}' must be true or false, not {quote_value(flag)}")
    if not is_sequence_id(sequence_id):
        raise InputMismatch(
            f"parameter '{ID_KEY}' must be an unsigned 64-bit integer or a string of at most "
            f"{MAX_SEQUENCE_ID_BYTES} bytes, not {quote_value(sequence_id)}"
        )
    if not sequence_id:
        if any(flags):
            raise InputMismatch(
                f"'{START_KEY}' and '{END_KEY}' require a '{ID_KEY}' that is not 0 or an empty string"
            )
        return None
    return SequenceStep(sequence_id, *flags)


def parse_sequence_headers(id_header: str | None, flags_header: str | None) -> SequenceStep | None:
    """Return the step for `X-Sequence-ID: 7` and `X-Sequence: start, end`. Raises `MalformedRequest`."""
    if id_header is None:
        if flags_header is not None:
            raise MalformedRequest("X-Sequence requires X-Sequence-ID, the id of the sequence")
        return None
    plain = id_header.isascii() and id_header.isprintable()
    is_number = plain and id_header.isdigit()
    sequence_id = int(id_header[:MAX_SEQUENCE_ID_BYTES]) if is_number else id_header
    if not (plain and sequence_id and is_sequence_id(sequence_id)):
        raise MalformedRequest(
            f"X-Sequence-ID must be a positive 64-bit integer or at most {MAX_SEQUENCE_ID_BYTES} printable "
            "ASCII characters"
        )
    flags = {flag.strip().lower() for flag in (flags_header or "").split(",")} - {""}
    if not flags.issubset(SEQUENCE_FLAGS):
        raise MalformedRequest("X-Sequence must be start, end, or both, separated by a comma")
    return SequenceStep(sequence_id, *(flag in flags for flag in SEQUENCE_FLAGS))


def is_sequence_id(value: Any) -> bool:
    if isinstance(value, str):
        return len(value.encode(errors="replace")) <= MAX_SEQUENCE_ID_BYTES
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < SEQUENCE_ID_LIMIT


def quote_value(value: Any) -> str:
    return quote_text(str(value))
