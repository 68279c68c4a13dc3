"""Administration while the gateway runs: the level of its log, events and quotas."""

from __future__ import annotations

import asyncio
import re
from dataclasses import fields
from datetime import datetime, timezone
from itertools import chain
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response

from gateway.callers import CallerLimits
from gateway.config.settings import LogLevel
from gateway.errors import MalformedRequest, NotFound
from gateway.media_types import JSON
from gateway.messages import format_utc_time, quote_text
from gateway.repository.state.content import MAX_EVENTS, EventId, encode_events, parse_event_id
from gateway.routes.dependencies import ServicesForAdministration
from gateway.routes.openapi import (
    COUNT_SCHEMA,
    STRING_SCHEMA,
    build_json_body,
    build_list_schema,
    build_object_schema,
    build_responses,
)
from gateway.routes.repository import REPLICA_STATES_SCHEMA, read_management_body
from gateway.services import Services
from gateway.telemetry.audit import Event
from gateway.telemetry.logs import get_level, set_level
from gateway.telemetry.request_info import name_action, record_change

router = APIRouter(tags=["management"])

# The level of the log

LOG_LEVEL_SCHEMA: Final = build_object_schema(
    {"level": {"enum": [each.value for each in LogLevel]}}, title="LogLevel"
)
LOG_LEVEL_RESPONSES: Final = build_responses(LOG_LEVEL_SCHEMA, "The level of the log.")
LOG_LEVEL_OPENAPI: Final = build_json_body(LOG_LEVEL_SCHEMA, example={"level": "debug"})


LEVELS = {level.value: level for level in LogLevel}


@router.get(
    "/v1/log-level",
    operation_id="get_log_level",
    summary="Level of the log",
    responses=LOG_LEVEL_RESPONSES,
)
async def get_log_level(services: ServicesForAdministration) -> dict[str, Any]:
    """Return the level of this process."""
    return {"level": get_level().value}


@router.put(
    "/v1/log-level",
    operation_id="set_log_level",
    summary="Change the level of the log",
    responses=LOG_LEVEL_RESPONSES,
    openapi_extra=LOG_LEVEL_OPENAPI,
)
async def set_log_level(request: Request, services: ServicesForAdministration) -> dict[str, Any]:
    """Change the level of this process until it exits; `GATEWAY_LOG_LEVEL` is not changed."""
    document = await read_management_body(request, services)
    name = document.get("level")
    level = LEVELS.get(name) if isinstance(name, str) else None
    if level is None:
        raise MalformedRequest(f'"level" must be one of {", ".join(LEVELS)}')
    name_action("log level")
    record_change("log level", get_level().value, level.value)
    set_level(level)
    return {"level": level.value}


# Events

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
    },
    title="Change",
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
    title="Event",
)
EVENTS_RESPONSES: Final = build_responses(
    build_object_schema(
        {
            "events": build_list_schema(EVENT_SCHEMA, "The oldest first."),
            "next": {**STRING_SCHEMA, "description": "The `since` of the events that follow."},
        },
        title="EventList",
    ),
    "The events.",
    503,
)


def parse_start(since: str, after: str) -> EventId | None:
    """Return the id from which on events are read; None for empty texts. Raises `MalformedRequest`."""
    if since and after:
        raise MalformedRequest("since and after exclude each other; send one of them")
    if after:
        event_id = parse_event_id(after)
        if event_id is None:
            raise MalformedRequest(
                f'after {quote_text(after)} is not the "next" of an earlier answer'
            )
        return event_id
    if not since:
        return None
    malformed = MalformedRequest(
        f"since {quote_text(since)} is not a time, such as 2026-01-31T14:03:00Z"
    )
    match = TIME.fullmatch(since)
    if match is None:
        raise malformed
    date, time, fraction, offset = match.groups("")
    offset = offset.upper().replace("Z", "+00:00").replace(" ", "+")
    try:
        at = datetime.fromisoformat(f"{date}T{time}{offset}").astimezone(timezone.utc)
    except (ValueError, OverflowError):
        raise malformed from None
    milliseconds = int(f"{fraction[1:]:0<3}"[:3])
    return EventId(max(int(at.timestamp()) * 1000 + milliseconds, 0))


# The schemas alone: the gateway's own sentences say more than the framework's.
SINCE_SCHEMA: Final[dict[str, Any]] = {"anyOf": [{"format": "date-time"}, {"maxLength": 0}]}
AFTER_SCHEMA: Final[dict[str, Any]] = {"pattern": "^([0-9]{1,15}-[0-9]{1,10})?$"}


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
            description="A time (RFC 3339). Default: the last events.",
            examples=["2026-01-31T14:03:00Z"],
            json_schema_extra=SINCE_SCHEMA,
        ),
    ] = "",
    after: Annotated[
        str,
        Query(
            description="The `next` of an earlier answer, instead of a time.",
            json_schema_extra=AFTER_SCHEMA,
        ),
    ] = "",
    limit: Annotated[int, Query(ge=1, le=MAX_EVENTS)] = DEFAULT_LIMIT,
) -> Response:
    """Return the events of all gateways that share the state, which keeps the last 1,000."""
    start = parse_start(since, after)
    events = await services.repository.state.events.read(start, limit)
    next_id = events[-1].id.next if events else start or EventId(0)
    # FastAPI would take 300 ms for all events.
    encoded = await asyncio.to_thread(encode_events, events)
    body = b'{"events":%b,"next":"%b"}' % (encoded, str(next_id).encode())
    return Response(body, media_type=JSON)


# Quotas

QUOTA_SCHEMA: Final = build_object_schema(
    {
        "caller": {**STRING_SCHEMA, "description": "The name of a key or rule."},
        "period": {"enum": ["day", "month"]},
        "limit": COUNT_SCHEMA
        | {"description": "Requests in the period; one that is several inferences counts as many."},
        "used": COUNT_SCHEMA,
        "resets_at": {"type": "string", "format": "date-time"},
    },
    title="Quota",
)
QUOTAS_SCHEMA: Final = build_object_schema(
    {"quotas": build_list_schema(QUOTA_SCHEMA, "Those of the current day and month (UTC).")},
    title="QuotaList",
)
QUOTAS_RESPONSES: Final = build_responses(QUOTAS_SCHEMA, "The quotas.")
RESET_RESPONSES: Final = build_responses(QUOTAS_SCHEMA, "The quotas of the caller.", 404, 503)


class NoQuota(NotFound):
    def __init__(self, caller: str) -> None:
        super().__init__(
            f"no caller {quote_text(caller)} has a quota; GET /v1/quotas lists those that have"
        )


@router.get(
    "/v1/quotas",
    operation_id="list_quotas",
    summary="Quotas of keys, tokens and certificates",
    responses=QUOTAS_RESPONSES,
)
async def list_quotas(services: ServicesForAdministration) -> dict[str, Any]:
    """Return what the callers have used of their quotas."""
    found = [await read_quotas(services, *each) for each in find_limits(services).items()]
    return {"quotas": list(chain.from_iterable(found))}


@router.delete(
    "/v1/quotas/{caller:path}",
    operation_id="reset_quotas",
    summary="Reset the quotas of a caller",
    responses=RESET_RESPONSES,
)
async def reset_quotas(services: ServicesForAdministration, caller: str) -> dict[str, Any]:
    """Count the requests of a caller in this day and month from zero again."""
    name_action("reset quotas")
    limits = find_limits(services).get(caller)
    if limits is None:
        raise NoQuota(caller)
    before = await read_quotas(services, caller, limits)
    await services.limiter.reset(caller, limits)
    for quota in before:
        record_change(f"used quota of {caller} in this {quota['period']}", quota["used"], 0)
    return {"quotas": await read_quotas(services, caller, limits)}


def find_limits(services: Services) -> dict[str, CallerLimits]:
    """Return the limits of the callers that have a quota, by their names."""
    file = services.access.keys_file
    if file is None:
        return {}
    return {
        caller.name: caller.limits
        for caller in file.value.list_callers()
        if caller.limits is not None and caller.limits.has_quota
    }


async def read_quotas(
    services: Services, caller: str, limits: CallerLimits
) -> list[dict[str, Any]]:
    return [
        {
            "caller": caller,
            "period": quota.name,
            "limit": quota.limit,
            "used": used,
            "resets_at": format_utc_time(quota.ends),
        }
        for quota, used in await services.limiter.read(caller, limits)
    ]
