"""How deep the JSON of a request is, as it passes: tritonserver 2.51 dies of some 50,000 levels. Pure."""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from gateway.errors import Malformed

MOST_DEPTH: Final = 1024
KEPT: Final = b'[]{}"'
REST: Final = bytes(set(range(256)) - set(KEPT))
ESCAPED: Final = re.compile(rb"\\.", re.DOTALL)
STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes


class Nesting:
    """Of one text, which is fed in pieces. Where it is no JSON, it may be taken for deeper than it is."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False  # the last piece ended with half an escape

    def feed(self, data: bytes) -> None:
        """Raises `Malformed`."""
        if self._escaped:
            data, self._escaped = data[1:], not data
        if b"\\" in data:
            data = ESCAPED.sub(b"", data)
            self._escaped = data.endswith(b"\\")
        parts = data.translate(None, REST).split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        opened = outside.count(b"[") + outside.count(b"{")
        if self._depth + opened > MOST_DEPTH:
            steps = np.frombuffer(outside.translate(STEPS), np.int8)
            if self._depth + int(np.cumsum(steps, dtype=np.int64).max()) > MOST_DEPTH:
                raise Malformed(f"the JSON is nested deeper than {MOST_DEPTH} levels")
        self._depth += 2 * opened - len(outside)
