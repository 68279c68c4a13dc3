"""What is known of a replica's health, as values: no clock, no I/O; who asks brings the time.

Two sources feed it. A probe on a fresh connection says whether the replica lives at all; what requests
experience says whether it should be left alone for a while (outlier ejection, as Envoy does it).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

SLOW_AFTER: Final = 2  # missed probes
EJECT_AFTER: Final = 5  # failed requests in a row
EJECTION_S: Final = 5.0
LONGEST_EJECTION_S: Final = 300.0
FORGIVEN_AFTER_S: Final = 300.0  # without a failure: the next ejection is as short as the first


class State(IntEnum):
    """The smaller, the better a choice; nothing is sent to a replica that is down."""

    UP = 0
    EJECTED = 1
    SLOW = 2  # accepts connections, perhaps, and does not answer
    DOWN = 3  # refuses connections, or was never seen


@dataclass(frozen=True)
class Health:
    """A replica is down until its first probe answers."""

    refuses: bool = True
    gone: bool = False  # it refused a connection: what comes back is another process
    misses: int = 0
    failures: int = 0
    ejections: int = 0
    ejected_until: float = 0.0

    def answered(self) -> Health:
        """A probe was answered."""
        return replace(self, refuses=False, gone=False, misses=0)

    def missed(self) -> Health:
        """A probe, or a connection, was not answered in time."""
        return replace(self, misses=self.misses + 1)

    def refused(self) -> Health:
        """A connection was refused: nobody is there."""
        return replace(self, refuses=True, gone=True)

    def succeeded(self) -> Health:
        """A request was answered."""
        return replace(self, failures=0)

    def failed(self, now: float, *, may_eject: bool) -> Health:
        """A request failed on the wire; after some in a row the replica is ejected."""
        if self.failures + 1 < EJECT_AFTER or not may_eject or now < self.ejected_until:
            return replace(self, failures=self.failures + 1)
        forgiven = now - self.ejected_until > FORGIVEN_AFTER_S
        ejections = 1 if forgiven else self.ejections + 1
        until = now + min(EJECTION_S * ejections, LONGEST_EJECTION_S)
        # The first failure after its return ejects it again.
        return replace(self, failures=EJECT_AFTER - 1, ejections=ejections, ejected_until=until)

    def state(self, now: float) -> State:
        if self.refuses:
            return State.DOWN
        if self.misses >= SLOW_AFTER:
            return State.SLOW
        return State.EJECTED if now < self.ejected_until else State.UP


def may_eject(fleet: int, ejected: int) -> bool:
    """Never more than half of the fleet: what is wrong with all of them is not the replicas' fault."""
    return 2 * (ejected + 1) <= fleet


@dataclass
class Budget:
    """Retries are a part of the requests, so that a fleet in trouble is not asked twice as much.

    Ten may be saved up, for a fleet that is asked rarely.
    """

    share: float = 0.2
    saved: float = 10.0

    def earn(self) -> None:
        """A request was answered."""
        if self.saved < 10.0:
            self.saved += self.share

    def spend(self) -> bool:
        """Whether a retry may be sent."""
        if self.saved < 1.0:
            return False
        self.saved -= 1.0
        return True
