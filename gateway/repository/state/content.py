"""The content of the state, as values: tables, desired models, confirmed loads, events, operations.

Others can write to the state too, so every document is parsed into one of these values, or skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar, cast

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


class Origin(Enum):
    """Who desires a model; only what a file declares is not stored."""

    declared = "declared"
    api = "api"
    demand = "demand"  # requests, while they use it


ALL: Final = "all"
ReplicaCount = int | Literal["all"]


@dataclass(frozen=True)
class DesiredModel:
    """How many replicas should have a model loaded, and with which parameters; 0 keeps it unloaded."""

    replicas: ReplicaCount
    parameters: Document = field(default_factory=dict)
    revision: int = 0  # of its entry, assigned by the store; a repeated request gets a new one
    config_digest: str = ""  # set if the config comes from the models file
    origin: Origin = Origin.api

    @property
    def is_loaded(self) -> bool:
        return self.replicas != 0

    @property
    def generation(self) -> str:
        """Return what a replica confirms that has loaded it; empty if any load of the model is sufficient."""
        revision = str(self.revision) if self.revision else ""
        return f"{revision}/{self.config_digest}" if self.config_digest else revision

    def describe(self) -> dict[str, Any]:
        """Return the state, as events show it: a parameter can be a whole model."""
        names = [name[:MAX_PARAMETER_CHARS] for name in self.parameters]
        described: dict[str, Any] = {"loaded": self.is_loaded}
        return {**described, "parameters": names[:MAX_RECORDED_PARAMETERS]} if names else described

    def to_dict(self) -> dict[str, Any]:
        """Return the document that is stored, without the revision."""
        return {
            "replicas": self.replicas,
            "parameters": dict(self.parameters),
            "origin": self.origin.value,
        }


DEMAND: Final = DesiredModel(1, origin=Origin.demand)


def parse_desired_model(entry: TableEntry) -> DesiredModel:
    match entry.document:
        case {"replicas": "all" | int(), "parameters": dict(), "origin": "api" | "demand"}:
            document = entry.document
            replicas: ReplicaCount = document["replicas"]
            if replicas == ALL or (not isinstance(replicas, bool) and replicas >= 0):
                origin = Origin(document["origin"])
                return DesiredModel(replicas, document["parameters"], entry.revision, origin=origin)
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


# What each replica confirmed: the generation of its last load of each model. It is deleted before another
# load begins, and written by the gateway that ran it. Without one, the model is loaded again.

Confirmed = Mapping[str, Mapping[str, str]]  # replica → model → generation
GENERATION: Final = re.compile(r"[0-9]{0,15}(/[0-9a-f]{1,100})?")


def parse_generation(entry: TableEntry) -> str:
    generation = entry.document
    if not isinstance(generation, str) or not GENERATION.fullmatch(generation):
        raise UnreadableState("it is not a generation")
    return generation


CONFIRMED: Final[Table[Confirmed]] = Table(
    "confirmed", parse_generation, subject="replica", is_durable=False
)
# Why the last load of a model on a replica failed, until one succeeds there.
MAX_ERROR_CHARS: Final = 4000


def parse_load_error(entry: TableEntry) -> str:
    check_form(entry.document, str)
    return str(entry.document)


LOAD_ERRORS: Final[Table[Confirmed]] = Table(
    "load_errors", parse_load_error, subject="replica", is_durable=False
)


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
    "owner": str,
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
