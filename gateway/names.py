"""Validation of model names and versions that become path segments."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

VERSION_NUMBER: Final = re.compile("[0-9]{1,19}")
FORBIDDEN_CHARACTERS: Final = re.compile(r"[/\\\x00-\x1f\x7f-\x9f]")
DOT_SEGMENTS: Final = (".", "..")
# Characters that a path segment may contain unescaped (RFC 3986, section 3.3).
PATH_SAFE_CHARACTERS: Final = "!$&'()*+,;=:@"
# The gateway decodes a path at most once, and a proxy between it and Triton may decode it again.
MAX_DECODINGS: Final = 2
MAX_MODEL_NAME_CHARS: Final = 256  # no file system has longer names


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
