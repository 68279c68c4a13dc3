"""Jobs in a SQLite database, for the gateways of one machine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final

import orjson

from gateway.capabilities.jobs.files import FOLDER_MODE
from gateway.capabilities.jobs.job import MAX_DOCUMENT_BYTES, StoredJob
from gateway.capabilities.jobs.store import ANY_TOKEN, LEASES, REFUSED, TOO_MANY, TURNS, Change
from gateway.repository.state.sqlite_connection import open_database, transaction

BUSY_TIMEOUT_S: Final = 10.0
# `entries` has the lists: the IDs of their jobs with scores.
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS documents (
    id TEXT PRIMARY KEY, token INTEGER NOT NULL, size_bytes INTEGER NOT NULL, document BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS documents_by_size ON documents (size_bytes);
CREATE TABLE IF NOT EXISTS entries (
    list TEXT NOT NULL, id TEXT NOT NULL, score REAL NOT NULL, PRIMARY KEY (list, id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS entries_by_score ON entries (list, score, id);
CREATE TABLE IF NOT EXISTS names (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
# The document is empty if it is too large for a job, or of another kind.
READ: Final = """SELECT id, iif(typeof(document) = 'blob' AND length(document) <= ?, document, x'')
    FROM documents WHERE id IN (SELECT value FROM json_each(?))"""
PUT_ENTRY: Final = "INSERT OR REPLACE INTO entries VALUES (?, ?, ?)"
DELETE_ENTRIES: Final = (
    "DELETE FROM entries WHERE id = ? AND list IN (SELECT value FROM json_each(?))"
)
COUNT: Final = "SELECT count(*) FROM entries WHERE list = ?"


class SqliteTable:
    """`JobTable` in a database. Its methods block: `BlockingCalls` runs them in a thread.

    Leases end by the monotonic clock, which all processes share: the time of day may be set while jobs run.
    """

    renewal_s = 0.0

    def __init__(self, folder: Path, lease_s: float) -> None:
        self._folder = folder
        self._lease_s = lease_s

    def open(self) -> None:
        self._folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        self._database = open_database(self._folder / "queue.db", SCHEMA, BUSY_TIMEOUT_S)
        self._database.text_factory = partial(str, encoding="utf-8", errors="replace")
        with transaction(self._database):  # leases from before a restart of the machine
            self._database.execute(
                "UPDATE entries SET score = 0 WHERE list = ? AND score > ?",
                (LEASES, time.monotonic() + self._lease_s),
            )

    def close(self) -> None:
        self._database.close()

    def change(self, change: Change) -> str:
        # A start that is lost in a crash of the machine is made again; everything else survives one.
        level = "NORMAL" if change.is_start else "FULL"
        self._database.execute(f"PRAGMA synchronous = {level}")
        with transaction(self._database):
            if change.seen_token is None:
                holder = self._find_name(change.name)
                if holder and holder != change.lost_id:
                    return holder
                if self._read_number(COUNT, change.limited) >= change.max_length:
                    return TOO_MANY
            elif change.seen_token not in (ANY_TOKEN, self._find_token(change.id)):
                return REFUSED
            self._put(change)
        return change.id

    def _put(self, change: Change) -> None:
        execute = self._database.execute
        if change.document:
            values = (change.id, change.token, change.size_bytes, change.document)
            execute("INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?)", values)
            if change.name:
                execute("INSERT OR REPLACE INTO names VALUES (?, ?)", (change.name, change.id))
        else:
            execute("DELETE FROM documents WHERE id = ?", (change.id,))
            execute("DELETE FROM names WHERE (name, value) = (?, ?)", (change.name, change.id))
        scores = {**change.scores, LEASES: None}
        if change.lease_s:
            scores[LEASES] = time.monotonic() + change.lease_s
        execute(DELETE_ENTRIES, (change.id, orjson.dumps([*scores]).decode()))
        entries = [(name, change.id, score) for name, score in scores.items() if score is not None]
        self._database.executemany(PUT_ENTRY, entries)
        if not self.list_ids(change.queue, 0, 1, inf, is_reverse=False):
            execute(DELETE_ENTRIES, (change.owner, orjson.dumps([TURNS]).decode()))
        elif change.is_start or self.find_rank(TURNS, change.owner) is None:
            execute(PUT_ENTRY, (TURNS, change.owner, time.time()))

    def _find_token(self, job_id: str) -> int | None:
        rows = self._database.execute("SELECT token FROM documents WHERE id = ?", (job_id,))
        return next((token for (token,) in rows), None)

    def renew(self, tokens: Mapping[str, int], lease_s: float) -> Set[str]:
        with transaction(self._database):
            own = {job_id for job_id, token in tokens.items() if self._find_token(job_id) == token}
            entries = [(LEASES, job_id, time.monotonic() + lease_s) for job_id in own]
            self._database.executemany(PUT_ENTRY, entries)
        return tokens.keys() - own

    def read(self, *job_ids: str) -> Sequence[StoredJob]:
        arguments = (MAX_DOCUMENT_BYTES, orjson.dumps(job_ids).decode())
        documents = dict(self._database.execute(READ, arguments))
        return [StoredJob(each.encode(), documents.get(each)) for each in job_ids]

    def list_ids(
        self, name: str, first: int, count: int, until: float | None, *, is_reverse: bool
    ) -> Sequence[str]:
        order = "score DESC, id DESC" if is_reverse else "score, id"
        statement = f"SELECT id FROM entries WHERE list = ? AND score <= ? ORDER BY {order} LIMIT ? OFFSET ?"  # noqa: S608 - constants
        last = time.monotonic() if until is None else until
        rows = self._database.execute(statement, (name, last, count, first))
        return [job_id for (job_id,) in rows]

    def find_rank(self, name: str, job_id: str) -> int | None:
        known = "SELECT score, id FROM entries WHERE (list, id) = (?, ?)"
        if self._database.execute(known, (name, job_id)).fetchone() is None:
            return None
        return self._read_number(f"{COUNT} AND (score, id) < ({known})", name, name, job_id)

    def count(self, *names: str) -> Sequence[int]:
        return [self._read_number(COUNT, name) for name in names]

    def measure(self) -> int:
        return self._read_number("SELECT total(size_bytes) FROM documents")

    def keep_name(self, name: str, value: str) -> str:
        if value:
            with transaction(self._database):
                self._database.execute("INSERT OR IGNORE INTO names VALUES (?, ?)", (name, value))
        return self._find_name(name)

    def _find_name(self, name: str) -> str:
        rows = self._database.execute("SELECT value FROM names WHERE name = ?", (name,))
        return next((str(value) for (value,) in rows), "")

    def _read_number(self, statement: str, *arguments: Any) -> int:
        return int(self._database.execute(statement, arguments).fetchone()[0])
