"""Request counters in Redis, for the rate limits of gateways that share a state."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

from limits import RateLimitItem
from limits.aio.strategies import SlidingWindowCounterRateLimiter

from gateway.state.desired import OutageLog
from gateway.state.redis_connection import (
    RedisServer,
    create_redis_client,
    explain_redis_error,
    redis_exceptions,
)

WINDOW_TIMEOUT_S: Final = 0.25  # short, because inference requests wait for it
WINDOW_CONNECTIONS: Final = 16
CLOCK_SLACK_S: Final = 1.0
MIN_WINDOW_WAIT_S: Final = 0.001
COUNT_ACTION: Final = "used to count requests"


class RedisRateWindows:
    """Requests of all gateways, counted by the clock of Redis, because theirs may differ."""

    def __init__(self, server: RedisServer, prefix: str) -> None:
        from limits.aio.storage import RedisStorage  # noqa: PLC0415 - an optional dependency
        from redis.asyncio import BlockingConnectionPool  # noqa: PLC0415 - as above

        default_pool = create_redis_client(server).connection_pool
        # Bursts of requests share a few connections instead of opening one each.
        pool: Any = BlockingConnectionPool(
            connection_class=default_pool.connection_class,
            max_connections=WINDOW_CONNECTIONS,
            timeout=WINDOW_TIMEOUT_S,
            **default_pool.connection_kwargs,
        )
        self._storage = RedisStorage(
            "async+redis://",
            implementation="redispy",
            key_prefix=f"{prefix}rate",
            connection_pool=pool,
        )
        self._pool = pool
        self._limiter = SlidingWindowCounterRateLimiter(self._storage)
        self._failures = redis_exceptions()
        self._outages = OutageLog(str(server))

    async def wait_s(self, window: RateLimitItem, name: str) -> float:
        try:
            wait_s = await asyncio.wait_for(self._wait_s(window, name), WINDOW_TIMEOUT_S)
        except ValueError:  # of the library, for a counter that is no number
            raise self._outages.record_failure(COUNT_ACTION, "a counter is invalid") from None
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
        with suppress(*self._failures):
            await self._pool.aclose()
