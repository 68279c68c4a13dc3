"""The routes of the log level."""

from __future__ import annotations

from typing import Final

from gateway.openapi.responses import build_responses
from gateway.openapi.schemas import build_json_body
from gateway.settings.observability import LogLevel
from gateway.tensors.schema import build_object_schema

LOG_LEVEL_SCHEMA: Final = build_object_schema(
    {"level": {"enum": [each.value for each in LogLevel]}}
)
LOG_LEVEL_RESPONSES: Final = build_responses(LOG_LEVEL_SCHEMA, "The level of the log.")
LOG_LEVEL_OPENAPI: Final = build_json_body(LOG_LEVEL_SCHEMA, example={"level": "debug"})
