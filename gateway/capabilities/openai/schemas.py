"""The documents of OpenAI's API and of reranking, as the API description has them."""

from __future__ import annotations

from typing import Any, Final

from gateway.capabilities.openai.text_vectors import ENCODING_FORMATS, MAX_TEXTS
from gateway.media_types import EVENT_STREAM
from gateway.routes.openapi import (
    COUNT_SCHEMA,
    ERROR_DESCRIPTIONS,
    OPENAI_ERROR_REFERENCE,
    REQUEST_HEADER_PARAMETERS,
    STREAM_CONTENT,
    STRING_SCHEMA,
    Schema,
    build_json_body,
    build_list_schema,
    build_object_schema,
    build_responses,
)

NAME: Final = STRING_SCHEMA | {"minLength": 1, "description": "Name of the model."}
POSITIVE: Final[Schema] = {"type": ["integer", "null"], "minimum": 1}
TEXTS: Final[Schema] = {"type": "array", "minItems": 1, "maxItems": MAX_TEXTS}
MODEL_FIELDS: Final[Schema] = {
    "id": STRING_SCHEMA,
    "object": {"const": "model"},
    "created": {"type": "integer"},
    "owned_by": STRING_SCHEMA,
}
LIST_FIELDS: Final[Schema] = {
    "object": {"const": "list"},
    "data": build_list_schema(
        build_object_schema(MODEL_FIELDS), "The same models, in OpenAI's format."
    ),
}


def build_request(
    properties: Schema, optional: tuple[str, ...] = (), **fields: Any
) -> dict[str, Any]:
    schema = build_object_schema({"model": NAME, **properties}, optional, **fields)
    return {**build_json_body(schema), "parameters": REQUEST_HEADER_PARAMETERS}


EMBEDDINGS_REQUEST: Final = build_request(
    {
        "input": {"anyOf": [STRING_SCHEMA, TEXTS | {"items": STRING_SCHEMA}]},
        "encoding_format": {"enum": [*ENCODING_FORMATS, None]},
        "dimensions": POSITIVE | {"description": "Length of the vectors, if the config allows it."},
    },
    ("encoding_format", "dimensions"),
    title="EmbeddingsRequest",
)
EMBEDDINGS_RESPONSES: Final = build_responses(
    {
        "type": "object",
        "description": "The document that OpenAI describes, with 0 tokens of usage.",
    },
    "A vector for each text.",
    *ERROR_DESCRIPTIONS,
    error_schema=OPENAI_ERROR_REFERENCE,
)
RERANK_REQUEST: Final = build_request(
    {
        "query": STRING_SCHEMA | {"minLength": 1},
        "documents": TEXTS
        | {"items": {"anyOf": [STRING_SCHEMA, build_object_schema({"text": STRING_SCHEMA})]}},
        "top_n": POSITIVE | {"description": "Number of results; all by default."},
    },
    ("top_n",),
    title="RankingRequest",
)
RANKED: Final = build_object_schema({"index": COUNT_SCHEMA, "relevance_score": {"type": "number"}})
RERANK_RESPONSES: Final = build_responses(
    build_object_schema({"model": STRING_SCHEMA, "results": {"type": "array", "items": RANKED}}),
    "The documents, best first.",
    *ERROR_DESCRIPTIONS,
)
COMPLETION_REQUEST: Final = build_request(
    {}, description="A request of OpenAI's API. The server reads everything but the model."
)
COMPLETION_RESPONSES: Final = build_responses(
    {"type": "object"},
    "The server's response.",
    *(*ERROR_DESCRIPTIONS, 501),
    error_schema=OPENAI_ERROR_REFERENCE,
    error_descriptions={501: "GATEWAY_OPENAI_URLS is not set."},
)
COMPLETION_RESPONSES[200]["content"] |= {EVENT_STREAM: STREAM_CONTENT[EVENT_STREAM]}
