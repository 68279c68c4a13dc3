"""The list of the events: what changed, and by whom."""

from __future__ import annotations

import asyncio
import re
from dataclasses import fields
from datetime import datetime, timezone
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Response

from gateway.errors import MalformedRequest
from gateway.media_types import JSON
from gateway.messages import quote_text
from gateway.repository.state.events import MAX_EVENTS, EventId, encode_events, parse_event_id
from gateway.routes.dependencies import ServicesForAdministration
from gateway.routes.openapi import build_list_schema, build_responses
from gateway.routes.repository import REPLICA_STATES_SCHEMA
from gateway.telemetry.audit import Event
from gateway.tensors.codecs import STRING_SCHEMA
from gateway.tensors.schema import build_object_schema

DEFAULT_LIMIT: Final = 100
# RFC 3339; a plus sign that a URL does not encode arrives as a space.
TIME: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d)(\.\d{1,9})?([Zz]|[+ -]\d\d:\d\d)", re.ASCII
)


CHANGE_SCHEMA: Final = build_object_schema(
    {
        "subject": STRING_SCHEMA,
        "from": {"description": "The value before; null for none."},
        "to": {"description": "The value afterwards; null for none."},
    }
)
REQUIRED_FIELDS: Final = {
    "time": {"type": "string", "format": "date-time"},
    **dict.fromkeys(("message", "action", "outcome"), STRING_SCHEMA),
}
OPTIONAL_FIELDS: Final = {
    **dict.fromkeys((each.name for each in fields(Event)), STRING_SCHEMA),
    "changes": build_list_schema(CHANGE_SCHEMA, "What is different now."),
    "replicas": REPLICA_STATES_SCHEMA,
    "parameters": build_list_schema(STRING_SCHEMA, "Names of the parameters of a load."),
    "status": {"type": "integer", "description": "Status of the response."},
}
EVENT_SCHEMA: Final = build_object_schema(
    {**OPTIONAL_FIELDS, **REQUIRED_FIELDS},
    optional=OPTIONAL_FIELDS.keys() - REQUIRED_FIELDS.keys(),
    description="A change: its time, caller, action, differences and outcomes. Empty fields are left out.",
)
EVENTS_RESPONSES: Final = build_responses(
    build_object_schema(
        {
            "events": build_list_schema(EVENT_SCHEMA, "The oldest first."),
            "next": {**STRING_SCHEMA, "description": "The `since` of the events that follow."},
        }
    ),
    "The events.",
    503,
)

# The schema alone: the gateway's own sentence says more than the framework's.
SINCE_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [{"format": "date-time"}, {"pattern": "^([0-9]{1,15}-[0-9]{1,10})?$"}]
}

router = APIRouter(tags=["management"])


class MalformedStart(MalformedRequest):
    def __init__(self, since: str) -> None:
        super().__init__(
            f'since {quote_text(since)} is neither a time, such as 2026-01-31T14:03:00Z, nor the "next" of '
            "an earlier answer"
        )


def parse_start(since: str) -> EventId | None:
    """Return the id from which on events are read; None for an empty text. Raises `MalformedStart`."""
    if not since:
        return None
    if (event_id := parse_event_id(since)) is not None:
        return event_id
    match = TIME.fullmatch(since)
    if match is None:
        raise MalformedStart(since)
    date, time, fraction, offset = match.groups("")
    offset = offset.upper().replace("Z", "+00:00").replace(" ", "+")
    try:
        at = datetime.fromisoformat(f"{date}T{time}{offset}").astimezone(timezone.utc)
    except (ValueError, OverflowError):
        raise MalformedStart(since) from None
    milliseconds = int(f"{fraction[1:]:0<3}"[:3])
    return EventId(max(int(at.timestamp()) * 1000 + milliseconds, 0))


@router.get(
    "/v1/events",
    operation_id="list_events",
    summary="What changed, and by whom",
    responses=EVENTS_RESPONSES,
)
async def list_events(
    services: ServicesForAdministration,
    since: Annotated[
        str,
        Query(
            description="A time (RFC 3339), or the `next` of an earlier answer. Default: the last events.",
            examples=["2026-01-31T14:03:00Z"],
            json_schema_extra=SINCE_SCHEMA,
        ),
    ] = "",
    limit: Annotated[int, Query(ge=1, le=MAX_EVENTS)] = DEFAULT_LIMIT,
) -> Response:
    """Return the events of all gateways that share the state, which keeps the last 1,000."""
    start = parse_start(since)
    events = await services.repository.state.events.read(start, limit)
    next_id = events[-1].id.next if events else start or EventId(0)
    # FastAPI would take 300 ms for all events.
    encoded = await asyncio.to_thread(encode_events, events)
    body = b'{"events":%b,"next":"%b"}' % (encoded, str(next_id).encode())
    return Response(body, media_type=JSON)
