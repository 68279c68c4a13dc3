"""SIGTERM: unready first, then quiet, then gone. Whoever sends requests has time to go elsewhere."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final

from gateway.exits import CLOSING_S, ExitDeadline

log = logging.getLogger(__name__)

Handler = Callable[[int, FrameType | None], Any]
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Drain:
    """Stands before the server's own handlers of SIGTERM and SIGINT, from the application's start to its end.

    The first SIGTERM makes `began` true: `/readyz` says 503, and every answer closes its connection. The
    server itself hears of it `seconds` later, and of SIGINT at once: it stops accepting, finishes what is
    under way for `shutdown_s` at most, and ends. A second signal ends it at once. A process that has not
    ended when that time is over is ended (`ExitDeadline`).
    """

    def __init__(self, seconds: float, shutdown_s: float) -> None:
        self.began = False
        self._seconds = seconds
        self._shutdown_s = shutdown_s
        self._loop = asyncio.get_running_loop()
        self._before: dict[int, Handler] = {}
        self._deadline: ExitDeadline | None = None

    def __enter__(self) -> Drain:
        before = {number: signal.getsignal(number) for number in SIGNALS}
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and callable(before[signal.SIGTERM]):
            self._deadline = ExitDeadline()
            for number, handler in before.items():
                if callable(handler):
                    self._before[number] = handler
                    signal.signal(number, self._signalled)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._deadline is not None:
            self._deadline.release()

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self.began:
            self._limit(0)
            self._before[number](number, frame)
            self._before[signal.SIGINT](signal.SIGINT, frame)  # to uvicorn: do not wait for anybody
            return
        self.began = True
        drain_s = self._seconds if number == signal.SIGTERM else 0.0
        self._limit(drain_s + self._shutdown_s)
        if not drain_s:
            self._before[number](number, frame)
            return
        log.warning("asked to end: not ready any more, and gone in %g s", drain_s)
        self._loop.call_soon_threadsafe(self._end_later)

    def _limit(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.within(seconds + CLOSING_S)

    def _end_later(self) -> None:
        self._loop.call_later(self._seconds, self._end)

    def _end(self) -> None:
        self._before[signal.SIGTERM](signal.SIGTERM, None)
