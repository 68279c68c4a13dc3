"""Wait for a condition. The timeout only guards against a hang: no test asserts how long a wait took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable

TIMEOUT_S = 60.0
INTERVAL_S = 0.02


def wait_until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> float:
    """Return the seconds until the condition held; raise AssertionError after `timeout_s`."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"not true after {timeout_s:g} s"
        time.sleep(INTERVAL_S)
    return time.monotonic() - start


async def wait_until_async(
    condition: Callable[[], object | Awaitable[object]], timeout_s: float = TIMEOUT_S
) -> float:
    """The same on an event loop; the condition may be a coroutine function."""
    start = time.monotonic()
    while True:
        result = condition()
        if await result if isawaitable(result) else result:
            return time.monotonic() - start
        assert time.monotonic() - start < timeout_s, f"not true after {timeout_s:g} s"
        await asyncio.sleep(INTERVAL_S / 4)
