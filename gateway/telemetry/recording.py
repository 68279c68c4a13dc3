"""The seam of recorders, which see the bodies of all requests and responses, and what they keep of them."""

from __future__ import annotations

import time
from typing import Any, Final, Protocol

from gateway.telemetry.request_info import RequestScope

MAX_BODY_BYTES: Final = 1 << 20
MAX_HELD_BYTES: Final = 16 << 20
# The memory of a piece besides its data.
CHUNK_BYTES: Final = 64


class RecorderMemory:
    """The memory of one recorder in this process, which is bounded."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self.held_bytes = 0
        self._max_bytes = max_bytes

    def reserve(self, size_bytes: int) -> bool:
        """Reserve memory, which is to be released; return False if there is no room."""
        if self.held_bytes + size_bytes > self._max_bytes:
            return False
        self.held_bytes += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes


class RecordedBody:
    """The body of a request or a response, which passes in pieces. One above `MAX_BODY_BYTES` is not kept."""

    def __init__(self, memory: RecorderMemory, headers: list[tuple[bytes, bytes]]) -> None:
        self.headers = headers
        self.size_bytes = 0
        self.is_complete = False
        self.is_dropped = False  # the recorder's memory has no room
        self._memory = memory
        self._chunks: list[bytes] = []
        self._held_bytes = 0

    @property
    def is_too_large(self) -> bool:
        return self.size_bytes > MAX_BODY_BYTES

    @property
    def data(self) -> bytes:
        return b"".join(self._chunks)

    def add(self, data: bytes, *, is_last: bool = True) -> None:
        self.size_bytes += len(data)
        self.is_complete = is_last
        if self.is_dropped:
            return
        held_bytes = len(data) + CHUNK_BYTES
        if self.is_too_large:
            self.release()
        elif self._memory.reserve(held_bytes):
            self._chunks.append(data)
            self._held_bytes += held_bytes
        else:
            self.is_dropped = True
            self.release()

    def release(self) -> None:
        self._chunks = []
        self._memory.release(self._held_bytes)
        self._held_bytes = 0


class Recording:
    """A request and its response, as one recorder keeps them."""

    def __init__(self, memory: RecorderMemory, scope: RequestScope, draw: float) -> None:
        self.started_at = time.time()
        self.draw = draw  # the request is kept if the share of its model or label is above it
        self.request = RecordedBody(memory, scope["headers"])
        self.response = RecordedBody(memory, [])

    @property
    def is_dropped(self) -> bool:
        return self.request.is_dropped or self.response.is_dropped

    def release(self) -> None:
        self.request.release()
        self.response.release()


class Recorder(Protocol):
    """Records requests and responses, over HTTP and gRPC."""

    def start(self, scope: RequestScope) -> Recording | None:
        """Return the recording of a request whose head has arrived; None if it is not recorded."""

    def end(self, scope: RequestScope, recording: Any, status: int) -> None:
        """End a request and its recording, which is what `start` returned."""
