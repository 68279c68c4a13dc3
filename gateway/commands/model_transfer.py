"""Transfers of model files: `push` and `pull`."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import quote

from gateway.client import Client
from gateway.client.calls import build_model_path
from gateway.client.uploads import find_model_name, open_source, report_file_errors
from gateway.commands.errors import ClientError, UsageError
from gateway.commands.progress import create_transfer_bar
from gateway.commands.target import Target

TRANSFER_TIMEOUT_S: Final = 600.0  # limit of one step, such as the load of a model


def push_model(target: Target, source: Path, name: str, **options: Any) -> dict[str, Any]:
    """Upload a model with a progress bar; return what the gateway stored."""
    try:
        model = find_model_name(source, name)
    except ValueError as exc:
        raise UsageError(f"{exc}; choose one with --name") from None
    with (
        target.connect() as client,
        open_source(source) as file,
        create_transfer_bar() as bar,
    ):
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        shown = bar.wrap_file(file, size, description=model)
        return client.push(shown, name=model, **options)


def pull_model(target: Target, name: str, version: str, output: Path) -> list[str]:
    """Download the files of a model into a folder of its name; return their paths.

    Raises `ClientError`, and leaves nothing behind then.
    """
    with target.connect(TRANSFER_TIMEOUT_S) as client:
        listed = client.request("GET", f"{build_model_path(name)}/files")["files"]
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
                    for count in download_file(client, name, entry, partial):
                        bar.advance(task, count)
                partial.chmod(0o755)
                partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return [str(folder / entry["path"]) for entry in entries]


def is_file_of_version(path: str, version: str) -> bool:
    first, slash, _ = path.partition("/")
    return first == version or not (slash and first.isdigit())


def download_file(client: Client, name: str, entry: dict[str, Any], folder: Path) -> Iterator[int]:
    path = PurePosixPath(entry["path"])
    if path.is_absolute() or ".." in path.parts:
        raise ClientError(f"the gateway listed an unsafe path: {entry['path']!r}")
    place = folder / path
    place.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    received = 0
    with place.open("wb") as file:
        for piece in client.download(f"{build_model_path(name)}/files/{quote(str(path))}"):
            received += len(piece)
            if received > entry["bytes"]:
                raise ClientError(f"the received {entry['path']} is longer than listed; try again")
            file.write(piece)
            digest.update(piece)
            yield len(piece)
    if digest.hexdigest() != entry["sha256"]:
        raise ClientError(f"the received {entry['path']} has a wrong checksum; try again")
