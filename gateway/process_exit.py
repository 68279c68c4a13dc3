"""Graceful shutdown, and process exit on time, even if threads are busy.

Readiness fails first, and the server stops after the drain period. Python waits for all non-daemon threads
when it exits, and a thread that decodes an image or reads from a disk that hangs cannot be stopped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Final, NoReturn

from gateway.messages import CommandError, join_names
from gateway.telemetry import logs

log = logging.getLogger(__name__)

SignalHandler = Callable[[int, FrameType | None], Any]
DRAIN_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
THREAD_JOIN_S: Final = 0.5  # enough for an idle thread to end
CLOSE_TIMEOUT_S: Final = 5.0  # limit for closing the services after the last request
# After this time the kernel kills the process, in case a thread does not release the interpreter.
KERNEL_KILL_GRACE_S: Final = 3.0
OVERDUE_EXIT_STATUS: Final = 1
INTERRUPTED_EXIT_STATUS: Final = 128 + signal.SIGINT


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


class ExitDeadline:
    """Exits the process at a deadline, from a thread of its own.

    There is no deadline before the first `set_timeout`, which signal handlers may call at any time.
    """

    def __init__(self) -> None:
        self._deadlines: SimpleQueue[float | None] = SimpleQueue()
        threading.Thread(target=self._enforce, name="exit-deadline", daemon=True).start()

    def set_timeout(self, limit_s: float) -> None:
        """Exit the process after `limit_s`; the earliest of several deadlines applies."""
        self._deadlines.put(time.monotonic() + limit_s)
        remaining_s, _ = signal.getitimer(signal.ITIMER_REAL)
        if not 0 < remaining_s < limit_s + KERNEL_KILL_GRACE_S:
            signal.setitimer(signal.ITIMER_REAL, limit_s + KERNEL_KILL_GRACE_S)

    def release(self) -> None:
        self._deadlines.put(None)

    def _enforce(self) -> None:
        deadline = self._deadlines.get()
        if deadline is None:
            return
        while (remaining_s := deadline - time.monotonic()) > 0:
            try:
                another = self._deadlines.get(timeout=remaining_s)
            except Empty:
                break
            deadline = min(deadline, another or deadline)
        log.error(
            "the shutdown deadline (GATEWAY_DRAIN_S, GATEWAY_SHUTDOWN_S) has passed: exiting with work "
            "in progress"
        )
        exit_now(OVERDUE_EXIT_STATUS)


@contextmanager
def prompt_exit() -> Iterator[None]:
    """Exit the process after the block without waiting for busy threads."""
    try:
        yield
    finally:
        logs.flush()
        if busy := find_busy_threads():
            status = report_exit_status(sys.exc_info()[1])
            log.warning("exiting without waiting for %s", join_names(busy))
            exit_now(status)


def find_busy_threads() -> list[str]:
    """Return the non-daemon threads that do not end within `THREAD_JOIN_S`."""
    deadline = time.monotonic() + THREAD_JOIN_S
    excluded = (threading.main_thread(), threading.current_thread())
    others = [
        thread for thread in threading.enumerate() if not thread.daemon and thread not in excluded
    ]
    for thread in others:
        thread.join(max(deadline - time.monotonic(), 0))
    return [f"thread {thread.name}" for thread in others if thread.is_alive()]


def report_exit_status(exc: BaseException | None) -> int:
    """Return the exit status of a command that ends with this exception; print or log a failure."""
    match exc:
        case None:
            return 0
        case CommandError():
            logs.print_failure(exc)
            return exc.status
        case SystemExit():
            return exc.code if isinstance(exc.code, int) else 0 if exc.code is None else 1
        case KeyboardInterrupt():
            return INTERRUPTED_EXIT_STATUS
    log.error("unhandled exception", exc_info=exc)
    return 1


def exit_now(status: int) -> NoReturn:
    logs.flush()
    os._exit(status)
