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

from gateway.words import printable

MOST_BYTES: Final = 4 << 20  # that wait to be written
BATCH_BYTES: Final = 64 << 10
# Lines that come this soon after the first are written together: waking a thread for each would cost more
# than all else that a line costs.
LINGER_S: Final = 0.005
LOOK_EVERY_S: Final = 0.005


def missing(count: int) -> str:
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
        most_bytes: int = MOST_BYTES,
        notice: Callable[[int], str] = missing,
    ) -> None:
        self.dropped = 0
        self._descriptor = descriptor
        self._most_bytes = most_bytes
        self._notice = notice
        self._lines: deque[str] = deque()
        self._size = 0
        self._untold = 0  # dropped since the last notice
        self._idle = True
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._lock = threading.RLock()  # a signal's handler may come in the midst of it
        threading.Thread(target=self._run, name="log-writer", daemon=True).start()

    def say(self, sentence: str) -> None:
        """A line for a person."""
        self.put(f"{printable(sentence)}\n")

    def put(self, text: str) -> None:
        """Whole lines, each with its end; all of them are written, or none."""
        with self._lock:
            if self._size and self._size + len(text) > self._most_bytes:
                self.dropped += 1
                self._untold += 1
                return
            if self._untold:
                self._tell()
            self._append(text)
            wake, self._idle = self._idle, False
        if wake:
            self._bell.put(None)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is written, but no longer than this; whether it is."""
        deadline = time.monotonic() + timeout_s
        while not self._idle:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_EVERY_S)
        return True

    def _tell(self) -> None:
        count, self._untold = self._untold, 0
        self._append(f"{self._notice(count)}\n")

    def _append(self, text: str) -> None:
        self._lines.append(text)
        self._size += len(text)

    def _run(self) -> None:
        while True:
            self._bell.get()
            time.sleep(LINGER_S)
            while lines := self._next():
                try:
                    write_all(self._descriptor, "".join(lines).encode("utf-8", "backslashreplace"))
                except OSError:  # nobody reads any more, or the disk is full
                    with self._lock:
                        self.dropped += len(lines)

    def _next(self) -> list[str]:
        """What is to be written next; nothing, and the thread idle, when there is nothing."""
        pieces: list[str] = []
        with self._lock:
            if not self._lines and self._untold:
                self._tell()
            size = 0
            while self._lines and size < BATCH_BYTES:
                pieces.append(self._lines.popleft())
                size += len(pieces[-1])
            self._size -= size
            self._idle = not pieces
        return pieces


def write_all(descriptor: int, data: bytes) -> None:
    """Raises `OSError`; waits for a descriptor that somebody has made non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
