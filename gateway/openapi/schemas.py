"""Schemas, contents and security schemes that several descriptions use."""

from __future__ import annotations

from typing import Any, Final

from gateway.media_types import EVENT_STREAM, JSON, NDJSON
from gateway.tensors.codecs import BINARY_SCHEMA, STRING_SCHEMA
from gateway.tensors.schema import Schema

COUNT_SCHEMA: Final[Schema] = {"type": "integer", "minimum": 0}
STRING_CONTENT: Final = {"schema": STRING_SCHEMA}
BINARY_CONTENT: Final = {"schema": BINARY_SCHEMA}
STREAM_CONTENT: Final[Schema] = {
    EVENT_STREAM: {
        "schema": {
            "type": "string",
            "description": "One event per response, as soon as it is available.",
        }
    },
    NDJSON: {
        "schema": {"type": "string", "description": "The same as one JSON document per line."}
    },
}
# How clients send their key.
SECURITY_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
SECURITY: Final[list[dict[str, list[str]]]] = [{name: []} for name in SECURITY_SCHEMES]


def build_list_schema(items: Schema, description: str) -> Schema:
    return {"type": "array", "items": items, "description": description}


def build_map_schema(values: Schema, description: str) -> Schema:
    return {"type": "object", "additionalProperties": values, "description": description}


def build_header_parameter(name: str, description: str, schema: Schema) -> Schema:
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": description,
        "schema": schema,
    }


def build_json_content(schema: Schema, **fields: Any) -> Schema:
    return {JSON: {"schema": schema, **fields}}


def build_json_body(schema: Schema, *, required: bool = True, **fields: Any) -> Schema:
    """Return the part of an operation that describes its request body; `fields` are those of its content."""
    return {"requestBody": {"required": required, "content": build_json_content(schema, **fields)}}


TIMEOUT_PARAMETER: Final = build_header_parameter(
    "X-Request-Timeout",
    "Timeout of the request in seconds, up to the gateway's own maximum.",
    {"type": "number", "exclusiveMinimum": 0},
)
