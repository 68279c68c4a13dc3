"""A folder of models that the gateway writes and the Tritons read, GATEWAY_REPOSITORY=file:///FOLDER."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from gateway.capabilities.uploads.model_files.staging import StagedFile, remove_leftovers
from gateway.capabilities.uploads.model_files.store import FileContent, StoredFile
from gateway.capacity.archives import TEMPORARY_PREFIX
from gateway.errors import Conflict
from gateway.messages import quote_text

FILE_MODE: Final = 0o644  # Triton may run as another user
FOLDER_MODE: Final = 0o755
BYTECODE_FOLDER: Final = "__pycache__"
PIECE_BYTES: Final = 256 << 10
MAX_SINGLE_SYNCS: Final = 32


class ModelFolder:
    """A `ModelFiles`, on a shared file system too. Uploads are received in hidden files beside the models.

    They are files and not a folder, because Triton takes each folder of a repository for a model.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def __str__(self) -> str:
        return str(self._root)

    def open(self) -> None:
        self._root.stat()  # raises an error that tells the reason
        remove_leftovers(self._root, TEMPORARY_PREFIX)

    def name_temporary(self) -> Path:
        return self._root / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"

    def measure(self) -> int:
        return sum(status.st_size for _, status in walk_files(self._root))

    def scan(self, folder: str) -> list[StoredFile]:
        found = []
        for path, status in walk_files(self._root / folder):
            is_file = stat.S_ISREG(status.st_mode)
            stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            name = path.relative_to(self._root).as_posix()
            found.append(StoredFile(name, status.st_size, stamp if is_file else ()))
        return sorted(found, key=lambda file: file.path)

    def read(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def open_file(self, path: str) -> FileContent:
        descriptor = os.open(self._root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        file = os.fdopen(descriptor, "rb")
        return FileContent(os.fstat(descriptor).st_size, "", read_pieces(file))

    def find_checksum(self, path: str) -> str:
        return ""

    def prepare_change(self, added: Mapping[str, StagedFile], removed: Collection[str]) -> None:
        root = self._root.resolve()
        for folder in {(root / path).parent for path in (*added, *removed)}:
            if folder.resolve() != folder:  # its files would be elsewhere
                name = folder.relative_to(root).parts[0]
                raise Conflict(
                    f"the folder of model {quote_text(name)} is a symbolic link, or has one; the gateway "
                    "changes only folders of its repository"
                )
        make_durable([file.path for file in added.values()])

    def put(self, path: str, file: StagedFile) -> None:
        file.path.chmod(FILE_MODE)
        self._place(file.path, self._root / path)

    def copy(self, source: str, target: str) -> None:
        """Make a link, or a copy on a file system that has none."""
        try:
            os.link(self._root / source, self._root / target, follow_symlinks=False)
        except OSError:
            shutil.copy2(self._root / source, self._root / target, follow_symlinks=False)

    def move(self, source: str, target: str) -> None:
        self._place(self._root / source, self._root / target)
        (self._root / source).unlink(missing_ok=True)  # two links to one file are not replaced

    def _place(self, source: Path, target: Path) -> None:
        target.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        source.replace(target)
        # Python takes a file of the same size and second for the one that it has compiled.
        shutil.rmtree(target.parent / BYTECODE_FOLDER, ignore_errors=True)

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            with suppress(FileNotFoundError, NotADirectoryError):
                (self._root / path).unlink()
            for parent in Path(path).parents[:-1]:
                folder = self._root / parent
                shutil.rmtree(folder / BYTECODE_FOLDER, ignore_errors=True)
                with suppress(OSError):  # it is not empty
                    folder.rmdir()

    def delete_folder(self, folder: str) -> None:
        shutil.rmtree(self._root / folder)
        make_durable([self._root])

    def finish_change(self, before: Sequence[StoredFile], changed: Sequence[str]) -> None:
        folders = {parent for path in changed for parent in (self._root / path).parents}
        make_durable(
            [each for each in folders if each.is_relative_to(self._root) and each.exists()]
        )


def walk_files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield what is no folder, without Python's caches. Links are not followed."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(folder):
            if not entry.is_dir(follow_symlinks=False):
                with suppress(FileNotFoundError):  # deleted meanwhile
                    yield Path(entry.path), entry.stat(follow_symlinks=False)
            elif entry.name != BYTECODE_FOLDER:
                yield from walk_files(Path(entry.path))


def make_durable(paths: Sequence[Path]) -> None:
    """Wait until files and folders are on the disk. Many of them wait once, for all that is written."""
    if len(paths) > MAX_SINGLE_SYNCS:
        os.sync()
        return
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError:
            if not path.is_dir():  # not every file system can do it for a folder
                raise
        finally:
            os.close(descriptor)


def read_pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(PIECE_BYTES):
            yield piece
