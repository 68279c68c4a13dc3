"""Server-sent events, as bytes in and bytes out (WHATWG HTML, section 9.2). Pure."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

SSE_MEDIA_TYPE = b"text/event-stream"
EVENT_END = b"\n\n"
# How Triton's generate extension tells an error after the first event.
ERROR_EVENT_START = b'data: {"error":'
MAX_HELD_EVENT_BYTES = 64 * 1024  # of an event that tells an error
MAX_SCRUBBED_ERRORS = 64  # errors of one stream; the others are told in the words of the last one


class EventState(Enum):
    """What becomes of the event that the stream is in the middle of."""

    passed = "passed"
    held = "held"  # an error that is not whole yet
    dropped = "dropped"  # the rest of an error that is too long


class EventStreamScrubber:
    """Passes events on as they come, byte for byte, but for the ones that tell an error."""

    def __init__(self, scrub: Callable[[bytes], bytes]) -> None:
        self._scrub = scrub
        self._state = EventState.passed
        self._tail = EVENT_END  # the last two bytes that are done with
        self._held = b""
        self._last_scrubbed = b""
        self._error_count = 0

    def feed(self, data: bytes) -> bytes:
        """What may go on now. Only an event that could be an error is held until it is whole, or too long."""
        text = self._tail + self._held + data
        start = len(self._tail)
        looked = start + max(len(self._held) - 1, 0)  # no held event ends before
        passed: list[bytes] = []
        while start < len(text):
            if self._state is EventState.passed:
                stop = self._find_next_error(text, start)
                passed.append(text[start:stop])
                start = stop
                if self._state is EventState.passed:
                    break
            end = text.find(
                EVENT_END, max(start, looked) if self._state is EventState.held else start - 1
            )
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
        self._tail, self._held = text[max(start - len(EVENT_END), 0) : start], text[start:]
        return b"".join(passed)

    def _find_next_error(self, text: bytes, start: int) -> int:
        """Where an error begins; or where what is here of one might, at the end."""
        found = text.find(EVENT_END + ERROR_EVENT_START, start - len(EVENT_END))
        if found >= 0:
            self._state = EventState.held
            return found + len(EVENT_END)
        last = text.rfind(
            EVENT_END, max(start - len(EVENT_END), len(text) - len(EVENT_END + ERROR_EVENT_START))
        )
        tail = text[last + len(EVENT_END) :]
        return (
            len(text) - len(tail) if last >= 0 and ERROR_EVENT_START.startswith(tail) else len(text)
        )

    def end(self) -> bytes:
        """What was held when the stream ended."""
        held, self._held = self._held, b""
        return self._rewrite(held) if self._state is EventState.held else held

    def _rewrite(self, event: bytes) -> bytes:
        self._error_count += 1
        if self._error_count <= MAX_SCRUBBED_ERRORS:
            self._last_scrubbed = self._scrub(event.removeprefix(b"data: ").rstrip(b"\n"))
        return b"data: " + self._last_scrubbed + EVENT_END
