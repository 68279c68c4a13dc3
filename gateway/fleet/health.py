"""What is known of a replica's health, as values: no clock, no I/O; who asks brings the time.

Two sources feed it. A probe on a fresh connection says whether the replica lives at all; what requests
experience says whether it should be left alone for a while (outlier ejection, as Envoy does it).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

SLOW_AFTER_MISSES: Final = 2  # missed probes
EJECT_AFTER_FAILURES: Final = 5  # failed requests in a row
EJECTION_S: Final = 5.0
MAX_EJECTION_S: Final = 300.0
EJECTION_RESET_S: Final = 300.0  # without a failure: the next ejection is as short as the first


class HealthState(IntEnum):
    """The smaller, the better a choice; nothing is sent to a replica that is down."""

    UP = 0
    EJECTED = 1
    SLOW = 2  # accepts connections, perhaps, and does not answer
    DOWN = 3  # refuses connections, or was never seen


@dataclass(frozen=True)
class Health:
    """A replica is down until its first probe answers."""

    is_down: bool = True
    has_exited: bool = False  # it refused a connection: what comes back is another process
    missed_probes: int = 0
    consecutive_failures: int = 0
    ejections: int = 0
    ejected_until: float = 0.0

    def with_probe_answer(self) -> Health:
        """A probe was answered."""
        return replace(self, is_down=False, has_exited=False, missed_probes=0)

    def with_probe_timeout(self) -> Health:
        """A probe, or a connection, was not answered in time."""
        return replace(self, missed_probes=self.missed_probes + 1)

    def with_refusal(self) -> Health:
        """A connection was refused: nobody is there."""
        return replace(self, is_down=True, has_exited=True)

    def with_success(self) -> Health:
        """A request was answered."""
        return replace(self, consecutive_failures=0)

    def with_failure(self, now: float, *, can_eject: bool) -> Health:
        """A request failed on the wire; after some in a row the replica is ejected."""
        if (
            self.consecutive_failures + 1 < EJECT_AFTER_FAILURES
            or not can_eject
            or now < self.ejected_until
        ):
            return replace(self, consecutive_failures=self.consecutive_failures + 1)
        forgiven = now - self.ejected_until > EJECTION_RESET_S
        ejections = 1 if forgiven else self.ejections + 1
        until = now + min(EJECTION_S * ejections, MAX_EJECTION_S)
        # The first failure after its return ejects it again.
        return replace(
            self,
            consecutive_failures=EJECT_AFTER_FAILURES - 1,
            ejections=ejections,
            ejected_until=until,
        )

    def state(self, now: float) -> HealthState:
        if self.is_down:
            return HealthState.DOWN
        if self.missed_probes >= SLOW_AFTER_MISSES:
            return HealthState.SLOW
        return HealthState.EJECTED if now < self.ejected_until else HealthState.UP


def can_eject(replica_count: int, ejected_count: int) -> bool:
    """Never more than half of the fleet: what is wrong with all of them is not the replicas' fault."""
    return 2 * (ejected_count + 1) <= replica_count


@dataclass
class RetryBudget:
    """Retries are a part of the requests, so that a fleet in trouble is not asked twice as much.

    Ten may be saved up, for a fleet that is asked rarely.
    """

    ratio: float = 0.2
    tokens: float = 10.0

    def earn(self) -> None:
        """A request was answered."""
        if self.tokens < 10.0:
            self.tokens += self.ratio

    def try_spend(self) -> bool:
        """Whether a retry may be sent."""
        if self.tokens < 1.0:
            return False
        self.tokens -= 1.0
        return True
