"""What people are told: the parts of a sentence, and the sentence with which a command ends."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import ClassVar


class Failure(Exception):
    """A command that ends: the sentence goes to standard error, and tells what to do."""

    status: ClassVar[int] = 1  # the command's exit status


def say(line: str) -> None:
    """To a person, on standard error; that nobody reads it any more must not stop anything."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def quoted(text: str, limit: int = 80) -> str:
    """`text` as it may stand in a sentence: printable, and no longer than `limit` characters."""
    shown = text if len(text) <= limit else text[: limit - 1] + "…"
    return "'" + "".join(c if c.isprintable() else "�" for c in shown) + "'"


def listed(names: Iterable[str], limit: int = 20) -> str:
    """«a, b and c», cut after `limit` names."""
    shown: Sequence[str] = list(names)
    if len(shown) > limit:
        shown = [*shown[:limit], f"{len(shown) - limit} more"]
    if len(shown) < 2:
        return "".join(shown) or "nothing"
    return ", ".join(shown[:-1]) + " and " + shown[-1]
