"""A check for model paths that this Triton's Python backend does not support.

The backend, and each one that is based on it, starts a stub process per model through a shell, with the path
unquoted, and the stub decodes it as ASCII. If the shell interprets the path, the stub exits before it
responds, and Triton waits forever.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

# Each was tested in a repository path. Brackets fail as soon as a file matches them.
SHELL_SAFE_PATH: Final = re.compile(r"[A-Za-z0-9_./+@=,%:~^!#-]*")


def find_unsupported_path(repository: Path) -> Path | None:
    """Return the repository, or the first of its models; those that are not loaded now may be later."""
    try:
        models = sorted(path for path in repository.iterdir() if path.is_dir())
    except OSError:
        return None  # Triton reports the reason
    if models and not SHELL_SAFE_PATH.fullmatch(str(repository)):
        return repository
    return next((path for path in models if not SHELL_SAFE_PATH.fullmatch(str(path))), None)


def find_unsafe_characters(path: Path) -> list[str]:
    unsafe = dict.fromkeys(c for c in str(path) if not SHELL_SAFE_PATH.fullmatch(c))
    return ["a space" if c == " " else c if c.isprintable() else ascii(c) for c in unsafe]
