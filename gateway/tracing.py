"""Every request has an id: the caller's if it is sane, else a new one."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

SANE = re.compile(rb"[\w.:/+=@-]{1,128}", re.ASCII)


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The caller's `X-Request-ID`, or 32 hexadecimal digits."""
    for name, value in headers:
        if name == b"x-request-id" and SANE.fullmatch(value):
            return value.decode()
    return f"{random.getrandbits(128):032x}"
