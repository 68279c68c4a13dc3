"""The state store in Redis, for gateways on several machines."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote

import orjson
from limits import RateLimitItem

from gateway.access.rate_limit import WindowCount
from gateway.errors import StateUnavailable
from gateway.repository.state import redis_scripts
from gateway.repository.state.desired import (
    OPERATION_TTL_S,
    READ_ACTION,
    WRITE_ACTION,
    BadState,
    DesiredModel,
    OutageLog,
    UnreadableState,
    decode_operation,
    decode_state,
    desired_model_to_dict,
    is_operation_id,
    parse_desired_model,
    parse_stored_label,
)
from gateway.repository.state.loads import (
    Loads,
    drop_orphaned_loads,
    is_in_progress,
    load_owners,
    new_load_token,
)
from gateway.repository.state.redis_connection import (
    RedisConnection,
    RedisServer,
    create_redis_client,
    explain_redis_error,
    redis_exceptions,
)
from gateway.repository.state.redis_scripts import CHECK_DEADLINE, COUNT_INFERENCES
from gateway.version_labels import LabelTable, VersionLabel

log = logging.getLogger(__name__)

T = TypeVar("T")
LEASE_MS: Final = 5000
DEFAULT_KEY_PREFIX: Final = "triton-gateway:"
TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
# The change that the script RESTORE names: the number of the restoration, and the revision of what it wrote.
RESTORED_CHANGE: Final = re.compile(rb"restored:(\d{1,18}):(\d{1,18})")
HISTORY_KEYS: Final = ("restorations", "revision")
MAX_FIELDS: Final = 1000  # a limit of Lua's unpack()
WINDOW_TIMEOUT_S: Final = 0.25  # short, because inference requests wait for it
WINDOW_CONNECTIONS: Final = 16
COUNT_ACTION: Final = "used to count requests"


def open_redis_store(url: SplitResult, port: int) -> RedisStateStore | None:
    options = dict(parse_qsl(url.query, keep_blank_values=True))
    prefix = options.pop("prefix", DEFAULT_KEY_PREFIX)
    database = url.path.strip("/") or "0"
    tls = url.scheme == "rediss"
    is_valid_query = options.keys() <= set(TLS_FILES if tls else ())
    if not (url.hostname and database.isdecimal() and is_valid_query) or url.fragment:
        return None
    for name, file in options.items():
        if not Path(file).is_file():
            raise BadState(f"GATEWAY_STATE: file {file} of {name} not found")
    server = RedisServer(
        unquote(url.hostname),
        port,
        int(database),
        None if url.username is None else unquote(url.username) or None,
        None if url.password is None else unquote(url.password),
        options if tls else None,
    )
    return RedisStateStore(server, prefix)


@dataclass
class CachedPart(Generic[T]):
    """A hash or a set of the state, as it was last read."""

    keys: tuple[str, str]  # of the part, and of its last change
    decode: Callable[[Sequence[bytes]], T]
    value: T
    commands: tuple[str, str] = ("HGETALL", "HSET")  # that read and write it
    position: tuple[int, int] = (0, 0)  # the restorations that it includes, and its revision
    change: bytes = b""
    entries: Sequence[bytes] = ()  # the value, as it is stored

    def is_later_than(self, restorations: int, change: bytes) -> bool:
        """Return whether this was read later than what the last restoration wrote and nothing changed."""
        restored = RESTORED_CHANGE.fullmatch(change)
        if restored is None or restorations <= self.position[0]:
            return False
        number, revision = map(int, restored.groups())
        return number == restorations and revision < self.position[1]

    def update(self, position: tuple[int, int], change: bytes, *entries: Sequence[bytes]) -> None:
        for each in entries:  # none, if they have not changed
            self.value, self.entries = self.decode(each), each
        self.position, self.change = position, change


class RedisStateStore:
    """State for gateways on several machines.

    Each change raises a revision. If that falls, Redis has lost its data. The gateway that notices writes the
    last known state again, and each other one replaces the parts that it had read later.
    """

    is_shared: ClassVar[bool] = True

    def __init__(self, server: RedisServer, prefix: str) -> None:
        self._redis = RedisConnection(server, prefix)
        self._rate_windows = RedisRateWindows(server, prefix)
        self._token = secrets.token_hex(16)
        self._alive_key = format_alive_key(self._token)
        self._leases: set[str] = set()  # the keys of those that were granted
        self._has_loaded = False
        self.loss_count = 0
        self._desired_models: CachedPart[Mapping[str, DesiredModel]] = CachedPart(
            ("wishes", "change"), decode_desired_models, {}
        )
        self._labels: CachedPart[LabelTable] = CachedPart(
            ("labels", "labels-change"), decode_labels, {}
        )
        self._loads: CachedPart[Loads] = CachedPart(("loads", "loads-change"), decode_loads, {})
        self._cordons: CachedPart[frozenset[str]] = CachedPart(
            ("cordons", "cordons-change"), decode_names, frozenset(), ("SMEMBERS", "SADD")
        )
        self._parts: tuple[CachedPart[Any], ...] = (
            self._desired_models,
            self._labels,
            self._loads,
            self._cordons,
        )

    async def read_desired_models(self) -> Mapping[str, DesiredModel]:
        return await self._read(self._desired_models)

    async def set_desired_model(
        self, model: str, desired: DesiredModel | None, expected_revision: int | None = None
    ) -> int:
        # Changes have random names, because a Redis that lost its data would count from 1 again.
        expected = "" if expected_revision is None else str(expected_revision)
        arguments: list[str | bytes] = [model, secrets.token_hex(8), expected]
        if desired is not None:
            # Without the opening brace: the script inserts the revision first.
            arguments.append(orjson.dumps(desired_model_to_dict(desired))[1:])
            if desired.revision:
                arguments.append(str(desired.revision))
        script = redis_scripts.SET_DESIRED_MODEL
        return await self._change(script, self._desired_models, *arguments)

    async def read_labels(self) -> LabelTable:
        return await self._read(self._labels)

    async def set_label(self, model: str, name: str, label: VersionLabel | None) -> None:
        arguments: list[str | bytes] = [orjson.dumps([model, name]), secrets.token_hex(8)]
        if label is not None:
            arguments.append(orjson.dumps(label.to_dict()))
        await self._change(redis_scripts.SET_LABEL, self._labels, *arguments)

    async def read_loads(self) -> Loads:
        loads = await self._read(self._loads)
        alive = {self._token}
        for owner in load_owners(loads) - alive:
            key = self._redis.full_key(format_alive_key(owner))
            if await self._redis.execute(READ_ACTION, "EXISTS", key, decode=bool):
                alive.add(owner)
        return drop_orphaned_loads(loads, frozenset(alive))

    async def begin_load(self, replica: str, model: str) -> tuple[str, str]:
        self._has_loaded = True
        token = new_load_token(self._token)
        before = await self._redis.run_script(
            WRITE_ACTION,
            redis_scripts.BEGIN_LOAD,
            (*self._loads.keys, self._alive_key),
            *(load_field(replica, model), token, LEASE_MS, self._token),
            decode=bytes.decode,
        )
        return token, "" if is_in_progress(before) else before

    async def end_load(self, replica: str, model: str, token: str, resulting_load: str) -> None:
        field = load_field(replica, model)
        script = redis_scripts.END_LOAD
        await self._write(script, self._loads.keys, field, token, resulting_load)

    async def forget_loads(self, replica: str) -> None:
        loads = await self._read(self._loads)  # with those of exited processes
        fields = [load_field(replica, model) for model in loads.get(replica, {})]
        for start in range(0, len(fields), MAX_FIELDS):
            batch = fields[start : start + MAX_FIELDS]
            change = secrets.token_hex(8)
            await self._write(redis_scripts.FORGET_LOADS, self._loads.keys, change, *batch)

    async def read_cordons(self) -> frozenset[str]:
        return await self._read(self._cordons)

    async def set_cordon(self, replica: str, *, is_cordoned: bool) -> None:
        arguments = (replica, secrets.token_hex(8), "SADD" if is_cordoned else "SREM")
        await self._change(redis_scripts.SET_CORDON, self._cordons, *arguments)

    async def record_operation(self, operation_id: str, document: Mapping[str, Any]) -> None:
        command = ("SET", self._operation_key(operation_id), orjson.dumps(document))
        await self._redis.execute(WRITE_ACTION, *command, "EX", OPERATION_TTL_S, decode=bool)

    async def read_operation(self, operation_id: str) -> Mapping[str, Any] | None:
        if not is_operation_id(operation_id):
            return None
        key = self._operation_key(operation_id)
        return await self._redis.execute(
            READ_ACTION, "GET", key, decode=lambda raw: decode_operation(raw) if raw else None
        )

    async def acquire_lease(self, name: str) -> bool:
        key = f"lease:{name}"
        script, keys = redis_scripts.ACQUIRE_LEASE, (key, self._alive_key)
        is_granted = await self._write(script, keys, self._token, LEASE_MS)
        if is_granted:
            self._leases.add(key)
        return is_granted

    async def release_lease(self, name: str) -> None:
        key = f"lease:{name}"
        self._leases.discard(key)
        await self._write(redis_scripts.RELEASE_LEASES, (key,), self._token)

    async def exchange_reports(self, report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        return await self._redis.run_script(
            WRITE_ACTION,
            redis_scripts.EXCHANGE_REPORTS,
            ("reports",),
            *(self._token, orjson.dumps(report), LEASE_MS),
            decode=decode_reports,
        )

    def rate_windows(self) -> RedisRateWindows:
        return self._rate_windows

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
        await self._rate_windows.close()

    def _operation_key(self, operation_id: str) -> str:
        return self._redis.full_key(f"operation:{operation_id}")

    async def _read(self, part: CachedPart[T]) -> T:
        # Parameters can contain a whole model, so a part is transferred only after a change.
        is_current = await self._redis.run_script(
            READ_ACTION,
            redis_scripts.READ_IF_CHANGED,
            (*part.keys, *HISTORY_KEYS),
            *(part.commands[0], part.change),
            decode=partial(self._update, part),
        )
        if not is_current:
            await self._restore()
        return part.value

    async def _change(self, script: str, part: CachedPart[Any], *arguments: str | bytes) -> int:
        """Run a script that changes a part, and return its result."""

        def decode(reply: Any) -> int | None:
            result, *stored = reply
            if not stored:
                return None
            self._update(part, stored)
            return int(result)

        async def run() -> int | None:
            return await self._redis.run_script(
                WRITE_ACTION,
                redis_scripts.CHANGE_PART % script,
                (*part.keys, *HISTORY_KEYS),
                *(*arguments, part.commands[0], *self._find_position(), part.position[0]),
                decode=decode,
            )

        result = await run()
        if result is None:  # Redis has lost its data, or another gateway has restored them
            await self._restore()
            for each in self._parts:
                await self._read(each)
            result = await run()
        if result is None:
            raise StateUnavailable(WRITE_ACTION, "Redis has lost the state repeatedly")
        return result

    def _find_position(self) -> tuple[int, int]:
        """Return how many restorations this gateway has seen, and the latest revision since."""
        return max(part.position for part in self._parts)

    def _update(self, part: CachedPart[Any], reply: Sequence[Any]) -> bool:
        """Note what was read. Return whether it is, unlike after a loss, what is known or later.

        Raises `UnreadableState`.
        """
        match reply:
            case [int(restorations), int(revision), bytes(change), *entries]:
                position = restorations, revision
            case _:
                raise UnreadableState("unexpected counters")
        if position < self._find_position() or part.is_later_than(restorations, change):
            return False
        part.update(position, change, *entries)
        return True

    async def _restore(self) -> None:
        """Write the last known state again, which Redis has lost."""
        arguments: list[str | bytes | int] = [*self._find_position()]
        for part in self._parts:
            entries = part.entries
            if (
                part is self._loads
            ):  # one in progress may have ended since, and nobody would end it again
                entries = drop_loads_in_progress(entries)
            arguments += [*part.position, part.commands[1], len(entries), *entries]
        keys = (*chain.from_iterable(part.keys for part in self._parts), *HISTORY_KEYS)
        is_lost, written = await self._redis.run_script(
            WRITE_ACTION, redis_scripts.RESTORE, keys, *arguments, decode=tuple
        )
        if is_lost:
            self.loss_count += 1
            log.error(
                "Redis has lost the state; the last known one was written again: %d models, labels of %d "
                "models, %d cordons (to go back further, use triton-gateway state import)",
                *(len(self._desired_models.value), len(self._labels.value)),
                len(self._cordons.value),
            )
        elif written:
            log.warning(
                "another gateway has restored the state that Redis lost, from an older copy; %d parts of "
                "it were replaced by what this gateway had read later",
                written,
            )

    async def _write(self, script: str, keys: Sequence[str], *arguments: str | bytes | int) -> bool:
        """Run a script that writes, and return the truth of its result."""
        return await self._redis.run_script(WRITE_ACTION, script, keys, *arguments, decode=bool)


def format_alive_key(owner: str) -> str:
    return f"alive:{owner}"


def load_field(replica: str, model: str) -> bytes:
    """Return the hash field of a model on a replica."""
    return orjson.dumps([replica, model])


def pair_up(values: Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
    """Return the entries of a hash, whose fields and values alternate."""
    return zip(values[::2], values[1::2], strict=True)


def decode_desired_models(values: Sequence[bytes]) -> Mapping[str, DesiredModel]:
    return {name.decode(): parse_desired_model(decode_state(raw)) for name, raw in pair_up(values)}


def decode_pair(field: bytes) -> tuple[str, str]:
    """Return the two names of a field of a hash. Raises `UnreadableState`."""
    match decode_state(field):
        case [str(first), str(second)]:
            return first, second
    raise UnreadableState("unexpected field")


def decode_reports(reply: Iterable[bytes]) -> list[Mapping[str, Any]]:
    documents = map(decode_state, reply)
    return [document for document in documents if isinstance(document, dict)]


def decode_names(members: Iterable[bytes]) -> frozenset[str]:
    return frozenset(member.decode() for member in members)


def decode_labels(values: Sequence[bytes]) -> LabelTable:
    table: dict[str, dict[str, VersionLabel]] = {}
    for key, raw in pair_up(values):
        model, name = decode_pair(key)
        table.setdefault(model, {})[name] = parse_stored_label(name, decode_state(raw))
    return table


def drop_loads_in_progress(values: Sequence[bytes]) -> list[bytes]:
    finished = (pair for pair in pair_up(values) if not is_in_progress(pair[1].decode()))
    return list(chain.from_iterable(finished))


def decode_loads(values: Sequence[bytes]) -> Loads:
    loads: dict[str, dict[str, str]] = {}
    for key, load in pair_up(values):
        replica, model = decode_pair(key)
        loads.setdefault(replica, {})[model] = load.decode()
    return loads


class RedisRateWindows:
    """Requests of all gateways, counted by the clock of Redis, because theirs may differ."""

    def __init__(self, server: RedisServer, prefix: str) -> None:
        from redis.asyncio import BlockingConnectionPool, Redis  # noqa: PLC0415 - an optional dependency

        default_pool = create_redis_client(server).connection_pool
        # Bursts of requests share a few connections instead of opening one each.
        self._pool: Any = BlockingConnectionPool(
            connection_class=default_pool.connection_class,
            max_connections=WINDOW_CONNECTIONS,
            timeout=WINDOW_TIMEOUT_S,
            **default_pool.connection_kwargs,
        )
        self._client: Any = Redis(connection_pool=self._pool)
        # If a request that counts as one is counted too late, nobody waits for long.
        self._count_one = self._client.register_script(COUNT_INFERENCES)
        self._count_several = self._client.register_script(CHECK_DEADLINE + COUNT_INFERENCES)
        self._key_prefix = f"{prefix}rate:"
        self._failures = redis_exceptions()
        self._outages = OutageLog(str(server))

    async def count(
        self, window: RateLimitItem, name: str, inferences: int, *, opens_window: bool
    ) -> WindowCount:
        keys = [self._key_prefix + window.key_for(name)]
        arguments = [window.amount, window.get_expiry() * 1000, inferences, int(opens_window)]
        script = self._count_one
        try:
            if inferences > 1:
                script = self._count_several
                now_s, now_us = await asyncio.wait_for(self._client.time(), WINDOW_TIMEOUT_S)
                # The caller waits for a response at least as long from now on.
                arguments.append(now_s * 1000 + now_us // 1000 + int(WINDOW_TIMEOUT_S * 1000))
            counting = script(keys=keys, args=arguments)
            wait_ms, was_empty = await asyncio.wait_for(counting, WINDOW_TIMEOUT_S)
        except self._failures as exc:
            raise self._outages.record_failure(COUNT_ACTION, explain_redis_error(exc)) from None
        self._outages.record_success(COUNT_ACTION)
        return WindowCount(wait_ms / 1000, bool(was_empty))

    async def close(self) -> None:
        with suppress(*self._failures):
            await self._pool.aclose()
