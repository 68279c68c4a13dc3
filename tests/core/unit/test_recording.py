"""The bodies that recorders keep, and their memory."""

from __future__ import annotations

import pytest

from gateway.telemetry.recording import CHUNK_BYTES, MAX_BODY_BYTES, RecordedBody, RecorderMemory


def test_pieces_of_a_body_count_with_their_own_memory() -> None:
    memory = RecorderMemory(10 * (2 + CHUNK_BYTES))
    body = RecordedBody(memory, [])
    for _ in range(9):
        body.add(b"ab", is_last=False)
    body.add(b"cd")
    assert (body.data, body.is_complete, body.is_dropped) == (b"ab" * 9 + b"cd", True, False)
    assert not memory.reserve(1)
    body.release()
    assert (body.data, memory.held_bytes) == (b"", 0)


@pytest.mark.parametrize(
    ("max_bytes", "is_dropped", "is_too_large"),
    [(1 << 30, False, True), (MAX_BODY_BYTES, True, True)],
)
def test_body_that_is_not_kept_holds_nothing(
    max_bytes: int, is_dropped: bool, is_too_large: bool
) -> None:
    memory = RecorderMemory(max_bytes)
    body = RecordedBody(memory, [])
    for _ in range(4):
        body.add(bytes(MAX_BODY_BYTES // 2), is_last=False)
    assert (body.is_dropped, body.is_too_large, body.data) == (is_dropped, is_too_large, b"")
    assert (memory.held_bytes, body.size_bytes) == (0, 2 * MAX_BODY_BYTES)
