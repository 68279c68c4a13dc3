"""Events: what changed, by whom, and the result on each replica.

An event is one record, which the line of the audit log and the list of `GET /v1/events` render. There is one
for every administrative call, for changes of watched files, and for `state import`. An administrative call
requires the right to manage and may change something; one that was refused is in the audit log only.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any, Final, TypeVar

import orjson

from gateway.messages import format_utc_time
from gateway.telemetry.request_info import ManagementCall, ReplicaOutcome, RequestInfo

T = TypeVar("T")

log = logging.getLogger("gateway.audit")  # a public name, wherever this module is

AUDIT_LEVEL: Final = logging.INFO
SUCCEEDED: Final = "succeeded"
FAILED: Final = "failed"
OUTCOMES: Final = {202: "accepted", 401: "denied", 403: "denied", 499: "client disconnected"}
MAX_EVENT_BYTES: Final = 16 << 10
MAX_LIST_BYTES: Final = 6 << 10  # the changes and the replicas are lists
MAX_REPLICA_REASON_CHARS: Final = 300
MAX_TEXT_CHARS: Final = 1000
# Fields that only some lines of the audit log have.
OPTIONAL_FIELDS: Final = ("status", "code", "reason", "subject")
LINE_FIELDS_OF_ITS_OWN: Final = ("time", "message")


@dataclass(frozen=True)
class Event:
    """A change, or the attempt. Who is the caller; what are the action, the subject and the changes."""

    message: str
    action: str
    outcome: str
    time: float = field(default_factory=time)
    caller: str = ""  # empty for a watched file: its author is unknown
    changes: list[dict[str, Any]] = field(default_factory=list)
    replicas: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    request_id: str = ""
    route: str = ""
    model: str = ""
    version: str = ""
    label: str = ""
    replica: str = ""
    file: str = ""
    sha256: str = ""
    parameters: tuple[str, ...] = ()
    operation: str = ""
    key: str = ""
    subject: str = ""
    client: str = ""
    status: int = 0
    code: str = ""
    reason: str = ""

    @property
    def is_refused(self) -> bool:
        """Return whether a call was refused before anything was done."""
        return 400 <= self.status < 499 and not (self.replicas or self.changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the document that is kept and listed: the fields that are not empty."""
        at = format_utc_time(self.time, "milliseconds")
        document = {"time": "", **vars(self)} | {"time": at}
        return {
            name: value[:MAX_TEXT_CHARS] if isinstance(value, str) else value
            for name, value in document.items()
            if value
        }

    def encode(self) -> bytes:
        """Return the document as JSON.

        Raises `TypeError` if a text is not valid Unicode, and `ValueError` if the document is too large.
        """
        raw = orjson.dumps(self.to_dict())
        if len(raw) > MAX_EVENT_BYTES:
            raise ValueError(f"it is larger than {MAX_EVENT_BYTES} bytes")
        return raw

    def write_line(self, **more: Any) -> None:
        """Write the line with some more fields than the document has."""
        fields = {**vars(self), **more}
        for name in LINE_FIELDS_OF_ITS_OWN:
            del fields[name]
        for name in OPTIONAL_FIELDS:
            if not fields[name]:
                del fields[name]
        log.log(AUDIT_LEVEL, "%s", self.message, extra=fields)


def find_outcome(status: int) -> str:
    return OUTCOMES.get(status, SUCCEEDED if status < 300 else FAILED)


def list_changes(changes: Sequence[tuple[str, Any, Any]]) -> list[dict[str, Any]]:
    """Return changes (subject, before, after) as in an event: the first ones, and the number of others."""
    listed = take_first(
        {"subject": each, "from": before, "to": after} for each, before, after in changes
    )
    if others := len(changes) - len(listed):
        listed.append({"subject": name_others(others), "from": None, "to": None})
    return listed


def list_outcomes(outcomes: Mapping[str, ReplicaOutcome]) -> dict[str, dict[str, str]]:
    """Return outcomes as in an event: the first ones, beginning with failures, and the number of others."""
    states = [
        (address, {name: text[:MAX_REPLICA_REASON_CHARS] for name, text in each.to_dict().items()})
        for address, each in sorted(outcomes.items())
    ]
    states.sort(key=lambda item: "reason" not in item[1])
    listed = dict(take_first(states))
    if others := len(states) - len(listed):
        listed[name_others(others)] = {"state": "not listed"}
    return listed


def name_others(count: int) -> str:
    return "1 other" if count == 1 else f"{count} others"


def take_first(items: Iterable[T]) -> list[T]:
    """Return the first items whose JSON has at most `MAX_LIST_BYTES`."""
    taken = []
    size = 0
    for item in items:
        size += len(json.dumps(item, default=str))  # it accepts every text, which orjson does not
        if size > MAX_LIST_BYTES:
            break
        taken.append(item)
    return taken


def build_call_event(
    info: RequestInfo, call: ManagementCall, message: str, outcome: str, **fields: Any
) -> Event:
    return Event(
        message,
        call.action or info.route,
        outcome,
        caller=info.caller_name or call.client,
        changes=list_changes([(each, *values) for each, values in call.changes.items()]),
        replicas=list_outcomes(call.outcomes),
        request_id=info.request_id,
        route=info.route,
        model=call.model,
        version=call.version,
        label=call.label,
        replica=call.replica,
        sha256=call.sha256,
        parameters=call.parameters,
        key=info.key,
        subject=info.subject,
        client=call.client,
        **{"operation": call.operation, **fields},
    )
