"""Changes of a model's folder that can be reverted until they are committed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from gateway.model_files.entry_names import TEMPORARY_PREFIX
from gateway.model_files.staging import FOLDER_MODE

ASIDE_MARK: Final = "-aside-"


class FolderChange:
    """Puts and removes files and folders by renaming, so that each is there completely or not at all.

    What is replaced or removed is moved aside within the same folder. After a crash,
    `recover_folder` puts it back if nothing else has its place.
    """

    def __init__(self, folder: Path, name_temporary: Callable[[Path], Path]) -> None:
        self.folder = folder
        self._name_temporary = name_temporary
        self._reversals: list[Callable[[], None]] = []
        self._asides: list[Path] = []

    def put(self, source: Path, path: str) -> None:
        """Move a file or folder to a path within the folder."""
        target = self.folder / path
        make_folders(target.parent)
        if os.path.lexists(target):
            aside = self._name_aside(path)
            if target.is_dir() or not try_link(target, aside):
                target.rename(aside)
            self._asides.append(aside)
            self._reversals.append(lambda: self._restore(aside, target))
        else:
            self._reversals.append(lambda: self._delete(target))
        source.rename(target)
        sync_folder(target.parent)

    def remove(self, path: str) -> None:
        target, aside = self.folder / path, self._name_aside(path)
        target.rename(aside)
        self._asides.append(aside)
        self._reversals.append(lambda: self._restore(aside, target))
        sync_folder(self.folder)

    def put_folder(self, source: Path) -> None:
        """Make `source` the whole folder, which is empty or does not exist."""
        self._reversals.append(lambda: self._delete(self.folder))
        source.rename(self.folder)
        sync_folder(self.folder.parent)

    def remove_folder(self) -> None:
        """Remove the whole folder, which cannot be reverted."""
        self._delete(self.folder)
        sync_folder(self.folder.parent)

    def revert(self) -> None:
        while self._reversals:
            self._reversals.pop()()
        self._asides.clear()
        with suppress(OSError):
            sync_folder(self.folder)

    def commit(self) -> None:
        self._reversals.clear()
        for aside in self._asides:
            delete_tree(aside)
        self._asides.clear()

    def _name_aside(self, path: str) -> Path:
        temporary = self._name_temporary(self.folder)
        return temporary.with_name(f"{temporary.name}{ASIDE_MARK}{quote(path, safe='')}")

    def _restore(self, aside: Path, target: Path) -> None:
        if aside.is_dir() and os.path.lexists(target):
            self._delete(target)
        aside.replace(target)
        aside.unlink(missing_ok=True)  # two links to one file are not replaced

    def _delete(self, target: Path) -> None:
        # Renamed first: a Triton that starts meanwhile reads all of it or nothing.
        parent = self.folder.parent if target == self.folder else self.folder
        doomed = self._name_temporary(parent)
        with suppress(FileNotFoundError):
            target.rename(doomed)
            delete_tree(doomed)


def make_folders(folder: Path) -> None:
    if not folder.is_dir():
        make_folders(folder.parent)
        folder.mkdir(FOLDER_MODE, exist_ok=True)


def try_link(target: Path, aside: Path) -> bool:
    """Link a file, so that it is never absent; return False if the file system has no links."""
    try:
        os.link(target, aside, follow_symlinks=False)
    except OSError:
        return False
    return True


def sync_folder(folder: Path) -> None:
    """Make renames durable; ignored by file systems that cannot."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete_tree(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def recover_folder(folder: Path, prefix: str) -> None:
    """Remove the leftovers with this prefix, and put back what was moved aside and not replaced."""
    for entry in list(os.scandir(folder)):
        if not entry.name.startswith(prefix):
            continue
        path = Path(entry.path)
        _, mark, quoted = entry.name.partition(ASIDE_MARK)
        if mark and not os.path.lexists(folder / unquote(quoted)):
            path.rename(folder / unquote(quoted))
        else:
            delete_tree(path)


def is_temporary(name: str) -> bool:
    return name.startswith(TEMPORARY_PREFIX)
