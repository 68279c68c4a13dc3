"""The limits of a caller: its rate, its quotas of requests in UTC days and months, its requests in progress.

Rates are counted in this process or, for all gateways, in the Redis of the state; quotas also in its file;
requests in progress in this process only. A request takes its part of a quota
before it is handled, in one step that checks and counts. It gives it back at its end if it was never sent to
a replica.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

from gateway.callers import CallerLimits
from gateway.errors import Overloaded, StateUnavailable
from gateway.messages import format_utc_time, quote_text
from gateway.tasks import TaskSet
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_info import RequestInfo, Reservation

MAX_REQUESTS_PER_WINDOW: Final = 1_000_000  # a higher rate is reduced to this
MAX_WINDOW_S: Final = 24 * 3600
MIN_RATE_WAIT_S: Final = 0.001
# After a failure the shared windows are skipped for this time, so that only one request waits for a timeout.
SHARED_WINDOWS_RETRY_S: Final = 2.0
# No count is larger: giving it back leaves nothing.
ALL: Final = 10**15


class RateWindow(NamedTuple):
    """A number of requests within a time."""

    amount: int
    length_s: int


@dataclass(frozen=True)
class WindowCount:
    wait_s: float = 0.0  # 0 if it was counted; otherwise the time until it can be
    opens_window: bool = False  # the window was empty


class RateWindows(Protocol):
    """Request counters in time windows, shared by several processes."""

    async def count(
        self, window: RateWindow, name: str, inferences: int, *, opens_window: bool
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

    def __init__(self, name: str, window: RateWindow, wait_s: float, inferences: int = 1) -> None:
        wait = max(math.ceil(wait_s), 1)
        count = "1 request" if window.amount == 1 else f"{window.amount} requests"
        within = "a second" if window.length_s == 1 else f"in {window.length_s} seconds"
        reason = ""
        if inferences > 1:
            reason = f", and this one counts as {inferences}, one for each of its inferences"
        elif wait > window.length_s + 1:
            reason = ", and has sent requests that count as more, one for each of their inferences"
        super().__init__(
            f"caller {quote_text(name)} may send {count} {within}{reason}; try again in {wait} s",
            headers={"Retry-After": str(wait)},
        )


@lru_cache(1024)
def create_rate_window(per_second: float) -> RateWindow:
    """Express a rate as whole requests in whole seconds: 2.5 as 5 in 2, a third as 1 in 3."""
    if per_second < 1:
        return RateWindow(1, round(min(1 / per_second, MAX_WINDOW_S)))
    ratio = Fraction(min(per_second, MAX_REQUESTS_PER_WINDOW)).limit_denominator(10)
    return RateWindow(ratio.numerator, ratio.denominator)


class LocalRateWindows:
    """Counts the requests to this process in sliding windows.

    The clock must be monotonic: if the time of day were set back by an hour, the requests of the last second
    would count for an hour.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: dict[tuple[str, int, int], deque[float]] = {}

    def count(
        self, window: RateWindow, name: str, inferences: int = 1, *, opens_window: bool = False
    ) -> WindowCount:
        now = self._clock()
        length_s = window.length_s
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
        window: RateWindow,
        times: deque[float],
        now: float,
        inferences: int,
        *,
        opens_window: bool,
    ) -> WindowCount:
        amount = window.amount
        length_s = window.length_s
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


@dataclass(frozen=True)
class Quota:
    name: str  # day or month
    limit: int
    period: str  # 2026-11-26 for a day, 2026-11 for a month
    begins: datetime
    ends: datetime

    def build_headers(self, used: int, wait_s: int) -> dict[str, str]:
        """Return the headers of draft-ietf-httpapi-ratelimit-headers-10, and Retry-After."""
        length_s = round((self.ends - self.begins).total_seconds())
        return {
            "Retry-After": str(wait_s),
            "RateLimit": f'"{self.name}";r={max(self.limit - used, 0)};t={wait_s}',
            "RateLimit-Policy": f'"{self.name}";q={self.limit};w={length_s}',
        }


def find_quotas(limits: CallerLimits, now_s: float) -> list[Quota]:
    now = datetime.fromtimestamp(now_s, timezone.utc)
    day = now.replace(hour=0, minute=0, second=0, microsecond=0)
    month = day.replace(day=1)
    next_month = (month + timedelta(days=32)).replace(day=1)
    quotas = []
    if limits.requests_per_day is not None:
        period = f"{day:%Y-%m-%d}"
        quotas.append(Quota("day", limits.requests_per_day, period, day, day + timedelta(days=1)))
    if limits.requests_per_month is not None:
        quotas.append(
            Quota("month", limits.requests_per_month, f"{month:%Y-%m}", month, next_month)
        )
    return quotas


class QuotaExceeded(LimitExceeded):
    """A caller has used its requests of a day or month."""

    code = "QUOTA_EXCEEDED"

    def __init__(self, name: str, quota: Quota, used: int, *, count: int, now_s: float) -> None:
        wait_s = max(math.ceil(quota.ends.timestamp() - now_s), 1)
        reason = ""
        if count > 1:
            reason = f", and this one counts as {count} more, one for each of its other inferences"
        super().__init__(
            f"caller {quote_text(name)} has used {used} of its {quota.limit} requests of this "
            f"{quota.name}{reason}; the next {quota.name} begins at {format_utc_time(quota.ends)}",
            headers=quota.build_headers(used, wait_s),
        )


class TooManyAtOnce(LimitExceeded):
    """A caller has too many requests in progress."""

    def __init__(self, name: str, maximum: int) -> None:
        requests = "request" if maximum == 1 else "requests"
        super().__init__(
            f"caller {quote_text(name)} may have {maximum} {requests} in progress; wait for a response, then "
            "try again"
        )


@dataclass(frozen=True)
class QuotaCount:
    is_added: bool
    # The requests in each period, with this one if it was added.
    used: tuple[int, ...]
    unreadable: int = 0  # counts that were no numbers, and began at zero


class QuotaCounters(Protocol):
    """Counts of requests by caller and period, shared by several processes."""

    async def add(self, name: str, limits: Mapping[str, int], count: int) -> QuotaCount:
        """Add to the counts of a caller in these periods, unless one would exceed its limit.

        A negative count is given back. Raises `StateUnavailable` after a short timeout.
        """


def add_to_counts(
    counts: MutableMapping[str, int], limits: Mapping[str, int], count: int
) -> QuotaCount:
    """Do the same with the counts of one caller. Counts of earlier days and months are dropped."""
    used = [counts.get(period, 0) for period in limits]
    is_added = count <= 0 or all(
        each + count <= limit for each, limit in zip(used, limits.values(), strict=True)
    )
    if is_added and count:
        used = [max(each + count, 0) for each in used]
        set_counts(counts, dict(zip(limits, used, strict=True)), drops_earlier=count > 0)
    return QuotaCount(is_added, tuple(used))


def set_counts(
    counts: MutableMapping[str, int], used: Mapping[str, int], *, drops_earlier: bool
) -> None:
    """Set counts of one caller, whose other key can have a quota of the other kind."""
    if drops_earlier:
        # A later one is that of a process whose clock is ahead, or of this one before its clock went back.
        for period in list(counts):
            if any(period < each and len(period) == len(each) for each in used):
                del counts[period]
    counts.update(used)


class CallerLimiter:
    """Counts the requests of callers that have limits.

    While the `shared` counters are unavailable, every process goes on from the counts that it knew last, and
    the requests of that time are not counted afterwards.
    """

    def __init__(
        self,
        rates: RateLimiter,
        shared: QuotaCounters | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._rates = rates
        self._shed = rates.metrics.shed
        self._shared = shared
        self._clock = clock
        self._shared_retry_at = 0.0
        self._local: dict[str, dict[str, int]] = {}
        self._inflight: Counter[str] = Counter()
        self._tasks = TaskSet()

    async def admit(self, info: RequestInfo, limits: CallerLimits) -> None:
        """Count a request against the limits of its caller, until `end`. Raises `LimitExceeded`."""
        name = info.caller.name
        info.reservation = reservation = Reservation(name)
        if limits.max_inflight is not None:
            if self._inflight[name] >= limits.max_inflight:
                self._shed.labels("inflight").inc()
                raise TooManyAtOnce(name, limits.max_inflight)
            self._inflight[name] += 1
            reservation.is_inflight = True
        if limits.requests_per_second is not None:
            info.opens_window = await self._rates.count_request(name, limits.requests_per_second)
        if limits.has_quota:
            await self._reserve(reservation, limits, 1)

    async def admit_inferences(self, info: RequestInfo, inferences: int) -> None:
        """Count the other inferences of a request that turns out to be several. Raises `LimitExceeded`."""
        limits = info.caller.limits
        if limits is None or info.reservation is None:
            return
        if limits.requests_per_second is not None:
            await self._rates.count_request(
                info.caller.name,
                limits.requests_per_second,
                inferences,
                opens_window=info.opens_window,
            )
        if limits.has_quota and inferences > 1:
            await self._reserve(info.reservation, limits, inferences - 1)

    def end(self, info: RequestInfo) -> None:
        """Count a request as no longer in progress, and give back what it did not use."""
        reservation = info.reservation
        if reservation is None:
            return
        if reservation.is_inflight:
            self._inflight[reservation.caller] -= 1
            if not self._inflight[reservation.caller]:
                del self._inflight[reservation.caller]
        if reservation.periods and not info.is_sent:
            self._tasks.start(self._give_back(reservation))

    async def read(self, name: str, limits: CallerLimits) -> list[tuple[Quota, int]]:
        """Return the quotas of a caller with what is used of each."""
        quotas = find_quotas(limits, self._clock())
        counted = await self._add(name, {quota.period: quota.limit for quota in quotas}, 0)
        return list(zip(quotas, counted.used, strict=True))

    async def reset(self, name: str, limits: CallerLimits) -> None:
        """Count the quotas of a caller from zero again. Raises `StateUnavailable`."""
        periods = {quota.period: 0 for quota in find_quotas(limits, self._clock())}
        if self._shared is not None:
            await self._shared.add(name, periods, -ALL)
        self._local.pop(name, None)

    async def _reserve(self, reservation: Reservation, limits: CallerLimits, count: int) -> None:
        now_s = self._clock()
        quotas = find_quotas(limits, now_s)
        periods = {quota.period: quota.limit for quota in quotas}
        counted = await self._add(reservation.caller, periods, count)
        if counted.is_added:
            for period in periods:
                reservation.periods[period] = reservation.periods.get(period, 0) + count
            return
        self._shed.labels("quota").inc()
        for quota, used in reversed(list(zip(quotas, counted.used, strict=True))):
            if used + count > quota.limit:
                raise QuotaExceeded(reservation.caller, quota, used, count=count, now_s=now_s)

    async def _give_back(self, reservation: Reservation) -> None:
        for period, count in reservation.periods.items():
            await self._add(reservation.caller, {period: 0}, -count)

    async def _add(self, name: str, limits: Mapping[str, int], count: int) -> QuotaCount:
        counts = self._local.setdefault(name, {})
        if self._shared is not None and time.monotonic() >= self._shared_retry_at:
            with suppress(StateUnavailable):
                counted = await self._shared.add(name, limits, count)
                used = dict(zip(limits, counted.used, strict=True))
                set_counts(counts, used, drops_earlier=count > 0)
                return counted
            self._shared_retry_at = time.monotonic() + SHARED_WINDOWS_RETRY_S
        return add_to_counts(counts, limits, count)
