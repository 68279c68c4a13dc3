"""The state store in Redis, for gateways on several machines."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar, cast
from urllib.parse import SplitResult, parse_qsl, unquote

import orjson

from gateway.access.limits import QuotaCount, RateWindow, WindowCount
from gateway.errors import StateUnavailable
from gateway.repository.state import redis_scripts
from gateway.repository.state.content import (
    CAPABILITY_TABLES,
    CORDONS,
    LOADS,
    MAX_EVENTS,
    MODELS,
    OPERATION_TTL_S,
    DesiredModel,
    Document,
    EventId,
    Loads,
    RawTable,
    StartedLoad,
    StoredEvent,
    Table,
    UnreadableState,
    create_raw_table,
    decode_operation,
    decode_state,
    drop_orphaned_loads,
    drop_token,
    is_in_progress,
    is_operation_id,
    load_owners,
    new_load_token,
    parse_event_id,
)
from gateway.repository.state.interface import COUNT_ACTION, READ_ACTION, WRITE_ACTION, BadState
from gateway.repository.state.redis_connection import RedisConnection, RedisServer
from gateway.repository.state.redis_scripts import ADD_TO_QUOTA, COUNT_INFERENCES

log = logging.getLogger(__name__)

T = TypeVar("T")
LEASE_MS: Final = 5000
DEFAULT_KEY_PREFIX: Final = "triton-gateway:"
TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
# The change that the script RESTORE names: the number of the restoration, and the revision of what it wrote.
RESTORED_CHANGE: Final = re.compile(rb"restored:(\d{1,18}):(\d{1,18})")
HISTORY_KEYS: Final = ("restorations", "revision")
WINDOW_TIMEOUT_S: Final = 0.25  # short, because inference requests wait for it
COUNTER_CONNECTIONS: Final = 16
QUOTA_TIMEOUT_S: Final = 1.0  # longer, because a quota is exact while Redis answers
QUOTA_TTL_S: Final = 40 * 24 * 3600  # longer than a month


def open_redis_store(url: SplitResult, port: int, password: str) -> RedisStateStore | None:
    parsed = parse_redis_url(url, port, password)
    return None if parsed is None else RedisStateStore(*parsed)


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


@dataclass(frozen=True)
class EntryCommands:
    """The Redis commands that read all entries of a table, add one and delete one."""

    read: str
    add: str
    delete: str


HASH: Final = EntryCommands("HGETALL", "HSET", "HDEL")
SET: Final = EntryCommands("SMEMBERS", "SADD", "SREM")


@dataclass(frozen=True, order=True)
class Position:
    """The state that a table shows: how often it had been restored, and the revision since."""

    restorations: int = 0
    revision: int = 0


@dataclass
class CachedTable:
    """A table, as it was last read."""

    table: Table[Any]  # a raw table until its owner has read it
    decode_entries: Callable[[Sequence[bytes]], RawTable]
    keys: tuple[str, str]  # the keys of the table and of its last change
    commands: EntryCommands = HASH
    value: Any = field(default_factory=dict)
    position: Position = Position()
    change: bytes = b""
    entries: Sequence[bytes] = ()  # the value, as it is stored

    def set_owner(self, table: Table[Any]) -> None:
        if self.table is not table:
            self.table = table
            self.value = table.decode({})
            self.change = b""  # read and decode it again

    def is_later_than(self, restorations: int, change: bytes) -> bool:
        """Return whether this was read later than what the last restoration wrote and nothing changed."""
        restored = RESTORED_CHANGE.fullmatch(change)
        if restored is None or restorations <= self.position.restorations:
            return False
        number, revision = map(int, restored.groups())
        return number == restorations and revision < self.position.revision

    def update(self, position: Position, change: bytes, *entries: Sequence[bytes]) -> None:
        for each in entries:  # none, if they have not changed
            self.value = self.table.decode(self.decode_entries(each))
            self.entries = each
        self.position = position
        self.change = change


class RedisStateStore:
    """State for gateways on several machines.

    Each change raises a revision. If that falls, Redis has lost its data. The gateway that notices writes the
    last known state again, and each other one replaces the parts that it had read later.
    """

    is_shared: ClassVar[bool] = True

    def __init__(self, server: RedisServer, prefix: str) -> None:
        self._redis = RedisConnection(server, prefix)
        self.rate_windows = RedisCounters(server, prefix)
        self.quotas = self.rate_windows
        self._token = secrets.token_hex(16)
        self._alive_key = format_alive_key(self._token)
        self._leases: set[str] = set()  # the keys of granted leases
        self._has_loaded = False
        self.loss_count = 0
        decode_loads = partial(decode_pairs, decode=bytes.decode)
        self._loads = CachedTable(create_raw_table(LOADS), decode_loads, change_keys(LOADS))
        self._tables = {
            MODELS.name: CachedTable(MODELS, decode_documents, change_keys(MODELS.name)),
            LOADS: self._loads,
            CORDONS.name: CachedTable(
                CORDONS, decode_members, change_keys(CORDONS.name), commands=SET
            ),
        }
        for name in CAPABILITY_TABLES:
            decode = partial(decode_pairs, decode=decode_state)
            self._tables[name] = CachedTable(create_raw_table(name), decode, change_keys(name))

    async def read(self, table: Table[T]) -> T:
        cached = self._find_table(table)
        await self._read(cached)
        return cast(T, cached.value)

    async def write(self, table: Table[T], keys: Sequence[str], value: Any) -> T:
        # Changes have random names, because a Redis that lost its data would count from 1 again.
        cached = self._find_table(table)
        command = cached.commands.delete if value is None else cached.commands.add
        arguments = [secrets.token_hex(8), command, encode_keys(keys)]
        if value is not None and cached.commands is HASH:
            arguments.append(orjson.dumps(value))
        await self._change(redis_scripts.WRITE_ENTRY, cached, *arguments)
        return cast(T, cached.value)

    async def set_desired_model(
        self, model: str, desired: DesiredModel | None, expected_revision: int | None = None
    ) -> int:
        expected = "" if expected_revision is None else str(expected_revision)
        arguments: list[str | bytes] = [model, secrets.token_hex(8), expected]
        if desired is not None:
            # Without the opening brace: the script inserts the revision first.
            arguments.append(orjson.dumps(desired.to_dict())[1:])
            if desired.revision:
                arguments.append(str(desired.revision))
        models = self._find_table(MODELS)
        return await self._change(redis_scripts.SET_DESIRED_MODEL, models, *arguments)

    def _find_table(self, table: Table[Any]) -> CachedTable:
        cached = self._tables[table.name]
        cached.set_owner(table)
        return cached

    async def read_loads(self) -> Loads:
        loads = await self._read(self._loads)
        alive = {self._token}
        for owner in load_owners(loads) - alive:
            key = self._redis.full_key(format_alive_key(owner))
            if await self._redis.execute(READ_ACTION, "EXISTS", key, decode=bool):
                alive.add(owner)
        return drop_orphaned_loads(loads, frozenset(alive))

    async def begin_load(self, replica: str, model: str) -> StartedLoad:
        self._has_loaded = True
        token = new_load_token(self._token)
        before = await self._redis.run_script(
            WRITE_ACTION,
            redis_scripts.BEGIN_LOAD,
            (*self._loads.keys, self._alive_key),
            encode_keys((replica, model)),
            token,
            LEASE_MS,
            self._token,
            decode=bytes.decode,
        )
        return StartedLoad(token, drop_token(before))

    async def end_load(self, replica: str, model: str, token: str, resulting_load: str) -> None:
        arguments = (encode_keys((replica, model)), token, resulting_load)
        await self._write(redis_scripts.END_LOAD, self._loads.keys, *arguments)

    async def forget_loads(self, replica: str) -> None:
        loads = await self._read(self._loads)  # includes loads of exited processes
        fields = [encode_keys((replica, model)) for model in loads.get(replica, {})]
        change = secrets.token_hex(8)
        await self._write(redis_scripts.FORGET_LOADS, self._loads.keys, change, *fields)

    async def record_operation(self, operation_id: str, document: Document) -> None:
        command = ("SET", self._operation_key(operation_id), orjson.dumps(document))
        await self._redis.execute(WRITE_ACTION, *command, "EX", OPERATION_TTL_S, decode=bool)

    async def read_operation(self, operation_id: str) -> Document | None:
        if not is_operation_id(operation_id):
            return None
        key = self._operation_key(operation_id)
        return await self._redis.execute(
            READ_ACTION, "GET", key, decode=lambda raw: decode_operation(raw) if raw else None
        )

    async def append_event(self, raw: bytes) -> None:
        await self._write(redis_scripts.APPEND_EVENT, ("events",), raw, MAX_EVENTS)

    async def read_events(self, start: EventId | None, limit: int) -> Sequence[StoredEvent]:
        key = self._redis.full_key("events")
        if start is None:
            command = ("XREVRANGE", key, "+", "-", "COUNT", limit)
            newest_first = await self._redis.execute(READ_ACTION, *command, decode=decode_events)
            return newest_first[::-1]
        command = ("XRANGE", key, str(start), "+", "COUNT", limit)
        return await self._redis.execute(READ_ACTION, *command, decode=decode_events)

    async def acquire_lease(self, name: str) -> bool:
        key = f"lease:{name}"
        script = redis_scripts.ACQUIRE_LEASE
        keys = (key, self._alive_key)
        is_granted = await self._write(script, keys, self._token, LEASE_MS)
        if is_granted:
            self._leases.add(key)
        return is_granted

    async def release_lease(self, name: str) -> None:
        key = f"lease:{name}"
        self._leases.discard(key)
        await self._write(redis_scripts.RELEASE_LEASES, (key,), self._token)

    async def exchange_reports(self, report: Document) -> list[Document]:
        return await self._redis.run_script(
            WRITE_ACTION,
            redis_scripts.EXCHANGE_REPORTS,
            ("reports",),
            self._token,
            orjson.dumps(report),
            LEASE_MS,
            decode=decode_reports,
        )

    @property
    def is_available(self) -> bool:
        return self._redis.is_available

    async def close(self) -> None:
        # Resign, so that another process leads at once and not only when the lease has expired.
        if self._leases or self._has_loaded:
            keys = (*self._leases, self._alive_key)
            with suppress(StateUnavailable):
                await self._write(redis_scripts.RELEASE_LEASES, keys, self._token)
        await self._redis.close()
        await self.rate_windows.close()

    def _operation_key(self, operation_id: str) -> str:
        return self._redis.full_key(f"operation:{operation_id}")

    async def _read(self, table: CachedTable) -> Any:
        # Parameters can contain a whole model, so a table is transferred only after a change.
        is_current = await self._redis.run_script(
            READ_ACTION,
            redis_scripts.READ_IF_CHANGED,
            (*table.keys, *HISTORY_KEYS),
            table.commands.read,
            table.change,
            decode=partial(self._update, table),
        )
        if not is_current:
            await self._restore()
        return table.value

    async def _change(self, script: str, table: CachedTable, *arguments: str | bytes) -> int:
        def decode(reply: Any) -> int | None:
            result, *stored = reply
            if not stored:
                return None
            self._update(table, stored)
            return int(result)

        async def run() -> int | None:
            latest = self._find_position()
            return await self._redis.run_script(
                WRITE_ACTION,
                redis_scripts.CHANGE_TABLE % script,
                (*table.keys, *HISTORY_KEYS),
                *arguments,
                table.commands.read,
                latest.restorations,
                latest.revision,
                table.position.restorations,
                decode=decode,
            )

        result = await run()
        if result is None:  # Redis has lost its data, or another gateway has restored them
            await self._restore()
            for each in self._tables.values():
                await self._read(each)
            result = await run()
        if result is None:
            raise StateUnavailable(WRITE_ACTION, "Redis has lost the state repeatedly")
        return result

    def _find_position(self) -> Position:
        return max(table.position for table in self._tables.values())

    def _update(self, table: CachedTable, reply: Sequence[Any]) -> bool:
        """Keep the reply, and return True, unless it is older than the known state, as after a loss.

        Raises `UnreadableState`.
        """
        match reply:
            case [int(restorations), int(revision), bytes(change), *entries]:
                position = Position(restorations, revision)
            case _:
                raise UnreadableState("unexpected counters")
        if position < self._find_position() or table.is_later_than(restorations, change):
            return False
        table.update(position, change, *entries)
        return True

    async def _restore(self) -> None:
        """Write the last known state again, which Redis has lost."""
        latest = self._find_position()
        arguments: list[str | bytes | int] = [latest.restorations, latest.revision]
        for table in self._tables.values():
            entries = table.entries
            if table is self._loads:
                # One in progress may have ended since, and nobody would end it again.
                entries = drop_loads_in_progress(entries)
            arguments += [table.position.restorations, table.position.revision]
            arguments += [table.commands.add, len(entries), *entries]
        keys = (*chain.from_iterable(table.keys for table in self._tables.values()), *HISTORY_KEYS)
        is_lost, written = await self._redis.run_script(
            WRITE_ACTION, redis_scripts.RESTORE, keys, *arguments, decode=tuple
        )
        if is_lost:
            self.loss_count += 1
            counts = {name: len(table.value) for name, table in self._tables.items()}
            tables = [f"{name} of {counts[name]} models" for name in CAPABILITY_TABLES]
            log.error(
                "Redis has lost the state; the last known one was written again: %d models, %s, %d cordons "
                "(to go back further, use triton-gateway state import)",
                counts[MODELS.name],
                ", ".join(tables),
                counts[CORDONS.name],
            )
        elif written:
            log.warning(
                "another gateway has restored the state that Redis lost, from an older copy; %d parts of "
                "it were replaced by what this gateway had read later",
                written,
            )

    async def _write(self, script: str, keys: Sequence[str], *arguments: str | bytes | int) -> bool:
        return await self._redis.run_script(WRITE_ACTION, script, keys, *arguments, decode=bool)


def format_alive_key(owner: str) -> str:
    return f"alive:{owner}"


def change_keys(name: str) -> tuple[str, str]:
    return name, f"{name}-change"


def encode_keys(keys: Sequence[str]) -> str | bytes:
    """Return the field of a hash, or the member of a set."""
    return keys[0] if len(keys) == 1 else orjson.dumps(keys)


def pair_up(values: Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
    return zip(values[::2], values[1::2], strict=True)


def decode_documents(values: Sequence[bytes]) -> RawTable:
    return {name.decode(): decode_state(raw) for name, raw in pair_up(values)}


def decode_pairs(values: Sequence[bytes], decode: Callable[[bytes], Any]) -> RawTable:
    table: dict[str, dict[str, Any]] = {}
    for field_name, raw in pair_up(values):
        match decode_state(field_name):
            case [str(first), str(second)]:
                table.setdefault(first, {})[second] = decode(raw)
            case _:
                raise UnreadableState("unexpected field")
    return table


def decode_members(members: Iterable[bytes]) -> RawTable:
    return {member.decode(): True for member in members}


def drop_loads_in_progress(values: Sequence[bytes]) -> list[bytes]:
    finished = (pair for pair in pair_up(values) if not is_in_progress(pair[1].decode()))
    return list(chain.from_iterable(finished))


def decode_reports(reply: Iterable[bytes]) -> list[Document]:
    documents = map(decode_state, reply)
    return [document for document in documents if isinstance(document, dict)]


def decode_events(reply: Iterable[Any]) -> list[StoredEvent]:
    """Decode the entries of a stream, each an id and its fields. Raises `UnreadableState`."""
    events = []
    for entry in reply:
        match entry:
            case (bytes(name), {b"event": bytes(raw)}):
                event_id = parse_event_id(name.decode())
            case _:
                event_id = None
        if event_id is None:
            raise UnreadableState("unexpected event")
        events.append(StoredEvent(event_id, raw))
    return events


class RedisCounters:
    """Requests and quotas of all gateways, counted by the clock of Redis, because theirs may differ."""

    def __init__(self, server: RedisServer, prefix: str) -> None:
        # Bursts of requests share a few connections instead of opening one each.
        self._redis = RedisConnection(server, prefix, max_connections=COUNTER_CONNECTIONS)

    async def count(
        self, window: RateWindow, name: str, inferences: int, *, opens_window: bool
    ) -> WindowCount:
        key = f"rate:{name}:{window.amount}:{window.length_s}"
        arguments = (window.amount, window.length_s * 1000, inferences, int(opens_window))
        if inferences > 1:
            counting = self._redis.run_script(
                COUNT_ACTION,
                COUNT_INFERENCES,
                (key,),
                *arguments,
                decode=decode_window_count,
                timeout_s=WINDOW_TIMEOUT_S,
            )
        else:
            # If a request that counts as one is counted too late, nobody waits for long.
            command = ("EVAL", COUNT_INFERENCES, 1, self._redis.full_key(key), *arguments)
            counting = self._redis.execute(
                COUNT_ACTION, *command, decode=decode_window_count, timeout_s=WINDOW_TIMEOUT_S
            )
        return await counting

    async def add(self, name: str, limits: Mapping[str, int], count: int) -> QuotaCount:
        return await self._redis.run_script(
            COUNT_ACTION,
            ADD_TO_QUOTA,
            [f"quota:{period}:{name}" for period in limits],
            QUOTA_TTL_S,
            count,
            *limits.values(),
            decode=decode_quota_count,
            timeout_s=QUOTA_TIMEOUT_S,
        )

    async def close(self) -> None:
        await self._redis.close()


def decode_window_count(reply: Sequence[int]) -> WindowCount:
    wait_ms, was_empty = reply
    return WindowCount(wait_ms / 1000, bool(was_empty))


def decode_quota_count(reply: Sequence[int]) -> QuotaCount:
    is_added, *used = reply
    return QuotaCount(bool(is_added), tuple(used))
