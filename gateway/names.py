"""Names of models and versions that stand in a path, and those that no path may hold."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

VERSION: Final = re.compile("[0-9]{1,19}")
FORBIDDEN: Final = re.compile(r"[/\\\x00-\x1f\x7f-\x9f]")
UPWARD: Final = (".", "..")
# The path is decoded by the gateway at most once, and perhaps by a proxy between it and Triton.
DECODINGS: Final = 2


def is_model_name(name: str) -> bool:
    """Whether a name means the same however often it is decoded: one segment of a path, and no other path."""
    for _ in range(DECODINGS + 1):
        if name in UPWARD or FORBIDDEN.search(name):
            return False
        if "%" not in name:
            return True
        name = unquote(name)
    return True


def normalized_version(version: str) -> str | None:
    """The version without leading zeros, as Triton names it; None for what is no version."""
    if not VERSION.fullmatch(version):
        return None
    return version.lstrip("0") or "0"
