"""Graceful shutdown: readiness fails first, and the server stops after the drain period."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, Final

from gateway.process_exit import CLOSE_TIMEOUT_S, ExitDeadline

log = logging.getLogger(__name__)

SignalHandler = Callable[[int, FrameType | None], Any]
DRAIN_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Drain:
    """Wraps the server's handlers of SIGTERM and SIGINT while the application runs.

    The first SIGTERM sets `is_draining`: `/readyz` returns 503, and every response closes its connection.
    The server receives the signal `drain_s` later, and SIGINT at once: it stops accepting, finishes the
    requests in progress within `shutdown_s`, and exits. A second signal stops it at once. `ExitDeadline`
    terminates a process that is still running after that time.
    """

    def __init__(self, drain_s: float, shutdown_s: float) -> None:
        self.is_draining = False
        self.stopping = asyncio.Event()  # set when the server stops accepting
        self._drain_s = drain_s
        self._shutdown_s = shutdown_s
        self._loop = asyncio.get_running_loop()
        self._previous_handlers: dict[int, SignalHandler] = {}
        self._exit_deadline: ExitDeadline | None = None

    def __enter__(self) -> Drain:
        handlers = {number: signal.getsignal(number) for number in DRAIN_SIGNALS}
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and callable(handlers[signal.SIGTERM]):
            self._exit_deadline = ExitDeadline()
            for number, handler in handlers.items():
                if callable(handler):
                    self._previous_handlers[number] = handler
                    signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        if self._exit_deadline is not None:
            self._exit_deadline.release()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_draining:
            self._limit_exit(0)
            self._previous_handlers[number](number, frame)
            # SIGINT makes uvicorn stop without waiting for requests.
            self._previous_handlers[signal.SIGINT](signal.SIGINT, frame)
            return
        self.is_draining = True
        drain_s = self._drain_s if number == signal.SIGTERM else 0.0
        self._limit_exit(drain_s + self._shutdown_s)
        if not drain_s:
            if number == signal.SIGINT:
                log.info("stopping; press Ctrl-C again to interrupt the requests in progress")
            self._previous_handlers[number](number, frame)
            self._loop.call_soon_threadsafe(self.stopping.set)
            return
        log.warning("SIGTERM received: draining, shutting down in %g s", drain_s)
        stop_server = partial(self._stop_server, number)
        self._loop.call_soon_threadsafe(self._loop.call_later, drain_s, stop_server)

    def _stop_server(self, number: int) -> None:
        self._previous_handlers[number](number, None)
        self.stopping.set()

    def _limit_exit(self, limit_s: float) -> None:
        if self._exit_deadline is not None:
            self._exit_deadline.set_timeout(limit_s + CLOSE_TIMEOUT_S)
