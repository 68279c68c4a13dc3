"""Server-sent events, as bytes in and bytes out (WHATWG HTML, section 9.2). Pure."""

from __future__ import annotations

from collections.abc import Callable

EVENT_STREAM = b"text/event-stream"
END = b"\n\n"
# How Triton's generate extension tells an error after the first event.
ERROR = b'data: {"error":'


class ScrubbedErrors:
    """Passes events on as they come, byte for byte, but for the ones that tell an error."""

    def __init__(self, scrub: Callable[[bytes], bytes]) -> None:
        self._scrub = scrub
        self._held = b""
        self._inside = False  # of an event whose beginning was passed on

    def feed(self, data: bytes) -> bytes:
        """What may go on now. Only an event that could be an error is held until it is whole."""
        data = self._held + data
        passed = []
        while data:
            end = data.find(END)
            event = data[: end + len(END)] if end >= 0 else data
            if self._inside or not event.startswith(ERROR[: len(event)]):
                self._inside = end < 0
                if self._inside and event.endswith(b"\n"):
                    event = event[:-1]  # perhaps the first half of the end
                    passed.append(event)
                    data = data[len(event) :]
                    break
                passed.append(event)
            elif end >= 0:
                passed.append(self._rewritten(event))
            else:
                break
            data = data[len(event) :]
        self._held = data
        return b"".join(passed)

    def end(self) -> bytes:
        """What was held when the stream ended."""
        held, self._held = self._held, b""
        return self._rewritten(held) if held.startswith(ERROR) else held

    def _rewritten(self, event: bytes) -> bytes:
        payload = event.removeprefix(b"data: ").rstrip(b"\n")
        return b"data: " + self._scrub(payload) + END
