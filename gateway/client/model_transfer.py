"""Transfers of model files: `push`, `pull` and `rm`."""

from __future__ import annotations

import base64
import hashlib
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final
from urllib.parse import quote

from gateway.client.api import ApiClient, model_api_path
from gateway.client.errors import ClientError, UsageError
from gateway.client.progress import create_transfer_bar
from gateway.client.target import Target

TRANSFER_TIMEOUT_S: Final = 600.0  # limit of one step, such as the load of a model
TRANSFER_PIECE_BYTES: Final = 256 << 10
ARCHIVE_NAME: Final = "model.tar.gz"


@dataclass(frozen=True)
class PushedModel:
    """A model file or folder to upload, and the files that belong to it."""

    source: Path
    name: str = ""
    version: str = ""
    config: Path | None = None
    labels: Path | None = None
    load: bool = True

    @property
    def model(self) -> str:
        name = self.name or self.source.resolve().name.partition(".")[0]
        if not name:
            raise UsageError(f"{self.source} has no name for a model; choose one with --name")
        return name


def push_model(target: Target, pushed: PushedModel) -> dict[str, Any]:
    path = model_api_path(pushed.model, pushed.version) + ("" if pushed.load else "?load=false")
    with ExitStack() as stack:
        api = stack.enter_context(ApiClient(target, TRANSFER_TIMEOUT_S))
        file = stack.enter_context(open_source(pushed.source))
        size = file.seek(0, 2)
        file_name = ARCHIVE_NAME if pushed.source.is_dir() else pushed.source.name
        fields = {"config": pushed.config, "labels": pushed.labels}
        attached = {
            field: (place.name, stack.enter_context(open_file(place)))
            for field, place in fields.items()
            if place is not None
        }
        digest = base64.b64encode(hash_stream(file)).decode()
        bar = stack.enter_context(create_transfer_bar())
        sent = bar.wrap_file(file, size, description=pushed.model)
        if attached:
            options: dict[str, Any] = {"files": {"model": (file_name, sent), **attached}}
        else:
            headers = {
                "Content-Type": "application/octet-stream",
                "Repr-Digest": f"sha-256=:{digest}:",
            }
            options = {"content": sent, "headers": headers}
        published: dict[str, Any] = api.call("PUT", path, **options)
    return published


def pull_model(target: Target, name: str, version: str, output: Path) -> list[str]:
    """Download the files of a model into a folder of its name; return their paths.

    Raises `ClientError`, and leaves nothing behind then.
    """
    with ApiClient(target, TRANSFER_TIMEOUT_S) as api:
        listed = api.get(f"{model_api_path(name)}/files")["files"]
        entries = [
            entry for entry in listed if not version or is_file_of_version(entry["path"], version)
        ]
        if version and not any(entry["path"].startswith(f"{version}/") for entry in entries):
            raise ClientError(f"model {name!r} has no version {version!r}")
        folder = output / name
        if folder.exists():
            raise UsageError(f"{folder} exists already; choose another folder with --output")
        with report_file_errors():
            output.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=output))
        try:
            total = sum(entry["bytes"] for entry in entries)
            with create_transfer_bar() as bar, report_file_errors():
                task = bar.add_task(name, total=total)
                for entry in entries:
                    for count in download_file(api, name, entry, partial):
                        bar.advance(task, count)
                partial.chmod(0o755)
                partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return [str(folder / entry["path"]) for entry in entries]


def is_file_of_version(path: str, version: str) -> bool:
    first, slash, _ = path.partition("/")
    return first == version or not (slash and first.isdigit())


def download_file(api: ApiClient, name: str, entry: dict[str, Any], folder: Path) -> Iterator[int]:
    path = PurePosixPath(entry["path"])
    if path.is_absolute() or ".." in path.parts:
        raise ClientError(f"the gateway listed an unsafe path: {entry['path']!r}")
    place = folder / path
    place.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with place.open("wb") as file:
        for piece in api.stream(f"{model_api_path(name)}/files/{quote(str(path))}"):
            file.write(piece)
            digest.update(piece)
            yield len(piece)
    if digest.hexdigest() != entry["sha256"]:
        raise ClientError(f"the received {entry['path']} has a wrong checksum; try again")


def remove_models(target: Target, names: list[str]) -> Iterator[str]:
    """Remove models, or versions as NAME/VERSION, and yield each. Raises `ClientError` for one that fails."""
    with ApiClient(target, TRANSFER_TIMEOUT_S) as api:
        for name in names:
            model, _, version = name.partition("/")
            api.call("DELETE", model_api_path(model, version))
            yield name


@contextmanager
def open_source(source: Path) -> Iterator[BinaryIO]:
    if not source.is_dir():
        with open_file(source) as file:
            yield file
        return
    with tempfile.TemporaryFile() as archive:
        with report_file_errors(), tarfile.open(fileobj=archive, mode="w:gz") as packed:
            packed.add(source, source.resolve().name)
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
        raise ClientError(f"{exc.filename or 'the file'}: {exc.strerror}") from None


def hash_stream(file: BinaryIO) -> bytes:
    file.seek(0)
    digest = hashlib.sha256()
    while piece := file.read(TRANSFER_PIECE_BYTES):
        digest.update(piece)
    file.seek(0)
    return digest.digest()
