"""Rewriting of error events in server-sent event streams (WHATWG HTML, section 9.2), without I/O."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

from gateway.media_types import EVENT_END, escape_line_separators

# The start of an error event of Triton's generate extension after the first event.
ERROR_EVENT_START = b'data: {"error":'
MAX_HELD_EVENT_BYTES = 64 * 1024  # limit of an error event
MAX_SCRUBBED_ERRORS = 64  # further errors of a stream repeat the last message


# The bytes that may be the beginning of a line separator, the longest first.
SEPARATOR_BEGINNINGS: Final = (b"\xe2\x80", b"\xe2", b"\xc2")


class EventState(Enum):
    """The treatment of the current, incomplete event."""

    passed = "passed"
    held = "held"  # an error event that is not complete yet
    dropped = "dropped"  # the rest of an error event that is too long


class LineSeparatorEscaper:
    """Escapes the line separators of JSON that arrives in pieces."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes, *, is_last: bool) -> bytes:
        """Return the bytes to send now; a possible beginning of a separator is held unless it `is_last`."""
        text = self._held + data
        self._held = b"" if is_last else next(filter(text.endswith, SEPARATOR_BEGINNINGS), b"")
        return escape_line_separators(text.removesuffix(self._held))


class EventStreamScrubber:
    """Passes events through, with escaped line separators.

    Of error events it replaces the data by `scrub(data)`.
    """

    def __init__(self, scrub: Callable[[bytes], bytes]) -> None:
        self._scrub = scrub
        self._escaper = LineSeparatorEscaper()
        self._state = EventState.passed
        self._tail = EVENT_END  # the last two bytes before `_held`
        self._held = b""
        self._last_scrubbed = b""
        self._error_count = 0

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to send now; a possible error event is held until it is complete."""
        text = self._tail + self._held + self._escaper.feed(data, is_last=False)
        start = len(self._tail)
        searched = start + max(len(self._held) - 1, 0)  # no held event ends before
        passed: list[bytes] = []
        while start < len(text):
            if self._state is EventState.passed:
                stop = self._find_next_error(text, start)
                passed.append(text[start:stop])
                start = stop
                if self._state is EventState.passed:
                    break
            begin = max(start, searched) if self._state is EventState.held else start - 1
            end = text.find(EVENT_END, begin)
            if self._state is EventState.held:
                if end < 0 and len(text) - start <= MAX_HELD_EVENT_BYTES:
                    break
                stop = end if end >= 0 else len(text)
                passed.append(self._rewrite(text[start : min(stop, start + MAX_HELD_EVENT_BYTES)]))
                self._state = EventState.dropped
            if end < 0:
                start = len(text)
                break
            start = end + len(EVENT_END)
            self._state = EventState.passed
        self._tail = text[max(start - len(EVENT_END), 0) : start]
        self._held = text[start:]
        return b"".join(passed)

    def _find_next_error(self, text: bytes, start: int) -> int:
        """Return the start of the next error event, or of a possible prefix of one at the end."""
        boundary = text.find(EVENT_END + ERROR_EVENT_START, start - len(EVENT_END))
        if boundary >= 0:
            self._state = EventState.held
            return boundary + len(EVENT_END)
        last = text.rfind(
            EVENT_END, max(start - len(EVENT_END), len(text) - len(EVENT_END + ERROR_EVENT_START))
        )
        tail = text[last + len(EVENT_END) :]
        is_prefix = last >= 0 and ERROR_EVENT_START.startswith(tail)
        return len(text) - len(tail) if is_prefix else len(text)

    def end(self) -> bytes:
        held, self._held = self._held + self._escaper.feed(b"", is_last=True), b""
        return self._rewrite(held) if self._state is EventState.held else held

    def _rewrite(self, event: bytes) -> bytes:
        self._error_count += 1
        if self._error_count <= MAX_SCRUBBED_ERRORS:
            self._last_scrubbed = self._scrub(event.removeprefix(b"data: ").rstrip(b"\n"))
        return b"data: " + escape_line_separators(self._last_scrubbed) + EVENT_END
