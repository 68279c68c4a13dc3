"""Leases and reports of the processes of one machine: locked files, and a file for each process."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import orjson

from gateway.state.file_locks import is_same_file, try_lock_file

REPORT_TTL_S: Final = 5.0


class FileLeases:
    """Leases as locks that end with their process. The methods block, and raise `OSError`."""

    def __init__(self, folder: Path, owner: str) -> None:
        self._folder = folder
        self._owner = owner
        self._locks: dict[str, int] = {}  # name → descriptor

    def acquire(self, name: str) -> bool:
        self._folder.mkdir(0o700, exist_ok=True)
        path = self._folder / f"{blake2b(name.encode(), digest_size=16).hexdigest()}.lease"
        if name in self._locks and not is_same_file(path, self._locks[name]):
            self.release(name)  # the file was removed, so the lock excludes nobody
        if name not in self._locks:
            descriptor = try_lock_file(path)
            if descriptor is None:
                return False
            self._locks[name] = descriptor
        return True

    def release(self, name: str) -> None:
        descriptor = self._locks.pop(name, None)
        if descriptor is not None:
            os.close(descriptor)

    def exchange_reports(self, report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        self._folder.mkdir(0o700, exist_ok=True)
        new = self._folder / f"{self._owner}.new"
        new.write_bytes(orjson.dumps(report))
        new.replace(self._folder / f"{self._owner}.report")
        found = []
        for path in self._folder.glob("*.report"):
            with suppress(FileNotFoundError, orjson.JSONDecodeError):  # its process has exited
                if time.time() - path.stat().st_mtime > REPORT_TTL_S:
                    path.unlink()
                elif path.stem != self._owner:
                    found.append(orjson.loads(path.read_bytes()))
        return [document for document in found if isinstance(document, dict)]

    def close(self) -> None:
        for name in list(self._locks):
            self.release(name)
        (self._folder / f"{self._owner}.report").unlink(missing_ok=True)
