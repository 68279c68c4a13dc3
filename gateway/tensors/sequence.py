"""Where a request stands in a sequence: those of one sequence share the state that a model keeps of it.

Triton takes a number of 64 bits or a text as a sequence's id; 0 and an empty text mean none (Model
Configuration, Sequence Batcher; Sequence Extension).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.errors import InputMismatch, MalformedRequest
from gateway.messages import quote_text

ID_KEY, START_KEY, END_KEY = SEQUENCE_KEYS = ("sequence_id", "sequence_start", "sequence_end")
MAX_SEQUENCE_ID_BYTES: Final = 128  # bytes of an id; Triton's control inputs hold no longer ones
SEQUENCE_ID_LIMIT: Final = 1 << 64
SEQUENCE_FLAGS: Final = ("start", "end")


@dataclass(frozen=True)
class SequenceStep:
    """One request of a sequence."""

    sequence_id: int | str
    is_start: bool = False
    is_end: bool = False


def parse_sequence_parameters(parameters: Mapping[str, Any]) -> SequenceStep | None:
    """The step that a request's parameters name, if any. Raises `DoesNotFit`."""
    if parameters.keys().isdisjoint(SEQUENCE_KEYS):
        return None
    sequence_id = parameters.get(ID_KEY, 0)
    flags = [parameters.get(key, False) for key in (START_KEY, END_KEY)]
    for key, flag in zip((START_KEY, END_KEY), flags, strict=True):
        if not isinstance(flag, bool):
            raise InputMismatch(
                f"the parameter '{key}' takes true or false, not {quote_value(flag)}"
            )
    if not is_sequence_id(sequence_id):
        raise InputMismatch(
            f"the parameter '{ID_KEY}' takes a whole number of 64 bits without a sign, or a text of at most "
            f"{MAX_SEQUENCE_ID_BYTES} bytes, not {quote_value(sequence_id)}"
        )
    if not sequence_id:
        if any(flags):
            raise InputMismatch(
                f"a sequence that starts or ends has a '{ID_KEY}', and not 0 or an empty text"
            )
        return None
    return SequenceStep(sequence_id, *flags)


def parse_sequence_headers(id_header: str | None, flags_header: str | None) -> SequenceStep | None:
    """The step that `X-Sequence-ID: 7` and `X-Sequence: start, end` name. Raises `Malformed`."""
    if id_header is None:
        if flags_header is not None:
            raise MalformedRequest(
                "X-Sequence says where a sequence starts or ends; X-Sequence-ID has to name it"
            )
        return None
    plain = id_header.isascii() and id_header.isprintable()
    sequence_id = (
        int(id_header[:MAX_SEQUENCE_ID_BYTES]) if plain and id_header.isdigit() else id_header
    )
    if not (plain and sequence_id and is_sequence_id(sequence_id)):
        raise MalformedRequest(
            f"X-Sequence-ID takes a number above 0 of 64 bits, or at most {MAX_SEQUENCE_ID_BYTES} "
            "printable characters "
            "of ASCII"
        )
    found = {flag.strip().lower() for flag in (flags_header or "").split(",")} - {""}
    if not found.issubset(SEQUENCE_FLAGS):
        raise MalformedRequest("X-Sequence takes start, end, or both with a comma between them")
    return SequenceStep(sequence_id, *(flag in found for flag in SEQUENCE_FLAGS))


def is_sequence_id(value: Any) -> bool:
    if isinstance(value, str):
        return len(value.encode(errors="replace")) <= MAX_SEQUENCE_ID_BYTES
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < SEQUENCE_ID_LIMIT


def quote_value(value: Any) -> str:
    return quote_text(str(value))
