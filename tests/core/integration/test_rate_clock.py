"""Requests per second in Redis, whose clock is set back: what is kept there would count for an hour."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis as client_of

from gateway.metrics import Metrics
from gateway.rate_limit import RateLimiter, RateLimitExceeded
from gateway.state.store import open_state_store
from tests.support.redis_server import RedisServer

HOUR_MS = 3_600_000
PER_SECOND = 5


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


async def asked(rates: RateLimiter, times: int) -> list[str]:
    """What each request gets: nothing, or the Retry-After of its refusal."""
    found = []
    for _ in range(times):
        try:
            await rates.count_request("shop", PER_SECOND)
            found.append("")
        except RateLimitExceeded as exc:
            found.append(str((exc.headers or {})["Retry-After"]))
    return found


def set_back(client: Any) -> int:
    """Let every key live an hour longer, as it does when the server's clock is set back an hour."""
    keys = list(client.scan_iter("*rate*"))
    for key in keys:
        client.pexpire(key, client.pttl(key) + HOUR_MS)
    return len(keys)


@pytest.mark.fault("the clock is set back or forward by an hour, on the gateway or in Redis")
async def test_a_clock_that_is_set_back_in_redis_locks_no_key_out(redis: RedisServer) -> None:
    kept = open_state_store(redis.url())
    rates = RateLimiter(Metrics(), kept.rate_windows())
    assert "1" in await asked(rates, 12)
    with client_of.Redis(port=redis.port) as client:
        assert set_back(client) > 0
    assert "" in await asked(rates, 2)
    assert "1" in await asked(rates, 12)  # and it counts again
    await kept.close()


@pytest.mark.long
@pytest.mark.fault("the clock is set back or forward by an hour, on the gateway or in Redis")
@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
async def test_the_gateways_own_clock_plays_no_part(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    kept = open_state_store(redis.url())
    rates = RateLimiter(Metrics(), kept.rate_windows())
    assert set(await asked(rates, 12)) == {"", "1"}
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    assert set(await asked(rates, 5)) <= {"", "1"}
    await asyncio.sleep(2.1)
    assert (await asked(rates, 1)) == [""]
    await kept.close()
