"""The deadlines of a client connection as a function of time, without a clock or an event loop."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import Final

MIN_BYTES_PER_S: Final = (
    1 << 10
)  # the average rate at which a client must send a body or read a response
MIN_CHECK_INTERVAL_S: Final = 0.25
RESERVED_HEADER_TIMEOUT_S: Final = 1.0
CLOSE_LINGER_S: Final = 1.0
# When the server stops, a request may be on its way for this time.
LAST_REQUEST_S: Final = 1.0
# A client that has closed its half is checked after this time.
HALF_CLOSED_S: Final = 0.05


@dataclass(frozen=True)
class ConnectionLimits:
    """The fields of the same names; see `gateway.config.settings`."""

    max_body_bytes: int = 64 << 20
    header_timeout_s: float = 10.0
    body_stall_s: float = 10.0
    write_timeout_s: float = 30.0
    max_connections: int = 4096
    max_connections_per_client: int = 1024  # 0: unlimited


class Due(Enum):
    """A deadline that has passed."""

    IDLE = auto()  # no request was started
    HEADER = auto()  # a header is incomplete
    BODY = auto()  # a body is received too slowly
    RESPONSE = auto()  # a response is read too slowly
    LINGER = auto()  # the client had time to read why it was rejected
    HALF_CLOSED = auto()  # the client has closed its half, and may be gone


class Deadlines:
    """The times at which the deadlines of one connection pass; infinity for those that do not apply.

    A body and a response must keep a minimum average rate: what was moved defers the deadline, but never to
    later than the time for which the client may stall.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        keep_alive_s: float,
        now: float,
        *,
        is_reserved: bool = False,
    ) -> None:
        self._limits = limits
        self._keep_alive_s = keep_alive_s
        self._header_timeout_s = (
            RESERVED_HEADER_TIMEOUT_S if is_reserved else limits.header_timeout_s
        )
        self._opened_at: float | None = now  # None after the first header
        self.idle_since = now
        self.is_receiving = True  # a request that is incomplete, or the first one
        # Since the last check, reading was paused or the client waited for 100 Continue.
        self.was_paused = False
        self._header_end = inf
        self._body_end = inf  # infinity for a body that comes in one read
        self._body_checked_at = now
        self._body_bytes = 0  # received since then
        self._response_end = inf  # while the client has not read all responses
        self._unwritten_bytes = 0
        self._linger_end = inf
        self._half_closed_at = inf
        self._next_half_closed_check_at = inf

    @property
    def idle_end(self) -> float:
        if self._opened_at is None:
            return self.idle_since + self._keep_alive_s
        return self.idle_since + min(self._header_timeout_s, self._keep_alive_s)

    def receive_header(self, now: float) -> float:
        """Record that a header is incomplete; return its deadline. The first one counts from the start."""
        if self._header_end == inf:
            started_at = now if self._opened_at is None else self._opened_at
            self._header_end = started_at + self._header_timeout_s
            self.is_receiving = True
        return self._header_end

    def receive_body(self, now: float, size: int, *, is_paused: bool) -> float:
        """Record data of a request whose body is incomplete; return its deadline."""
        if self._body_end == inf:
            self.is_receiving = True
            self._opened_at = None
            self._header_end = inf
            self._body_end = now + self._limits.body_stall_s
            self._body_checked_at = now
            self._body_bytes = 0
            self.was_paused = self.was_paused or is_paused
        else:
            self._body_bytes += size
        return self._body_end

    def end_receiving(self) -> None:
        """Drop the deadlines of a request that was received or rejected."""
        self.is_receiving = False
        self._opened_at = None
        self._header_end = self._body_end = inf

    def limit_last_request(self, now: float) -> float:
        """Record that the server stops before a header is complete; return the deadline of the header."""
        self.idle_since = self._opened_at = now
        self._header_timeout_s = min(self._header_timeout_s, LAST_REQUEST_S)
        if self._header_end < inf:
            self._header_end = min(self._header_end, self.idle_end)
        return self.idle_end

    def start_sending(self, now: float, unwritten_bytes: int) -> float:
        """Record how much of its responses the client has not read; return the deadline."""
        self._unwritten_bytes = unwritten_bytes
        self._response_end = now + self._limits.write_timeout_s
        return self._response_end

    def end_sending(self) -> None:
        self._response_end = inf

    def start_linger(self, now: float) -> float:
        self._linger_end = now + CLOSE_LINGER_S
        return self._linger_end

    def start_half_closed(self, now: float) -> float:
        """Record that the client has closed its half; return the time of the first check."""
        self._half_closed_at = now
        self._next_half_closed_check_at = now + HALF_CLOSED_S
        return self._next_half_closed_check_at

    def defer_half_closed(self, now: float) -> float:
        """Return the time of the next check: each one comes after twice the time of the last."""
        self._next_half_closed_check_at = 2 * now - self._half_closed_at
        return self._next_half_closed_check_at

    def check(
        self,
        now: float,
        *,
        is_idle: bool = False,
        is_paused: bool = False,
        is_closing: bool = False,
        unwritten_bytes: int = 0,
    ) -> tuple[Due | None, float]:
        """Return the deadline that passed first, if any, and the time of the next check.

        A connection `is_idle` while it answers no request, and `is_paused` while the client cannot send or
        waits for 100 Continue. When it `is_closing`, it only sends the rest of its responses.
        """
        if is_closing and self._response_end == inf:
            self.start_sending(now, unwritten_bytes)
        self._defer_response(now, unwritten_bytes)
        ends = {Due.RESPONSE: self._response_end}
        if not is_closing and self._linger_end < inf:
            ends[Due.LINGER] = self._linger_end
        elif not is_closing:
            self._defer_request(now, is_paused=is_paused)
            ends[Due.HALF_CLOSED] = self._next_half_closed_check_at
            ends[Due.BODY] = self._body_end
            ends[Due.HEADER] = self._header_end
            if is_idle and self._header_end == inf:
                ends[Due.IDLE] = self.idle_end
        due = min(ends, key=ends.__getitem__)
        next_check_at = max(min(ends[due], now + self._keep_alive_s), now + MIN_CHECK_INTERVAL_S)
        return due if ends[due] <= now else None, next_check_at

    def _defer_request(self, now: float, *, is_paused: bool) -> None:
        if is_paused and self._header_end < inf:
            self._header_end = now + self._header_timeout_s
        if self._body_end < inf:
            if self.was_paused or is_paused:  # the client was not the one who waited
                self.was_paused = is_paused
                self._body_end += now - self._body_checked_at
            else:
                moved_s = self._body_bytes / MIN_BYTES_PER_S
                self._body_end = min(self._body_end + moved_s, now + self._limits.body_stall_s)
            self._body_checked_at = now
            self._body_bytes = 0

    def _defer_response(self, now: float, unwritten_bytes: int) -> None:
        if self._response_end < inf:
            moved_s = (self._unwritten_bytes - unwritten_bytes) / MIN_BYTES_PER_S
            self._response_end = min(
                self._response_end + moved_s, now + self._limits.write_timeout_s
            )
            self._unwritten_bytes = unwritten_bytes
