"""Rates are counted with a monotonic clock: changes of the time of day do not affect them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access.limits import (
    MIN_RATE_WAIT_S,
    LocalRateWindows,
    RateLimiter,
    RateLimitExceeded,
    create_rate_window,
)
from gateway.telemetry.metrics import Metrics


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


async def ask(rates: RateLimiter, per_second: float = 5) -> str:
    """Return the Retry-After of a refused request; empty if it was accepted."""
    try:
        await rates.count_request("shop", per_second)
    except RateLimitExceeded as exc:
        return str((exc.headers or {})["Retry-After"])
    return ""


@pytest.mark.fault("the clock is set back or forward by an hour, on the gateway or in Redis")
@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0, -86400.0 * 365])
async def test_change_of_the_time_of_day_does_not_change_rates(
    monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    clock = Clock()
    rates = RateLimiter(Metrics(), clock=clock)
    assert [await ask(rates) for _ in range(6)] == ["", "", "", "", "", "1"]
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    assert await ask(rates) == "1"
    clock.now += 1.01
    assert [await ask(rates) for _ in range(6)] == ["", "", "", "", "", "1"]


async def test_retry_after_is_the_time_until_the_next_request() -> None:
    clock = Clock()
    rates = RateLimiter(Metrics(), clock=clock)
    assert await ask(rates, 0.1) == ""
    for later_s, wait in ((0, "10"), (2.5, "8"), (7.4, "3"), (9.9, "1")):
        clock.now = 1000 + later_s
        assert await ask(rates, 0.1) == wait
    clock.now = 1010.0
    assert await ask(rates, 0.1) == ""


# Of differences of floating-point numbers.
ROUNDING = 1e-9


@given(
    st.lists(st.floats(0, 3), max_size=60),
    st.sampled_from([0.5, 1, 2.5, 7]),
)
def test_drawn_requests_are_refused_only_above_the_rate(
    pauses: list[float], per_second: float
) -> None:
    clock, window = Clock(0.0), create_rate_window(per_second)
    windows = LocalRateWindows(clock)
    length_s = window.length_s
    admitted: list[float] = []
    for pause in pauses:
        clock.now += pause
        recent = [at for at in admitted if at > clock.now - length_s]
        wait_s = windows.count(window, "a").wait_s
        assert (wait_s == 0) == (len(recent) < window.amount)
        assert 0 <= wait_s <= length_s * (1 + ROUNDING)
        if not wait_s:
            admitted.append(clock.now)
        else:
            assert wait_s == max(recent[0] + length_s - clock.now, MIN_RATE_WAIT_S)


def test_window_keeps_only_the_times_of_its_requests() -> None:
    clock, window = Clock(), create_rate_window(100_000)
    windows = LocalRateWindows(clock)
    for _ in range(30_000):
        clock.now += 0.001
        assert not windows.count(window, "a").wait_s
    (times,) = windows._times.values()
    assert len(times) <= 1001
