"""A check for model paths that this Triton's Python backend does not support.

The backend starts a stub process per model through a shell, with the path unquoted, and the stub decodes
it as ASCII. If the shell interprets the path, the stub exits before it responds, and Triton waits forever.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# Each was tested in a repository path. Brackets fail as soon as a file matches them.
SHELL_SAFE_PATH: Final = re.compile(r"[A-Za-z0-9_./+@=,%:~^!#-]*")
BACKEND_FIELD: Final = re.compile(r"""^[^#\n]*?\bbackend\s*:\s*["'](\w+)["']""", re.MULTILINE)
CONFIG_NAMES: Final = ("configs/embedded.pbtxt", "config.pbtxt")  # the first one that exists


def find_unsupported_path(repository: Path, names: frozenset[str] | None) -> Path | None:
    """Return the unsupported path: the repository or one of the models `names` (None: all)."""
    python = (folder for folder in list_model_folders(repository) if is_python_model(folder))
    if not SHELL_SAFE_PATH.fullmatch(str(repository)):
        return repository if any(python) else None
    selected = (folder for folder in python if names is None or folder.name in names)
    return next((folder for folder in selected if not SHELL_SAFE_PATH.fullmatch(folder.name)), None)


def list_model_folders(repository: Path) -> Iterator[Path]:
    try:
        yield from sorted(path for path in repository.iterdir() if path.is_dir())
    except OSError:
        return  # Triton reports the reason


def is_python_model(model: Path) -> bool:
    try:
        config = next((model / name for name in CONFIG_NAMES if (model / name).is_file()), None)
        text = config.read_text(errors="replace") if config is not None else ""
        if declared := BACKEND_FIELD.search(text):
            return declared[1] == "python"
        return any(model.glob("*/model.py"))  # without a config, Triton goes by the files
    except OSError:
        return False


def find_unsafe_characters(path: Path) -> list[str]:
    """Return the unsupported characters, each once, in printable form."""
    unsafe = dict.fromkeys(c for c in str(path) if not SHELL_SAFE_PATH.fullmatch(c))
    return ["a space" if c == " " else c if c.isprintable() else ascii(c) for c in unsafe]
