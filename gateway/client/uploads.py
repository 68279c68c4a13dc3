"""Uploads of models: a file, an archive or a folder, with the files that belong to it."""

from __future__ import annotations

import base64
import hashlib
import os
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

from gateway.client.bodies import Form, StreamedBody
from gateway.client.errors import UNREADABLE, GatewayError
from gateway.media_types import OCTET_STREAM

PIECE_BYTES: Final = 256 << 10
ARCHIVE_NAME: Final = "model.tar.gz"


# A path, or a file that is open for reading.
ModelSource: TypeAlias = "str | os.PathLike[str] | BinaryIO"


def find_model_name(source: ModelSource, name: str) -> str:
    """Return the name of a model, by default that of its file. Raises `ValueError` without one."""
    path = Path(source) if isinstance(source, (str, os.PathLike)) else None
    name = name or ("" if path is None else path.resolve().name.partition(".")[0])
    if not name:
        raise ValueError(f"{path or 'a file'} has no name for a model")
    return name


@contextmanager
def open_source(source: ModelSource) -> Iterator[BinaryIO]:
    """Open the files of a model, a folder as an archive. Raises `GatewayError` if one cannot be read."""
    if not isinstance(source, (str, os.PathLike)):
        yield source
        return
    path = Path(source)
    with open_archive(path) if path.is_dir() else open_file(path) as file:
        yield file


@contextmanager
def open_body(
    source: ModelSource, attached: Mapping[str, str | os.PathLike[str] | None]
) -> Iterator[Form | StreamedBody]:
    """Open the body of an upload, with the paths of attached files by their names in the form."""
    with ExitStack() as stack:
        file = stack.enter_context(open_source(source))
        parts: list[tuple[str, Any]] = [("model", (find_file_name(file), file))]
        for name, place in attached.items():
            if place is not None:
                path = Path(place)
                parts.append((name, (path.name, stack.enter_context(open_file(path)))))
        yield Form(parts) if len(parts) > 1 else create_file_body(file)


def create_file_body(file: BinaryIO) -> StreamedBody:
    headers = {"content-type": OCTET_STREAM}
    if file.seekable():  # another one can be read only once
        headers["repr-digest"] = f"sha-256=:{base64.b64encode(hash_file(file)).decode()}:"
    return StreamedBody(read_pieces(file), headers)


def find_file_name(file: BinaryIO) -> str:
    name = getattr(file, "name", "")
    return Path(name).name if isinstance(name, str) and name else ARCHIVE_NAME


@contextmanager
def open_archive(folder: Path) -> Iterator[BinaryIO]:
    with tempfile.TemporaryFile() as archive:
        with report_file_errors(), tarfile.open(fileobj=archive, mode="w:gz") as packed:
            packed.add(folder, folder.resolve().name)
        archive.seek(0)
        yield archive


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    with report_file_errors():
        file = path.open("rb")
    with file:
        yield file


@contextmanager
def report_file_errors() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise GatewayError(f"{exc.filename or 'the file'}: {exc.strerror}", UNREADABLE) from None


def hash_file(file: BinaryIO) -> bytes:
    start = file.tell()
    digest = hashlib.sha256()
    for piece in read_pieces(file):
        digest.update(piece)
    file.seek(start)
    return digest.digest()


def read_pieces(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(PIECE_BYTES):
        yield piece
