"""The quotas of callers, as administrators see and reset them."""

from __future__ import annotations

from itertools import chain
from typing import Any, Final

from fastapi import APIRouter

from gateway.callers import CallerLimits
from gateway.errors import NotFound
from gateway.messages import format_utc_time, quote_text
from gateway.routes.dependencies import ServicesForAdministration
from gateway.routes.openapi import COUNT_SCHEMA, build_list_schema, build_responses
from gateway.services import Services
from gateway.telemetry.request_info import name_action, record_change
from gateway.tensors.codecs import STRING_SCHEMA
from gateway.tensors.schema import build_object_schema

QUOTA_SCHEMA: Final = build_object_schema(
    {
        "caller": {**STRING_SCHEMA, "description": "The name of a key or rule."},
        "period": {"enum": ["day", "month"]},
        "limit": COUNT_SCHEMA
        | {"description": "Requests in the period; one that is several inferences counts as many."},
        "used": COUNT_SCHEMA,
        "resets_at": {"type": "string", "format": "date-time"},
    }
)
QUOTAS_SCHEMA: Final = build_object_schema(
    {"quotas": build_list_schema(QUOTA_SCHEMA, "Those of the current day and month (UTC).")}
)
QUOTAS_RESPONSES: Final = build_responses(QUOTAS_SCHEMA, "The quotas.")
RESET_RESPONSES: Final = build_responses(QUOTAS_SCHEMA, "The quotas of the caller.", 404, 503)

router = APIRouter(tags=["management"])


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
