"""SQLite databases that several processes of one machine use: how they are opened, and their transactions."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

FILE_MODE: Final = 0o600
IN_MEMORY: Final = ":memory:"
OPEN_RETRY_S: Final = 0.01
# A deferred transaction that becomes a write fails while another one writes.
WRITE: Final = "BEGIN IMMEDIATE"
READ: Final = "BEGIN"


class NoWriteAheadLog(sqlite3.OperationalError):
    """Without this log, readers and writers would lock each other out."""

    def __init__(self) -> None:
        super().__init__(
            "its file system does not support the write-ahead log of SQLite; use a local disk"
        )


def open_database(path: Path | None, schema: str, timeout_s: float) -> sqlite3.Connection:
    """Open a database that can be written, or one in memory. Raises `sqlite3.Error` or `OSError`."""
    if path is not None:
        with suppress(FileExistsError):
            # SQLite would let others read it. A file that exists is not opened here: its locks would end.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, FILE_MODE))
    database = sqlite3.connect(
        path or IN_MEMORY, timeout_s, isolation_level=None, check_same_thread=False
    )
    try:
        enable_write_ahead_log(database, timeout_s)
        database.executescript(f"{WRITE};{schema};COMMIT;")
    except BaseException:
        database.close()
        raise
    return database


def enable_write_ahead_log(database: sqlite3.Connection, timeout_s: float) -> None:
    """Switch to the log, which SQLite refuses at once, without its timeout, while another process does it."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            mode = database.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            break
        except sqlite3.OperationalError as exc:
            if "locked" not in str(exc) or time.monotonic() > deadline:
                raise
        time.sleep(OPEN_RETRY_S)
    if mode not in ("wal", "memory"):
        raise NoWriteAheadLog


@contextmanager
def transaction(database: sqlite3.Connection, begin: str = WRITE) -> Iterator[None]:
    database.execute(begin)
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # a full disk has ended it already
            database.execute("ROLLBACK")
        raise
