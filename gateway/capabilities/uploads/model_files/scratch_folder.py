"""A folder for temporary files on the local disk, which disappears with its process."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final

FOLDER_PREFIX: Final = "triton-gateway-uploads-"
LOCK_FILE: Final = "lock"


class ScratchFolder:
    """Creates a folder in the system's folder for temporary files (TMPDIR), and locks it while it is used.

    The folders of exited processes of the same user are removed.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._lock = -1
        self._creating = threading.Lock()
        self._numbers = count(1)

    def name_file(self) -> Path:
        with self._creating:
            while self._folder is None:
                folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
                flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
                self._lock = os.open(folder / LOCK_FILE, flags, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if (folder / LOCK_FILE).exists():
                    self._folder = folder
                else:  # another process that starts found it before it was locked
                    os.close(self._lock)
        return self._folder / str(next(self._numbers))

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)


def remove_abandoned_folders() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid != os.getuid() or folder.is_symlink():
                continue
            with (folder / LOCK_FILE).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
