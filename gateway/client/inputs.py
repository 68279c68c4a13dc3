"""What is sent: files, folders, globs, texts, and lines; each with a name, and read when it is its turn."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gateway.client.errors import Misused
from gateway.client.pipes import CHUNK_BYTES, in_thread, read_some

STDIN: Final = "-"
TEXT: Final = "text/plain; charset=utf-8"
OCTETS: Final = "application/octet-stream"
SUFFIXES: Final = {
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".png": "image/png",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".bmp": "image/bmp",
    ".tif": "image/tiff",
    ".tiff": "image/tiff",
    ".json": "application/json",
    ".npy": "application/x-npy",
    ".npz": "application/x-npz",
    ".txt": TEXT,
    ".text": TEXT,
    ".md": TEXT,
}
MAGIC: Final = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"RIFF": "image/webp",
    b"GIF8": "image/gif",
    b"\x93NUMPY": "application/x-npy",
}


@dataclass(frozen=True)
class Body:
    content_type: str
    data: bytes


@dataclass(frozen=True)
class Input:
    """One thing to infer: a file that is yet to be read, or a text."""

    name: str
    source: str | bytes  # a path, or the text itself

    def read(self) -> Body:
        """Raises `OSError`."""
        if isinstance(self.source, bytes):
            return Body(TEXT, self.source)
        data = content_of(self.source)
        return Body(content_type_of(self.source, data), data)

    async def body(self) -> Body:
        """Like `read`, but the loop goes on however long the other end of a pipe takes."""
        if isinstance(self.source, bytes) or not is_special(self.source):
            return self.read()
        return await in_thread(self.read)


def content_of(path: str) -> bytes:
    """With half of the system calls that `open` makes, which are most of what reading a small file costs."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        expected = os.fstat(descriptor).st_size
        data = os.read(descriptor, expected + 1)
        if len(data) == expected > 0:
            return data
        chunks = [data]
        while chunk := os.read(descriptor, CHUNK_BYTES):
            chunks.append(chunk)
        return b"".join(chunks)
    finally:
        os.close(descriptor)


def content_type_of(path: str, data: bytes) -> str:
    """By the suffix, else by the first bytes."""
    known = SUFFIXES.get(os.path.splitext(path)[1].lower())  # noqa: PTH122
    return known or next((kind for magic, kind in MAGIC.items() if data.startswith(magic)), OCTETS)


def shown(path: str) -> str:
    """A path as it stands in JSON, whatever bytes its name has."""
    return os.fsencode(path).decode("utf-8", "replace")


@dataclass(frozen=True)
class Inputs:
    """All that the command line names, in its order. `total` is None when nobody knows yet."""

    texts: Sequence[str]
    paths: Sequence[str]  # files, and STDIN
    lines: bool = False  # each line of a file is a text

    @property
    def total(self) -> int | None:
        if STDIN in self.paths or (self.lines and self.paths):
            return None
        return len(self.texts) + len(self.paths)

    async def __aiter__(self) -> AsyncIterator[Input]:
        for number, text in enumerate(self.texts, 1):
            yield Input(f"text:{number}", text.encode("utf-8", "surrogateescape"))
        for path in self.paths:
            if path == STDIN:
                async for found in lines_of_stdin():
                    yield found
            elif self.lines and is_special(path):
                async for found in lines_of_pipe(path):
                    yield found
            elif self.lines:
                for found in lines_of(path):
                    yield found
            else:
                yield Input(shown(path), path)


def lines_of(path: str) -> Iterator[Input]:
    """Raises `Misused` of a file that cannot be read: how many texts would be missing is not known."""
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                yield Input(f"{shown(path)}:{number}", without_end(line))
    except OSError as exc:
        raise Misused(f"{shown(path)} cannot be read: {exc.strerror}") from None


async def lines_of_stdin() -> AsyncIterator[Input]:
    """As they come."""
    async for found in lines_from(0, STDIN, "standard input"):
        yield found


async def lines_of_pipe(path: str) -> AsyncIterator[Input]:
    """As they come. To open it waits for the other end."""
    try:
        descriptor = await in_thread(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as exc:
        raise Misused(f"{shown(path)} cannot be read: {exc.strerror}") from None
    try:
        async for found in lines_from(descriptor, shown(path), shown(path)):
            yield found
    finally:
        os.close(descriptor)


async def lines_from(descriptor: int, name: str, called: str) -> AsyncIterator[Input]:
    number, rest = 0, b""
    while data := await some_of(descriptor, called):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            number += 1
            yield Input(f"{name}:{number}", without_end(line))
    if rest:
        yield Input(f"{name}:{number + 1}", without_end(rest))


async def some_of(descriptor: int, called: str) -> bytes:
    try:
        return await read_some(descriptor)
    except OSError as exc:
        raise Misused(f"{called} cannot be read: {exc.strerror}") from None


def without_end(line: bytes) -> bytes:
    return line.rstrip(b"\n").removesuffix(b"\r")


def found(arguments: Sequence[str], but: Path | None = None) -> list[str]:
    """The files that these arguments name, a folder's in the order of their names; never the file `but`.

    Raises `Misused` for what names nothing.
    """
    left_out = but.resolve() if but is not None else None
    paths = [path for argument in arguments for path in named_by(argument)]
    if left_out is None:
        return paths
    return [
        path
        for path in paths
        if os.path.basename(path) != left_out.name or Path(path).resolve() != left_out  # noqa: PTH119
    ]


def named_by(argument: str) -> list[str]:
    if argument == STDIN:
        return [STDIN]
    if Path(argument).is_dir():
        return list(below(argument))
    if Path(argument).exists():
        return [argument]
    matching = glob.glob(argument, recursive=True)  # noqa: PTH207 - it may be absolute
    files = sorted(path for path in matching if not Path(path).is_dir() and not is_special(path))
    if not files:
        raise Misused(f"{shown(argument)} is no file, no folder and no pattern that matches any")
    return files


def is_special(path: str) -> bool:
    """A pipe, a socket or a device: reading it may never end, so it must be named itself."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116
    except OSError:
        return False  # it is said when it is its turn
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def below(folder: str) -> Iterator[str]:
    """Every file in the folder and its folders; what is hidden stays so."""
    for at, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names = sorted(name for name in files if not name.startswith("."))
        paths = (os.path.join(at, name) for name in names)  # noqa: PTH118
        yield from (path for path in paths if not is_special(path))
