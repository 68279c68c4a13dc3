"""The level of the gateway's log, while it runs."""

from __future__ import annotations

import logging
from typing import Any, Final

from fastapi import APIRouter, Request

from gateway.errors import MalformedRequest
from gateway.routes.dependencies import ServicesForAdministration
from gateway.routes.openapi import build_json_body, build_responses
from gateway.routes.repository import read_management_body
from gateway.settings.server import LogLevel
from gateway.telemetry.logs import get_level, set_level
from gateway.telemetry.request_info import name_action, record_change
from gateway.tensors.schema import build_object_schema

LOG_LEVEL_SCHEMA: Final = build_object_schema(
    {"level": {"enum": [each.value for each in LogLevel]}}
)
LOG_LEVEL_RESPONSES: Final = build_responses(LOG_LEVEL_SCHEMA, "The level of the log.")
LOG_LEVEL_OPENAPI: Final = build_json_body(LOG_LEVEL_SCHEMA, example={"level": "debug"})


log = logging.getLogger(__name__)
router = APIRouter(tags=["management"])
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
