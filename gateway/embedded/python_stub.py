"""Which models the Python backend of this Triton cannot start, for the path at which they are.

It starts a process for each, the stub, through a shell, with the path unquoted; and the stub reads it as
ASCII. What a shell takes for something else ends the stub before it answers, and Triton waits for ever.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# Tried, each in a repository's path. Brackets work only until something matches them.
SHELL_SAFE_PATH: Final = re.compile(r"[A-Za-z0-9_./+@=,%:~^!#-]*")
BACKEND_FIELD: Final = re.compile(r"""^[^#\n]*?\bbackend\s*:\s*["'](\w+)["']""", re.MULTILINE)
CONFIG_NAMES: Final = ("configs/embedded.pbtxt", "config.pbtxt")  # the first that is there


def find_unsupported_path(repository: Path, names: frozenset[str] | None) -> Path | None:
    """The folder whose path no stub can be given: the repository, or a model of `names`; None is all."""
    python = (folder for folder in list_model_folders(repository) if is_python_model(folder))
    if not SHELL_SAFE_PATH.fullmatch(str(repository)):
        return repository if any(python) else None
    wanted = (folder for folder in python if names is None or folder.name in names)
    return next((folder for folder in wanted if not SHELL_SAFE_PATH.fullmatch(folder.name)), None)


def list_model_folders(repository: Path) -> Iterator[Path]:
    try:
        yield from sorted(path for path in repository.iterdir() if path.is_dir())
    except OSError:
        return  # Triton says why


def is_python_model(model: Path) -> bool:
    """By its config, or by what it consists of where that does not say."""
    try:
        config = next((model / name for name in CONFIG_NAMES if (model / name).is_file()), None)
        text = config.read_text(errors="replace") if config is not None else ""
        if declared := BACKEND_FIELD.search(text):
            return declared[1] == "python"
        return any(model.glob("*/model.py"))
    except OSError:
        return False


def find_unsafe_characters(path: Path) -> list[str]:
    """Those that are wrong, each once, as they may be shown."""
    odd = dict.fromkeys(c for c in str(path) if not SHELL_SAFE_PATH.fullmatch(c))
    return ["a blank" if c == " " else c if c.isprintable() else ascii(c) for c in odd]
