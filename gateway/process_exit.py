"""Process exit on time, even if threads are busy.

Python waits for all non-daemon threads when it exits, and a thread that decodes an image or reads from a disk
that hangs cannot be stopped.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Final, NoReturn

from gateway.messages import CommandError, join_names
from gateway.telemetry import logs

log = logging.getLogger(__name__)

THREAD_JOIN_S: Final = 0.5  # enough for an idle thread to end
CLOSE_TIMEOUT_S: Final = 5.0  # limit for closing the services after the last request
# After this time the kernel kills the process, in case a thread does not release the interpreter.
KERNEL_KILL_GRACE_S: Final = 3.0
OVERDUE_EXIT_STATUS: Final = 1
INTERRUPTED_EXIT_STATUS: Final = 128 + signal.SIGINT


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
