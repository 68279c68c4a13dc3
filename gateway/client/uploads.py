"""Uploads of models: a file, an archive or a folder, with the files that belong to it."""

from __future__ import annotations

import base64
import hashlib
import os
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from gateway.client.bodies import Form, StreamedBody
from gateway.client.errors import UNREADABLE, GatewayError
from gateway.media_types import OCTET_STREAM

PIECE_BYTES: Final = 256 << 10
ARCHIVE_NAME: Final = "model.tar.gz"


@dataclass(frozen=True)
class ModelSource:
    """A model to upload. `source` is a path, or a file that is open for reading."""

    source: str | os.PathLike[str] | BinaryIO
    name: str = ""
    version: str = ""
    config: str | os.PathLike[str] | None = None
    labels: str | os.PathLike[str] | None = None
    load: bool = True

    @property
    def source_path(self) -> Path | None:
        return Path(self.source) if isinstance(self.source, (str, os.PathLike)) else None

    @property
    def model(self) -> str:
        """The name of the model, by default that of the file. Raises `ValueError` without one."""
        path = self.source_path
        name = self.name or ("" if path is None else path.resolve().name.partition(".")[0])
        if not name:
            raise ValueError(f"{path or 'a file'} has no name for a model")
        return name


@dataclass(frozen=True)
class UploadContent:
    """The files of an upload, open for reading."""

    model: str
    file: BinaryIO
    file_name: str
    digest: bytes  # SHA-256; empty for a file that can be read only once
    attached: dict[str, tuple[str, BinaryIO]] = field(default_factory=dict)

    def create_body(self) -> Form | StreamedBody:
        if self.attached:
            return Form([("model", (self.file_name, self.file)), *self.attached.items()])
        headers = {"content-type": OCTET_STREAM}
        if self.digest:
            headers["repr-digest"] = f"sha-256=:{base64.b64encode(self.digest).decode()}:"
        return StreamedBody(read_pieces(self.file), headers)


@contextmanager
def open_upload(upload: ModelSource) -> Iterator[UploadContent]:
    """Open the files of an upload, a folder as an archive.

    Raises `GatewayError` if one cannot be read, and `ValueError` if the model has no name.
    """
    model = upload.model
    path = upload.source_path
    with ExitStack() as stack:
        file: BinaryIO = (
            upload.source  # type: ignore[assignment]  # it is no path
            if path is None
            else stack.enter_context(open_archive(path) if path.is_dir() else open_file(path))
        )
        fields = {"config": upload.config, "labels": upload.labels}
        attached = {
            name: (Path(place).name, stack.enter_context(open_file(Path(place))))
            for name, place in fields.items()
            if place is not None
        }
        digest = hash_file(file) if file.seekable() else b""
        yield UploadContent(model, file, find_file_name(file), digest, attached)


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
