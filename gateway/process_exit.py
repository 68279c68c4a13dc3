"""How a process that serves comes to its end: on time, whatever its threads are doing.

Python waits at its end for every thread that is no daemon, and nobody can stop one that decodes an image or
reads from a disk that hangs.
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

from gateway import logs
from gateway.messages import CommandError, join_names, print_message

log = logging.getLogger(__name__)

THREAD_JOIN_S: Final = 0.5  # in which a thread that has nothing to do ends
CLOSE_TIMEOUT_S: Final = 5.0  # for what is closed when the requests are over
# Then the kernel ends the process, if a thread does not even let go of the interpreter.
KERNEL_KILL_GRACE_S: Final = 3.0
OVERDUE_EXIT_STATUS: Final = 1
INTERRUPTED_EXIT_STATUS: Final = 128 + signal.SIGINT


class ExitDeadline:
    """Ends the process when its time is over, from a thread of its own.

    Nothing ends before `within` was called. Signal handlers may call it, also in the midst of itself.
    """

    def __init__(self) -> None:
        self._deadlines: SimpleQueue[float | None] = SimpleQueue()
        threading.Thread(target=self._enforce, name="exit-deadline", daemon=True).start()

    def set_timeout(self, limit_s: float) -> None:
        """End the process in so many seconds; of several limits the first that passes counts."""
        self._deadlines.put(time.monotonic() + limit_s)
        left_s, _ = signal.getitimer(signal.ITIMER_REAL)
        if not 0 < left_s < limit_s + KERNEL_KILL_GRACE_S:
            signal.setitimer(signal.ITIMER_REAL, limit_s + KERNEL_KILL_GRACE_S)

    def release(self) -> None:
        """Nothing ends any more, unless a limit was set."""
        self._deadlines.put(None)

    def _enforce(self) -> None:
        end = self._deadlines.get()
        if end is None:
            return
        while (left_s := end - time.monotonic()) > 0:
            try:
                another = self._deadlines.get(timeout=left_s)
            except Empty:
                break
            end = min(end, another or end)
        log.error(
            "the time for shutting down is over (GATEWAY_DRAIN_S, GATEWAY_SHUTDOWN_S): leaving at once, "
            "whatever is still running"
        )
        exit_now(OVERDUE_EXIT_STATUS)


@contextmanager
def prompt_exit() -> Iterator[None]:
    """End the process after the block at once where threads are busy that Python would wait for."""
    try:
        yield
    finally:
        logs.flush()
        if busy := find_busy_threads():
            status = report_exit_status(sys.exc_info()[1])
            log.warning("leaving without %s, which nobody waits for any more", join_names(busy))
            exit_now(status)


def find_busy_threads() -> list[str]:
    """The threads that Python would wait for, and that do not end by themselves soon."""
    deadline = time.monotonic() + THREAD_JOIN_S
    kept = (threading.main_thread(), threading.current_thread())
    others = [each for each in threading.enumerate() if not each.daemon and each not in kept]
    for thread in others:
        thread.join(max(deadline - time.monotonic(), 0))
    return [f"the thread {thread.name}" for thread in others if thread.is_alive()]


def report_exit_status(exc: BaseException | None) -> int:
    """The exit status of a command that ends so; the sentence of a failure is said."""
    match exc:
        case None:
            return 0
        case CommandError():
            print_message(f"triton-gateway: {exc}")
            return exc.status
        case SystemExit():
            return exc.code if isinstance(exc.code, int) else 0 if exc.code is None else 1
        case KeyboardInterrupt():
            return INTERRUPTED_EXIT_STATUS
    log.error("a fault in the gateway", exc_info=exc)
    return 1


def exit_now(status: int) -> NoReturn:
    """End the process now, with what was said written, as far as somebody reads it."""
    logs.flush()
    os._exit(status)
