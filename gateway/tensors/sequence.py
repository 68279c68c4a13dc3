"""Where a request stands in a sequence: those of one sequence share the state that a model keeps of it.

Triton takes a number of 64 bits or a text as a sequence's id; 0 and an empty text mean none (Model
Configuration, Sequence Batcher; Sequence Extension).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.errors import DoesNotFit, Malformed
from gateway.words import quoted

ID, START, END = KEYS = ("sequence_id", "sequence_start", "sequence_end")
LONGEST: Final = 128  # bytes of an id; Triton's control inputs hold no longer ones
ENDLESS: Final = 1 << 64
FLAGS: Final = ("start", "end")


@dataclass(frozen=True)
class Step:
    """One request of a sequence."""

    sequence_id: int | str
    start: bool = False
    end: bool = False


def from_parameters(parameters: Mapping[str, Any]) -> Step | None:
    """The step that a request's parameters name, if any. Raises `DoesNotFit`."""
    if parameters.keys().isdisjoint(KEYS):
        return None
    sequence_id = parameters.get(ID, 0)
    flags = [parameters.get(key, False) for key in (START, END)]
    for key, flag in zip((START, END), flags, strict=True):
        if not isinstance(flag, bool):
            raise DoesNotFit(f"the parameter '{key}' takes true or false, not {shown(flag)}")
    if not is_id(sequence_id):
        raise DoesNotFit(
            f"the parameter '{ID}' takes a whole number of 64 bits without a sign, or a text of at most "
            f"{LONGEST} bytes, not {shown(sequence_id)}"
        )
    if not sequence_id:
        if any(flags):
            raise DoesNotFit(
                f"a sequence that starts or ends has a '{ID}', and not 0 or an empty text"
            )
        return None
    return Step(sequence_id, *flags)


def from_headers(named: str | None, flags: str | None) -> Step | None:
    """The step that `X-Sequence-ID: 7` and `X-Sequence: start, end` name. Raises `Malformed`."""
    if named is None:
        if flags is not None:
            raise Malformed(
                "X-Sequence says where a sequence starts or ends; X-Sequence-ID has to name it"
            )
        return None
    plain = named.isascii() and named.isprintable()
    sequence_id = int(named[:LONGEST]) if plain and named.isdigit() else named
    if not (plain and sequence_id and is_id(sequence_id)):
        raise Malformed(
            f"X-Sequence-ID takes a number above 0 of 64 bits, or at most {LONGEST} printable characters "
            "of ASCII"
        )
    found = {flag.strip().lower() for flag in (flags or "").split(",")} - {""}
    if not found.issubset(FLAGS):
        raise Malformed("X-Sequence takes start, end, or both with a comma between them")
    return Step(sequence_id, *(flag in found for flag in FLAGS))


def is_id(value: Any) -> bool:
    if isinstance(value, str):
        return len(value.encode(errors="replace")) <= LONGEST
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < ENDLESS


def shown(value: Any) -> str:
    return quoted(str(value))
