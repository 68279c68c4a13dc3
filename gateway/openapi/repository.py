"""The routes of model management."""

from __future__ import annotations

from gateway.openapi.responses import ERROR_PROPERTIES, build_response, build_responses
from gateway.openapi.schemas import (
    build_header_parameter,
    build_json_body,
    build_json_content,
    build_map_schema,
)
from gateway.repository.load_parameters import CONFIG_PARAMETER, STAGED, UNLOAD_DEPENDENTS
from gateway.tensors.codecs import STRING_SCHEMA
from gateway.tensors.schema import Schema, build_object_schema

RESPOND_ASYNC = "respond-async"  # RFC 7240, section 4.1

REPLICA_STATES_SCHEMA = build_map_schema(
    build_object_schema({"state": STRING_SCHEMA, "reason": STRING_SCHEMA}, optional=("reason",)),
    "State of each replica, by address.",
)
INDEX_ENTRY_SCHEMA = build_object_schema(
    {
        **dict.fromkeys(("name", "version", "state", "reason"), STRING_SCHEMA),
        "replicas": REPLICA_STATES_SCHEMA,
    },
    optional=("version", "state", "reason", "replicas"),
)
NAMED_STATE = {"model": STRING_SCHEMA, "state": STRING_SCHEMA}
REPORT_PROPERTIES = {**NAMED_STATE, "replicas": REPLICA_STATES_SCHEMA}
REPORT_SCHEMA = build_object_schema(REPORT_PROPERTIES)
MANAGEMENT_ERROR_SCHEMA = build_object_schema(
    {**ERROR_PROPERTIES, **REPORT_PROPERTIES},
    optional=REPORT_PROPERTIES,
    description="The body of an error of a load or unload, with the result on each replica.",
)
ACCEPTED_SCHEMA = build_object_schema(
    {"id": STRING_SCHEMA, "model": STRING_SCHEMA, "operation": {"const": "running"}}
)
OPERATION_SCHEMA = build_object_schema(
    {
        "id": STRING_SCHEMA,
        "action": {"enum": ["load", "unload"]},
        **REPORT_PROPERTIES,
        "operation": {"enum": ["running", "succeeded", "failed"]},
        "updated_at": {
            "type": "integer",
            "description": "Time of the record, in seconds since 1970.",
        },
        "error": {"type": "string", "description": "Reason of the failure, in one sentence."},
        "code": STRING_SCHEMA,
    },
    optional=("error", "code"),
)
INDEX_RESPONSES = build_responses({"type": "array", "items": INDEX_ENTRY_SCHEMA}, "The index.")
OPERATION_RESPONSES = build_responses(
    OPERATION_SCHEMA,
    "The operation's status.",
    404,
    error_descriptions={404: "The operation was not found."},
)
MANAGEMENT_RESPONSES = build_responses(
    REPORT_SCHEMA,
    "The action succeeded on every replica.",
    *(404, 409, 502, 504),
    error_schema={"$ref": "#/components/schemas/ManagementError"},
    error_descriptions={
        422: "Triton cannot load the model.",
        502: "The action succeeded on some replicas only. The gateway retries on the others.",
    },
)
MANAGEMENT_RESPONSES[202] = build_response(
    "The operation was started, because the request has `Prefer: respond-async`.",
    build_json_content(ACCEPTED_SCHEMA),
    {
        "Location": {"required": True, "schema": STRING_SCHEMA},
        "Preference-Applied": {"required": True, "schema": {"const": RESPOND_ASYNC}},
    },
)
OPERATION_LINK = {
    "operationId": "get_operation",
    "parameters": {"operation": "$response.body#/id"},
}
MANAGEMENT_RESPONSES[202]["links"] = {"operation": OPERATION_LINK}


def build_optional_body(properties: Schema, example: Schema) -> Schema:
    schema = {"type": "object", "properties": properties}
    return build_json_body(schema, example=example, required=False)


INDEX_OPENAPI = build_optional_body(
    {
        "ready": {"type": "boolean", "description": "Return only versions that are ready."},
        "parameters": {"type": "object"},
    },
    {"ready": True},
)
MANAGEMENT_OPENAPI = {
    **build_optional_body(
        {
            "parameters": {
                "type": "object",
                "properties": {
                    UNLOAD_DEPENDENTS: {
                        "type": "boolean",
                        "description": "For unload: also unload the models that only this model needs.",
                    },
                    STAGED: {
                        "type": "boolean",
                        "description": "For load: one replica after the other, until one fails.",
                    },
                    CONFIG_PARAMETER: {
                        "description": "For load, if uploads are allowed: the model's configuration."
                    },
                },
                "additionalProperties": {
                    "type": "string",
                    "description": "For load, if uploads are allowed: `file:PATH` with the file in base64.",
                },
            }
        },
        {"parameters": {}},
    ),
    "parameters": [
        build_header_parameter(
            "Prefer",
            "`respond-async`: return 202 immediately, with an operation to poll.",
            STRING_SCHEMA,
        )
        | {"example": RESPOND_ASYNC}
    ],
}
