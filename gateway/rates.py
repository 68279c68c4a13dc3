"""How often each key may ask: counted in this process, or for all gateways in the Redis of the state."""

from __future__ import annotations

import math
import time
from fractions import Fraction
from functools import lru_cache
from typing import Final

from limits import RateLimitItem, RateLimitItemPerSecond
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from gateway.auth import OPEN
from gateway.errors import Overloaded, StateUnavailable
from gateway.metrics import Metrics
from gateway.state.wishes import Windows
from gateway.words import quoted

# What watches the gateway is heard however often its key is used.
UNCOUNTED: Final = OPEN | {"/metrics", "/v2/health/live", "/v2/health/ready"}
MOST: Final = 1_000_000  # in a window; more is no limit
LONGEST_S: Final = 24 * 3600
REST_S: Final = 2.0  # whoever comes after one that waited in vain to be counted does not wait


class TooFast(Overloaded):
    """A key that asks more often than it may."""

    def __init__(self, name: str, window: RateLimitItem, wait_s: float) -> None:
        wait = max(math.ceil(wait_s), 1)
        count = "1 request" if window.amount == 1 else f"{window.amount} requests"
        within = "a second" if window.multiples == 1 else f"in {window.multiples} seconds"
        super().__init__(
            f"the key {quoted(name)} may send {count} {within}; try again in {wait} s",
            headers={"Retry-After": str(wait)},
        )


@lru_cache(1024)
def window_of(per_second: float) -> RateLimitItem:
    """A rate as whole requests in whole seconds: 2.5 as 5 in 2, a third as 1 in 3."""
    if per_second < 1:
        return RateLimitItemPerSecond(1, round(min(1 / per_second, LONGEST_S)))
    ratio = Fraction(min(per_second, MOST)).limit_denominator(10)
    return RateLimitItemPerSecond(ratio.numerator, ratio.denominator)


class Rates:
    """Counts requests by the name of the key, in a window that moves with time.

    While `shared` windows cannot be asked, every process counts for itself, as without them.
    """

    def __init__(self, metrics: Metrics, shared: Windows | None = None) -> None:
        self._metrics = metrics
        self._own = MovingWindowRateLimiter(MemoryStorage())
        self._shared = shared
        self._rests_until = 0.0

    async def count(self, name: str, per_second: float) -> None:
        """One request more. Raises `TooFast`, for a request that is then not counted."""
        window = window_of(per_second)
        until: float | None = None
        if self._shared is not None and time.monotonic() >= self._rests_until:
            try:
                until = await self._shared.full_until(window, name)
            except StateUnavailable:
                self._rests_until = time.monotonic() + REST_S
        if until is None:
            hit = self._own.hit(window, name)
            until = 0.0 if hit else self._own.get_window_stats(window, name).reset_time
        if until:
            self._metrics.shed.labels("rate").inc()
            raise TooFast(name, window, until - time.time())
