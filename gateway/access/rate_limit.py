"""Rate limits per key, counted in this process or, for all gateways, in the Redis of the state."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final, Protocol

from limits import RateLimitItem, RateLimitItemPerSecond

from gateway.errors import Overloaded, StateUnavailable
from gateway.messages import quote_text
from gateway.telemetry.metrics import Metrics

MAX_REQUESTS_PER_WINDOW: Final = 1_000_000  # a higher rate is reduced to this
MAX_WINDOW_S: Final = 24 * 3600
MIN_RATE_WAIT_S: Final = 0.001
# After a failure the shared windows are skipped for this time, so that only one request waits for a timeout.
SHARED_WINDOWS_RETRY_S: Final = 2.0


@dataclass(frozen=True)
class WindowCount:
    wait_s: float = 0.0  # 0 if it was counted; otherwise the time until it can be
    opens_window: bool = False  # the window was empty


class RateWindows(Protocol):
    """Request counters in time windows, shared by several processes."""

    async def count(
        self, window: RateLimitItem, name: str, inferences: int, *, opens_window: bool
    ) -> WindowCount:
        """Count a request, or if it is several inferences, the others of a request that was counted as one.

        They are counted if the window has room for all of them. The request that opened the window needs no
        room: what does not fit counts in the following windows, which closes them.

        Raises `StateUnavailable` after a short timeout.
        """


ONLY_REQUEST: Final = WindowCount(opens_window=True)
COUNTED_REQUEST: Final = WindowCount()


class LimitExceeded(Overloaded):
    """A caller exceeds one of its limits."""


class RateLimitExceeded(LimitExceeded):
    """A key exceeds its request rate."""

    def __init__(
        self, name: str, window: RateLimitItem, wait_s: float, inferences: int = 1
    ) -> None:
        wait = max(math.ceil(wait_s), 1)
        count = "1 request" if window.amount == 1 else f"{window.amount} requests"
        within = "a second" if window.multiples == 1 else f"in {window.multiples} seconds"
        reason = ""
        if inferences > 1:
            reason = f", and this one counts as {inferences}, one for each of its inferences"
        elif wait > window.get_expiry() + 1:
            reason = ", and has sent requests that count as more, one for each of their inferences"
        super().__init__(
            f"caller {quote_text(name)} may send {count} {within}{reason}; try again in {wait} s",
            headers={"Retry-After": str(wait)},
        )


@lru_cache(1024)
def create_rate_window(per_second: float) -> RateLimitItem:
    """Express a rate as whole requests in whole seconds: 2.5 as 5 in 2, a third as 1 in 3."""
    if per_second < 1:
        return RateLimitItemPerSecond(1, round(min(1 / per_second, MAX_WINDOW_S)))
    ratio = Fraction(min(per_second, MAX_REQUESTS_PER_WINDOW)).limit_denominator(10)
    return RateLimitItemPerSecond(ratio.numerator, ratio.denominator)


class LocalRateWindows:
    """Counts the requests to this process in sliding windows.

    The clock must be monotonic: if the time of day were set back by an hour, the requests of the last second
    would count for an hour. The windows of the `limits` package use the time of day.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: dict[tuple[str, int, int], deque[float]] = {}

    def count(
        self, window: RateLimitItem, name: str, inferences: int = 1, *, opens_window: bool = False
    ) -> WindowCount:
        now = self._clock()
        length_s = window.get_expiry()
        times = self._times.setdefault((name, window.amount, length_s), deque())
        while times and times[0] <= now - length_s:
            times.popleft()
        if inferences > 1:
            return self._count_further(window, times, now, inferences, opens_window=opens_window)
        if len(times) >= window.amount:
            return WindowCount(max(times[-window.amount] + length_s - now, MIN_RATE_WAIT_S))
        times.append(now)
        return ONLY_REQUEST if len(times) == 1 else COUNTED_REQUEST

    @staticmethod
    def _count_further(
        window: RateLimitItem,
        times: deque[float],
        now: float,
        inferences: int,
        *,
        opens_window: bool,
    ) -> WindowCount:
        amount = window.amount
        length_s = window.get_expiry()
        added = inferences - 1
        can_exceed = len(times) <= amount and (opens_window or not times)
        if len(times) + added > amount and not can_exceed:
            # The last request that must have left the window.
            last = times[min(inferences, amount) - amount - 1]
            return WindowCount(max(last + length_s - now, MIN_RATE_WAIT_S))
        for _ in range(added):
            is_full = len(times) >= amount
            # Inferences above the amount count in the next windows.
            times.append(times[-amount] + length_s if is_full else now)
        return COUNTED_REQUEST


class RateLimiter:
    """Counts requests by the name of the key in sliding windows.

    While the `shared` windows are unavailable, every process counts for itself.
    """

    def __init__(
        self,
        metrics: Metrics,
        shared: RateWindows | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = metrics
        self.shared = shared
        self.clock = clock
        self._shared_retry_at = 0.0
        self._local = LocalRateWindows(self.clock)

    async def count_request(
        self, name: str, per_second: float, inferences: int = 1, *, opens_window: bool = False
    ) -> bool:
        """Count a request, and return whether its window was empty. Raises `RateLimitExceeded`.

        A request that turns out to be several inferences is counted a second time, as all of them. A rejected
        request is not counted, but what was counted of it before is.
        """
        window = create_rate_window(per_second)
        result: WindowCount | None = None
        if self.shared is not None and self.clock() >= self._shared_retry_at:
            try:
                result = await self.shared.count(
                    window, name, inferences, opens_window=opens_window
                )
            except StateUnavailable:
                self._shared_retry_at = self.clock() + SHARED_WINDOWS_RETRY_S
        if result is None:
            result = self._local.count(window, name, inferences, opens_window=opens_window)
        if result.wait_s:
            self.metrics.shed.labels("rate").inc()
            raise RateLimitExceeded(name, window, result.wait_s, inferences=inferences)
        return result.opens_window
