"""Events: what changed, by whom, and the result on each replica.

An event is one record, which the line of the audit log and the list of `GET /v1/events` render. There is one
for every administrative call, for changes of watched files, and for `state import`. An administrative call
requires the right to manage and may change something; one that was denied to a known caller is an event, too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from itertools import islice
from time import time
from typing import Any, Final

from gateway.telemetry.request_info import ManagementCall, RequestInfo

log = logging.getLogger("gateway.audit")  # a public name, wherever this module is

AUDIT_LEVEL: Final = logging.INFO
SUCCEEDED: Final = "succeeded"
FAILED: Final = "failed"
OUTCOMES: Final = {202: "accepted", 401: "denied", 403: "denied", 499: "client disconnected"}
MAX_CHANGES: Final = 50
MAX_REPLICAS: Final = 200
MAX_REASON_CHARS: Final = 300  # of a replica
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
        at = datetime.fromtimestamp(self.time, timezone.utc).isoformat(timespec="milliseconds")
        document = {"time": "", **asdict(self)} | {"time": at.replace("+00:00", "Z")}
        return {
            name: value[:MAX_TEXT_CHARS] if isinstance(value, str) else value
            for name, value in document.items()
            if value
        }

    def write_line(self) -> None:
        """Write the line of the audit log."""
        fields = asdict(self)
        for name in LINE_FIELDS_OF_ITS_OWN:
            del fields[name]
        for name in OPTIONAL_FIELDS:
            if not fields[name]:
                del fields[name]
        log.log(AUDIT_LEVEL, "%s", self.message, extra=fields)


def find_outcome(status: int) -> str:
    return OUTCOMES.get(status, SUCCEEDED if status < 300 else FAILED)


def list_changes(changes: Sequence[tuple[str, Any, Any]]) -> list[dict[str, Any]]:
    """Return changes (subject, before, after) as in an event, which has a limited number of them."""
    shown = changes[:MAX_CHANGES]
    listed = [{"subject": each, "from": before, "to": after} for each, before, after in shown]
    if len(changes) > len(shown):
        others = f"{len(changes) - len(shown)} others"
        listed.append({"subject": others, "from": None, "to": None})
    return listed


def build_call_event(
    info: RequestInfo, call: ManagementCall, message: str, outcome: str, **fields: Any
) -> Event:
    """Return the event of an administrative call, as far as it has come."""
    replicas = {
        address: {name: text[:MAX_REASON_CHARS] for name, text in each.to_dict().items()}
        for address, each in islice(sorted(call.outcomes.items()), MAX_REPLICAS)
    }
    return Event(
        message,
        call.action or info.route,
        outcome,
        caller=info.caller_name or call.client,
        changes=list_changes([(each, *values) for each, values in call.changes.items()]),
        replicas=replicas,
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
