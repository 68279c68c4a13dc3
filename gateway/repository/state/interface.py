"""The primitives of a place that keeps the state, and their failures.

A place has tables, whose entries have revisions; values, claims and counts that expire; reports; and events.
It knows nothing of their meaning, and everything in it can have been written by others.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from gateway.errors import StateUnavailable
from gateway.messages import CommandError
from gateway.repository.state.content import EventId, StoredEvent

# Commands import this module before they import the application.
if TYPE_CHECKING:
    from gateway.access.limits import QuotaCount, RateWindows

log = logging.getLogger(__name__)
READ_ACTION: Final = "read"  # the actions complete messages such as "cannot be read"
WRITE_ACTION: Final = "written"
COUNT_ACTION: Final = "used to count requests"
UNKNOWN_CHANGE: Final = "?"  # no change of a table has this name
REFUSED: Final = 0  # results of a write, which are no revisions
LOST: Final = -1


class Entry(NamedTuple):
    """An entry of a table as it is stored, and the revision of the state in which it was written."""

    value: Any  # bytes; anything else is unreadable
    revision: int


Entries = Mapping[str, Entry]


@dataclass(frozen=True)
class EntryChange:
    table: str
    key: str
    value: bytes | None  # None deletes the entry
    known_revision: int  # of the state
    expected_revision: int | None = None  # of the entry until now, 0 for none
    kept_revision: int = 0  # of an entry that does not get the new one
    is_durable: bool = True


class Reading(NamedTuple):
    """The revision of the state, and of each table that has changed its last change and its entries.

    If a table is something else, the revision is 0: the place has lost the state.
    """

    revision: int
    tables: Mapping[str, tuple[str, Entries]]
    damaged: Sequence[str] = ()


class KeyValues(Protocol):
    """A place that keeps the state. Methods are atomic, and raise `StateUnavailable` if they did nothing.

    Values above `max_bytes`, and those that are no bytes at all, are read as anything else than bytes.
    """

    @property
    def is_shared(self) -> bool:
        """Return whether other processes can have this state."""

    @property
    def is_available(self) -> bool:
        """Return whether the last read and write succeeded."""

    @property
    def rate_windows(self) -> RateWindows | None:
        """Return counters of rates that all processes with this state share, if the place has them."""

    async def read(self, known: Mapping[str, tuple[str, int]]) -> Reading:
        """Read tables, given the last known change and the largest value of each."""

    async def write(self, change: EntryChange) -> int:
        """Change an entry, and return the new revision of the state, which is higher than every earlier one.

        Nothing is changed if the entry does not have the expected revision (`REFUSED`), or if the state has a
        lower revision than the caller knows (`LOST`).
        """

    async def restore(self, revision: int, tables: Mapping[str, Entries]) -> bool:
        """Write all tables as they were in a revision, if the place has lost them."""

    async def claim(self, names: Sequence[str], owner: str, ttl_s: float) -> bool:
        """Take or renew names for an owner, and return whether nobody else has the last one."""

    async def release(self, names: Sequence[str], owner: str) -> None: ...

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        """Store a value for a time."""

    async def get(self, keys: Sequence[str], max_bytes: int) -> Sequence[object]:
        """Return values, None for one that is missing."""

    async def exchange(
        self, owner: str, report: bytes, ttl_s: float, max_bytes: int
    ) -> Sequence[object]:
        """Store a report for a time, and return those of others."""

    async def append_event(self, raw: bytes, max_events: int) -> None:
        """Append to the events, unless it is the last one, of which the answer was lost."""

    async def read_events(
        self, start: EventId, limit: int, max_bytes: int
    ) -> Sequence[StoredEvent]:
        """Return the last events from an id on, in order."""

    async def count(self, limits: Mapping[str, int], amount: int, ttl_s: float) -> QuotaCount:
        """Add an amount, which may be negative, to counters, unless one of them would exceed its limit."""

    async def find_weakness(self) -> str:
        """Return why the place can lose what was written; empty if it cannot, or does not say."""

    async def close(self) -> None: ...


class BadState(CommandError):
    """An invalid or unusable `GATEWAY_STATE`."""


class OutageLog:
    """Logs the begin and the end of an outage, but not every failure in between."""

    def __init__(self, place: str, subject: str = "state") -> None:
        self._place = f"{subject} at {place}"
        self._reasons: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def record_failure(self, action: str, reason: str) -> StateUnavailable:
        if self._reasons.get(action) != reason:
            log.warning("the %s cannot be %s: %s", self._place, action, reason)
        self._reasons[action] = reason
        return StateUnavailable(action, reason)

    def record_success(self, action: str) -> None:
        if self._reasons.pop(action, None) is not None:
            log.info("the %s can be %s again", self._place, action)
