"""Parts of the API description (OpenAPI 3.1) that routes share: schemas, parameters and responses. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from gateway.callers import Priority
from gateway.media_types import EVENT_STREAM, JSON, NDJSON

Schema = dict[str, Any]
STRING_SCHEMA: Final[Schema] = {"type": "string"}
BINARY_SCHEMA: Final[Schema] = {"type": "string", "format": "binary"}
ARRAY_SCHEMA: Final[Schema] = {"type": "array", "items": {}}
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
SERVERS: Final = [{"url": "/", "description": "Where this document is."}]
LICENSE: Final = {"name": "Apache-2.0", "identifier": "Apache-2.0"}


def build_object_schema(
    properties: Schema, optional: Collection[str] = (), **fields: Any
) -> Schema:
    """Return the schema of an object in which every property but the optional ones is required."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, **fields}


def build_security(*, requires_key: bool) -> list[dict[str, list[str]]]:
    """Return how callers are identified; without keys, they need not say who they are."""
    return SECURITY if requires_key else [{}, *SECURITY]


def name_schemas(document: dict[str, Any]) -> None:
    """Move each object with a title to the components, so that the types of generated clients have names."""
    components: Schema = {}
    for name, schema in document["components"]["schemas"].items():
        components[name] = {key: name_parts(part, components) for key, part in schema.items()}
    document["paths"] = name_parts(document["paths"], components)
    document["components"]["schemas"] = components


def name_parts(node: Any, components: Schema) -> Any:
    """Return a copy with references instead of named schemas, which `components` gets."""
    if isinstance(node, list):
        return [name_parts(each, components) for each in node]
    if not isinstance(node, dict):
        return node
    copy = {key: name_parts(value, components) for key, value in node.items()}
    name = node.get("title")
    if not (isinstance(name, str) and name.isidentifier() and "properties" in node):
        return copy
    del copy["title"]
    components[name] = copy
    return {"$ref": f"#/components/schemas/{name}"}


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
    """Return the part of an operation that describes its request body; `fields` describe its content."""
    return {"requestBody": {"required": required, "content": build_json_content(schema, **fields)}}


TIMEOUT_PARAMETER: Final = build_header_parameter(
    "X-Request-Timeout",
    "Timeout of the request in seconds, up to the gateway's own maximum.",
    {"type": "number", "exclusiveMinimum": 0},
)
REQUEST_HEADER_PARAMETERS = [
    TIMEOUT_PARAMETER,
    build_header_parameter(
        "X-Request-ID", "ID of the request in the response and in the logs.", STRING_SCHEMA
    ),
    build_header_parameter(
        "X-Priority",
        "The request's priority while requests wait, if it is lower than the caller's.",
        {"type": "string", "enum": [priority.name for priority in Priority]},
    ),
]

ERROR_PROPERTIES: Final[Schema] = {
    "error": {"type": "string", "description": "The error in one sentence."},
    "code": {"type": "string", "description": "Stable name of the error."},
    "request_id": STRING_SCHEMA,
}
ERROR_SCHEMA: Final = build_object_schema(ERROR_PROPERTIES, description="The body of every error.")
ERROR_REFERENCE: Final[Schema] = {"$ref": "#/components/schemas/Error"}
OPENAI_ERROR_SCHEMA: Final = build_object_schema(
    {
        "error": build_object_schema(
            {
                "message": STRING_SCHEMA,
                "type": STRING_SCHEMA,
                "param": {"type": "null"},
                "code": STRING_SCHEMA,
            }
        )
    },
    description="An error in the shape of OpenAI's API.",
)
OPENAI_ERROR_REFERENCE: Final[Schema] = {"$ref": "#/components/schemas/OpenAIError"}
# An inference can end with any of these; other routes with some.
ERROR_DESCRIPTIONS: Final = {
    400: "The request is malformed.",
    401: "The API key is missing or unknown.",
    403: "The caller is not allowed to do this.",
    404: "The model or version was not found.",
    406: "The response is not available in a format that Accept allows.",
    408: "The request was not received in time.",
    409: "The request conflicts with the model management mode, or its sequence is not running.",
    413: "The body or an image is too large.",
    414: "The URL is too long.",
    415: "The Content-Type is not supported.",
    422: "The request does not match the model's inputs; the message says what the model expects.",
    429: "The gateway or Triton's queue is full, or the key exceeds its rate limit.",
    431: "The request header is too large.",
    500: "The model or the gateway failed.",
    502: "The replica sent an invalid response.",
    503: "No replica can serve the model now.",
    504: "The response was not ready in time.",
}
# Any request can result in these errors.
COMMON_ERROR_STATUSES: Final = (400, 401, 403, 408, 413, 414, 422, 429, 431, 500, 503)
REQUEST_ID_HEADER: Final = {
    "X-Request-ID": {
        "description": "The request's X-Request-ID, or a generated one.",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
    }
}
RETRY_AFTER_HEADER: Final = {
    "Retry-After": {
        "description": "Seconds to wait before a retry.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1},
    }
}
CHALLENGE_HEADER: Final = {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}}
EXTRA_ERROR_HEADERS: Final[dict[int, dict[str, Any]]] = {
    401: CHALLENGE_HEADER,
    429: RETRY_AFTER_HEADER,
    503: RETRY_AFTER_HEADER,
}

OpenApiResponses = dict[int | str, dict[str, Any]]


def build_response(
    description: str, content: Schema, headers: dict[str, Any] | None = None
) -> dict[str, Any]:
    headers = REQUEST_ID_HEADER | (headers or {})
    return {"description": description, "headers": headers, "content": content}


def build_error_responses(
    *statuses: int,
    schema: Schema = ERROR_REFERENCE,
    descriptions: dict[int, str] | None = None,
) -> OpenApiResponses:
    texts = ERROR_DESCRIPTIONS | (descriptions or {})
    content = build_json_content(schema)
    return {
        status: build_response(texts[status], content, EXTRA_ERROR_HEADERS.get(status))
        for status in sorted({*COMMON_ERROR_STATUSES, *statuses})
    }


def build_responses(
    body_schema: Schema,
    description: str,
    *error_statuses: int,
    headers: dict[str, Any] | None = None,
    error_schema: Schema = ERROR_REFERENCE,
    error_descriptions: dict[int, str] | None = None,
) -> OpenApiResponses:
    errors = build_error_responses(
        *error_statuses, schema=error_schema, descriptions=error_descriptions
    )
    return errors | {200: build_response(description, build_json_content(body_schema), headers)}
