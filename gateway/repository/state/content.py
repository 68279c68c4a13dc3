"""The content of the state, as values: tables, loads, events, operations."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any, Final, Generic, NamedTuple, TypeVar

import orjson

from gateway.telemetry.request_info import MAX_PARAMETER_CHARS, MAX_RECORDED_PARAMETERS

T_co = TypeVar("T_co", covariant=True)
RawTable = Mapping[str, Any]  # JSON objects, as deep as the keys of the table are long
Document = Mapping[str, Any]


# Tables: JSON in every store, which the owner of a table decodes.


class UnreadableState(ValueError):
    """Stored data that no gateway of this version has written."""


def decode_state(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise UnreadableState("invalid JSON") from None


@dataclass(frozen=True)
class Table(Generic[T_co]):
    """A table, by its name in the state. `decode` raises `UnreadableState`."""

    name: str
    decode: Callable[[RawTable], T_co]
    subject: str = "model"  # the meaning of a key's first name, for messages


def create_raw_table(name: str) -> Table[RawTable]:
    """Return a table as a gateway sees it that lacks the owner."""
    return Table(name, dict)


def with_entry(table: RawTable, keys: Sequence[str], value: Any) -> dict[str, Any]:
    """Return the table with a value; None deletes the value, and objects that become empty."""
    first, *others = keys
    if others:
        value = with_entry(table.get(first, {}), others, value) or None
    if value is not None:
        return {**table, first: value}
    return {name: kept for name, kept in table.items() if name != first}


# The desired models, the cordons, and the tables of capabilities.


@dataclass(frozen=True)
class DesiredModel:
    """The state of a model that the API requested: loaded with some parameters, or unloaded."""

    is_loaded: bool
    parameters: Document = field(default_factory=dict)
    revision: int = 0  # assigned by the store; a repeated request gets a new one
    config_digest: str = ""  # set if the config comes from the models file

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
        return {"loaded": self.is_loaded, "parameters": dict(self.parameters)}


def decode_models(table: RawTable) -> Mapping[str, DesiredModel]:
    return {name: parse_desired_model(name, document) for name, document in table.items()}


def parse_desired_model(name: str, document: Any) -> DesiredModel:
    match document:
        case {"loaded": bool(loaded), "parameters": dict(parameters), "revision": int(revision)}:
            return DesiredModel(loaded, parameters, revision)
    raise UnreadableState(f"unexpected structure of model {name!r}")


MODELS: Final = Table("models", decode_models)
CORDONS: Final = Table("cordons", frozenset[str], "the cordon of replica")
# The tables that capabilities own; the keys of each are a model and another name. They are named here, so
# that a gateway without the capability exports them, and writes them again when Redis has lost its data.
CAPABILITY_TABLES: Final = ("labels",)


def check_capability_tables(document: Mapping[str, Any]) -> None:
    """Check that the tables of capabilities have two names for each value. Raises `UnreadableState`."""
    for name in CAPABILITY_TABLES:
        table = document.get(name, {})
        if not isinstance(table, dict) or not all(
            isinstance(each, dict) for each in table.values()
        ):
            raise UnreadableState(f"unexpected structure of the {name}")


# The loads: which load of each model every replica confirmed, and loads in progress.

# Replica → model → the id of the last confirmed load, or the token of a load in progress.
Loads = Mapping[str, Mapping[str, str]]
LOADS: Final = "loads"  # the name of the table
IN_PROGRESS_PREFIX: Final = "?"
UNKNOWN_LOAD: Final = ""  # the replica may have any load of the model, or none


@dataclass(frozen=True)
class StartedLoad:
    """A load in progress on a replica, and the load that the replica had confirmed before."""

    token: str
    confirmed_load: str


def parse_loads(document: Any) -> Loads:
    # An invalid document yields an empty table, so that the models are loaded again.
    if not isinstance(document, dict):
        return {}
    return {
        replica: {model: load for model, load in models.items() if isinstance(load, str)}
        for replica, models in document.items()
        if isinstance(models, dict)
    }


def new_load_token(owner: str) -> str:
    return f"{IN_PROGRESS_PREFIX}{owner}:{secrets.token_hex(8)}"


def is_in_progress(load: str) -> bool:
    return load.startswith(IN_PROGRESS_PREFIX)


def token_owner(token: str) -> str:
    return token[len(IN_PROGRESS_PREFIX) :].partition(":")[0]


def drop_token(load: str) -> str:
    """Return a confirmed load; empty if it is in progress, and so unknown."""
    return "" if is_in_progress(load) else load


def with_finished_load(
    loads: Loads, replica: str, model: str, token: str, resulting_load: str
) -> Loads:
    """Return the table with the resulting load.

    If another load has begun since, it is unknown which ended last. A repeated call changes nothing.
    """
    is_known = loads.get(replica, {}).get(model) in (token, resulting_load)
    return with_load(loads, replica, model, resulting_load if is_known else UNKNOWN_LOAD)


def with_load(loads: Loads, replica: str, model: str, load: str) -> Loads:
    """Return the table with a load; without one if it is unknown."""
    return with_entry(loads, (replica, model), load or None)


def drop_orphaned_loads(loads: Loads, live_owners: frozenset[str]) -> Loads:
    """Return the table without loads in progress of exited processes: their results are unknown."""
    return {
        replica: {
            model: load
            for model, load in models.items()
            if not is_in_progress(load) or token_owner(load) in live_owners
        }
        for replica, models in loads.items()
    }


def load_owners(loads: Loads) -> frozenset[str]:
    all_loads = (load for models in loads.values() for load in models.values())
    return frozenset(token_owner(load) for load in all_loads if is_in_progress(load))


# Events: their ids, by which they are in order in every store, and the choice of some of them.

MAX_EVENTS: Final = 1000
EVENT_ID: Final = re.compile(r"(\d{1,15})-(\d{1,10})", re.ASCII)


class EventId(NamedTuple):
    """The time of storing an event in milliseconds, and its number within that, as in a stream of Redis."""

    time_ms: int
    number: int = 0

    def __str__(self) -> str:
        return f"{self.time_ms}-{self.number}"

    @property
    def next(self) -> EventId:
        return EventId(self.time_ms, self.number + 1)


@dataclass(frozen=True)
class StoredEvent:
    id: EventId
    raw: bytes


def parse_event_id(text: str) -> EventId | None:
    match = EVENT_ID.fullmatch(text)
    return None if match is None else EventId(int(match[1]), int(match[2]))


def next_event(events: Sequence[StoredEvent], raw: bytes) -> StoredEvent | None:
    """Return the event to append; None for one that was stored already, without the caller knowing it.

    Its id is higher than the others, also if the clock was set back.
    """
    now = EventId(int(time() * 1000))
    if not events:
        return StoredEvent(now, raw)
    last = events[-1]
    return None if last.raw == raw else StoredEvent(max(now, last.id.next), raw)


def select_events(
    events: Sequence[StoredEvent], start: EventId | None, limit: int
) -> Sequence[StoredEvent]:
    kept = events[-MAX_EVENTS:]
    if start is None:
        return kept[-limit:]
    return [event for event in kept if event.id >= start][:limit]


def decode_event(event: StoredEvent) -> Mapping[str, Any]:
    """Return the document of an event; an empty one if anything else was written into the state."""
    try:
        document = orjson.loads(event.raw)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def find_last_change(events: Sequence[StoredEvent], file: str) -> Mapping[str, Any]:
    documents = map(decode_event, reversed(events))
    return next((each for each in documents if each.get("file") == file), {})


def encode_events(events: Sequence[StoredEvent]) -> bytes:
    return b"[%b]" % b",".join(event.raw for event in events if decode_event(event))


def format_event_line(event: StoredEvent) -> bytes:
    return b"%b %b\n" % (str(event.id).encode(), event.raw)


def parse_event_lines(raw: bytes) -> list[StoredEvent]:
    """Return the events of a file. A line without an end was not finished, because a process was killed."""
    events = []
    for line in raw[: raw.rfind(b"\n") + 1].splitlines():
        name, _, document = line.partition(b" ")
        event_id = parse_event_id(name.decode(errors="replace"))
        if event_id is not None:
            events.append(StoredEvent(event_id, document))
    return events


# Operations.

OPERATION_TTL_S: Final = 3600  # how long a finished operation can be read
# Strict, because the id comes from a URL and becomes a part of a file name or key.
OPERATION_ID: Final = re.compile("[0-9a-f]{32}")


def is_operation_id(operation_id: str) -> bool:
    return OPERATION_ID.fullmatch(operation_id) is not None


def decode_operation(raw: bytes) -> Document:
    document = decode_state(raw)
    if not isinstance(document, dict):
        raise UnreadableState("unexpected structure of an operation")
    return document
