"""The routes of the usage."""

from __future__ import annotations

import asyncio
import csv
import io
import re
from collections.abc import Sequence
from datetime import date
from typing import Annotated, Any, Final

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response

from gateway.capabilities.identity.usage import UsageLedger, UsageTable, find_today
from gateway.errors import MalformedRequest, NotAcceptable
from gateway.media_types import JSON
from gateway.messages import quote_text
from gateway.repository.state.content import KEPT_DAYS
from gateway.routes.dependencies import ServicesForAnyCaller, ServicesForMetrics, get_caller
from gateway.routes.openapi import COUNT_SCHEMA, STRING_CONTENT, build_list_schema, build_responses
from gateway.services import Services
from gateway.tensors.codecs import STRING_SCHEMA
from gateway.tensors.outputs import choose_media_type
from gateway.tensors.schema import build_object_schema

CSV: Final = "text/csv"
GROUPS: Final = ("caller", "model")
# Spreadsheets evaluate cells that begin with these.
FORMULA_BEGINNINGS: Final = ("=", "+", "-", "@", "\t", "\r")
DEFAULT_DAYS: Final = 30
DAY: Final = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)

DAY_SCHEMA: Final = {"type": "string", "format": "date"}
MEASURES: Final = {
    **dict.fromkeys(("requests", "rows", "bytes_in", "bytes_out"), COUNT_SCHEMA),
    "inference_seconds": {"type": "number", "description": "Time of waiting for Triton."},
}
ROW: Final = dict.fromkeys(GROUPS, STRING_SCHEMA) | MEASURES
USAGE_SCHEMA: Final = build_object_schema(
    {
        "from": DAY_SCHEMA,
        "to": DAY_SCHEMA,
        "by": build_list_schema({"enum": list(GROUPS)}, "The groups."),
        "usage": build_list_schema(
            build_object_schema({"day": DAY_SCHEMA} | ROW, GROUPS), "By day and group."
        ),
        "total": build_list_schema(build_object_schema(ROW, GROUPS), "By group."),
    }
)
USAGE_RESPONSES: Final = build_responses(USAGE_SCHEMA, "The usage.", 406)
USAGE_RESPONSES[200]["content"][CSV] = STRING_CONTENT

router = APIRouter(tags=["metrics"])


def describe_day(alias: str, description: str) -> Any:
    return Query(alias=alias, description=description, json_schema_extra=DAY_SCHEMA)


class UsageQuery:
    """The parameters of a request. Raises `MalformedRequest`."""

    def __init__(
        self,
        first: Annotated[str, describe_day("from", "First day (UTC). Default: 30 days.")] = "",
        last: Annotated[str, describe_day("to", "Last day (UTC). Default: today.")] = "",
        by: Annotated[str, Query(description="Groups: caller, model or both.")] = ",".join(GROUPS),
    ) -> None:
        self.last = parse_day("to", last) if last else find_today()
        default = date.fromordinal(max(self.last.toordinal() - DEFAULT_DAYS + 1, 1))
        self.first = parse_day("from", first) if first else default
        if self.first > self.last:
            raise MalformedRequest(f"from {self.first} is after to {self.last}")
        self.by = parse_groups(by)

    def list_days(self) -> list[str]:
        """Return the days of which the state can have counts."""
        today = find_today().toordinal()
        first = max(self.first.toordinal(), today - KEPT_DAYS + 1)
        last = min(self.last.toordinal(), today)
        return [date.fromordinal(day).isoformat() for day in range(first, last + 1)]


def parse_day(name: str, text: str) -> date:
    try:
        if DAY.fullmatch(text):
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise MalformedRequest(f"{name} {quote_text(text)} is not a day; use one such as 2026-01-31")


def parse_groups(text: str) -> Sequence[str]:
    groups = tuple(dict.fromkeys(filter(None, text.split(","))))
    for group in groups:
        if group not in GROUPS:
            raise MalformedRequest(f"by {quote_text(group)} is unknown; use by=caller,model")
    return groups


UsageParameters = Annotated[UsageQuery, Depends()]


@router.get(
    "/v1/usage",
    operation_id="get_usage",
    summary="Who used what, by day",
    responses=USAGE_RESPONSES,
)
async def get_usage(
    request: Request, services: ServicesForMetrics, query: UsageParameters
) -> Response:
    """Return the usage of all gateways that share the state, which keeps 400 days."""
    return await build_answer(request, services, query, UsageTable(query.by))


@router.get(
    "/v1/usage/me",
    operation_id="get_own_usage",
    summary="What this key used, by day",
    responses=USAGE_RESPONSES,
)
async def get_own_usage(
    request: Request, services: ServicesForAnyCaller, query: UsageParameters
) -> Response:
    """Return the usage of the caller."""
    table = UsageTable(query.by, only_caller=get_caller(request).name)
    return await build_answer(request, services, query, table)


async def build_answer(
    request: Request, services: Services, query: UsageQuery, table: UsageTable
) -> Response:
    accept = request.headers.get("accept", "")
    media_type = choose_media_type(accept, (JSON, CSV))
    if not media_type:
        raise NotAcceptable(accept, (JSON, CSV))
    ledger = services.get(UsageLedger)
    for day in query.list_days():
        await asyncio.to_thread(table.add, day, *await ledger.read(day))
    render = render_csv if media_type == CSV else render_json
    body = await asyncio.to_thread(render, query, table)
    return Response(body, media_type=media_type, headers={"Vary": "Accept"})


def render_json(query: UsageQuery, table: UsageTable) -> bytes:
    period = {"from": query.first, "to": query.last, "by": query.by}
    return orjson.dumps({**period, "usage": table.list_days(), "total": table.list_totals()})


def render_csv(query: UsageQuery, table: UsageTable) -> str:
    text = io.StringIO()
    columns = ("day", *query.by, "requests", "rows", "inference_seconds", "bytes_in", "bytes_out")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    for row in table.list_days():
        writer.writerow(row | {group: quote_formula(row[group]) for group in query.by})
    return text.getvalue()


def quote_formula(name: str) -> str:
    """Return a name that no spreadsheet evaluates: of a model, it can be a client's."""
    return f"'{name}" if name.startswith(FORMULA_BEGINNINGS) else name
