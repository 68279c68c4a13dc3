"""Refused requests in the log at level warning, sampled, so that an attack neither hides nor floods it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

log = logging.getLogger("gateway.refusals")  # a public name, wherever this module is

INTERVAL_S: Final = 60.0
MAX_CALLERS: Final = 1000
OTHERS: Final = "others"
# No or a wrong key, no right, and too many requests.
REFUSED_STATUSES: Final = frozenset((401, 403, 429))


@dataclass(frozen=True)
class RefusalKey:
    """The refusals that are counted together. Only those of administrative calls have a route."""

    caller: str
    code: str
    route: str


class RefusalLog:
    """Logs the first refusal with a key at once, and then once in each interval their number."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._counts: dict[RefusalKey, int] = {}  # refusals without a line
        self._timers: dict[RefusalKey, asyncio.TimerHandle] = {}

    def record(self, key: RefusalKey, reason: str, **fields: Any) -> bool:
        """Count a refusal, and return whether it is the first, which has a line."""
        if key not in self._counts and len(self._counts) >= MAX_CALLERS:
            key = replace(key, caller=OTHERS)
        if key in self._counts:
            self._counts[key] += 1
            return False
        self._begin_interval(key)
        self._log_line(f"refused a request of {key.caller}: {reason}", key, {**fields, "count": 1})
        return True

    def close(self) -> None:
        for key in list(self._counts):
            self._timers[key].cancel()
            self._end_interval(key, is_last=True)

    def _begin_interval(self, key: RefusalKey) -> None:
        self._counts[key] = 0
        loop = asyncio.get_running_loop()
        self._timers[key] = loop.call_later(self._interval_s, self._end_interval, key)

    def _end_interval(self, key: RefusalKey, *, is_last: bool = False) -> None:
        count = self._counts.pop(key)
        del self._timers[key]
        if not count:
            return
        requests = "request" if count == 1 else "requests"
        message = f"refused {count} more {requests} of {key.caller} within {self._interval_s:g} s"
        route = {"route": key.route} if key.route else {}
        self._log_line(message, key, {**route, "count": count})
        if not is_last:
            self._begin_interval(key)

    @staticmethod
    def _log_line(message: str, key: RefusalKey, fields: Mapping[str, Any]) -> None:
        log.warning("%s", message, extra={"caller": key.caller, "code": key.code, **fields})
