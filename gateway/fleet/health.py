"""Replica health and the retry budget as values: no clock, no I/O; callers pass the time.

Probes on fresh connections decide whether a replica is alive. The results of requests decide whether it
is avoided for a while (outlier ejection, as in Envoy).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

SLOW_AFTER_MISSES: Final = 2  # probes missed in a row
EJECT_AFTER_FAILURES: Final = 5  # failed requests in a row
EJECTION_S: Final = 5.0
MAX_EJECTION_S: Final = 300.0
EJECTION_RESET_S: Final = 300.0  # a pause without ejections, after which they start short again


# Triton lists its repository for each index: in a bucket with S3, it makes two requests for each model.
# An index that takes longer than this is read beside the probes, after pauses that grow with its duration.
SLOW_INDEX_S: Final = 0.5
SLOW_INDEX_PAUSES: Final = 10  # times the duration of a read
MAX_INDEX_PAUSE_S: Final = 10.0


class HealthState(IntEnum):
    """Health states from best to worst. No requests are sent to a `DOWN` replica."""

    UP = 0
    EJECTED = 1
    SLOW = 2  # does not answer probes in time
    DOWN = 3  # refuses connections, or has never answered a probe


@dataclass(frozen=True)
class Health:
    """The health of a replica, which is down until it answers its first probe."""

    is_down: bool = True
    has_exited: bool = False  # it refused a connection: a new process will replace it
    missed_probes: int = 0
    consecutive_failures: int = 0
    ejections: int = 0
    ejected_until: float = 0.0

    def with_probe_answer(self) -> Health:
        return replace(self, is_down=False, has_exited=False, missed_probes=0)

    def with_probe_timeout(self) -> Health:
        return replace(self, missed_probes=self.missed_probes + 1)

    def with_refusal(self) -> Health:
        return replace(self, is_down=True, has_exited=True)

    def with_success(self) -> Health:
        return replace(self, consecutive_failures=0)

    def with_failure(self, now: float, *, can_eject: bool) -> Health:
        """Record a transport failure; `EJECT_AFTER_FAILURES` in a row eject the replica."""
        failures = self.consecutive_failures + 1
        if failures < EJECT_AFTER_FAILURES or not can_eject or now < self.ejected_until:
            return replace(self, consecutive_failures=failures)
        is_reset = now - self.ejected_until > EJECTION_RESET_S
        ejections = 1 if is_reset else self.ejections + 1
        until = now + min(EJECTION_S * ejections, MAX_EJECTION_S)
        failures = EJECT_AFTER_FAILURES - 1  # one failure after its return ejects it again
        return replace(
            self, consecutive_failures=failures, ejections=ejections, ejected_until=until
        )

    def state(self, now: float) -> HealthState:
        if self.is_down:
            return HealthState.DOWN
        if self.missed_probes >= SLOW_AFTER_MISSES:
            return HealthState.SLOW
        return HealthState.EJECTED if now < self.ejected_until else HealthState.UP


@dataclass(frozen=True)
class IndexSchedule:
    """When to read a replica's index next, by the clock of the caller."""

    duration_s: float = 0.0  # how long the last read took
    due_at: float = 0.0
    has_failed: bool = False  # the last read timed out

    @property
    def is_slow(self) -> bool:
        return self.duration_s >= SLOW_INDEX_S

    def with_read(self, now: float, duration_s: float) -> IndexSchedule:
        # The first read after one that failed may have waited for a Triton that hung.
        pause_s = 0.0 if self.has_failed else min(SLOW_INDEX_PAUSES * duration_s, MAX_INDEX_PAUSE_S)
        return IndexSchedule(duration_s, now + pause_s)

    def with_timeout(self, timeout_s: float) -> IndexSchedule:
        return IndexSchedule(timeout_s, has_failed=True)

    def with_request(self) -> IndexSchedule:
        """Read it at the next probe, because it is known to be outdated."""
        return replace(self, due_at=0.0)


def can_eject(replica_count: int, ejected_count: int) -> bool:
    """Return whether one more replica may be ejected.

    Half of the fleet at most: if more replicas fail, the replicas are not the cause.
    """
    return 2 * (ejected_count + 1) <= replica_count


@dataclass
class RetryBudget:
    """A token bucket that limits retries to a share of the requests, to not overload a failing fleet.

    Up to ten retries are saved, for a fleet with little traffic.
    """

    ratio: float = 0.2
    tokens: float = 10.0

    def earn(self) -> None:
        if self.tokens < 10.0:
            self.tokens += self.ratio

    def try_spend(self) -> bool:
        if self.tokens < 1.0:
            return False
        self.tokens -= 1.0
        return True
