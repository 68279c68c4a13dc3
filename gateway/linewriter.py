"""Lines for standard error, written by a thread: nobody who has something to say waits for who reads it."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

from gateway.messages import escape_unprintable

MAX_QUEUED_BYTES: Final = 4 << 20  # that wait to be written
WRITE_BATCH_BYTES: Final = 64 << 10
# Lines that come this soon after the first are written together: waking a thread for each would cost more
# than all else that a line costs.
BATCH_DELAY_S: Final = 0.005
FLUSH_POLL_S: Final = 0.005


def format_dropped_notice(count: int) -> str:
    """The line that stands where others were dropped."""
    return f"{count} lines of the log were dropped here: standard error was not read in time"


class LineWriter:
    """A bounded queue of lines, and the thread that writes them.

    A line that finds the queue full is dropped and counted, and a line says how many are missing as soon as
    there is room again. Anything here may be called by any thread, and by a signal's handler.
    """

    def __init__(
        self,
        descriptor: int,
        *,
        max_bytes: int = MAX_QUEUED_BYTES,
        format_notice: Callable[[int], str] = format_dropped_notice,
    ) -> None:
        self.dropped_count = 0
        self._descriptor = descriptor
        self._max_bytes = max_bytes
        self._format_notice = format_notice
        self._lines: deque[str] = deque()
        self._queued_size = 0
        self._unreported_count = 0  # dropped since the last notice
        self._is_idle = True
        self._wakeup: SimpleQueue[None] = SimpleQueue()
        self._lock = threading.RLock()  # a signal's handler may come in the midst of it
        threading.Thread(target=self._run, name="log-writer", daemon=True).start()

    def write_message(self, message: str) -> None:
        """A line for a person."""
        self.enqueue(f"{escape_unprintable(message)}\n")

    def enqueue(self, text: str) -> None:
        """Whole lines, each with its end; all of them are written, or none."""
        with self._lock:
            if self._queued_size and self._queued_size + len(text) > self._max_bytes:
                self.dropped_count += 1
                self._unreported_count += 1
                return
            if self._unreported_count:
                self._append_notice()
            self._append(text)
            wake, self._is_idle = self._is_idle, False
        if wake:
            self._wakeup.put(None)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is written, but no longer than this; whether it is."""
        deadline = time.monotonic() + timeout_s
        while not self._is_idle:
            if time.monotonic() > deadline:
                return False
            time.sleep(FLUSH_POLL_S)
        return True

    def _append_notice(self) -> None:
        count, self._unreported_count = self._unreported_count, 0
        self._append(f"{self._format_notice(count)}\n")

    def _append(self, text: str) -> None:
        self._lines.append(text)
        self._queued_size += len(text)

    def _run(self) -> None:
        while True:
            self._wakeup.get()
            time.sleep(BATCH_DELAY_S)
            while lines := self._take_batch():
                try:
                    write_fully(
                        self._descriptor, "".join(lines).encode("utf-8", "backslashreplace")
                    )
                except OSError:  # nobody reads any more, or the disk is full
                    with self._lock:
                        self.dropped_count += len(lines)

    def _take_batch(self) -> list[str]:
        """What is to be written next; nothing, and the thread idle, when there is nothing."""
        pieces: list[str] = []
        with self._lock:
            if not self._lines and self._unreported_count:
                self._append_notice()
            size = 0
            while self._lines and size < WRITE_BATCH_BYTES:
                pieces.append(self._lines.popleft())
                size += len(pieces[-1])
            self._queued_size -= size
            self._is_idle = not pieces
        return pieces


def write_fully(descriptor: int, data: bytes) -> None:
    """Raises `OSError`; waits for a descriptor that somebody has made non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
