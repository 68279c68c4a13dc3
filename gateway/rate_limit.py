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

from gateway.auth import PUBLIC_PATHS
from gateway.errors import Overloaded, StateUnavailable
from gateway.messages import quote_text
from gateway.metrics import Metrics
from gateway.state.desired import RateWindows

# What watches the gateway is heard however often its key is used.
UNLIMITED_PATHS: Final = PUBLIC_PATHS | {"/metrics", "/v2/health/live", "/v2/health/ready"}
MAX_REQUESTS_PER_WINDOW: Final = 1_000_000  # in a window; more is no limit
MAX_WINDOW_S: Final = 24 * 3600
MIN_RATE_WAIT_S: Final = 0.001
SHARED_WINDOWS_RETRY_S: Final = (
    2.0  # whoever comes after one that waited in vain to be counted does not wait
)


class RateLimitExceeded(Overloaded):
    """A key that asks more often than it may."""

    def __init__(self, name: str, window: RateLimitItem, wait_s: float) -> None:
        wait = max(math.ceil(wait_s), 1)
        count = "1 request" if window.amount == 1 else f"{window.amount} requests"
        within = "a second" if window.multiples == 1 else f"in {window.multiples} seconds"
        super().__init__(
            f"the key {quote_text(name)} may send {count} {within}; try again in {wait} s",
            headers={"Retry-After": str(wait)},
        )


@lru_cache(1024)
def create_rate_window(per_second: float) -> RateLimitItem:
    """A rate as whole requests in whole seconds: 2.5 as 5 in 2, a third as 1 in 3."""
    if per_second < 1:
        return RateLimitItemPerSecond(1, round(min(1 / per_second, MAX_WINDOW_S)))
    ratio = Fraction(min(per_second, MAX_REQUESTS_PER_WINDOW)).limit_denominator(10)
    return RateLimitItemPerSecond(ratio.numerator, ratio.denominator)


class LocalRateWindows:
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
            return max(times[0] + length_s - now, MIN_RATE_WAIT_S)
        times.append(now)
        return 0.0


class RateLimiter:
    """Counts requests by the name of the key, in a window that moves with time.

    While `shared` windows cannot be asked, every process counts for itself, as without them.
    """

    def __init__(
        self,
        metrics: Metrics,
        shared: RateWindows | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._local = LocalRateWindows(clock)
        self._shared = shared
        self._clock = clock
        self._shared_retry_at = 0.0

    async def count_request(self, name: str, per_second: float) -> None:
        """One request more. Raises `TooFast`, for a request that is then not counted."""
        window = create_rate_window(per_second)
        wait_s: float | None = None
        if self._shared is not None and self._clock() >= self._shared_retry_at:
            try:
                wait_s = await self._shared.wait_s(window, name)
            except StateUnavailable:
                self._shared_retry_at = self._clock() + SHARED_WINDOWS_RETRY_S
        if wait_s is None:
            wait_s = self._local.wait_s(window, name)
        if wait_s:
            self._metrics.shed.labels("rate").inc()
            raise RateLimitExceeded(name, window, wait_s)
