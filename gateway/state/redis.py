"""In Redis, for gateways on several machines."""

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
from gateway.state.loads import Loads, is_under_way, new_token, owners, without_owners
from gateway.state.wishes import (
    KEPT,
    KEPT_S,
    READ,
    BadState,
    Trouble,
    Unreadable,
    Wish,
    decoded,
    encodable,
    is_operation,
    require_operation,
    wish_of,
)

T = TypeVar("T")
REDIS_TIMEOUT_S: Final = 1.0  # to connect, and for each answer
COMMAND_TIMEOUT_S: Final = 3.0  # all of it, with a second connection when the first was stale
LEASE_MS: Final = 5000
WINDOW_TIMEOUT_S: Final = 0.25  # an inference waits for it
WINDOW_CONNECTIONS: Final = 16
SLACK_S: Final = 1.0
LEAST_WAIT_S: Final = 0.001
COUNTED: Final = "used to count requests"
PREFIX: Final = "triton-gateway:"
TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


def redis_at(url: SplitResult, port: int) -> Redis | None:
    options = dict(parse_qsl(url.query, keep_blank_values=True))
    prefix = options.pop("prefix", PREFIX)
    database = url.path.strip("/") or "0"
    tls = url.scheme == "rediss"
    known = options.keys() <= set(TLS_FILES if tls else ())
    if not (url.hostname and database.isdecimal() and known) or url.fragment:
        return None
    for name, file in options.items():
        if not Path(file).is_file():
            raise BadState(f"GATEWAY_STATE: there is no file {file} for {name}")
    server = Server(
        unquote(url.hostname),
        port,
        int(database),
        None if url.username is None else unquote(url.username) or None,
        None if url.password is None else unquote(url.password),
        options if tls else None,
    )
    return Redis(server, prefix)


@dataclass(frozen=True)
class Server:
    """Where a Redis is, and who asks."""

    host: str
    port: int
    database: int
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: Mapping[str, str] | None = None

    def __str__(self) -> str:
        scheme = "redis" if self.tls is None else "rediss"
        return f"{scheme}://{self.host}:{self.port}/{self.database}"


# The scripts change several keys at once, or one that nobody may touch meanwhile.
WISH = """
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
# A hash, if it has changed since it was read.
CHANGED_HASH = """
local change = redis.call('GET', KEYS[2])
if change and change == ARGV[1] then
  return {change}
end
return {change or '', redis.call('HGETALL', KEYS[1])}
"""
BEGIN_LOAD = """
local before = redis.call('HGET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[2])
redis.call('SET', KEYS[3], '1', 'PX', ARGV[3])
return before or ''
"""
END_LOAD = """
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] and ARGV[3] ~= '' then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
else
  redis.call('HDEL', KEYS[1], ARGV[1])
end
redis.call('SET', KEYS[2], ARGV[2] .. '.')
return 1
"""
FORGET_LOADS = """
local count = redis.call('HDEL', KEYS[1], unpack(ARGV, 2))
redis.call('SET', KEYS[2], ARGV[1])
return count
"""
LEAD = """
redis.call('SET', KEYS[2], '1', 'PX', ARGV[2])
local leader = redis.call('GET', KEYS[1])
if leader and leader ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
RESIGN = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
redis.call('DEL', KEYS[2])
"""
# By the name of the exception or of one that it is derived from. Its own text is never told: a server
# quotes the arguments of a command that it does not take, and those can be a password.
REDIS_REASONS = {
    "TimeoutError": "Redis does not answer",
    "AuthenticationError": "Redis does not know this user or password",
    "AuthorizationError": "Redis does not let this user in",
    "NoPermissionError": "Redis does not allow this user a command or key that is needed",
    "BusyLoadingError": "Redis is still loading its data",
    "ReadOnlyError": "this Redis is a copy that cannot be written to",
    "OutOfMemoryError": "Redis is out of memory",
    "ResponseError": "Redis refuses a command",
    "InvalidResponse": "what answers there is not Redis",
    "Exception": "Redis cannot be reached",
}
MOST_FIELDS: Final = 1000  # for which Lua has room
CODE = re.compile("[A-Z]{4,}(?= )")  # such as MISCONF or WRONGTYPE, before the text


def why_redis(exc: Exception) -> str:
    known = (REDIS_REASONS.get(kind.__name__) for kind in type(exc).__mro__)
    reason, code = next(filter(None, known)), CODE.match(str(exc))
    return f"{reason} ({code[0]})" if code else reason


def client(server: Server) -> Any:
    """Of redis-py, with deadlines; it connects when it is used. Raises `BadState`."""
    try:
        from redis import asyncio as redis  # noqa: PLC0415 - an extra
        from redis import backoff, exceptions  # noqa: PLC0415
        from redis.asyncio.retry import Retry  # noqa: PLC0415
    except ImportError:
        raise BadState(
            "GATEWAY_STATE is in Redis, which needs: pip install 'triton-gateway[redis]'"
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
        # Once, for a connection that was closed while it was idle. Every command bears it.
        retry=Retry(backoff.NoBackoff(), 1, (exceptions.ConnectionError,)),
        protocol=2,  # the other begins with a command that has the password among its arguments
    )


def failures() -> tuple[type[Exception], ...]:
    """What a `client` raises when it does not get what it asks for."""
    from redis.exceptions import RedisError  # noqa: PLC0415 - an extra

    return (RedisError, OSError, UnicodeError, asyncio.TimeoutError)


class Redis:
    """For gateways on several machines; as durable as that Redis is."""

    def __init__(self, server: Server, prefix: str) -> None:
        self._client = client(server)
        self._failures = failures()
        self._token = secrets.token_hex(16)
        self._leading = False
        self._has_loaded = False
        self._change = b""
        self._wishes: Mapping[str, Wish] = {}
        self._loads_change = b""
        self._loads: Loads = {}
        self._prefix = prefix
        self._trouble = Trouble(str(server))
        self._windows = RedisWindows(server, prefix)

    async def wishes(self) -> Mapping[str, Wish]:
        """A wish can hold a whole model: they are sent only when one has changed."""
        keys = f"{self._prefix}wishes", f"{self._prefix}change"
        return await self._ask(
            READ, "EVAL", CHANGED_HASH, len(keys), *keys, self._change, of=self._changed
        )

    def _changed(self, answer: Any) -> Mapping[str, Wish]:
        change, *hashes = answer
        for found in hashes:
            pairs = zip(found[::2], found[1::2], strict=True)
            self._wishes = {name.decode(): wish_of(decoded(raw)) for name, raw in pairs}
        self._change = change
        return self._wishes

    async def wish(self, model: str, wish: Wish | None) -> int:
        keys = [f"{self._prefix}{name}" for name in ("wishes", "revision", "change")]
        # A change is known by a random name: a Redis that lost its data counts from 1 again.
        arguments: list[str | bytes] = [model, secrets.token_hex(8)]
        if wish is not None:
            # Less the brace: the script begins the object with the revision.
            arguments.append(orjson.dumps(encodable(wish))[1:])
            if wish.revision:
                arguments.append(str(wish.revision))
        return await self._ask(KEPT, "EVAL", WISH, len(keys), *keys, *arguments, of=int)

    async def leads(self) -> bool:
        arguments = (f"{self._prefix}leader", self._alive_key(self._token), self._token, LEASE_MS)
        try:
            self._leading = await self._ask(KEPT, "EVAL", LEAD, 2, *arguments, of=bool)
        except StateUnavailable:
            # Nobody can say who leads. If nobody did, a replica that restarts now would stay empty;
            # if all do, it is told several times to load the same, which changes nothing.
            return True
        return self._leading

    async def loads(self) -> Loads:
        change = self._loads_change
        found = await self._ask(
            READ, "EVAL", CHANGED_HASH, 2, *self._loads_keys, change, of=self._changed_loads
        )
        alive = {self._token}
        for owner in owners(found) - alive:
            if await self._ask(READ, "EXISTS", self._alive_key(owner), of=bool):
                alive.add(owner)
        return without_owners(found, frozenset(alive))

    def _changed_loads(self, answer: Any) -> Loads:
        change, *hashes = answer
        for found in hashes:
            loads: dict[str, dict[str, str]] = {}
            for field_, load in zip(found[::2], found[1::2], strict=True):
                replica, model = decoded(field_)
                loads.setdefault(replica, {})[model] = load.decode()
            self._loads = loads
        self._loads_change = change
        return self._loads

    async def begin_load(self, replica: str, model: str) -> tuple[str, str]:
        self._has_loaded = True
        token = new_token(self._token)
        keys = (*self._loads_keys, self._alive_key(self._token))
        arguments = (load_field(replica, model), token, LEASE_MS)
        before = await self._ask(
            KEPT, "EVAL", BEGIN_LOAD, len(keys), *keys, *arguments, of=bytes.decode
        )
        return token, "" if is_under_way(before) else before

    async def end_load(self, replica: str, model: str, token: str, left: str) -> None:
        arguments = (load_field(replica, model), token, left)
        await self._ask(KEPT, "EVAL", END_LOAD, 2, *self._loads_keys, *arguments, of=bool)

    async def forget_loads(self, replica: str) -> None:
        fields = [load_field(replica, model) for model in (await self.loads()).get(replica, {})]
        for start in range(0, len(fields), MOST_FIELDS):
            some = fields[start : start + MOST_FIELDS]
            change = secrets.token_hex(8)
            await self._ask(
                KEPT, "EVAL", FORGET_LOADS, 2, *self._loads_keys, change, *some, of=bool
            )

    @property
    def _loads_keys(self) -> tuple[str, str]:
        return f"{self._prefix}loads", f"{self._prefix}loads-change"

    def _alive_key(self, owner: str) -> str:
        return f"{self._prefix}alive:{owner}"

    async def record(self, operation: str, document: Mapping[str, Any]) -> None:
        require_operation(operation)
        raw = orjson.dumps(document)
        await self._ask(KEPT, "SET", self._operation_key(operation), raw, "EX", KEPT_S, of=bool)

    async def operation(self, operation: str) -> Mapping[str, Any] | None:
        if not is_operation(operation):
            return None
        key = self._operation_key(operation)
        return await self._ask(READ, "GET", key, of=lambda raw: raw and decoded(raw))

    def windows(self) -> RedisWindows:
        return self._windows

    @property
    def is_available(self) -> bool:
        return not self._trouble

    async def close(self) -> None:
        """Another leads at once, and not only when the lease has lapsed."""
        if self._leading or self._has_loaded:
            with suppress(StateUnavailable):
                keys = (f"{self._prefix}leader", self._alive_key(self._token))
                await self._ask(KEPT, "EVAL", RESIGN, len(keys), *keys, self._token, of=bool)
        with suppress(*self._failures):
            await self._client.aclose()
            await self._windows.close()

    def _operation_key(self, operation: str) -> str:
        return f"{self._prefix}operation:{operation}"

    async def _ask(self, action: str, *command: str | bytes | int, of: Callable[[Any], T]) -> T:
        """What `of` makes of the answer."""
        asked = self._client.execute_command(*command)
        try:
            made = of(await asyncio.wait_for(asked, COMMAND_TIMEOUT_S))
        except (Unreadable, UnicodeDecodeError):
            reason = f"Redis holds what no gateway wrote, at {self._prefix}*"
            raise self._trouble.begins(action, reason) from None
        except self._failures as exc:
            raise self._trouble.begins(action, why_redis(exc)) from None
        self._trouble.ends(action)
        return made


def load_field(replica: str, model: str) -> bytes:
    """The name of the field that says what a replica has of a model."""
    return orjson.dumps([replica, model])


class RedisWindows:
    """Requests of all gateways, counted by the clock of Redis: theirs may differ."""

    def __init__(self, server: Server, prefix: str) -> None:
        from limits.aio.storage import RedisStorage  # noqa: PLC0415 - as the extra
        from redis.asyncio import BlockingConnectionPool  # noqa: PLC0415

        usual = client(server).connection_pool
        # A crowd of requests waits for a few connections, and does not open one each.
        pool: Any = BlockingConnectionPool(
            connection_class=usual.connection_class,
            max_connections=WINDOW_CONNECTIONS,
            timeout=WINDOW_TIMEOUT_S,
            **usual.connection_kwargs,
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
        self._failures = failures()
        self._trouble = Trouble(str(server))

    async def wait_s(self, window: RateLimitItem, name: str) -> float:
        try:
            wait_s = await asyncio.wait_for(self._wait_s(window, name), WINDOW_TIMEOUT_S)
        except self._failures as exc:
            raise self._trouble.begins(COUNTED, why_redis(exc)) from None
        self._trouble.ends(COUNTED)
        return wait_s

    async def _wait_s(self, window: RateLimitItem, name: str) -> float:
        if await self._limiter.hit(window, name):
            return 0.0
        length_s = window.get_expiry()
        before, before_s, now, now_s = await self._storage.get_sliding_window(
            window.key_for(name), length_s
        )
        # A window counts for its own length and, as the one before, once more: longer only where the
        # clock of Redis was set back, and then for as long as that.
        if before_s > length_s + SLACK_S or now_s > 2 * length_s + SLACK_S:
            await self._limiter.clear(window, name)
            return 0.0
        waits = [before_s % (length_s / before)] if before else []
        waits += [now_s % length_s] if now else []
        return max(min(waits, default=0.0), LEAST_WAIT_S)

    async def close(self) -> None:
        await self._pool.aclose()
