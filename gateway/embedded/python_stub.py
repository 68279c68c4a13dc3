"""A check for model paths that this Triton's Python backend does not support.

The backend, and each one that is based on it, starts a stub process per model through a shell, with the path
unquoted, and the stub decodes it as ASCII. If the shell interprets the path, the stub exits before it
responds, and Triton waits forever.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gateway.embedded.backends import PYTHON_BASED_BACKENDS

# Each was tested in a repository path. Brackets fail as soon as a file matches them.
SHELL_SAFE_PATH: Final = re.compile(r"[A-Za-z0-9_./+@=,%:~^!#-]*")
CONFIG_NAMES: Final = ("configs/embedded.pbtxt", "config.pbtxt")  # the first one that exists
# A field that selects the backend or the file; other strings and comments are skipped.
CONFIG_FIELD: Final = re.compile(
    r"""\b(backend|platform|default_model_filename)\s*:\s*["']([^"'\n]*)["']"""
    r"""|"[^"\n]*"|'[^'\n]*'|\#[^\n]*"""
)
STUB_BACKENDS: Final = frozenset(["python", *PYTHON_BASED_BACKENDS])
# Triton goes by these files if a config names neither a backend nor a platform.
MODEL_FILES: Final = (
    "model.py",
    *(name for backend in PYTHON_BASED_BACKENDS.values() for name in backend.model_files),
)
ENSEMBLE: Final = "ensemble"


def find_unsupported_path(repository: Path, names: frozenset[str] | None) -> Path | None:
    models = (folder for folder in list_model_folders(repository) if runs_in_stub(folder))
    if not SHELL_SAFE_PATH.fullmatch(str(repository)):
        return repository if any(models) else None
    selected = (folder for folder in models if names is None or folder.name in names)
    paths = (folder / read_fields(folder).get("default_model_filename", "") for folder in selected)
    return next((path for path in paths if not SHELL_SAFE_PATH.fullmatch(str(path))), None)


def list_model_folders(repository: Path) -> Iterator[Path]:
    try:
        yield from sorted(path for path in repository.iterdir() if path.is_dir())
    except OSError:
        return  # Triton reports the reason


def runs_in_stub(model: Path) -> bool:
    fields = read_fields(model)
    if backend := fields.get("backend"):
        return backend in STUB_BACKENDS
    if platform := fields.get("platform"):
        return platform != ENSEMBLE  # any other platform is a backend of `STUB_BACKENDS`
    if fields.get("default_model_filename") in MODEL_FILES:
        return True
    try:
        return any(path.name in MODEL_FILES for path in model.glob("*/*"))
    except OSError:
        return False


def read_fields(model: Path) -> dict[str, str]:
    try:
        config = next((model / name for name in CONFIG_NAMES if (model / name).is_file()), None)
        text = config.read_text(errors="replace") if config is not None else ""
    except OSError:
        return {}  # Triton reports the reason
    return dict(CONFIG_FIELD.findall(text))


def find_unsafe_characters(path: Path) -> list[str]:
    unsafe = dict.fromkeys(c for c in str(path) if not SHELL_SAFE_PATH.fullmatch(c))
    return ["a space" if c == " " else c if c.isprintable() else ascii(c) for c in unsafe]
