"""Inputs of `infer`: files, folders, glob patterns, texts and lines. A file is read when it is sent."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gateway.client.bodies import Body, guess_content_type
from gateway.commands.errors import UsageError
from gateway.commands.inference.pipes import PIPE_READ_BYTES, read_available, run_in_daemon_thread
from gateway.media_types import TYPES_BY_SUFFIX, UTF8_TEXT

STDIN_ARGUMENT: Final = "-"


@dataclass(frozen=True)
class Input:
    """An input: a file that has not been read yet, or a text."""

    name: str
    source: str | bytes  # a path, or the text itself

    def read(self) -> Body:
        if isinstance(self.source, bytes):
            return Body(self.source, UTF8_TEXT)
        data = read_input_file(self.source)
        return Body(data, guess_content_type(self.source, data))

    async def read_async(self) -> Body:
        if isinstance(self.source, bytes) or not is_special_file(self.source):
            return self.read()
        return await run_in_daemon_thread(self.read)


def read_input_file(path: str) -> bytes:
    # Half the system calls of `open`, which are most of the cost of reading a small file.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        expected = os.fstat(descriptor).st_size
        data = os.read(descriptor, expected + 1)
        if len(data) == expected > 0:
            return data
        chunks = [data]
        while chunk := os.read(descriptor, PIPE_READ_BYTES):
            chunks.append(chunk)
        return b"".join(chunks)
    finally:
        os.close(descriptor)


def format_path(path: str) -> str:
    """Return a path as valid Unicode, whatever bytes its name contains."""
    return os.fsencode(path).decode("utf-8", "replace")


@dataclass(frozen=True)
class InputSource:
    """The inputs of the command line, in order. `total` is None while the number is unknown."""

    texts: Sequence[str]
    paths: Sequence[str]  # files, and STDIN_ARGUMENT
    split_lines: bool = False  # each line of a file is a text

    @property
    def total(self) -> int | None:
        if STDIN_ARGUMENT in self.paths or (self.split_lines and self.paths):
            return None
        return len(self.texts) + len(self.paths)

    async def __aiter__(self) -> AsyncIterator[Input]:
        for number, text in enumerate(self.texts, 1):
            yield Input(f"text:{number}", text.encode("utf-8", "surrogateescape"))
        for path in self.paths:
            if path == STDIN_ARGUMENT:
                async for line in read_descriptor_lines(0, path, "standard input"):
                    yield line
            elif self.split_lines:
                async for line in read_file_lines(path):
                    yield line
            else:
                yield Input(format_path(path), path)


@contextmanager
def report_unreadable(label: str) -> Iterator[None]:
    """Turn an `OSError` into a `UsageError`: the number of texts that are missing is unknown."""
    try:
        yield
    except OSError as exc:
        raise UsageError(f"{label} cannot be read: {exc.strerror}") from None


async def read_file_lines(path: str) -> AsyncIterator[Input]:
    label = format_path(path)
    with report_unreadable(label):  # opening a pipe blocks until its other end is open
        descriptor = await run_in_daemon_thread(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    try:
        async for line in read_descriptor_lines(descriptor, label, label):
            yield line
    finally:
        os.close(descriptor)


async def read_descriptor_lines(descriptor: int, name: str, label: str) -> AsyncIterator[Input]:
    number = 0
    partial = b""
    with report_unreadable(label):
        while data := await read_available(descriptor):
            *lines, partial = (partial + data).split(b"\n")
            for line in lines:
                number += 1
                yield Input(f"{name}:{number}", strip_line_end(line))
    if partial:
        yield Input(f"{name}:{number + 1}", strip_line_end(partial))


def strip_line_end(line: bytes) -> bytes:
    return line.rstrip(b"\n").removesuffix(b"\r")


def find_input_files(arguments: Sequence[str], exclude: Path | None = None) -> list[str]:
    """Return the files that the arguments name, those of a folder sorted by name, without `exclude`.

    Raises `UsageError` if an argument names no file.
    """
    paths = [path for argument in arguments for path in expand_argument(argument)]
    if exclude is None:
        return paths
    excluded = exclude.resolve()
    return [
        path
        for path in paths
        if os.path.basename(path) != excluded.name or Path(path).resolve() != excluded  # noqa: PTH119 - strings are faster
    ]


def is_text(argument: str) -> bool:
    """Return whether an argument neither names a file nor looks like a path."""
    if argument == STDIN_ARGUMENT or os.path.lexists(argument):
        return False
    if os.sep in argument or Path(argument).suffix.lower() in TYPES_BY_SUFFIX:
        return False
    return not glob.glob(argument)  # noqa: PTH207 - a text may be an invalid pattern


def expand_argument(argument: str) -> list[str]:
    if argument == STDIN_ARGUMENT:
        return [STDIN_ARGUMENT]
    if Path(argument).is_dir():
        return list(walk_files(argument))
    if Path(argument).exists():
        return [argument]
    matching = glob.glob(argument, recursive=True)  # noqa: PTH207 - it may be absolute
    paths = (path for path in matching if not Path(path).is_dir())
    files = sorted(path for path in paths if not is_special_file(path))
    if not files:
        raise UsageError(
            f"no such file or folder, and no file matches the pattern: {format_path(argument)}; "
            "--text sends it as a text"
        )
    return files


def is_special_file(path: str) -> bool:
    """Return True for pipes, sockets and devices: reading them may never end, so they must be named."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - strings are faster
    except OSError:
        return False  # reading it reports the error
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def walk_files(folder: str) -> Iterator[str]:
    for directory, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names = sorted(name for name in files if not name.startswith("."))
        paths = (os.path.join(directory, name) for name in names)  # noqa: PTH118 - strings are faster
        yield from (path for path in paths if not is_special_file(path))
