"""Schemas, contents and security schemes that several descriptions use."""

from __future__ import annotations

from typing import Final

from gateway.media_types import EVENT_STREAM, JSON, NDJSON
from gateway.tensors.codecs import BINARY_SCHEMA, STRING_SCHEMA
from gateway.tensors.schema import Schema

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


def build_json_body(
    schema: Schema, example: Schema | None = None, *, required: bool = True
) -> Schema:
    """Return the part of an operation that describes its request body."""
    examples = {} if example is None else {"example": example}
    return {
        "requestBody": {"required": required, "content": {JSON: {"schema": schema, **examples}}}
    }


TIMEOUT_PARAMETER: Final = build_header_parameter(
    "X-Request-Timeout",
    "Timeout of the request in seconds, up to the gateway's own maximum.",
    {"type": "number", "exclusiveMinimum": 0},
)
