"""Wait for a condition. The timeout only guards against a hang: no test asserts how long a wait took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
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
    condition: Callable[[], object | Awaitable[object]],
    timeout_s: float = TIMEOUT_S,
    interval_s: float = INTERVAL_S / 4,
) -> float:
    """The same on an event loop; the condition may be a coroutine function."""
    start = time.monotonic()
    while True:
        result = condition()
        if await result if isawaitable(result) else result:
            return time.monotonic() - start
        assert time.monotonic() - start < timeout_s, f"not true after {timeout_s:g} s"
        await asyncio.sleep(interval_s)


@asynccontextmanager
async def no_task_left() -> AsyncIterator[None]:
    """Wait at the end until every task that was created meanwhile has ended."""
    before = asyncio.all_tasks()
    yield
    await wait_until_async(lambda: asyncio.all_tasks() <= before)


@contextmanager
def takes_at_least(seconds: float) -> Iterator[None]:
    """No deadline comes early, but for a tick of the clock."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start > seconds - 0.01


def lengthening(first_s: float) -> Iterator[float]:
    """Pauses, each twice as long as the last: one of them is long enough on any machine."""
    pause_s = first_s
    while pause_s < TIMEOUT_S:
        yield pause_s
        pause_s *= 2


class Pace:
    """The longest time between two moments at which something that must keep up did go on."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._last = time.monotonic()

    def restart(self) -> None:
        """Begin here: nothing had to keep up since the last mark."""
        self._last = time.monotonic()

    def mark(self) -> None:
        now = time.monotonic()
        self.longest_s = max(self.longest_s, now - self._last)
        self._last = now

    async def watch(self, scene: Awaitable[None], every_s: float = 0.01) -> None:
        """Run the scene, and mark whenever its event loop goes on: without a task of its own."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def beat() -> None:
            nonlocal timer
            self.mark()
            timer = loop.call_later(every_s, beat)

        beat()
        try:
            await scene
        finally:
            timer.cancel()
            self.mark()


def retry_when_late(
    attempt: Callable[[Pace], None], within_s: float, most_attempts: int = 50
) -> None:
    """Repeat what is only right if its own side keeps up, for as long as the machine held it up.

    An attempt that fails counts only if no two marks of its pace were further apart than `within_s`.
    """
    for left in reversed(range(most_attempts)):
        pace = Pace()
        try:
            attempt(pace)
        except Exception:
            if left and pace.longest_s > within_s:
                continue
            raise
        return
