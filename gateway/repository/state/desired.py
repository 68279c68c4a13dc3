"""Desired state: its values, its JSON format, and the interface of the stores that keep it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, cast

import orjson

from gateway.access.rate_limit import RateWindows
from gateway.errors import StateUnavailable
from gateway.messages import CommandError
from gateway.repository.state.loads import Loads
from gateway.version_labels import (
    InvalidLabel,
    LabelTable,
    VersionLabel,
    check_label_name,
    parse_label,
)

log = logging.getLogger(__name__)

Document = Mapping[str, Any]
# Of the file. A release reads the state of the one before, and writes what that one reads: fields are only
# added, and unknown ones are kept. What the one before would misread needs another number.
STATE_FORMAT: Final = 1
OPERATION_TTL_S: Final = 3600  # how long a finished operation can be read
# Strict, because the id comes from a URL and becomes a part of a file name or key.
OPERATION_ID: Final = re.compile("[0-9a-f]{32}")
READ_ACTION: Final = "read"  # the actions complete messages such as "cannot be read"
WRITE_ACTION: Final = "written"


class BadState(CommandError):
    """An invalid or unusable `GATEWAY_STATE`."""


class UnreadableState(ValueError):
    """Stored data that no gateway of this version has written."""


@dataclass(frozen=True)
class DesiredModel:
    """The state of a model that the API requested: loaded with some parameters, or unloaded."""

    is_loaded: bool
    parameters: Mapping[str, Any] = field(default_factory=dict)
    revision: int = 0  # assigned by the store; a repeated request gets a new one
    config_digest: str = ""  # of the config, if it comes from the models file
    unknown: Mapping[str, Any] = field(default_factory=dict)  # fields of a later release

    @property
    def load_id(self) -> str:
        """Return the identity of this load; empty if any load of the model is sufficient."""
        revision = str(self.revision) if self.revision else ""
        return f"{revision}/{self.config_digest}" if self.config_digest else revision


class StateStore(Protocol):
    """A store of desired state. Methods raise `StateUnavailable`, and leave the state unchanged then."""

    async def read_desired_models(self) -> Mapping[str, DesiredModel]: ...

    async def set_desired_model(
        self, model: str, desired: DesiredModel | None, expected_revision: int | None = None
    ) -> int:
        """Store the desired model, or delete it if None, and return the new revision of the state.

        The revision is higher than every earlier one. A model that already has a revision keeps it. If
        `expected_revision` is given (0: none is stored) and the stored model has another one, nothing is
        changed, and the result is 0.
        """

    async def read_labels(self) -> LabelTable: ...

    async def set_label(self, model: str, name: str, label: VersionLabel | None) -> None:
        """Store a version label of a model, or delete it if None."""

    async def read_loads(self) -> Loads:
        """Return the last confirmed loads, without those in progress of processes that have exited."""

    async def begin_load(self, replica: str, model: str) -> tuple[str, str]:
        """Record a load in progress; return a token for `end_load`, and the load confirmed before."""

    async def end_load(self, replica: str, model: str, token: str, resulting_load: str) -> None:
        """Record the load that a replica has now; empty, or unknown if another load began meanwhile."""

    async def forget_loads(self, replica: str) -> None:
        """Delete the confirmed loads of a replica that restarted or was removed."""

    async def read_cordons(self) -> frozenset[str]:
        """Return the replicas that get no new requests."""

    async def set_cordon(self, replica: str, *, is_cordoned: bool) -> None:
        """Store that a replica gets no new requests, or that it gets them again."""

    async def record_operation(self, operation_id: str, document: Mapping[str, Any]) -> None:
        """Store the progress of an operation for an hour."""

    async def read_operation(self, operation_id: str) -> Mapping[str, Any] | None:
        """Return the last record of an operation; None if there is none, or if the id is invalid."""

    async def acquire_lease(self, name: str) -> bool:
        """Take or renew a lease, and return whether this process has it.

        No other process has it meanwhile. It ends with the process, at the latest five seconds after the
        last call.
        """

    async def release_lease(self, name: str) -> None:
        """Give a lease back; nothing happens without it."""

    async def exchange_reports(self, report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Publish this process's report, and return the last ones of the others, for five seconds each."""

    def rate_windows(self) -> RateWindows | None:
        """Return counters that all processes with this state share, if the store supports them."""

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


@dataclass(frozen=True)
class DesiredState:
    """All desired models and version labels, and the revision of the last change, immutable."""

    models: Mapping[str, DesiredModel] = field(default_factory=dict)
    revision: int = 0
    labels: LabelTable = field(default_factory=dict)
    unknown: Mapping[str, Any] = field(default_factory=dict)  # fields of a later release

    def has_revision(self, model: str, expected_revision: int | None) -> bool:
        """Return whether the model has this revision (0: it has none); None is any."""
        revision = self.models[model].revision if model in self.models else 0
        return expected_revision in (None, revision)

    def with_model(self, model: str, desired: DesiredModel | None) -> DesiredState:
        revision = self.revision + 1
        if desired is not None:
            desired = replace(desired, revision=desired.revision or revision)
        models = with_desired_model(self.models, model, desired)
        return replace(self, models=models, revision=revision)

    def with_label(self, model: str, name: str, label: VersionLabel | None) -> DesiredState:
        return replace(self, labels=with_version_label(self.labels, model, name, label))

    def to_json(self) -> bytes:
        models = {
            name: {**desired_model_to_dict(desired), "revision": desired.revision}
            for name, desired in self.models.items()
        }
        document = {"format": STATE_FORMAT, "revision": self.revision, "models": models}
        if self.labels:
            document["labels"] = {
                model: {name: label.to_dict() for name, label in labels.items()}
                for model, labels in self.labels.items()
            }
        document |= self.unknown
        return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def with_desired_model(
    models: Mapping[str, DesiredModel], model: str, desired: DesiredModel | None
) -> dict[str, DesiredModel]:
    others = {name: value for name, value in models.items() if name != model}
    return others if desired is None else {**others, model: desired}


def with_version_label(
    table: LabelTable, model: str, name: str, label: VersionLabel | None
) -> dict[str, Mapping[str, VersionLabel]]:
    """Return the table with a label, or without it if None."""
    labels = {key: value for key, value in table.get(model, {}).items() if key != name}
    if label is not None:
        labels[name] = label
    others = {key: value for key, value in table.items() if key != model}
    return {**others, model: labels} if labels else others


def with_cordon(cordons: frozenset[str], replica: str, *, is_cordoned: bool) -> frozenset[str]:
    return cordons | {replica} if is_cordoned else cordons - {replica}


def desired_model_to_dict(desired: DesiredModel) -> dict[str, Any]:
    known = {"loaded": desired.is_loaded, "parameters": dict(desired.parameters)}
    return {**known, **desired.unknown}


def decode_state(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise UnreadableState("invalid JSON") from None


def decode_operation(raw: bytes) -> Mapping[str, Any]:
    """Return the record of an operation. Raises `UnreadableState`."""
    document = decode_state(raw)
    if not isinstance(document, dict):
        raise UnreadableState("unexpected structure of an operation")
    return document


def parse_desired_model(document: Any) -> DesiredModel:
    """Raise `UnreadableState` if the document is invalid."""
    match document:
        case {
            "loaded": bool(loaded),
            "parameters": dict(parameters),
            "revision": int(revision),
            **unknown,
        }:
            return DesiredModel(loaded, parameters, revision, unknown=cast(Document, unknown))
    raise UnreadableState("unexpected structure")


def parse_desired_state(document: Any) -> DesiredState:
    """Raise `UnreadableState` if the document is invalid."""
    match document:
        case {"format": int(version)} if version != STATE_FORMAT:
            raise UnreadableState(f"format {version} is not supported, only format {STATE_FORMAT}")
        case {"format": int(), "revision": int(revision), "models": dict(models), **others}:
            parsed = {name: parse_desired_model(value) for name, value in models.items()}
            labels = parse_label_table(others.pop("labels", {}))
            return DesiredState(parsed, revision, labels, cast(Document, others))
    raise UnreadableState("unexpected structure")


def parse_label_table(document: Any) -> LabelTable:
    """Raise `UnreadableState` if the document is invalid."""
    if not isinstance(document, dict) or not all(isinstance(x, dict) for x in document.values()):
        raise UnreadableState("unexpected structure of the labels")
    return {
        model: {name: parse_stored_label(name, label) for name, label in labels.items()}
        for model, labels in document.items()
    }


def parse_stored_label(name: str, document: Any) -> VersionLabel:
    """Raise `UnreadableState` if the name or the document is invalid."""
    try:
        check_label_name(name)
        return parse_label(document, is_stored=True)
    except InvalidLabel as exc:
        raise UnreadableState(f"invalid label: {exc}") from None


def is_operation_id(operation_id: str) -> bool:
    return OPERATION_ID.fullmatch(operation_id) is not None


class OutageLog:
    """Logs the begin and the end of an outage, but not every failure in between."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._reasons: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def __contains__(self, action: str) -> bool:
        return action in self._reasons

    def record_failure(self, action: str, reason: str) -> StateUnavailable:
        if self._reasons.get(action) != reason:
            log.warning("the state at %s cannot be %s: %s", self._place, action, reason)
        self._reasons[action] = reason
        return StateUnavailable(action, reason)

    def record_success(self, action: str) -> None:
        if self._reasons.pop(action, None) is not None:
            log.info("the state at %s can be %s again", self._place, action)
