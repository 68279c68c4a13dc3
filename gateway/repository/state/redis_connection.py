"""Commands to a Redis within a time limit, and their failures in words."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from gateway.repository.state.interface import READ_ACTION, BadState, OutageLog
from gateway.repository.state.redis_scripts import CHECK_DEADLINE

T = TypeVar("T")
REDIS_TIMEOUT_S: Final = 1.0  # limit for connecting, and for each response
COMMAND_TIMEOUT_S: Final = 3.0  # total limit, a second connection after a stale one included
MAX_CONNECTIONS: Final = 64
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
EXPIRED: Final = "EXPIRED"  # a script that began after its deadline
ERROR_CODE: Final = re.compile("[A-Z]{4,}(?= )")  # such as MISCONF or WRONGTYPE


@dataclass(frozen=True)
class RedisServer:
    """The address of a Redis, and the credentials to use."""

    host: str
    port: int
    database: int
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: Mapping[str, Any] | None = None  # files, by the names of redis-py's arguments

    def __str__(self) -> str:
        scheme = "redis" if self.tls is None else "rediss"
        return f"{scheme}://{self.host}:{self.port}/{self.database}"


def explain_redis_error(exc: Exception) -> str:
    if str(exc) == EXPIRED:
        return REDIS_REASONS["TimeoutError"]
    known = (REDIS_REASONS.get(kind.__name__) for kind in type(exc).__mro__)
    reason = next(filter(None, known))
    code = ERROR_CODE.match(str(exc))
    return f"{reason} ({code[0]})" if code else reason


def create_redis_client(server: RedisServer) -> Any:
    """Create a redis-py client with timeouts, which connects on first use. Raises `BadState`."""
    try:
        import redis.asyncio  # noqa: PLC0415 - an optional dependency
    except ImportError:
        raise BadState(
            "GATEWAY_STATE uses Redis, which requires: pip install 'triton-gateway[redis]'"
        ) from None
    no_backoff = redis.backoff.NoBackoff()
    return redis.asyncio.Redis(
        host=server.host,
        port=server.port,
        db=server.database,
        username=server.user,
        password=server.password,
        ssl=server.tls is not None,
        ssl_check_hostname=True,
        **(server.tls or {}),
        socket_connect_timeout=REDIS_TIMEOUT_S,
        socket_timeout=REDIS_TIMEOUT_S,
        # One retry, for a connection that was closed while idle. Every command is safe to repeat.
        retry=redis.asyncio.retry.Retry(no_backoff, 1, (redis.ConnectionError,)),
        protocol=2,  # version 3 begins with HELLO, which has the password among its arguments
    )


def redis_exceptions() -> tuple[type[Exception], ...]:
    """Return the exceptions of a failed command.

    uvloop raises `RuntimeError` for a write to a connection that was reset since the last one.
    """
    from redis.exceptions import RedisError  # noqa: PLC0415 - an optional dependency

    return (RedisError, OSError, UnicodeError, RuntimeError, asyncio.TimeoutError)


class RedisConnection:
    """A Redis, and the prefix of all keys."""

    def __init__(
        self,
        server: RedisServer,
        prefix: str,
        subject: str = "state",
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._client = create_redis_client(server)
        self._failures = redis_exceptions()
        self._prefix = prefix
        self._outages = OutageLog(str(server), subject)
        # The client refuses a command when 100 connections are in use.
        self._turns = asyncio.Semaphore(max_connections)

    @property
    def is_available(self) -> bool:
        return not self._outages

    def full_key(self, key: str) -> str:
        return self._prefix + key

    async def run_script(
        self,
        action: str,
        script: str,
        keys: Sequence[str],
        *arguments: str | bytes | int,
        decode: Callable[[Any], T],
        timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> T:
        """Return the decoded result of a Lua script. Raises `StateUnavailable`.

        One that does more than read is executed before this raises, or never.
        """
        if action != READ_ACTION:
            script = CHECK_DEADLINE + script
            now_s, now_us = await self.execute(action, "TIME", decode=tuple, timeout_s=timeout_s)
            # The caller waits for a response at least as long from now on.
            wait_ms = int(min(timeout_s, REDIS_TIMEOUT_S) * 1000)
            arguments = (*arguments, now_s * 1000 + now_us // 1000 + wait_ms)
        command = ("EVAL", script, len(keys), *map(self.full_key, keys), *arguments)
        return await self.execute(action, *command, decode=decode, timeout_s=timeout_s)

    async def execute(
        self,
        action: str,
        *command: str | bytes | int,
        decode: Callable[[Any], T],
        timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> T:
        """Return the decoded response to a command. Raises `StateUnavailable`."""
        try:
            reply = await asyncio.wait_for(self._send(command), timeout_s)
        except self._failures as exc:
            raise self._outages.record_failure(action, explain_redis_error(exc)) from None
        try:
            result = decode(reply)
        except (ValueError, TypeError, LookupError, AttributeError):
            reason = f"Redis has invalid data at {self._prefix}*"
            raise self._outages.record_failure(action, reason) from None
        self._outages.record_success(action)
        return result

    async def is_append_only(self) -> bool:
        """Return whether Redis writes each change to its disk. Raises `StateUnavailable`."""
        facts = await self.execute(READ_ACTION, "INFO", "persistence", decode=dict)
        return bool(facts.get("aof_enabled"))

    async def _send(self, command: Sequence[str | bytes | int]) -> Any:
        async with self._turns:
            return await self._client.execute_command(*command)

    async def close(self) -> None:
        with suppress(*self._failures):
            await self._client.aclose()
