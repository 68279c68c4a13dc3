"""Changes of a model's folder that can be reverted until they are committed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import orjson

from gateway.model_files.entry_names import TEMPORARY_PREFIX
from gateway.model_files.staging import FILE_MODE, FOLDER_MODE

JOURNAL_SUFFIX: Final = "-journal"


class FolderChange:
    """Puts and removes files and folders by renaming, so that each is there completely or not at all.

    What is replaced or removed is moved aside within the same folder, and a journal in the folder records
    each step before it. To delete the journal is to commit. After a crash, `recover_folder` reverts the
    steps of a journal.
    """

    def __init__(self, folder: Path, name_temporary: Callable[[Path], Path]) -> None:
        self.folder = folder
        self._name_temporary = name_temporary
        # As in the journal: a path, and what was moved aside.
        self._steps: list[tuple[str, str]] = []
        self._journal: Path | None = None

    def put(self, source: Path, path: str) -> None:
        """Move a file or folder to a path within the folder."""
        target = self.folder / path
        make_folders(target.parent)
        if os.path.lexists(target):
            aside = self._record_aside(path)
            if target.is_dir() or not try_link(target, aside):
                target.rename(aside)
        else:
            self._record(path)
        source.rename(target)
        sync_folder(target.parent)

    def remove(self, path: str) -> None:
        aside = self._record_aside(path)
        (self.folder / path).rename(aside)
        sync_folder(self.folder)

    def put_folder(self, source: Path) -> None:
        """Make `source` the whole folder, which is empty or does not exist."""
        self._record("", place=source)
        source.rename(self.folder)
        sync_folder(self.folder.parent)

    def remove_folder(self) -> None:
        """Remove the whole folder, which cannot be reverted."""
        self._delete(self.folder)
        sync_folder(self.folder.parent)

    def revert(self) -> None:
        while self._steps:
            self.revert_step(*self._steps.pop())
        self._delete_journal()

    def commit(self) -> None:
        self._delete_journal()
        for _, aside in self._steps:
            if aside:
                delete_tree(self.folder / aside)
        self._steps.clear()

    def _record_aside(self, path: str) -> Path:
        aside = self._name_temporary(self.folder)
        self._record(path, aside.name)
        return aside

    def _record(self, path: str, aside: str = "", place: Path | None = None) -> None:
        """Append a step to the journal; the empty path is the whole folder."""
        place = place or self.folder
        if self._journal is None:
            temporary = self._name_temporary(self.folder)
            self._journal = temporary.with_name(f"{temporary.name}{JOURNAL_SUFFIX}")
        flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC
        descriptor = os.open(place / self._journal.name, flags, FILE_MODE)
        try:
            os.write(descriptor, orjson.dumps([path, aside]) + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(place)
        self._steps.append((path, aside))

    def _delete_journal(self) -> None:
        if self._journal is not None:
            with suppress(OSError):
                self._journal.unlink(missing_ok=True)
                sync_folder(self.folder)
            self._journal = None

    def revert_step(self, path: str, aside: str) -> None:
        """Revert a step of this change, or of the journal of an exited process."""
        target = self.folder / path
        if not aside:
            self._delete(target)
        elif os.path.lexists(moved := self.folder / aside):  # otherwise the step was not executed
            if moved.is_dir() and os.path.lexists(target):
                self._delete(target)
            moved.replace(target)
            moved.unlink(missing_ok=True)  # two links to one file are not replaced

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


def sync_file(path: Path) -> None:
    """Make the content durable. Raises `OSError`, also for a write that failed later."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


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


def recover_folder(folder: Path, prefix: str, name_temporary: Callable[[Path], Path]) -> bool:
    """Revert the uncommitted change of an exited process, whose temporary files have this prefix.

    Removes its other leftovers. Returns whether there was a change.
    """
    change = FolderChange(folder, name_temporary)
    leftovers = [Path(entry.path) for entry in os.scandir(folder) if entry.name.startswith(prefix)]
    journals = [path for path in leftovers if path.name.endswith(JOURNAL_SUFFIX)]
    for journal in journals:
        for path, aside in reversed(read_journal(journal)):
            change.revert_step(path, aside)
    for leftover in (*journals, *leftovers):
        delete_tree(leftover)
    return bool(journals)


def read_journal(journal: Path) -> list[tuple[str, str]]:
    lines = journal.read_bytes().split(b"\n")[:-1]  # what follows the last line feed is incomplete
    return [(path, aside) for path, aside in map(orjson.loads, lines)]


def is_temporary(name: str) -> bool:
    return name.startswith(TEMPORARY_PREFIX)
