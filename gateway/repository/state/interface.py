"""The interface of the stores that keep the state, and their failures."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from gateway.errors import StateUnavailable
from gateway.messages import CommandError
from gateway.repository.state.content import (
    DesiredModel,
    Document,
    EventId,
    Loads,
    StartedLoad,
    StoredEvent,
    Table,
)

# Commands import this module before they import the application.
if TYPE_CHECKING:
    from gateway.access.limits import QuotaCounters, RateWindows

log = logging.getLogger(__name__)
T = TypeVar("T")
READ_ACTION: Final = "read"  # the actions complete messages such as "cannot be read"
WRITE_ACTION: Final = "written"
COUNT_ACTION: Final = "used to count requests"


class StateStore(Protocol):
    """A store of desired state. A method that raises `StateUnavailable` leaves the state unchanged."""

    async def read(self, table: Table[T]) -> T:
        """Return the table; the same object as before if it has not changed."""

    async def write(self, table: Table[T], keys: Sequence[str], value: Any) -> T:
        """Store a value, or delete it if None, and return the table. It is not for desired models."""

    async def set_desired_model(
        self, model: str, desired: DesiredModel | None, expected_revision: int | None = None
    ) -> int:
        """Store the desired model, or delete it if None, and return the new revision of the state.

        The revision is higher than every earlier one. A model that already has a revision keeps it. If
        `expected_revision` is given (0: none is stored) and the stored model has another one, nothing is
        changed, and the result is 0.
        """

    async def read_loads(self) -> Loads:
        """Return the last confirmed loads, without those in progress of processes that have exited."""

    async def begin_load(self, replica: str, model: str) -> StartedLoad:
        """Record a load in progress; return its token, and the load confirmed before."""

    async def end_load(self, replica: str, model: str, token: str, resulting_load: str) -> None:
        """Record the load that a replica has now; empty, or unknown if another load has begun since."""

    async def forget_loads(self, replica: str) -> None:
        """Delete the confirmed loads of a replica that restarted or was removed."""

    async def record_operation(self, operation_id: str, document: Document) -> None:
        """Store the progress of an operation for an hour."""

    async def read_operation(self, operation_id: str) -> Document | None:
        """Return the last record of an operation; None if there is none, or if the id is invalid."""

    async def append_event(self, raw: bytes) -> None:
        """Store an event in JSON after the others; of those, the last `MAX_EVENTS` are kept."""

    async def read_events(self, start: EventId | None, limit: int) -> Sequence[StoredEvent]:
        """Return the first events from an id on, or without one the last; in order."""

    async def acquire_lease(self, name: str) -> bool:
        """Take or renew a lease, and return whether this process has it.

        No other process has it until it ends: with this process, at the latest five seconds after the
        last call.
        """

    async def release_lease(self, name: str) -> None:
        """Give a lease back; nothing happens without it."""

    async def exchange_reports(self, report: Document) -> list[Document]:
        """Publish this process's report, and return the last ones of the others, for five seconds each."""

    @property
    def rate_windows(self) -> RateWindows | None:
        """Return counters that all processes with this state share, if the store supports them."""

    @property
    def quotas(self) -> QuotaCounters | None:
        """Return the same for quotas."""

    @property
    def loss_count(self) -> int:
        """Return how often this process has restored a state that the store had lost."""

    @property
    def is_shared(self) -> bool:
        """Return whether other processes can have this state."""

    @property
    def is_available(self) -> bool:
        """Return whether the last read and write succeeded."""

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

    def __contains__(self, action: str) -> bool:
        return action in self._reasons

    def record_failure(self, action: str, reason: str) -> StateUnavailable:
        if self._reasons.get(action) != reason:
            log.warning("the %s cannot be %s: %s", self._place, action, reason)
        self._reasons[action] = reason
        return StateUnavailable(action, reason)

    def record_success(self, action: str) -> None:
        if self._reasons.pop(action, None) is not None:
            log.info("the %s can be %s again", self._place, action)
