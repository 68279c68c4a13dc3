"""Copying of large bodies in pieces, so that no copy holds the GIL, or the event loop, for long."""

from __future__ import annotations

import io
from typing import Final

# Copying this takes a millisecond or less.
MAX_PIECE_BYTES: Final = 1 << 20


def copy_bytes(data: bytes | bytearray | memoryview) -> bytes:
    """Return the data as bytes. Other threads can run between its pieces."""
    if isinstance(data, bytes):
        return data
    if len(data) <= MAX_PIECE_BYTES:
        return bytes(data)
    file = io.BytesIO()
    view = memoryview(data)
    for start in range(0, len(data), MAX_PIECE_BYTES):
        file.write(view[start : start + MAX_PIECE_BYTES])
    return file.getvalue()  # this makes no copy
