"""Marks of the gateways that still have work on a replica, so that a drain knows of all of them.

A mark expires unless it is renewed: a gateway that exits blocks no drain.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from pathlib import Path
from typing import Final

from gateway.state.desired import READ_ACTION, WRITE_ACTION
from gateway.state.redis_connection import RedisConnection

MARK_TTL_S: Final = 3.0

MARK_SCRIPT: Final = """
local now = redis.call('TIME')
redis.call('ZADD', KEYS[1], now[1] * 1000 + math.floor(now[2] / 1000) + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""
COUNT_OTHERS_SCRIPT: Final = """
local now = redis.call('TIME')
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now[1] * 1000 + math.floor(now[2] / 1000))
local count = redis.call('ZCARD', KEYS[1])
if redis.call('ZSCORE', KEYS[1], ARGV[1]) then
  return count - 1
end
return count
"""


class FileActivityMarks:
    """One empty file for each process and replica; its time is that of the last mark."""

    def __init__(
        self,
        folder: Path,
        owner: str,
        run_action: Callable[[str, Callable[[], int]], Awaitable[int]],
    ) -> None:
        self._folder = folder
        self._owner = owner
        self._run_action = run_action

    async def mark(self, replica: str) -> None:
        await self._run_action(WRITE_ACTION, lambda: self._touch_mark(replica))

    async def count_others(self, replica: str) -> int:
        return await self._run_action(READ_ACTION, lambda: self._count_fresh(replica))

    def _touch_mark(self, replica: str) -> int:
        self._folder.mkdir(0o700, exist_ok=True)
        (self._folder / f"{hash_name(replica)}.{self._owner}").touch(0o600)
        return 1

    def _count_fresh(self, replica: str) -> int:
        count = 0
        for path in self._folder.glob(f"{hash_name(replica)}.*"):
            if path.suffix[1:] == self._owner:
                continue
            if time.time() - path.stat().st_mtime < MARK_TTL_S:
                count += 1
            else:
                path.unlink(missing_ok=True)
        return count


class RedisActivityMarks:
    """One sorted set for each replica: processes by the time at which their mark expires, of Redis' clock."""

    def __init__(self, redis: RedisConnection, owner: str) -> None:
        self._redis = redis
        self._owner = owner

    async def mark(self, replica: str) -> None:
        keys = (f"activity:{replica}",)
        ttl_ms = int(MARK_TTL_S * 1000)
        await self._redis.run_script(
            WRITE_ACTION, MARK_SCRIPT, keys, self._owner, ttl_ms, decode=bool
        )

    async def count_others(self, replica: str) -> int:
        keys = (f"activity:{replica}",)
        return await self._redis.run_script(
            READ_ACTION, COUNT_OTHERS_SCRIPT, keys, self._owner, decode=int
        )


def hash_name(replica: str) -> str:
    return blake2b(replica.encode(), digest_size=8).hexdigest()
