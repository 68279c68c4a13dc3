"""The state in SQLite: in a file for the processes of one machine, or in memory for one process."""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from itertools import compress
from pathlib import Path
from time import time
from typing import Any, ClassVar, Concatenate, Final, ParamSpec, TypeVar
from urllib.parse import SplitResult, unquote

from gateway.access.limits import QuotaCount, add_to_counts
from gateway.repository.state.content import EventId, StoredEvent
from gateway.repository.state.interface import (
    COUNT_ACTION,
    LOST,
    READ_ACTION,
    REFUSED,
    WRITE_ACTION,
    BadState,
    Entries,
    Entry,
    EntryChange,
    OutageLog,
    Reading,
)
from gateway.repository.state.sqlite_connection import READ, WRITE, open_database, transaction

T = TypeVar("T")
P = ParamSpec("P")
Database = sqlite3.Connection
BlockingMethod = Callable[Concatenate["SqliteKeyValues", Database, P], T]
Method = Callable[Concatenate["SqliteKeyValues", P], Coroutine[Any, Any, T]]
LOCK_TIMEOUT_S: Final = 3.0  # a write takes milliseconds, so a longer wait means a stopped process
MAX_TTL_S: Final = 50 * 24 * 3600.0
MAX_DIGITS: Final = 20  # of a counter
# A column of SQLite takes values of any type, unless a condition refuses them. The number of changes of the
# state is the `user_version` of the database.
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS entries (
    tab TEXT, key TEXT, value BLOB CHECK (typeof(value) = 'blob'),
    revision INTEGER CHECK (typeof(revision) = 'integer'), PRIMARY KEY (tab, key));
CREATE TABLE IF NOT EXISTS changes (tab TEXT PRIMARY KEY, name TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS expiring (
    key TEXT PRIMARY KEY, value, expires_at REAL CHECK (typeof(expires_at) = 'real')) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS expiring_by_time ON expiring (expires_at);
CREATE TABLE IF NOT EXISTS events (
    time_ms INTEGER CHECK (time_ms BETWEEN 0 AND 999999999999999),
    number INTEGER CHECK (number BETWEEN 0 AND 9999999999), raw, PRIMARY KEY (time_ms, number))
    WITHOUT ROWID
"""
READ_ENTRIES: Final = (
    "SELECT key, CASE WHEN length(value) <= ? THEN value END, revision FROM entries WHERE tab = ?"
)
PUT_ENTRY: Final = "REPLACE INTO entries VALUES (?, ?, ?, ?)"
READ_VALUE: Final = (
    "SELECT CASE WHEN length(value) <= ? THEN value ELSE -1 END FROM expiring "
    "WHERE key = ? AND expires_at BETWEEN ? AND ?"
)
READ_REPORTS: Final = (
    "SELECT CASE WHEN length(value) <= ? THEN value END FROM expiring WHERE key > 'report:' "
    "AND key < 'report;' AND key != ? AND expires_at BETWEEN ? AND ?"
)
READ_EVENTS: Final = """SELECT time_ms, number, CASE WHEN length(raw) <= ? THEN raw END FROM events
    WHERE (time_ms, number) >= (?, ?) ORDER BY time_ms DESC, number DESC LIMIT ?"""
DELETE_OLD_EVENTS: Final = """DELETE FROM events WHERE (time_ms, number) NOT IN
    (SELECT time_ms, number FROM events ORDER BY time_ms DESC, number DESC LIMIT ?)"""


def open_file_store(url: SplitResult) -> SqliteKeyValues | None:
    path = Path(unquote(url.path))
    is_file_path = path.is_absolute() and not url.path.endswith("/") and "\0" not in str(path)
    if not is_file_path or url.netloc not in ("", "localhost") or url.query or url.fragment:
        return None
    if path.suffix == ".json":
        raise BadState(
            f"GATEWAY_STATE: {path} ends in .json, but the state is a database: name it state.db, and import "
            "an exported state with: triton-gateway state import"
        )
    store = SqliteKeyValues(path)
    store.check(path)
    return store


def transacts(
    action: str, *, is_durable: bool = False
) -> Callable[[BlockingMethod[P, T]], Method[P, T]]:
    """Make a coroutine of a method that gets the database in a transaction, and may block."""

    def decorate(method: BlockingMethod[P, T]) -> Method[P, T]:
        @wraps(method)
        async def run(place: SqliteKeyValues, /, *args: P.args, **kwargs: P.kwargs) -> T:
            def work(database: Database) -> T:
                return method(place, database, *args, **kwargs)

            return await place.run(action, work, is_durable=is_durable)

        return run

    return decorate


class SqliteKeyValues:
    """A `KeyValues` in a database, which a thread of its own uses."""

    rate_windows: ClassVar[None] = None

    def __init__(self, path: Path | None) -> None:
        self._path = path  # None: in memory
        self._database: sqlite3.Connection | None = None
        self._file: os.stat_result | None = None
        self._is_durable: bool | None = None  # whether the database waits for the disk
        self._executor = ThreadPoolExecutor(1, "state")
        self._outages = OutageLog(str(path))

    @property
    def is_shared(self) -> bool:
        return self._path is not None

    @property
    def is_available(self) -> bool:
        return not self._outages

    def check(self, path: Path) -> None:
        """Create the folder if necessary. Raises `BadState` unless the state can be read and written."""
        try:
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            self._open()
        except (OSError, sqlite3.Error) as exc:
            raise BadState(
                f"GATEWAY_STATE: {path} cannot be used ({explain_sqlite_error(exc)}); it needs a folder that "
                "this user can write to, and a file that a gateway has made"
            ) from None
        finally:
            self._disconnect()  # a process that this one forks must not have it

    def _open(self) -> sqlite3.Connection:
        """Return the database; another one if the file was removed or replaced."""
        if self._database is None or not self._has_file():
            self._disconnect()
            self._database = open_database(self._path, SCHEMA, LOCK_TIMEOUT_S)
            self._database.text_factory = decode_stored_text
            self._is_durable = None
            self._file = None if self._path is None else self._path.stat()
        return self._database

    def _has_file(self) -> bool:
        if self._path is None or self._file is None:
            return True
        with suppress(OSError):
            return os.path.samestat(self._path.stat(), self._file)
        return False

    def _disconnect(self) -> None:
        if self._database is not None:
            self._database.close()
        self._database = None

    async def run(self, action: str, work: Callable[[Database], T], *, is_durable: bool) -> T:
        """Return the result of work in one transaction, which is on the disk then if it is durable.

        What is not can be lost when the machine fails, but not what was written before.
        """

        def transact() -> T:
            database = self._open()
            if is_durable is not self._is_durable:
                database.execute(f"PRAGMA synchronous = {'FULL' if is_durable else 'NORMAL'}")
                self._is_durable = is_durable
            with transaction(database, READ if action == READ_ACTION else WRITE):
                return work(database)

        try:
            if self._path is None:
                return transact()
            result = await asyncio.get_running_loop().run_in_executor(self._executor, transact)
        except (sqlite3.Error, OSError, ValueError, TypeError) as exc:
            raise self._outages.record_failure(action, explain_sqlite_error(exc)) from None
        self._outages.record_success(action)
        return result

    @transacts(READ_ACTION)
    def read(self, database: Database, known: Mapping[str, tuple[str, int]]) -> Reading:
        tables = {}
        for name, (known_change, max_bytes) in known.items():
            change = find_change(database, name)
            if change != known_change:
                rows = database.execute(READ_ENTRIES, (max_bytes, name))
                tables[name] = (change, {key: Entry(*entry) for key, *entry in rows})
        return Reading(find_revision(database), tables)

    async def write(self, change: EntryChange) -> int:
        work = partial(write_entry, change=change)
        return await self.run(WRITE_ACTION, work, is_durable=change.is_durable)

    @transacts(WRITE_ACTION, is_durable=True)
    def restore(self, database: Database, revision: int, tables: Mapping[str, Entries]) -> bool:
        if find_revision(database) >= revision:
            return False
        for name, entries in tables.items():
            database.execute("DELETE FROM entries WHERE tab = ?", (name,))
            rows = ((name, key, *entry) for key, entry in entries.items())
            database.executemany(PUT_ENTRY, rows)
            set_revision(database, name, revision)
        return True

    @transacts(WRITE_ACTION)
    def claim(self, database: Database, names: Sequence[str], owner: str, ttl_s: float) -> bool:
        now = time()
        delete = "DELETE FROM expiring WHERE expires_at < ? OR expires_at > ?"
        database.execute(delete, (now, now + MAX_TTL_S))
        # One that lasts longer is from before the clock was set back.
        found = [find_value(database, name, len(owner), max_ttl_s=ttl_s) for name in names]
        free = [value in (None, owner) for value in found]
        for name in compress(names, free):
            put_value(database, name, owner, ttl_s)
        return free[-1]

    @transacts(WRITE_ACTION)
    def release(self, database: Database, names: Sequence[str], owner: str) -> None:
        delete = "DELETE FROM expiring WHERE key = ? AND value = ?"
        database.executemany(delete, [(name, owner) for name in names])

    @transacts(WRITE_ACTION)
    def put(self, database: Database, key: str, value: bytes, ttl_s: float) -> None:
        put_value(database, key, value, ttl_s)

    @transacts(READ_ACTION)
    def get(self, database: Database, keys: Sequence[str], max_bytes: int) -> Sequence[object]:
        return [find_value(database, key, max_bytes) for key in keys]

    @transacts(WRITE_ACTION)
    def exchange(
        self, database: Database, owner: str, report: bytes, ttl_s: float, max_bytes: int
    ) -> Sequence[object]:
        own = f"report:{owner}"
        put_value(database, own, report, ttl_s)
        now = time()
        rows = database.execute(READ_REPORTS, (max_bytes, own, now, now + ttl_s))
        return [value for (value,) in rows]

    @transacts(WRITE_ACTION, is_durable=True)
    def append_event(self, database: Database, raw: bytes, max_events: int) -> None:
        event_id = EventId(int(time() * 1000))
        for last in read_events(database, EventId(0), 1, len(raw)):
            if last.raw == raw:
                return
            event_id = max(event_id, last.id.next)
        database.execute("REPLACE INTO events VALUES (?, ?, ?)", (*event_id, raw))
        database.execute(DELETE_OLD_EVENTS, (max_events,))

    @transacts(READ_ACTION)
    def read_events(
        self, database: Database, start: EventId, limit: int, max_bytes: int
    ) -> Sequence[StoredEvent]:
        return read_events(database, start, limit, max_bytes)

    @transacts(COUNT_ACTION)
    def count(
        self, database: Database, limits: Mapping[str, int], amount: int, ttl_s: float
    ) -> QuotaCount:
        found = [find_value(database, key, MAX_DIGITS) for key in limits]
        used = [each if isinstance(each, int) and each > 0 else 0 for each in found]
        unreadable = sum(each not in (None, count) for each, count in zip(found, used, strict=True))
        counts = dict(zip(limits, used, strict=True))
        result = add_to_counts(counts, limits, amount)
        if result.is_added and amount:
            for key, value in zip(limits, found, strict=True):
                if value is None:
                    put_value(database, key, counts[key], ttl_s)
                else:
                    database.execute(
                        "UPDATE expiring SET value = ? WHERE key = ?", (counts[key], key)
                    )
        return replace(result, unreadable=unreadable)

    async def find_weakness(self) -> str:
        return ""

    async def close(self) -> None:
        closing = asyncio.get_running_loop().run_in_executor(self._executor, self._disconnect)
        await asyncio.wait([closing], timeout=LOCK_TIMEOUT_S)  # the disk may hang
        self._executor.shutdown(wait=False)


def read_events(
    database: Database, start: EventId, limit: int, max_bytes: int
) -> list[StoredEvent]:
    rows = database.execute(READ_EVENTS, (max_bytes, *start, limit)).fetchall()
    return [StoredEvent(EventId(time_ms, number), raw) for time_ms, number, raw in reversed(rows)]


def decode_stored_text(raw: bytes) -> str:
    return raw.decode(errors="surrogateescape")  # it can be invalid


def find_change(database: Database, table: str) -> str:
    row = database.execute("SELECT name FROM changes WHERE tab = ?", (table,)).fetchone()
    return str(row[0]) if row else ""


def find_revision(database: Database) -> int:
    return int(database.execute("PRAGMA user_version").fetchone()[0])


def set_revision(database: Database, table: str, revision: int) -> None:
    """Set the revision of the state, which has changed a table."""
    database.execute(f"PRAGMA user_version = {revision:d}")
    database.execute("REPLACE INTO changes VALUES (?, ?)", (table, secrets.token_hex(8)))


def write_entry(database: Database, change: EntryChange) -> int:
    """Return the result of `KeyValues.write`."""
    revision = find_revision(database)
    if revision < change.known_revision:
        return LOST
    entry = (change.table, change.key)
    row = database.execute(
        "SELECT revision FROM entries WHERE tab = ? AND key = ?", entry
    ).fetchone()
    if change.expected_revision not in (None, row[0] if row else 0):
        return REFUSED
    revision += 1
    set_revision(database, change.table, revision)
    if change.value is None:
        database.execute("DELETE FROM entries WHERE tab = ? AND key = ?", entry)
    else:
        database.execute(PUT_ENTRY, (*entry, change.value, change.kept_revision or revision))
    return revision


def find_value(
    database: Database, key: str, max_bytes: int, max_ttl_s: float = MAX_TTL_S
) -> object:
    """Return a value; None for one that is missing or has expired, -1 for one that is too large."""
    now = time()
    row = database.execute(READ_VALUE, (max_bytes, key, now, now + max_ttl_s)).fetchone()
    return None if row is None else row[0]


def put_value(database: Database, key: str, value: str | bytes | int, ttl_s: float) -> None:
    database.execute("REPLACE INTO expiring VALUES (?, ?, ?)", (key, value, time() + ttl_s))


def explain_sqlite_error(exc: Exception) -> str:
    strerror = getattr(exc, "strerror", None)
    return str(strerror or exc).lower()
