"""Server-sent events, as bytes in and bytes out (WHATWG HTML, section 9.2). Pure."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

EVENT_STREAM = b"text/event-stream"
END = b"\n\n"
# How Triton's generate extension tells an error after the first event.
ERROR = b'data: {"error":'
MOST_HELD_BYTES = 64 * 1024  # of an event that tells an error
MOST_SCRUBBED = 64  # errors of one stream; the others are told in the words of the last one


class Event(Enum):
    """What becomes of the event that the stream is in the middle of."""

    passed = "passed"
    held = "held"  # an error that is not whole yet
    dropped = "dropped"  # the rest of an error that is too long


class ScrubbedErrors:
    """Passes events on as they come, byte for byte, but for the ones that tell an error."""

    def __init__(self, scrub: Callable[[bytes], bytes]) -> None:
        self._scrub = scrub
        self._event = Event.passed
        self._before = END  # the last two bytes that are done with
        self._held = b""
        self._scrubbed = b""
        self._errors = 0

    def feed(self, data: bytes) -> bytes:
        """What may go on now. Only an event that could be an error is held until it is whole, or too long."""
        text = self._before + self._held + data
        start = len(self._before)
        looked = start + max(len(self._held) - 1, 0)  # no held event ends before
        passed: list[bytes] = []
        while start < len(text):
            if self._event is Event.passed:
                stop = self._next_error(text, start)
                passed.append(text[start:stop])
                start = stop
                if self._event is Event.passed:
                    break
            end = text.find(END, max(start, looked) if self._event is Event.held else start - 1)
            if self._event is Event.held:
                if end < 0 and len(text) - start <= MOST_HELD_BYTES:
                    break
                stop = end if end >= 0 else len(text)
                passed.append(self._rewritten(text[start : min(stop, start + MOST_HELD_BYTES)]))
                self._event = Event.dropped
            if end < 0:
                start = len(text)
                break
            start = end + len(END)
            self._event = Event.passed
        self._before, self._held = text[max(start - len(END), 0) : start], text[start:]
        return b"".join(passed)

    def _next_error(self, text: bytes, start: int) -> int:
        """Where an error begins; or where what is here of one might, at the end."""
        found = text.find(END + ERROR, start - len(END))
        if found >= 0:
            self._event = Event.held
            return found + len(END)
        last = text.rfind(END, max(start - len(END), len(text) - len(END + ERROR)))
        tail = text[last + len(END) :]
        return len(text) - len(tail) if last >= 0 and ERROR.startswith(tail) else len(text)

    def end(self) -> bytes:
        """What was held when the stream ended."""
        held, self._held = self._held, b""
        return self._rewritten(held) if self._event is Event.held else held

    def _rewritten(self, event: bytes) -> bytes:
        self._errors += 1
        if self._errors <= MOST_SCRUBBED:
            self._scrubbed = self._scrub(event.removeprefix(b"data: ").rstrip(b"\n"))
        return b"data: " + self._scrubbed + END
