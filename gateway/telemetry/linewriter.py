"""A queue of lines for standard error, written by a thread so that no caller blocks."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final

from gateway.messages import escape_unprintable

MAX_QUEUED_BYTES: Final = 4 << 20  # of lines that wait to be written
WRITE_BATCH_BYTES: Final = 64 << 10
# Lines that follow the first one within this time are written together, because waking the thread for each
# line would cost more than the line itself.
BATCH_DELAY_S: Final = 0.005
FLUSH_POLL_S: Final = 0.005


def format_dropped_notice(count: int) -> str:
    return f"{count} log lines were dropped here because standard error was not read in time"


@dataclass(eq=False, repr=False)
class LineWriter:
    """A bounded queue of lines, and the thread that writes them.

    A full queue drops and counts new lines, and writes a notice with their number when it has room again. All
    methods may be called from any thread and from signal handlers.
    """

    descriptor: int
    max_bytes: int = MAX_QUEUED_BYTES
    format_notice: Callable[[int], str] = format_dropped_notice
    dropped_count: int = 0
    _lines: deque[str] = field(default_factory=deque)
    _queued_size: int = 0
    _unreported_count: int = 0  # dropped since the last notice
    _is_idle: bool = True

    def __post_init__(self) -> None:
        self._wakeup: SimpleQueue[None] = SimpleQueue()
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt its holder
        threading.Thread(target=self._run, name="log-writer", daemon=True).start()

    def write_message(self, message: str) -> None:
        self.enqueue(f"{escape_unprintable(message)}\n")

    def enqueue(self, text: str) -> None:
        # `text` is one or more lines with their line ends; all of them are written, or none.
        with self._lock:
            if self._queued_size and self._queued_size + len(text) > self.max_bytes:
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
        """Wait until all lines are written; return False after the timeout."""
        deadline = time.monotonic() + timeout_s
        while not self._is_idle:
            if time.monotonic() > deadline:
                return False
            time.sleep(FLUSH_POLL_S)
        return True

    def _append_notice(self) -> None:
        self._append(f"{self.format_notice(self._unreported_count)}\n")
        self._unreported_count = 0

    def _append(self, text: str) -> None:
        self._lines.append(text)
        self._queued_size += len(text)

    def _run(self) -> None:
        while True:
            self._wakeup.get()
            time.sleep(BATCH_DELAY_S)
            is_idle = False
            while not is_idle:
                try:
                    is_idle = self._write_batch()
                except Exception:  # noqa: BLE001 - such as MemoryError; later lines must be written
                    with self._lock:
                        self.dropped_count += 1
                    time.sleep(BATCH_DELAY_S)

    def _write_batch(self) -> bool:
        """Write the next lines; return whether there are none."""
        lines = self._take_batch()
        if lines:
            data = "".join(lines).encode("utf-8", "backslashreplace")
            try:
                write_fully(self.descriptor, data)
            except OSError:  # the reader closed the pipe, or the disk is full
                with self._lock:
                    self.dropped_count += len(lines)
        return not lines

    def _take_batch(self) -> list[str]:
        """Return the next lines to write; an empty list marks the thread as idle."""
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
    """Write all data, waiting even if another program made the descriptor non-blocking. Raises `OSError`."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
