"""Repeated requests: within the deadline of the call, and after the delay that the gateway asks for."""

from __future__ import annotations

import random
import time
from typing import Final

from gateway.client.errors import CONNECTION_LOST, TIMEOUT, UNREACHABLE, GatewayError

CONNECT_TIMEOUT_S: Final = 5.0
INITIAL_DELAY_S: Final = 0.25
MAX_DELAY_S: Final = 8.0
# Requests that were refused together must not return together.
MAX_JITTER: Final = 1.25
REFUSED_STATUSES: Final = (429, 503)
# The model may have run: the repeated request has the same Idempotency-Key.
BAD_GATEWAY_STATUS: Final = 502
# The gateway enforces the deadline; the client waits longer, to receive the gateway's error.
RESPONSE_GRACE_S: Final = 1.0
MIN_WAIT_S: Final = 0.001


class Attempts:
    """The attempts of a request: how much time is left, and whether another one follows a failure."""

    def __init__(self, timeout_s: float, max_retries: int) -> None:
        self.timeout_s = timeout_s
        self._started_at = time.monotonic()
        self._deadline = self._started_at + timeout_s
        self._retries_left = max_retries
        self._next_delay_s = INITIAL_DELAY_S

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_at

    @property
    def remaining_s(self) -> float:
        return max(self._deadline - time.monotonic(), MIN_WAIT_S)

    @property
    def response_timeout_s(self) -> float:
        return self.remaining_s + RESPONSE_GRACE_S

    def check_deadline(self) -> None:
        """Check that the response is not late, although parts of it still arrive. Raises `GatewayError`."""
        if time.monotonic() > self._deadline + RESPONSE_GRACE_S:
            raise self.create_timeout_error()

    def create_timeout_error(self) -> GatewayError:
        return GatewayError(f"no complete response within {self.timeout_s:g} s", TIMEOUT)

    def plan_retry(self, error: GatewayError, *, is_repeatable: bool) -> float | None:
        """Return the delay before the next attempt; None if there is none."""
        if self._retries_left == 0 or not can_retry(error, is_repeatable=is_repeatable):
            return None
        self._retries_left -= 1
        delay_s = self._next_delay_s if error.retry_after_s is None else error.retry_after_s
        self._next_delay_s = min(2 * self._next_delay_s, MAX_DELAY_S)
        delay_s *= random.uniform(1, MAX_JITTER)  # noqa: S311 - not for security
        return delay_s if time.monotonic() + delay_s < self._deadline else None


def can_retry(error: GatewayError, *, is_repeatable: bool) -> bool:
    """Return whether a request can be sent again: it was not executed, or may be executed twice."""
    if error.status in REFUSED_STATUSES or error.code == UNREACHABLE:
        return True
    is_lost = error.status == BAD_GATEWAY_STATUS or error.code == CONNECTION_LOST
    return is_lost and is_repeatable
