"""The routes of health checks."""

from __future__ import annotations

from gateway.openapi.responses import (
    ERROR_REFERENCE,
    RETRY_AFTER_HEADER,
    build_error_responses,
    build_response,
    build_responses,
)
from gateway.openapi.schemas import build_json_content, build_map_schema
from gateway.tensors.codecs import STRING_SCHEMA
from gateway.tensors.schema import build_object_schema

REASONS_SCHEMA = {"type": "object", "additionalProperties": STRING_SCHEMA}
LIVENESS_SCHEMA = build_object_schema({"live": {"const": True}})
READINESS_SCHEMA = build_object_schema(
    {
        "ready": {"type": "boolean"},
        "draining": {"type": "boolean", "description": "The gateway is shutting down."},
        "asleep": {
            "const": True,
            "description": "No replica is up; requests wait for one (GATEWAY_HOLD_S).",
        },
        "replicas": build_map_schema(STRING_SCHEMA, "State of each replica, by address."),
        "missing": build_map_schema(
            REASONS_SCHEMA,
            "Declared models that are not ready on the quorum, with the reason on each replica. A gateway "
            "that was ready stays so while it can serve others, unless one has `required: always`.",
        ),
        "pending": build_map_schema(
            REASONS_SCHEMA,
            "Models that were declared after the gateway started and are not ready "
            "yet. They do not affect `ready`.",
        ),
    },
    optional=("draining", "asleep", "replicas", "missing", "pending"),
)
LIVENESS_RESPONSES = build_responses(LIVENESS_SCHEMA, "The gateway process is running.")
READINESS_RESPONSES = build_responses(READINESS_SCHEMA, "The gateway is ready.") | {
    503: build_response(
        "The gateway is not ready.",
        build_json_content({"anyOf": [READINESS_SCHEMA, ERROR_REFERENCE]}),
        RETRY_AFTER_HEADER,
    )
}
EMPTY_CONTENT = {"text/plain": {"schema": {"type": "string", "maxLength": 0}}}
V2_READY_RESPONSES = build_error_responses() | {
    200: build_response("The fleet is ready.", EMPTY_CONTENT)
}
