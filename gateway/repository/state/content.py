"""The content of the state, as values: tables, desired models, loads, events, operations.

Others can write to the state too, so every document is parsed into one of these values, or skipped.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

import orjson

from gateway.messages import quote_text
from gateway.repository.state.documents import UnreadableState, check_form, decode_document
from gateway.telemetry.audit import MAX_EVENT_BYTES
from gateway.telemetry.request_info import MAX_PARAMETER_CHARS, MAX_RECORDED_PARAMETERS

T_co = TypeVar("T_co", covariant=True)
RawTable = Mapping[str, Any]  # JSON objects, as deep as the keys of the table are long
Document = Mapping[str, Any]
Keys = tuple[str, ...]
MAX_NAME_CHARS: Final = 1024  # of a name in the state
MAX_ENTRY_BYTES: Final = 64 << 10
MAX_MODEL_BYTES: Final = 128 << 20  # the parameters of a load can be a whole model
MAX_DOCUMENT_BYTES: Final = 4 << 20  # a report or an operation of a large fleet


# Tables.


@dataclass(frozen=True)
class TableEntry:
    """An entry of a table: its keys, its JSON, and the revision of the state in which it was written."""

    keys: Keys
    document: Any
    revision: int = 0


@dataclass(frozen=True)
class Table(Generic[T_co]):
    """A table, by its name in the state: values by one name, or by two."""

    name: str
    parse: Callable[[TableEntry], Any]  # returns the value of an entry. Raises `UnreadableState`
    key_count: int = 2
    subject: str = "model"  # the meaning of a key's first name, for messages
    max_bytes: int = MAX_ENTRY_BYTES  # of an entry
    is_durable: bool = True

    def encode_keys(self, keys: Sequence[str]) -> str:
        return keys[0] if self.key_count == 1 else orjson.dumps(keys).decode()

    def decode_keys(self, key: str) -> Keys:
        """Return the names of an entry. Raises `UnreadableState`."""
        names: Any = [key]
        if self.key_count > 1:
            names = decode_document(key.encode(errors="replace"), MAX_ENTRY_BYTES)
        match names:
            case [*parts] if len(parts) == self.key_count and all(map(is_name, parts)):
                keys: Keys = tuple(parts)
                if self.encode_keys(keys) == key:
                    return keys
        raise UnreadableState("its key is invalid")

    def parse_entry(
        self, key: str, value: object, revision: int
    ) -> tuple[Keys, Any] | UnreadableState:
        """Return the names and the value of a stored entry, or why it is unreadable."""
        try:
            keys = self.decode_keys(key)
            entry = TableEntry(keys, decode_document(value, self.max_bytes), revision)
            return keys, self.parse(entry)
        except UnreadableState as exc:
            return exc

    def combine(self, entries: Iterable[tuple[Keys, Any] | UnreadableState]) -> T_co:
        """Return the table of the readable entries."""
        table: dict[str, Any] = {}
        for each in entries:
            if isinstance(each, UnreadableState):
                continue
            (first, *others), value = each
            if others:
                table.setdefault(first, {})[others[0]] = value
            else:
                table[first] = value
        return table  # type: ignore[return-value]  # parse has the type of the values


def is_name(value: object) -> bool:
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARS:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # it was not UTF-8
        return False
    return True


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
        """Return the document that is stored and exported, without the revision."""
        return {"loaded": self.is_loaded, "parameters": dict(self.parameters)}


def parse_desired_model(entry: TableEntry) -> DesiredModel:
    match entry.document:
        case {"loaded": bool(loaded), "parameters": dict(parameters)}:
            return DesiredModel(loaded, parameters, entry.revision)
    raise UnreadableState(f"unexpected structure of model {quote_text(entry.keys[0])}")


def parse_cordon(entry: TableEntry) -> bool:
    check_form(entry.document, bool)
    return True


def parse_raw_entry(entry: TableEntry) -> Document:
    check_form(entry.document, {})
    return cast(Document, entry.document)


def create_raw_table(name: str) -> Table[RawTable]:
    """Return a table as a gateway sees it that lacks the owner."""
    return Table(name, parse_raw_entry)


MODELS: Final[Table[Mapping[str, DesiredModel]]] = Table(
    "models", parse_desired_model, key_count=1, max_bytes=MAX_MODEL_BYTES
)
CORDONS: Final[Table[Mapping[str, bool]]] = Table(
    "cordons", parse_cordon, key_count=1, subject="the cordon of replica"
)
# The tables that capabilities own; the keys of each are a model and another name. They are named here, so
# that a gateway without the capability exports them, and writes them again when the state was lost.
CAPABILITY_TABLES: Final = ("labels",)


# The loads: which load of each model every replica confirmed, and loads in progress.

# Replica → model → the id of the last confirmed load, or the token of a load in progress.
Loads = Mapping[str, Mapping[str, str]]
IN_PROGRESS_PREFIX: Final = "?"
UNKNOWN_LOAD: Final = ""  # the replica may have any load of the model, or none
LOAD: Final = re.compile(
    rf"\{IN_PROGRESS_PREFIX}[0-9a-f]*:[0-9a-f]{{16}}|[0-9]{{0,15}}(/[0-9a-f]+)?"
)
MAX_LOAD_CHARS: Final = 200


@dataclass(frozen=True)
class StartedLoad:
    """A load in progress on a replica, and the load that the replica had confirmed before."""

    token: str
    confirmed_load: str


def parse_load(entry: TableEntry) -> str:
    load = entry.document
    if not isinstance(load, str) or len(load) > MAX_LOAD_CHARS or not LOAD.fullmatch(load):
        raise UnreadableState("it is not the id of a load")
    return load


LOADS: Final[Table[Loads]] = Table("loads", parse_load, subject="replica", is_durable=False)


def new_load_token(owner: str) -> str:
    return f"{IN_PROGRESS_PREFIX}{owner}:{secrets.token_hex(8)}"


def is_in_progress(load: str) -> bool:
    return load.startswith(IN_PROGRESS_PREFIX)


def token_owner(token: str) -> str:
    return token[len(IN_PROGRESS_PREFIX) :].partition(":")[0]


def drop_token(load: str) -> str:
    """Return a confirmed load; empty if it is in progress, and so unknown."""
    return "" if is_in_progress(load) else load


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


# Events: their ids, by which they are in order in every store.

MAX_EVENTS: Final = 1000
EVENT_ID: Final = re.compile(r"(\d{1,15})-(\d{1,10})", re.ASCII)
# The fields that whoever reads events may rely on. Others can be of any kind.
EVENT_FORM: Final = dict.fromkeys(("time", "message", "action", "outcome", "file", "sha256"), str)


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
    raw: Any  # bytes; anything else is unreadable


def parse_event_id(text: str) -> EventId | None:
    match = EVENT_ID.fullmatch(text)
    return None if match is None else EventId(int(match[1]), int(match[2]))


def decode_event(event: StoredEvent) -> Document:
    """Return the document of an event. Raises `UnreadableState`."""
    document = decode_document(event.raw, MAX_EVENT_BYTES)
    check_form(document, EVENT_FORM)
    return cast(Document, document)


def find_last_change(events: Sequence[StoredEvent], file: str) -> Mapping[str, Any]:
    documents = map(decode_event, reversed(events))
    return next((each for each in documents if each.get("file") == file), {})


def encode_events(events: Sequence[StoredEvent]) -> bytes:
    return b"[%b]" % b",".join(event.raw for event in events)


# Operations.

OPERATION_TTL_S: Final = 3600  # how long a finished operation can be read
# Strict, because the id comes from a URL and becomes a part of a key.
OPERATION_ID: Final = re.compile("[0-9a-f]{32}")
OPERATION_FORM: Final = {
    **dict.fromkeys(("id", "action", "model", "state", "operation", "error", "code"), str),
    "replicas": {str: {str: str}},
    "updated_at": int,
    "forgotten_unloads": [str],
    "unloaded_dependents": [str],
}


def is_operation_id(operation_id: str) -> bool:
    return OPERATION_ID.fullmatch(operation_id) is not None


def decode_operation(operation_id: str, raw: object) -> Document:
    """Return the record of an operation. Raises `UnreadableState`."""
    document = decode_document(raw, MAX_DOCUMENT_BYTES)
    check_form(document, OPERATION_FORM)
    if document.get("id") != operation_id:
        raise UnreadableState("it is another operation")
    return cast(Document, document)
