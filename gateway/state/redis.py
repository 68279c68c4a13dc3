"""The state store in Redis, for gateways on several machines."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote

import orjson
from limits import RateLimitItem
from limits.aio.strategies import SlidingWindowCounterRateLimiter

from gateway.errors import StateUnavailable
from gateway.state.desired import (
    OPERATION_TTL_S,
    READ_ACTION,
    WRITE_ACTION,
    BadState,
    DesiredModel,
    OutageLog,
    UnreadableState,
    decode_state,
    desired_model_to_dict,
    is_operation_id,
    parse_desired_model,
    require_operation_id,
)
from gateway.state.loads import (
    Loads,
    drop_orphaned_loads,
    is_in_progress,
    load_owners,
    new_load_token,
)

T = TypeVar("T")
REDIS_TIMEOUT_S: Final = 1.0  # to connect, and for each response
COMMAND_TIMEOUT_S: Final = 3.0  # in total, with a second connection if the first was stale
LEASE_MS: Final = 5000
WINDOW_TIMEOUT_S: Final = 0.25  # short, because inference requests wait for it
WINDOW_CONNECTIONS: Final = 16
CLOCK_SLACK_S: Final = 1.0
MIN_WINDOW_WAIT_S: Final = 0.001
COUNT_ACTION: Final = "used to count requests"
DEFAULT_KEY_PREFIX: Final = "triton-gateway:"
TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


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


@dataclass(frozen=True)
class RedisServer:
    """The address of a Redis, and the credentials to use."""

    host: str
    port: int
    database: int
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: Mapping[str, str] | None = None

    def __str__(self) -> str:
        scheme = "redis" if self.tls is None else "rediss"
        return f"{scheme}://{self.host}:{self.port}/{self.database}"


# Scripts make changes of several keys, and read-modify-write changes, atomic.
SET_DESIRED_MODEL_SCRIPT = """
local revision = redis.call('INCR', KEYS[2])
if ARGV[4] then
  revision = tonumber(ARGV[4])
end
redis.call('SET', KEYS[3], ARGV[2])
if ARGV[3] then
  redis.call('HSET', KEYS[1], ARGV[1], string.format('{"revision":%d,', revision) .. ARGV[3])
else
  redis.call('HDEL', KEYS[1], ARGV[1])
end
return revision
"""
# Return a hash only if it changed since the last read.
READ_IF_CHANGED_SCRIPT = """
local change = redis.call('GET', KEYS[2])
if change and change == ARGV[1] then
  return {change}
end
return {change or '', redis.call('HGETALL', KEYS[1])}
"""
BEGIN_LOAD_SCRIPT = """
local before = redis.call('HGET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[2])
redis.call('SET', KEYS[3], '1', 'PX', ARGV[3])
return before or ''
"""
END_LOAD_SCRIPT = """
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] and ARGV[3] ~= '' then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
else
  redis.call('HDEL', KEYS[1], ARGV[1])
end
redis.call('SET', KEYS[2], ARGV[2] .. '.')
return 1
"""
FORGET_LOADS_SCRIPT = """
local count = redis.call('HDEL', KEYS[1], unpack(ARGV, 2))
redis.call('SET', KEYS[2], ARGV[1])
return count
"""
LEAD_SCRIPT = """
redis.call('SET', KEYS[2], '1', 'PX', ARGV[2])
local leader = redis.call('GET', KEYS[1])
if leader and leader ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
RESIGN_SCRIPT = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
redis.call('DEL', KEYS[2])
"""
# Exception name (of the class or a base class) → reason. The exception's own text is never shown, because
# Redis quotes the arguments of rejected commands, which can include the password.
REDIS_REASONS = {
    "TimeoutError": "no response from Redis",
    "AuthenticationError": "Redis rejects this user or password",
    "AuthorizationError": "Redis denies this user access",
    "NoPermissionError": "Redis denies this user a required command or key",
    "BusyLoadingError": "Redis is still loading its data",
    "ReadOnlyError": "this Redis is a read-only replica",
    "OutOfMemoryError": "Redis is out of memory",
    "ResponseError": "Redis rejected a command",
    "InvalidResponse": "the server is not Redis",
    "Exception": "Redis is unreachable",
}
MAX_FIELDS: Final = 1000  # a limit of Lua's unpack()
ERROR_CODE = re.compile("[A-Z]{4,}(?= )")  # the prefix of an error, such as MISCONF or WRONGTYPE


def explain_redis_error(exc: Exception) -> str:
    known = (REDIS_REASONS.get(kind.__name__) for kind in type(exc).__mro__)
    reason, code = next(filter(None, known)), ERROR_CODE.match(str(exc))
    return f"{reason} ({code[0]})" if code else reason


def create_redis_client(server: RedisServer) -> Any:
    """Create a redis-py client with timeouts, which connects on first use. Raises `BadState`."""
    try:
        from redis import asyncio as redis  # noqa: PLC0415 - an optional dependency
        from redis import backoff, exceptions  # noqa: PLC0415
        from redis.asyncio.retry import Retry  # noqa: PLC0415
    except ImportError:
        raise BadState(
            "GATEWAY_STATE uses Redis, which requires: pip install 'triton-gateway[redis]'"
        ) from None
    tls = server.tls or {}
    return redis.Redis(
        host=server.host,
        port=server.port,
        db=server.database,
        username=server.user,
        password=server.password,
        ssl=server.tls is not None,
        ssl_check_hostname=True,
        ssl_ca_certs=tls.get("ssl_ca_certs"),
        ssl_certfile=tls.get("ssl_certfile"),
        ssl_keyfile=tls.get("ssl_keyfile"),
        socket_connect_timeout=REDIS_TIMEOUT_S,
        socket_timeout=REDIS_TIMEOUT_S,
        # One retry, for a connection that was closed while idle. Every command is safe to repeat.
        retry=Retry(backoff.NoBackoff(), 1, (exceptions.ConnectionError,)),
        protocol=2,  # version 3 begins with HELLO, which has the password among its arguments
    )


def redis_exceptions() -> tuple[type[Exception], ...]:
    """Return the exceptions of a failed command."""
    from redis.exceptions import RedisError  # noqa: PLC0415 - an optional dependency

    return (RedisError, OSError, UnicodeError, asyncio.TimeoutError)


class RedisStateStore:
    """State for gateways on several machines, as durable as the Redis."""

    def __init__(self, server: RedisServer, prefix: str) -> None:
        self._client = create_redis_client(server)
        self._failures = redis_exceptions()
        self._token = secrets.token_hex(16)
        self._is_leader = False
        self._has_loaded = False
        self._desired_version = b""
        self._desired_models: Mapping[str, DesiredModel] = {}
        self._loads_version = b""
        self._loads: Loads = {}
        self._prefix = prefix
        self._outages = OutageLog(str(server))
        self._rate_windows = RedisRateWindows(server, prefix)

    async def read_desired_models(self) -> Mapping[str, DesiredModel]:
        # Parameters can contain a whole model, so they are transferred only after a change.
        keys = f"{self._prefix}wishes", f"{self._prefix}change"
        return await self._execute(
            READ_ACTION,
            "EVAL",
            READ_IF_CHANGED_SCRIPT,
            len(keys),
            *keys,
            self._desired_version,
            decode=self._update_desired_models,
        )

    def _update_desired_models(self, reply: Any) -> Mapping[str, DesiredModel]:
        change, *hashes = reply
        for entries in hashes:
            pairs = zip(entries[::2], entries[1::2], strict=True)
            self._desired_models = {
                name.decode(): parse_desired_model(decode_state(raw)) for name, raw in pairs
            }
        self._desired_version = change
        return self._desired_models

    async def set_desired_model(self, model: str, desired: DesiredModel | None) -> int:
        keys = [f"{self._prefix}{name}" for name in ("wishes", "revision", "change")]
        # Changes have random names, because a Redis that lost its data would count from 1 again.
        arguments: list[str | bytes] = [model, secrets.token_hex(8)]
        if desired is not None:
            # Without the opening brace: the script inserts the revision first.
            arguments.append(orjson.dumps(desired_model_to_dict(desired))[1:])
            if desired.revision:
                arguments.append(str(desired.revision))
        return await self._execute(
            WRITE_ACTION, "EVAL", SET_DESIRED_MODEL_SCRIPT, len(keys), *keys, *arguments, decode=int
        )

    async def renew_leadership(self) -> bool:
        arguments = (f"{self._prefix}leader", self._alive_key(self._token), self._token, LEASE_MS)
        try:
            self._is_leader = await self._execute(
                WRITE_ACTION, "EVAL", LEAD_SCRIPT, 2, *arguments, decode=bool
            )
        except StateUnavailable:
            # The leader is unknown. Without one, a replica that restarts now would stay empty; with
            # several, it only gets the same loads several times.
            return True
        return self._is_leader

    async def read_loads(self) -> Loads:
        change = self._loads_version
        loads = await self._execute(
            READ_ACTION,
            "EVAL",
            READ_IF_CHANGED_SCRIPT,
            2,
            *self._loads_keys,
            change,
            decode=self._update_loads,
        )
        alive = {self._token}
        for owner in load_owners(loads) - alive:
            if await self._execute(READ_ACTION, "EXISTS", self._alive_key(owner), decode=bool):
                alive.add(owner)
        return drop_orphaned_loads(loads, frozenset(alive))

    def _update_loads(self, reply: Any) -> Loads:
        change, *hashes = reply
        for entries in hashes:
            loads: dict[str, dict[str, str]] = {}
            for field_, load in zip(entries[::2], entries[1::2], strict=True):
                replica, model = decode_state(field_)
                loads.setdefault(replica, {})[model] = load.decode()
            self._loads = loads
        self._loads_version = change
        return self._loads

    async def begin_load(self, replica: str, model: str) -> tuple[str, str]:
        self._has_loaded = True
        token = new_load_token(self._token)
        keys = (*self._loads_keys, self._alive_key(self._token))
        arguments = (load_field(replica, model), token, LEASE_MS)
        before = await self._execute(
            WRITE_ACTION,
            "EVAL",
            BEGIN_LOAD_SCRIPT,
            len(keys),
            *keys,
            *arguments,
            decode=bytes.decode,
        )
        return token, "" if is_in_progress(before) else before

    async def end_load(self, replica: str, model: str, token: str, resulting_load: str) -> None:
        arguments = (load_field(replica, model), token, resulting_load)
        await self._execute(
            WRITE_ACTION, "EVAL", END_LOAD_SCRIPT, 2, *self._loads_keys, *arguments, decode=bool
        )

    async def forget_loads(self, replica: str) -> None:
        fields = [
            load_field(replica, model) for model in (await self.read_loads()).get(replica, {})
        ]
        for start in range(0, len(fields), MAX_FIELDS):
            batch = fields[start : start + MAX_FIELDS]
            change = secrets.token_hex(8)
            await self._execute(
                WRITE_ACTION,
                "EVAL",
                FORGET_LOADS_SCRIPT,
                2,
                *self._loads_keys,
                change,
                *batch,
                decode=bool,
            )

    @property
    def _loads_keys(self) -> tuple[str, str]:
        return f"{self._prefix}loads", f"{self._prefix}loads-change"

    def _alive_key(self, owner: str) -> str:
        return f"{self._prefix}alive:{owner}"

    async def record_operation(self, operation_id: str, document: Mapping[str, Any]) -> None:
        require_operation_id(operation_id)
        raw = orjson.dumps(document)
        await self._execute(
            WRITE_ACTION,
            "SET",
            self._operation_key(operation_id),
            raw,
            "EX",
            OPERATION_TTL_S,
            decode=bool,
        )

    async def read_operation(self, operation_id: str) -> Mapping[str, Any] | None:
        if not is_operation_id(operation_id):
            return None
        key = self._operation_key(operation_id)
        return await self._execute(
            READ_ACTION, "GET", key, decode=lambda raw: raw and decode_state(raw)
        )

    def rate_windows(self) -> RedisRateWindows:
        return self._rate_windows

    @property
    def is_available(self) -> bool:
        return not self._outages

    async def close(self) -> None:
        # Resign, so that another process leads at once and not only when the lease has expired.
        if self._is_leader or self._has_loaded:
            with suppress(StateUnavailable):
                keys = (f"{self._prefix}leader", self._alive_key(self._token))
                await self._execute(
                    WRITE_ACTION, "EVAL", RESIGN_SCRIPT, len(keys), *keys, self._token, decode=bool
                )
        with suppress(*self._failures):
            await self._client.aclose()
        with suppress(*self._failures):
            await self._rate_windows.close()

    def _operation_key(self, operation: str) -> str:
        return f"{self._prefix}operation:{operation}"

    async def _execute(
        self, action: str, *command: str | bytes | int, decode: Callable[[Any], T]
    ) -> T:
        pending = self._client.execute_command(*command)
        try:
            result = decode(await asyncio.wait_for(pending, COMMAND_TIMEOUT_S))
        except (UnreadableState, UnicodeDecodeError):
            reason = f"Redis has invalid data at {self._prefix}*"
            raise self._outages.record_failure(action, reason) from None
        except self._failures as exc:
            raise self._outages.record_failure(action, explain_redis_error(exc)) from None
        self._outages.record_success(action)
        return result


def load_field(replica: str, model: str) -> bytes:
    """Return the hash field of a model on a replica."""
    return orjson.dumps([replica, model])


class RedisRateWindows:
    """Requests of all gateways, counted by the clock of Redis, because theirs may differ."""

    def __init__(self, server: RedisServer, prefix: str) -> None:
        from limits.aio.storage import RedisStorage  # noqa: PLC0415 - an optional dependency
        from redis.asyncio import BlockingConnectionPool  # noqa: PLC0415

        default_pool = create_redis_client(server).connection_pool
        # Bursts of requests share a few connections instead of opening one each.
        pool: Any = BlockingConnectionPool(
            connection_class=default_pool.connection_class,
            max_connections=WINDOW_CONNECTIONS,
            timeout=WINDOW_TIMEOUT_S,
            **default_pool.connection_kwargs,
        )
        self._pool = pool
        storage = RedisStorage(
            "async+redis://",
            implementation="redispy",
            key_prefix=f"{prefix}rate",
            connection_pool=pool,
        )
        self._storage = storage
        self._limiter = SlidingWindowCounterRateLimiter(storage)
        self._failures = redis_exceptions()
        self._outages = OutageLog(str(server))

    async def wait_s(self, window: RateLimitItem, name: str) -> float:
        try:
            wait_s = await asyncio.wait_for(self._wait_s(window, name), WINDOW_TIMEOUT_S)
        except self._failures as exc:
            raise self._outages.record_failure(COUNT_ACTION, explain_redis_error(exc)) from None
        self._outages.record_success(COUNT_ACTION)
        return wait_s

    async def _wait_s(self, window: RateLimitItem, name: str) -> float:
        if await self._limiter.hit(window, name):
            return 0.0
        length_s = window.get_expiry()
        before, before_s, now, now_s = await self._storage.get_sliding_window(
            window.key_for(name), length_s
        )
        # A window counts for its own length, and once more as the previous one. Longer times mean that the
        # clock of Redis was set back.
        if before_s > length_s + CLOCK_SLACK_S or now_s > 2 * length_s + CLOCK_SLACK_S:
            await self._limiter.clear(window, name)
            return 0.0
        waits = [before_s % (length_s / before)] if before else []
        waits += [now_s % length_s] if now else []
        return max(min(waits, default=0.0), MIN_WINDOW_WAIT_S)

    async def close(self) -> None:
        await self._pool.aclose()
