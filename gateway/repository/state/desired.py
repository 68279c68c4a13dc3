"""Desired models and cordons: their values, and the interface of the stores that keep them."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar, cast

from gateway.access.limits import QuotaCounters, RateWindows
from gateway.errors import StateUnavailable
from gateway.messages import CommandError
from gateway.repository.state.events import EventId, StoredEvent
from gateway.repository.state.tables import (
    Counts,
    Loads,
    RawTable,
    StartedLoad,
    Table,
    UnreadableState,
    decode_state,
)
from gateway.telemetry.request_info import MAX_PARAMETER_CHARS, MAX_RECORDED_PARAMETERS

log = logging.getLogger(__name__)

T = TypeVar("T")
Document = Mapping[str, Any]
OPERATION_TTL_S: Final = 3600  # how long a finished operation can be read
# Strict, because the id comes from a URL and becomes a part of a file name or key.
OPERATION_ID: Final = re.compile("[0-9a-f]{32}")
READ_ACTION: Final = "read"  # the actions complete messages such as "cannot be read"
WRITE_ACTION: Final = "written"
COUNT_ACTION: Final = "used to count requests"


class BadState(CommandError):
    """An invalid or unusable `GATEWAY_STATE`."""


@dataclass(frozen=True)
class DesiredModel:
    """The state of a model that the API requested: loaded with some parameters, or unloaded."""

    is_loaded: bool
    parameters: Document = field(default_factory=dict)
    revision: int = 0  # assigned by the store; a repeated request gets a new one
    config_digest: str = ""  # set if the config comes from the models file
    unknown: Document = field(default_factory=dict)  # fields of a later release

    @property
    def load_id(self) -> str:
        """Return the identity of this load; empty if any load of the model is sufficient."""
        revision = str(self.revision) if self.revision else ""
        return f"{revision}/{self.config_digest}" if self.config_digest else revision

    def describe(self) -> dict[str, Any]:
        """Return the state, as events show it: a parameter can be a whole model."""
        names = [name[:MAX_PARAMETER_CHARS] for name in self.parameters]
        described: dict[str, Any] = {"loaded": self.is_loaded}
        return {**described, "parameters": names[:MAX_RECORDED_PARAMETERS]} if names else described

    def to_dict(self) -> dict[str, Any]:
        """Return the document that is stored with the revision, and exported without it."""
        return {"loaded": self.is_loaded, "parameters": dict(self.parameters), **self.unknown}


def decode_models(table: RawTable) -> Mapping[str, DesiredModel]:
    return {name: parse_desired_model(name, document) for name, document in table.items()}


def parse_desired_model(name: str, document: Any) -> DesiredModel:
    match document:
        case {
            "loaded": bool(loaded),
            "parameters": dict(parameters),
            "revision": int(revision),
            **unknown,
        }:
            return DesiredModel(loaded, parameters, revision, unknown=cast(Document, unknown))
    raise UnreadableState(f"unexpected structure of model {name!r}")


MODELS: Final = Table("models", decode_models)
CORDONS: Final = Table("cordons", frozenset[str], "the cordon of replica")


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

    async def add_counts(self, day: str, counts: Counts, batch: str) -> None:
        """Add to the counts of a day (YYYY-MM-DD), of which the last `KEPT_DAYS` are kept.

        A failed call is repeated with the same batch before the next one: it is not added twice if only the
        response of the store was lost.
        """

    async def read_counts(self, day: str) -> Counts: ...

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


def is_operation_id(operation_id: str) -> bool:
    return OPERATION_ID.fullmatch(operation_id) is not None


def decode_operation(raw: bytes) -> Document:
    document = decode_state(raw)
    if not isinstance(document, dict):
        raise UnreadableState("unexpected structure of an operation")
    return document


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
