"""Texts: of messages, of times, and of the names of models in paths; the base class of CLI errors."""

from __future__ import annotations

import json
import re
import select
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from difflib import get_close_matches
from functools import lru_cache
from typing import ClassVar, Final, TextIO
from urllib.parse import quote, unquote

WRITE_TIMEOUT_MS: Final = 1000
# Comparing longer names takes too long.
MAX_SUGGESTION_CHARS: Final = 64
# Names of models and versions that become path segments.
VERSION_NUMBER: Final = re.compile("[0-9]{1,19}")
FORBIDDEN_CHARACTERS: Final = re.compile(r"[/\\\x00-\x1f\x7f-\x9f]")
DOT_SEGMENTS: Final = (".", "..")
# Characters that a path segment may contain unescaped (RFC 3986, section 3.3).
PATH_SAFE_CHARACTERS: Final = "!$&'()*+,;=:@"
# The gateway decodes a path at most once, and a proxy between it and Triton may decode it again.
MAX_DECODINGS: Final = 2
MAX_MODEL_NAME_CHARS: Final = 256  # no file system has longer names


class CommandError(Exception):
    """Ends a command; the message goes to standard error and says what to do."""

    status: ClassVar[int] = 1  # the command's exit status


def print_message(message: str) -> None:
    """Write a line to standard error; ignore a closed stream, and one that is not read in time."""
    with suppress(OSError, ValueError):
        if can_write_line(sys.stderr):
            sys.stderr.write(f"{escape_unprintable(message)}\n")
            sys.stderr.flush()


def can_write_line(stream: TextIO) -> bool:
    """Return False for a pipe that stays full for `WRITE_TIMEOUT_MS`."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return True  # the stream is a Python object only
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(WRITE_TIMEOUT_MS))


def escape_unprintable(text: str) -> str:
    """Escape line ends, terminal control sequences and bidirectional controls."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def escape_unprintable_json(text: str) -> str:
    """Escape the same characters as `escape_unprintable` in JSON text, except line ends."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def suggest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `; did you mean NAME?` with the most similar name, or "" if none is similar."""
    near = get_close_matches(name, known, 1, cutoff) if len(name) <= MAX_SUGGESTION_CHARS else []
    return f"; did you mean {near[0]}?" if near else ""


def quote_text(text: str, limit: int = 80) -> str:
    """Return `text` in quotes, printable and cut to `limit` characters."""
    shown = text if len(text) <= limit else text[: limit - 1] + "…"
    return "'" + "".join(c if c.isprintable() else "�" for c in shown) + "'"


def join_names(names: Iterable[str], limit: int = 20) -> str:
    shown: Sequence[str] = list(names)
    if len(shown) > limit:
        shown = [*shown[:limit], f"{len(shown) - limit} more"]
    if len(shown) < 2:
        return "".join(shown) or "nothing"
    return ", ".join(shown[:-1]) + " and " + shown[-1]


def parse_time(text: str) -> datetime | None:
    """Return a time with a zone (RFC 3339); None for another text."""
    try:
        time = datetime.fromisoformat(text.strip().upper().replace("Z", "+00:00"))
        return None if time.tzinfo is None else time.astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None


def format_utc_time(time: datetime | float, timespec: str = "seconds") -> str:
    """Return a time, which may be in seconds since 1970, in UTC with a Z (RFC 3339)."""
    if not isinstance(time, datetime):
        time = datetime.fromtimestamp(time, timezone.utc)
    return time.astimezone(timezone.utc).isoformat(timespec=timespec).replace("+00:00", "Z")


def describe_difference(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """Return the names that were added, removed and changed, such as `added a; changed b and c`."""
    changed = (name for name in before.keys() & after.keys() if before[name] != after[name])
    parts = {
        "added": after.keys() - before.keys(),
        "removed": before.keys() - after.keys(),
        "changed": set(changed),
    }
    listed = (
        f"{verb} {join_names(map(quote_text, sorted(names)))}"
        for verb, names in parts.items()
        if names
    )
    return "; ".join(listed) or "nothing of effect"


# The names of models and versions.


def is_model_name(name: str) -> bool:
    """Return whether a model can have this name.

    A name in a gRPC message can have any length, and names are keys of tables that outlive their request.
    """
    return len(name) <= MAX_MODEL_NAME_CHARS and is_path_segment(name)


@lru_cache(1024)
def is_path_segment(name: str) -> bool:
    """Return whether a name stays a single path segment however often it is percent-decoded."""
    for _ in range(MAX_DECODINGS + 1):
        if name in DOT_SEGMENTS or FORBIDDEN_CHARACTERS.search(name):
            return False
        if "%" not in name:
            return True
        name = unquote(name)
    return True


def quote_path_segment(name: str) -> str:
    return quote(name, safe=PATH_SAFE_CHARACTERS)


def normalize_version(version: str) -> str | None:
    """Return the version without leading zeros, as Triton names it; None if it is not a number."""
    if not VERSION_NUMBER.fullmatch(version):
        return None
    return version.lstrip("0") or "0"
