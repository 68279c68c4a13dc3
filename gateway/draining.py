"""SIGTERM: unready first, then quiet, then gone. Whoever sends requests has time to go elsewhere."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

log = logging.getLogger(__name__)

Handler = Callable[[int, FrameType | None], Any]


class Drain:
    """Stands before the server's own handler of SIGTERM, from the application's start to its end.

    The first signal makes `began` true: `/readyz` says 503, and every answer closes its connection. The
    server itself hears of it `seconds` later: it stops accepting, finishes what is under way, and ends. A
    second signal ends it at once.
    """

    def __init__(self, seconds: float) -> None:
        self.began = False
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._server: Handler | None = None

    def __enter__(self) -> Drain:
        before = signal.getsignal(signal.SIGTERM)
        in_main_thread = threading.current_thread() is threading.main_thread()
        if self._seconds > 0 and in_main_thread and callable(before):
            self._server = before
            signal.signal(signal.SIGTERM, self._terminate)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._server is not None:
            signal.signal(signal.SIGTERM, self._server)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if self._server is None:
            return
        if self.began:
            self._server(number, frame)
            self._server(signal.SIGINT, frame)  # to uvicorn: do not wait for anybody
            return
        self.began = True
        log.warning("asked to end: not ready any more, and gone in %g s", self._seconds)
        self._loop.call_soon_threadsafe(self._end_later)

    def _end_later(self) -> None:
        self._loop.call_later(self._seconds, self._end)

    def _end(self) -> None:
        if self._server is not None:
            self._server(signal.SIGTERM, None)
