"""Names of models and versions that stand in a path, and those that no path may hold."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

VERSION_NUMBER: Final = re.compile("[0-9]{1,19}")
FORBIDDEN_CHARACTERS: Final = re.compile(r"[/\\\x00-\x1f\x7f-\x9f]")
DOT_SEGMENTS: Final = (".", "..")
# The path is decoded by the gateway at most once, and perhaps by a proxy between it and Triton.
MAX_DECODINGS: Final = 2


def is_model_name(name: str) -> bool:
    """Whether a name means the same however often it is decoded: one segment of a path, and no other path."""
    for _ in range(MAX_DECODINGS + 1):
        if name in DOT_SEGMENTS or FORBIDDEN_CHARACTERS.search(name):
            return False
        if "%" not in name:
            return True
        name = unquote(name)
    return True


def normalize_version(version: str) -> str | None:
    """The version without leading zeros, as Triton names it; None for what is no version."""
    if not VERSION_NUMBER.fullmatch(version):
        return None
    return version.lstrip("0") or "0"
