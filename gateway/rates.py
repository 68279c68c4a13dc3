"""How often each key may ask: counted in this process, or for all gateways in the Redis of the state."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Final

from limits import RateLimitItem, RateLimitItemPerSecond

from gateway.auth import OPEN
from gateway.errors import Overloaded, StateUnavailable
from gateway.metrics import Metrics
from gateway.state.wishes import Windows
from gateway.words import quoted

# What watches the gateway is heard however often its key is used.
UNCOUNTED: Final = OPEN | {"/metrics", "/v2/health/live", "/v2/health/ready"}
MOST: Final = 1_000_000  # in a window; more is no limit
LONGEST_S: Final = 24 * 3600
LEAST_WAIT_S: Final = 0.001
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


class MovingWindows:
    """Counts the requests to this process, in windows that move with time.

    The clock must be a monotonic one: with the clock of the day set back an hour, every request of the last
    second would count for an hour. The windows of `limits` itself know no other.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: dict[tuple[str, int, int], deque[float]] = {}

    def wait_s(self, window: RateLimitItem, name: str) -> float:
        """Count one more request; 0, or in how many seconds there is room for it."""
        now, length_s = self._clock(), window.get_expiry()
        times = self._times.setdefault((name, window.amount, length_s), deque())
        while times and times[0] <= now - length_s:
            times.popleft()
        if len(times) >= window.amount:
            return max(times[0] + length_s - now, LEAST_WAIT_S)
        times.append(now)
        return 0.0


class Rates:
    """Counts requests by the name of the key, in a window that moves with time.

    While `shared` windows cannot be asked, every process counts for itself, as without them.
    """

    def __init__(
        self,
        metrics: Metrics,
        shared: Windows | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._own = MovingWindows(clock)
        self._shared = shared
        self._clock = clock
        self._rests_until = 0.0

    async def count(self, name: str, per_second: float) -> None:
        """One request more. Raises `TooFast`, for a request that is then not counted."""
        window = window_of(per_second)
        wait_s: float | None = None
        if self._shared is not None and self._clock() >= self._rests_until:
            try:
                wait_s = await self._shared.wait_s(window, name)
            except StateUnavailable:
                self._rests_until = self._clock() + REST_S
        if wait_s is None:
            wait_s = self._own.wait_s(window, name)
        if wait_s:
            self._metrics.shed.labels("rate").inc()
            raise TooFast(name, window, wait_s)
