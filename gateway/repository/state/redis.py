"""The state in Redis, for gateways on several machines."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import SplitResult, parse_qsl, unquote

from gateway.access.limits import QuotaCount, RateWindow, WindowCount
from gateway.errors import StateUnavailable
from gateway.repository.state.content import MAX_NAME_CHARS, EventId, StoredEvent, parse_event_id
from gateway.repository.state.interface import (
    COUNT_ACTION,
    READ_ACTION,
    UNKNOWN_CHANGE,
    WRITE_ACTION,
    BadState,
    Entries,
    Entry,
    EntryChange,
    Reading,
)
from gateway.repository.state.redis_connection import RedisConnection, RedisServer
from gateway.repository.state.redis_scripts import (
    ADD_TO_COUNTERS,
    APPEND_EVENT,
    CLAIM,
    COUNT_INFERENCES,
    EXCHANGE_REPORTS,
    GET_VALUES,
    READ_EVENTS,
    READ_TABLES,
    RELEASE,
    RESTORE_TABLES,
    WRITE_ENTRY,
)

DEFAULT_KEY_PREFIX: Final = "triton-gateway:"
TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
STATE_KEYS: Final = ("state:revision", "state:changes")
ESCAPED: Final = "surrogateescape"  # what is no UTF-8
MAX_REVISION_DIGITS: Final = 15
MAX_NAME_BYTES: Final = 16 * MAX_NAME_CHARS  # of two names in JSON
MAX_REPLY_ENTRY_BYTES: Final = (
    1 << 20
)  # larger entries have a reply each, and a timeout of their own
WINDOW_TIMEOUT_S: Final = 0.25  # short, because inference requests wait for it
COUNTER_CONNECTIONS: Final = 16  # which bursts of requests share, instead of opening one each
QUOTA_TIMEOUT_S: Final = 1.0  # longer, because a quota is exact while Redis answers


def open_redis_store(url: SplitResult, port: int, password: str) -> RedisKeyValues | None:
    parsed = parse_redis_url(url, port, password)
    return None if parsed is None else RedisKeyValues(*parsed)


def parse_redis_url(
    url: SplitResult, port: int, password: str, setting: str = "GATEWAY_STATE"
) -> tuple[RedisServer, str] | None:
    """Return the server and the prefix of all keys; None for an invalid URL. Raises `BadState`."""
    options = dict(parse_qsl(url.query, keep_blank_values=True))
    prefix = options.pop("prefix", DEFAULT_KEY_PREFIX)
    database = url.path.strip("/") or "0"
    tls = url.scheme == "rediss"
    is_valid_query = options.keys() <= set(TLS_FILES if tls else ())
    if not (url.hostname and database.isdecimal() and is_valid_query) or url.fragment:
        return None
    for name, file in options.items():
        if not Path(file).is_file():
            raise BadState(f"{setting}: file {file} of {name} not found")
    server = RedisServer(
        unquote(url.hostname),
        port,
        int(database),
        user=None if url.username is None else unquote(url.username) or None,
        password=(password or None) if url.password is None else unquote(url.password),
        tls=options if tls else None,
    )
    return server, prefix


class RedisKeyValues:
    """A `KeyValues` in Redis, by whose clock everything expires, because those of gateways may differ."""

    is_shared: ClassVar[bool] = True

    def __init__(self, server: RedisServer, prefix: str) -> None:
        self._redis = RedisConnection(server, prefix)
        self._read = partial(self._redis.run_script, READ_ACTION)
        self._change = partial(self._redis.run_script, WRITE_ACTION)
        self._counters = RedisConnection(server, prefix, max_connections=COUNTER_CONNECTIONS)
        self.rate_windows = RedisRateWindows(self._counters)

    @property
    def is_available(self) -> bool:
        return self._redis.is_available

    async def read(self, known: Mapping[str, tuple[str, int]]) -> Reading:
        arguments: list[str | int] = [MAX_NAME_BYTES, MAX_REPLY_ENTRY_BYTES]
        for change, max_bytes in known.values():
            arguments += [change, max_bytes + MAX_REVISION_DIGITS + 1]
        revision, *tables = await self._read(
            READ_TABLES, name_tables(known), *arguments, decode=decode_tables
        )
        readings = {}
        for name, (_, change, *found) in zip(known, tables, strict=True):
            if found:  # the change is not known
                entries, large = found
                is_whole = await self._read_large_entries(name, entries, large)
                readings[name] = (change if is_whole else UNKNOWN_CHANGE, entries)
        damaged = [name for name, table in zip(known, tables, strict=True) if table[0]]
        return Reading(revision, readings, damaged)

    async def _read_large_entries(
        self, table: str, entries: dict[str, Entry], keys: Sequence[str]
    ) -> bool:
        """Read entries one by one, and return whether they were read: the others do not wait for them."""
        is_whole = True
        for key in keys:
            command = ("HGET", self._redis.full_key(name_table(table)), key.encode(errors=ESCAPED))
            try:
                entries[key] = await self._redis.execute(READ_ACTION, *command, decode=decode_entry)
            except StateUnavailable:
                is_whole = False
        return is_whole

    async def write(self, change: EntryChange) -> int:
        expected = "" if change.expected_revision is None else change.expected_revision
        arguments: list[str | bytes | int] = [change.known_revision, secrets.token_hex(8)]
        arguments += [change.key, expected, change.kept_revision or ""]
        if change.value is not None:
            arguments.append(change.value)
        keys = name_tables([change.table])
        return await self._change(WRITE_ENTRY, keys, *arguments, decode=int)

    async def restore(self, revision: int, tables: Mapping[str, Entries]) -> bool:
        arguments: list[str | bytes | int] = [revision, secrets.token_hex(8)]
        for number, entries in enumerate(tables.values(), len(STATE_KEYS) + 1):
            for key, entry in entries.items():
                arguments += [number, key, b"%d %b" % (entry.revision, entry.value)]
        return await self._change(RESTORE_TABLES, name_tables(tables), *arguments, decode=bool)

    async def claim(self, names: Sequence[str], owner: str, ttl_s: float) -> bool:
        return await self._change(CLAIM, names, owner, to_ms(ttl_s), decode=bool)

    async def release(self, names: Sequence[str], owner: str) -> None:
        await self._change(RELEASE, names, owner, decode=bool)

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        command = ("SET", self._redis.full_key(key), value, "PX", to_ms(ttl_s))
        await self._redis.execute(WRITE_ACTION, *command, decode=bool)

    async def get(self, keys: Sequence[str], max_bytes: int) -> Sequence[object]:
        return await self._read(GET_VALUES, keys, max_bytes, decode=list)

    async def exchange(
        self, owner: str, report: bytes, ttl_s: float, max_bytes: int
    ) -> Sequence[object]:
        arguments = (owner, report, to_ms(ttl_s), max_bytes)
        return await self._change(EXCHANGE_REPORTS, ["reports"], *arguments, decode=list)

    async def append_event(self, raw: bytes, max_events: int) -> None:
        await self._change(APPEND_EVENT, ["events"], raw, max_events, decode=bool)

    async def read_events(
        self, start: EventId, limit: int, max_bytes: int
    ) -> Sequence[StoredEvent]:
        arguments = (str(start), limit, max_bytes)
        return await self._read(READ_EVENTS, ["events"], *arguments, decode=decode_events)

    async def count(self, limits: Mapping[str, int], amount: int, ttl_s: float) -> QuotaCount:
        return await self._counters.run_script(
            COUNT_ACTION,
            ADD_TO_COUNTERS,
            list(limits),
            *(to_ms(ttl_s), amount, *limits.values()),
            decode=decode_counts,
            timeout_s=QUOTA_TIMEOUT_S,
        )

    async def find_weakness(self) -> str:
        with suppress(StateUnavailable):  # a managed Redis may not say
            if not await self._redis.is_append_only():
                return "the state is lost when Redis ends, because its appendonly is no"
        return ""

    async def close(self) -> None:
        await self._redis.close()
        await self._counters.close()


class RedisRateWindows:
    """Requests of all gateways, counted by the clock of Redis."""

    def __init__(self, connection: RedisConnection) -> None:
        self._redis = connection

    async def count(
        self, window: RateWindow, name: str, inferences: int, *, opens_window: bool
    ) -> WindowCount:
        key = f"rate:{name}:{window.amount}:{window.length_s}"
        arguments = (window.amount, to_ms(window.length_s), inferences, int(opens_window))
        options: Any = {"decode": decode_window_count, "timeout_s": WINDOW_TIMEOUT_S}
        if inferences > 1:
            return await self._redis.run_script(
                COUNT_ACTION, COUNT_INFERENCES, (key,), *arguments, **options
            )
        # If a request that counts as one is counted too late, nobody waits for long.
        command = ("EVAL", COUNT_INFERENCES, 1, self._redis.full_key(key), *arguments)
        return await self._redis.execute(COUNT_ACTION, *command, **options)


def name_table(table: str) -> str:
    return f"state:{table}"


def name_tables(tables: Iterable[str]) -> list[str]:
    return [*STATE_KEYS, *map(name_table, tables)]


def to_ms(seconds: float) -> int:
    return int(seconds * 1000)


def decode_tables(reply: Any) -> list[Any]:
    """Decode the reply of `READ_TABLES`: changes, keys and entries."""
    revision, *tables = reply
    decoded: list[Any] = [int(revision)]
    for is_damaged, change, *found in tables:
        table = [bool(is_damaged), change.decode(errors="replace")]
        for entries, large in [found] if found else []:
            keys = [key.decode(errors=ESCAPED) for key in entries[::2]]
            values = map(decode_entry, entries[1::2])
            table += [
                dict(zip(keys, values, strict=True)),
                [key.decode(errors=ESCAPED) for key in large],
            ]
        decoded.append(table)
    return decoded


def decode_entry(raw: bytes) -> Entry:
    value = raw.lstrip(b"0123456789")
    digits = raw[: len(raw) - len(value)]
    is_revision = 0 < len(digits) <= MAX_REVISION_DIGITS
    return Entry(value[1:] if value[:1] == b" " else None, int(digits) if is_revision else 0)


def decode_events(reply: Sequence[Any]) -> list[StoredEvent]:
    events = []
    for name, raw in reversed(reply):
        event_id = parse_event_id(name.decode())
        events.append(StoredEvent(event_id or EventId(0), raw if event_id else None))
    return events


def decode_counts(reply: Sequence[int]) -> QuotaCount:
    is_added, unreadable, *used = reply
    return QuotaCount(bool(is_added), tuple(used), unreadable)


def decode_window_count(reply: Sequence[int]) -> WindowCount:
    wait_ms, was_empty = reply
    return WindowCount(wait_ms / 1000, bool(was_empty))
