"""Stores of one state, as several gateways would open them, and whoever else writes to its place."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import redis

from gateway.repository.models_file import ModelsFile
from gateway.repository.reconciler import FLEET_LEASE
from gateway.repository.shared_state import SharedState
from gateway.repository.state.content import ALL, DesiredModel, create_raw_table
from gateway.repository.state.places import open_state_store
from gateway.repository.state.store import StateStore

ID = "0123456789abcdef" * 2
LABELS = create_raw_table("labels")
LOADED = DesiredModel(ALL)
UNLOADED = DesiredModel(0)


@asynccontextmanager
async def opened(url: str, count: int = 1) -> AsyncIterator[list[StateStore]]:
    """Open stores of one state, like so many processes would."""
    stores = [open_state_store(url) for _ in range(count)]
    try:
        yield stores
    finally:
        for store in stores:
            await store.close()


async def is_leader(store: StateStore) -> bool:
    state = SharedState(store, ModelsFile(None), can_upload=False)
    return await state.renew_lease(FLEET_LEASE)


class Intruder(Protocol):
    """Somebody who writes to the place of a state without a gateway."""

    def put_entry(self, table: str, key: str | bytes, value: bytes) -> None: ...

    def put_value(self, key: str, value: bytes) -> None:
        """Store a value that expires later."""

    def put_report(self, owner: str, report: bytes) -> None: ...

    def put_event(self, raw: bytes) -> None: ...

    def lose_everything(self) -> None: ...


class FileIntruder:
    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def connect(self) -> Iterator[sqlite3.Connection]:
        database = sqlite3.connect(self._path, isolation_level=None)
        try:
            yield database
        finally:
            database.close()

    def _execute(self, statement: str, *arguments: Any) -> None:
        with self.connect() as database:
            database.execute(statement, arguments)

    def put_entry(self, table: str, key: str | bytes, value: bytes) -> None:
        entry = "REPLACE INTO entries VALUES (?, CAST(? AS TEXT), ?, 7)"
        self._execute(entry, table, key, value)
        self._execute("REPLACE INTO changes VALUES (?, hex(randomblob(8)))", table)

    def put_value(self, key: str, value: bytes) -> None:
        at = "unixepoch() + 4.0"
        self._execute(f"REPLACE INTO expiring VALUES (?, ?, {at})", key, value)

    def put_report(self, owner: str, report: bytes) -> None:
        self.put_value(f"report:{owner}", report)

    def put_event(self, raw: bytes) -> None:
        last = "SELECT ifnull(max(time_ms), 0) + 1 FROM events"
        self._execute(f"INSERT INTO events VALUES (({last}), 0, ?)", raw)

    def lose_everything(self) -> None:
        self._path.unlink()


class RedisIntruder:
    def __init__(self, client: redis.Redis, prefix: str) -> None:
        self.client = client
        self.prefix = prefix

    def put_entry(self, table: str, key: str | bytes, value: bytes) -> None:
        name = f"{self.prefix}state:{table}"
        self.client.hset(name, key, b"7 " + value)
        self.client.hset(f"{self.prefix}state:changes", name, uuid4().hex)

    def put_value(self, key: str, value: bytes) -> None:
        self.client.set(f"{self.prefix}{key}", value, ex=4)

    def put_report(self, owner: str, report: bytes) -> None:
        seconds, microseconds = self.client.time()
        at = seconds * 1000 + microseconds // 1000
        self.client.hset(f"{self.prefix}reports", owner, b"%d %b" % (at, report))

    def put_event(self, raw: bytes) -> None:
        self.client.xadd(f"{self.prefix}events", {"event": raw})

    def lose_everything(self) -> None:
        self.client.flushall()
