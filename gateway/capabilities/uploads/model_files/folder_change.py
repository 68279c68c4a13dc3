"""Changes of a model's folder that can be reverted until they are committed."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import orjson

from gateway.capabilities.uploads.model_files.staging import FILE_MODE, FOLDER_MODE
from gateway.capacity.archives import TEMPORARY_PREFIX

JOURNAL_SUFFIX: Final = "-journal"
MAX_SINGLE_SYNCS: Final = 32
# Python has no function for it.
SYNCFS: Final = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)


class FolderChange:
    """Puts and removes files and folders by renaming, so that each is there completely or not at all.

    What is replaced or removed is moved aside within the same folder, and a journal in the folder records
    each step before it. To delete the journal is to commit. After a crash, `recover_folder` reverts the
    steps of a journal.
    """

    def __init__(self, folder: Path, name_temporary: Callable[[Path], Path]) -> None:
        self.folder = folder
        self._name_temporary = name_temporary
        # As in the journal: a path, and the name of the old file or folder, which was moved aside.
        self._steps: list[tuple[str, str]] = []
        self._journal: Path | None = None

    def put(self, sources: Mapping[str, Path]) -> None:
        targets = {path: self.folder / path for path in sources}
        make_folders(target.parent for target in targets.values())
        steps = [
            (path, self._name_aside() if os.path.lexists(target) else "")
            for path, target in targets.items()
        ]
        self._record(steps)
        for path, aside in steps:
            target = targets[path]
            if aside and (target.is_dir() or not try_link(target, self.folder / aside)):
                target.rename(self.folder / aside)
            sources[path].rename(target)
        parents = {target.parent for target in targets.values()}
        changed = {place for parent in parents for place in (parent, *parent.parents)}
        make_durable([place for place in changed if place.is_relative_to(self.folder)])

    def remove(self, path: str) -> None:
        aside = self._name_aside()
        self._record([(path, aside)])
        (self.folder / path).rename(self.folder / aside)
        sync_folder(self.folder)

    def put_folder(self, source: Path) -> None:
        """Make `source` the whole folder, which is empty or does not exist."""
        self._record([("", "")], place=source)
        source.rename(self.folder)
        sync_folder(self.folder.parent)

    def remove_folder(self) -> None:
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

    def _name_aside(self) -> str:
        return self._name_temporary(self.folder).name

    def _record(self, steps: Sequence[tuple[str, str]], place: Path | None = None) -> None:
        """Append steps to the journal; the empty path is the whole folder."""
        place = place or self.folder
        if self._journal is None:
            temporary = self._name_temporary(self.folder)
            self._journal = temporary.with_name(f"{temporary.name}{JOURNAL_SUFFIX}")
        flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC
        with os.fdopen(os.open(place / self._journal.name, flags, FILE_MODE), "ab") as journal:
            journal.write(b"".join(orjson.dumps(step) + b"\n" for step in steps))
            journal.flush()
            os.fsync(journal.fileno())
        sync_folder(place)
        self._steps += steps

    def _delete_journal(self) -> None:
        if self._journal is not None:
            with suppress(OSError):
                self._journal.unlink(missing_ok=True)
                sync_folder(self.folder)
            self._journal = None

    def revert_step(self, path: str, aside: str) -> None:
        target = self.folder / path
        if not aside:
            self._delete(target)
        elif os.path.lexists(moved := self.folder / aside):  # otherwise the step was not executed
            if moved.is_dir() and os.path.lexists(target):
                self._delete(target)
            moved.replace(target)
            moved.unlink(missing_ok=True)  # two links to one file are not replaced

    def _delete(self, target: Path) -> None:
        # Renamed first, so that a Triton that is starting reads all of it or nothing.
        parent = self.folder.parent if target == self.folder else self.folder
        doomed = self._name_temporary(parent)
        with suppress(FileNotFoundError):
            target.rename(doomed)
            delete_tree(doomed)


def make_folders(folders: Iterable[Path]) -> None:
    for folder in set(folders):
        make_folder(folder)


def make_folder(folder: Path) -> None:
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(FOLDER_MODE, exist_ok=True)


def try_link(target: Path, aside: Path) -> bool:
    """Link a file, so that it is never absent; return False if the file system has no links."""
    try:
        os.link(target, aside, follow_symlinks=False)
    except OSError:
        return False
    return True


def make_durable(paths: Sequence[Path]) -> None:
    """Make the contents of files, and the entries of folders, of one file system durable.

    Each fsync waits for the disk, so that many paths wait once for all that the file system has to write.
    Raises `OSError`, also for a write of a file that failed later.
    """
    if len(paths) > MAX_SINGLE_SYNCS and sync_file_system(paths[0]):
        return
    for path in paths:
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())


def sync_file_system(path: Path) -> bool:
    """Write all of the file system of a path to its disk; return False if the system has no `syncfs`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if SYNCFS is None:
            return False
        if SYNCFS(descriptor) != 0:
            code = ctypes.get_errno()
            if code == errno.ENOSYS:
                return False
            raise OSError(code, os.strerror(code))
    finally:
        os.close(descriptor)
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
    lines = journal.read_bytes().split(b"\n")[:-1]  # a line without a line feed is incomplete
    return [(path, aside) for path, aside in map(orjson.loads, lines)]


def is_temporary(name: str) -> bool:
    return name.startswith(TEMPORARY_PREFIX)
