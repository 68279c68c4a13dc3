"""The state store in Redis, for gateways on several machines."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote

import orjson

from gateway.errors import StateUnavailable
from gateway.state import redis_scripts
from gateway.state.desired import (
    OPERATION_TTL_S,
    READ_ACTION,
    WRITE_ACTION,
    BadState,
    DesiredModel,
    UnreadableState,
    decode_operation,
    decode_state,
    desired_model_to_dict,
    is_operation_id,
    parse_desired_model,
    parse_stored_label,
)
from gateway.state.loads import (
    Loads,
    drop_orphaned_loads,
    is_in_progress,
    load_owners,
    new_load_token,
)
from gateway.state.redis_connection import RedisConnection, RedisServer
from gateway.state.redis_windows import RedisRateWindows
from gateway.version_labels import LabelTable, VersionLabel

log = logging.getLogger(__name__)

T = TypeVar("T")
LEASE_MS: Final = 5000
DEFAULT_KEY_PREFIX: Final = "triton-gateway:"
TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
CORDONS_KEY: Final = "cordons"
REVISION_KEY: Final = "revision"
LOST: Final = -1  # the result of a change after Redis has lost its data
MAX_FIELDS: Final = 1000  # a limit of Lua's unpack()


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
class CachedHash(Generic[T]):
    """A hash, which is transferred only if it changed since the last read."""

    keys: tuple[str, str]  # of the hash, and of its last change
    decode: Callable[[Mapping[bytes, bytes]], T]
    value: T
    change: bytes = b""
    entries: Mapping[bytes, bytes] = field(default_factory=dict)  # the value, as it is stored

    def update(self, change: bytes, *hashes: Sequence[bytes]) -> None:
        for flat in hashes:
            entries = dict(zip(flat[::2], flat[1::2], strict=True))
            self.value, self.entries = self.decode(entries), entries
        self.change = change


class RedisStateStore:
    """State for gateways on several machines.

    Each change raises a revision. If that falls, Redis has lost its data, and the gateway that notices writes
    the last known state again.
    """

    is_shared: ClassVar[bool] = True

    def __init__(self, server: RedisServer, prefix: str) -> None:
        self._redis = RedisConnection(server, prefix)
        self._rate_windows = RedisRateWindows(server, prefix)
        self._token = secrets.token_hex(16)
        self._alive_key = format_alive_key(self._token)
        self._leases: set[str] = set()  # the keys of those that were granted
        self._has_loaded = False
        self._revision = 0  # the highest one that was read
        self._cordons: frozenset[str] = frozenset()
        self.loss_count = 0
        # Parameters can contain a whole model, so they are transferred only after a change.
        self._desired_models: CachedHash[Mapping[str, DesiredModel]] = CachedHash(
            ("wishes", "change"), decode_desired_models, {}
        )
        self._labels: CachedHash[LabelTable] = CachedHash(
            ("labels", "labels-change"), decode_labels, {}
        )
        self._loads: CachedHash[Loads] = CachedHash(("loads", "loads-change"), decode_loads, {})

    async def read_desired_models(self) -> Mapping[str, DesiredModel]:
        return await self._read_hash(self._desired_models)

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
        return await self._read_hash(self._labels)

    async def set_label(self, model: str, name: str, label: VersionLabel | None) -> None:
        arguments: list[str | bytes] = [orjson.dumps([model, name]), secrets.token_hex(8)]
        if label is not None:
            arguments.append(orjson.dumps(label.to_dict()))
        await self._change(redis_scripts.SET_LABEL, self._labels, *arguments)

    async def read_loads(self) -> Loads:
        loads = await self._read_hash(self._loads)
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
        loads = await self._read_hash(self._loads)  # with those of exited processes
        fields = [load_field(replica, model) for model in loads.get(replica, {})]
        for start in range(0, len(fields), MAX_FIELDS):
            batch = fields[start : start + MAX_FIELDS]
            change = secrets.token_hex(8)
            await self._write(redis_scripts.FORGET_LOADS, self._loads.keys, change, *batch)

    async def read_cordons(self) -> frozenset[str]:
        def decode(reply: Any) -> int:
            revision, names = reply
            if revision >= self._revision:
                self._cordons = decode_names(names)
            return int(revision)

        script, keys = redis_scripts.READ_CORDONS, (CORDONS_KEY, REVISION_KEY)
        await self._check_revision(
            await self._redis.run_script(READ_ACTION, script, keys, decode=decode)
        )
        return self._cordons

    async def set_cordon(self, replica: str, *, is_cordoned: bool) -> None:
        await self._change(
            redis_scripts.SET_CORDON, None, replica, "SADD" if is_cordoned else "SREM"
        )

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

    async def _read_hash(self, cached: CachedHash[T]) -> T:
        def decode(reply: Any) -> int:
            revision, *update = reply
            if revision >= self._revision:
                cached.update(*update)
            return int(revision)

        script, keys = redis_scripts.READ_IF_CHANGED, (*cached.keys, REVISION_KEY)
        await self._check_revision(
            await self._redis.run_script(READ_ACTION, script, keys, cached.change, decode=decode)
        )
        return cached.value

    async def _check_revision(self, revision: int) -> None:
        """Restore the state if what was read with this revision is older than what is known."""
        if revision < self._revision:
            await self._restore()
        else:
            self._revision = revision

    async def _change(
        self, script: str, cached: CachedHash[Any] | None, *arguments: str | bytes
    ) -> int:
        """Run a script that changes a hash, or without one the cordons; return its result."""
        keys = (CORDONS_KEY,) if cached is None else cached.keys
        script = redis_scripts.CHECK_LOSS + script

        async def run() -> int:
            return await self._redis.run_script(
                WRITE_ACTION,
                script,
                (*keys, REVISION_KEY),
                *(*arguments, self._revision),
                decode=int,
            )

        result = await run()
        if result == LOST:
            await self._restore()
            result = await run()
        with suppress(StateUnavailable):  # what is known must include the change
            await (self.read_cordons() if cached is None else self._read_hash(cached))
        return result

    async def _restore(self) -> None:
        """Write the last known state again, which Redis has lost."""
        hashes = (self._desired_models, self._labels, self._loads)
        change = secrets.token_hex(8)
        arguments: list[str | bytes | int] = [self._revision + 1, change]
        for cached in hashes:
            arguments += [len(cached.entries), *chain.from_iterable(cached.entries.items())]
        arguments += [len(self._cordons), *self._cordons]
        keys = (*chain.from_iterable(cached.keys for cached in hashes), CORDONS_KEY, REVISION_KEY)
        if await self._write(redis_scripts.RESTORE, keys, *arguments):
            self.loss_count += 1
            log.error(
                "Redis has lost the state; the last known one was written again: %d models, labels of %d "
                "models, %d cordons (to go back further, use triton-gateway state import)",
                *(len(self._desired_models.value), len(self._labels.value), len(self._cordons)),
            )

    async def _write(self, script: str, keys: Sequence[str], *arguments: str | bytes | int) -> bool:
        """Run a script that writes, and return the truth of its result."""
        return await self._redis.run_script(WRITE_ACTION, script, keys, *arguments, decode=bool)


def format_alive_key(owner: str) -> str:
    return f"alive:{owner}"


def load_field(replica: str, model: str) -> bytes:
    """Return the hash field of a model on a replica."""
    return orjson.dumps([replica, model])


def decode_desired_models(entries: Mapping[bytes, bytes]) -> Mapping[str, DesiredModel]:
    return {name.decode(): parse_desired_model(decode_state(raw)) for name, raw in entries.items()}


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


def decode_labels(entries: Mapping[bytes, bytes]) -> LabelTable:
    table: dict[str, dict[str, VersionLabel]] = {}
    for key, raw in entries.items():
        model, name = decode_pair(key)
        table.setdefault(model, {})[name] = parse_stored_label(name, decode_state(raw))
    return table


def decode_loads(entries: Mapping[bytes, bytes]) -> Loads:
    loads: dict[str, dict[str, str]] = {}
    for key, load in entries.items():
        replica, model = decode_pair(key)
        loads.setdefault(replica, {})[model] = load.decode()
    return loads
