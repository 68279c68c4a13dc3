"""Inputs of `infer`: files, folders, glob patterns, texts and lines. A file is read when it is sent."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gateway.client import Body
from gateway.client.many import read_item
from gateway.commands.errors import UsageError
from gateway.media_types import TYPES_BY_SUFFIX, UTF8_TEXT

STDIN_ARGUMENT: Final = "-"
STDIN_DESCRIPTOR: Final = 0


@dataclass(frozen=True)
class InputSource:
    """The inputs of the command line, in order, as their names and values for the client."""

    texts: Sequence[str]
    paths: Sequence[str]  # files, and STDIN_ARGUMENT
    split_lines: bool = False  # each line of a file is a text

    @property
    def total(self) -> int | None:
        """The number of inputs; None while it is unknown."""
        if STDIN_ARGUMENT in self.paths or (self.split_lines and self.paths):
            return None
        return len(self.texts) + len(self.paths)

    @property
    def may_block(self) -> bool:
        return self.total is None or any(map(is_special, self.paths))

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for number, text in enumerate(self.texts, 1):
            yield f"text:{number}", read_text(text.encode("utf-8", "surrogateescape"))
        for path in self.paths:
            if path == STDIN_ARGUMENT:
                yield from read_lines(STDIN_DESCRIPTOR, path, "standard input")
            elif self.split_lines:
                yield from read_lines(path, format_path(path), format_path(path))
            else:
                # What blocks is read in the thread of this iterator, for which nothing waits.
                file = Path(path)
                yield format_path(path), read_item(file) if is_special(path) else file


def read_text(content: bytes) -> Any:
    return read_item(Body(content, UTF8_TEXT))


def format_path(path: str) -> str:
    """Return a path as valid Unicode, whatever bytes its name contains."""
    return os.fsencode(path).decode("utf-8", "replace")


def read_lines(file: str | int, name: str, label: str) -> Iterator[tuple[str, Any]]:
    """Yield the lines of a file. Raises `UsageError`: the number of texts that are missing is unknown."""
    try:
        with open(file, "rb", closefd=file != STDIN_DESCRIPTOR) as lines:
            for number, line in enumerate(lines, 1):
                yield f"{name}:{number}", read_text(line.rstrip(b"\n").removesuffix(b"\r"))
    except OSError as exc:
        raise UsageError(f"{label} cannot be read: {exc.strerror}") from None


def find_input_files(arguments: Sequence[str], exclude: Path | None = None) -> list[str]:
    """Return the files that the arguments name, those of a folder sorted by name, without `exclude`.

    Raises `UsageError` if an argument names no file.
    """
    paths = [path for argument in arguments for path in expand_argument(argument)]
    excluded = exclude and exclude.resolve()
    return [path for path in paths if excluded is None or Path(path).resolve() != excluded]


def is_text(argument: str) -> bool:
    """Return whether an argument neither names a file nor looks like a path."""
    if argument == STDIN_ARGUMENT or os.path.lexists(argument):
        return False
    if os.sep in argument or Path(argument).suffix.lower() in TYPES_BY_SUFFIX:
        return False
    return not glob.glob(argument)  # noqa: PTH207 - a text may be an invalid pattern


def expand_argument(argument: str) -> list[str]:
    if Path(argument).is_dir():
        return list(walk_files(argument))
    if argument == STDIN_ARGUMENT or Path(argument).exists():
        return [argument]
    matching = glob.glob(argument, recursive=True)  # noqa: PTH207 - it may be absolute
    files = sorted(each for each in matching if not (Path(each).is_dir() or is_special(each)))
    if not files:
        raise UsageError(
            f"no such file or folder, and no file matches the pattern: {format_path(argument)}; "
            "--text sends it as a text"
        )
    return files


def is_special(path: str) -> bool:
    """Return True for pipes, sockets and devices: reading them may never end, so they must be named."""
    place = Path(path)
    return place.exists() and not (place.is_file() or place.is_dir())


def walk_files(folder: str) -> Iterator[str]:
    for directory, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (str(Path(directory, name)) for name in sorted(files) if not name.startswith("."))
        yield from (path for path in paths if not is_special(path))
