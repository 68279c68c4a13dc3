"""Request counters in Redis, for the rate limits of gateways that share a state."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

from limits import RateLimitItem

from gateway.access.rate_limit import WindowCount
from gateway.repository.state.desired import OutageLog
from gateway.repository.state.redis_connection import (
    RedisServer,
    create_redis_client,
    explain_redis_error,
    redis_exceptions,
)
from gateway.repository.state.redis_scripts import CHECK_DEADLINE, COUNT_INFERENCES

WINDOW_TIMEOUT_S: Final = 0.25  # short, because inference requests wait for it
WINDOW_CONNECTIONS: Final = 16
COUNT_ACTION: Final = "used to count requests"


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
