"""Refused requests in the log at level warning, sampled, so that an attack neither hides nor floods it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

log = logging.getLogger("gateway.refusals")  # a public name, wherever this module is

INTERVAL_S: Final = 60.0
MAX_CALLERS: Final = 1000
OTHERS: Final = "others"
# No or a wrong key, no right, and too many requests.
REFUSED_STATUSES: Final = frozenset((401, 403, 429))


class RefusalLog:
    """Logs the first refusal of a caller with a code at once, and then once in each interval their number."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._counts: dict[tuple[str, str], int] = {}  # caller and code → refusals without a line
        self._timers: dict[tuple[str, str], asyncio.TimerHandle] = {}

    def record(self, caller: str, code: str, reason: str, **fields: Any) -> None:
        key = (caller, code)
        if key not in self._counts and len(self._counts) >= MAX_CALLERS:
            key = (OTHERS, code)
        if key in self._counts:
            self._counts[key] += 1
            return
        self._begin_interval(key)
        self._log_line(f"refused a request of {key[0]}: {reason}", key, {**fields, "count": 1})

    def close(self) -> None:
        """Log what was counted."""
        for key in list(self._counts):
            self._timers[key].cancel()
            self._end_interval(key, is_last=True)

    def _begin_interval(self, key: tuple[str, str]) -> None:
        self._counts[key] = 0
        loop = asyncio.get_running_loop()
        self._timers[key] = loop.call_later(self._interval_s, self._end_interval, key)

    def _end_interval(self, key: tuple[str, str], *, is_last: bool = False) -> None:
        count = self._counts.pop(key)
        del self._timers[key]
        if not count:
            return
        requests = "request" if count == 1 else "requests"
        message = f"refused {count} more {requests} of {key[0]} within {self._interval_s:g} s"
        self._log_line(message, key, {"count": count})
        if not is_last:
            self._begin_interval(key)

    @staticmethod
    def _log_line(message: str, key: tuple[str, str], fields: Mapping[str, Any]) -> None:
        caller, code = key
        log.warning("%s", message, extra={"caller": caller, "code": code, **fields})
