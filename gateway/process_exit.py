"""Graceful shutdown: readiness fails first, and the server stops after the drain period."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

log = logging.getLogger(__name__)

SignalHandler = Callable[[int, FrameType | None], Any]
DRAIN_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Drain:
    """Wraps the server's handlers of SIGTERM and SIGINT while the application runs.

    The first SIGTERM sets `is_draining`: `/readyz` returns 503, and every response closes its connection.
    The server receives the signal `drain_s` later, and SIGINT at once: it stops accepting, finishes the
    requests in progress within `GATEWAY_SHUTDOWN_S`, and exits. SIGINT after another signal stops it at once;
    SIGTERM after another one is ignored, because a supervisor sends it to workers that a service manager or a
    terminal has signalled already. A thread that does not end delays the exit: the platform kills such a
    process.
    """

    def __init__(self, drain_s: float) -> None:
        self.is_draining = False
        self.stopping = asyncio.Event()  # set when the server stops accepting
        self._drain_s = drain_s
        self._loop = asyncio.get_running_loop()
        self._previous_handlers: dict[int, SignalHandler] = {}

    def __enter__(self) -> Drain:
        if threading.current_thread() is threading.main_thread():
            for number in DRAIN_SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._previous_handlers[number] = handler
                    signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_draining:
            if number == signal.SIGINT:
                # The second one makes uvicorn stop without waiting for requests.
                self._previous_handlers[number](number, frame)
                self._previous_handlers[number](number, frame)
            return
        self.is_draining = True
        if number == signal.SIGTERM and self._drain_s:
            log.warning("SIGTERM received: draining, shutting down in %g s", self._drain_s)
            self._loop.call_soon_threadsafe(
                self._loop.call_later, self._drain_s, self._stop_server, number
            )
            return
        if number == signal.SIGINT:
            log.info("stopping; press Ctrl-C again to interrupt the requests in progress")
        self._loop.call_soon_threadsafe(self._stop_server, number)

    def _stop_server(self, number: int) -> None:
        self._previous_handlers[number](number, None)
        self.stopping.set()
