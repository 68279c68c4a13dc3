"""The routes of embeddings and reranking, and OpenAI's fields in the descriptions of models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from gateway.capabilities.openai.text_vectors import ENCODING_FORMATS, MAX_TEXTS
from gateway.media_types import EVENT_STREAM
from gateway.openapi.infer import REQUEST_HEADER_PARAMETERS
from gateway.openapi.responses import ERROR_DESCRIPTIONS, build_responses
from gateway.openapi.schemas import COUNT_SCHEMA, STREAM_CONTENT, build_json_body, build_list_schema
from gateway.services import ModelDescriber, Services
from gateway.tensors.codecs import STRING_SCHEMA
from gateway.tensors.schema import Schema, build_object_schema
from gateway.tensors.signature import Signature

NAME_SCHEMA: Final[Schema] = {"type": "string", "minLength": 1, "description": "Name of the model."}
POSITIVE_SCHEMA: Final[Schema] = {"type": ["integer", "null"], "minimum": 1}
TEXTS_SCHEMA: Final[Schema] = {
    "type": "array",
    "items": STRING_SCHEMA,
    "minItems": 1,
    "maxItems": MAX_TEXTS,
}
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
EMBEDDINGS_RESPONSE_SCHEMA: Final = build_object_schema(
    {
        "object": {"const": "list"},
        "data": {
            "type": "array",
            "items": build_object_schema(
                {
                    "object": {"const": "embedding"},
                    "index": COUNT_SCHEMA,
                    "embedding": {
                        "anyOf": [{"type": "array", "items": {"type": "number"}}, STRING_SCHEMA],
                        "description": "The vector, or the base64 of its little-endian FP32 values.",
                    },
                }
            ),
        },
        "model": STRING_SCHEMA,
        "usage": build_object_schema(
            {"prompt_tokens": COUNT_SCHEMA, "total_tokens": COUNT_SCHEMA},
            description="Always 0: Triton does not report tokens.",
        ),
    }
)
EMBEDDINGS_REQUEST_SCHEMA: Final[Schema] = {
    "type": "object",
    "properties": {
        "model": NAME_SCHEMA,
        "input": {"anyOf": [STRING_SCHEMA, TEXTS_SCHEMA], "description": "A text, or texts."},
        "encoding_format": {"enum": [*ENCODING_FORMATS, None]},
        "dimensions": POSITIVE_SCHEMA
        | {"description": "Length of the vectors, if the model's config allows it."},
    },
    "required": ["model", "input"],
}
RERANK_RESPONSE_SCHEMA: Final = build_object_schema(
    {
        "model": STRING_SCHEMA,
        "results": {
            "type": "array",
            "items": build_object_schema(
                {
                    "index": COUNT_SCHEMA,
                    "relevance_score": {"type": "number"},
                    "document": build_object_schema({"text": STRING_SCHEMA}),
                },
                optional=("document",),
            ),
        },
    }
)
RERANK_REQUEST_SCHEMA: Final[Schema] = {
    "type": "object",
    "properties": {
        "model": NAME_SCHEMA,
        "query": {"type": "string", "minLength": 1},
        "documents": TEXTS_SCHEMA
        | {
            "items": {
                "anyOf": [
                    STRING_SCHEMA,
                    {
                        "type": "object",
                        "properties": {"text": STRING_SCHEMA},
                        "required": ["text"],
                    },
                ]
            }
        },
        "top_n": POSITIVE_SCHEMA | {"description": "Number of results; all by default."},
        "return_documents": {"type": ["boolean", "null"]},
    },
    "required": ["model", "query", "documents"],
}


def build_json_operation(schema: Schema) -> dict[str, Any]:
    return {**build_json_body(schema), "parameters": REQUEST_HEADER_PARAMETERS}


EMBEDDINGS_OPENAPI: Final = build_json_operation(EMBEDDINGS_REQUEST_SCHEMA)
EMBEDDINGS_RESPONSES: Final = build_responses(
    EMBEDDINGS_RESPONSE_SCHEMA,
    "A vector for each text.",
    *ERROR_DESCRIPTIONS,
    error_schema=OPENAI_ERROR_REFERENCE,
)
RERANK_OPENAPI: Final = build_json_operation(RERANK_REQUEST_SCHEMA)
RERANK_RESPONSES: Final = build_responses(
    RERANK_RESPONSE_SCHEMA, "The documents, best first.", *ERROR_DESCRIPTIONS
)
COMPLETION_REQUEST_SCHEMA: Final[Schema] = {
    "type": "object",
    "properties": {"model": NAME_SCHEMA},
    "required": ["model"],
    "description": "A request of OpenAI's API. The server reads everything but the model.",
}
COMPLETION_OPENAPI: Final = build_json_operation(COMPLETION_REQUEST_SCHEMA)
COMPLETION_RESPONSES: Final = build_responses(
    {"type": "object"},
    "The server's response.",
    *(*ERROR_DESCRIPTIONS, 501),
    error_schema=OPENAI_ERROR_REFERENCE,
    error_descriptions={501: "GATEWAY_OPENAI_URLS is not set."},
)
COMPLETION_RESPONSES[200]["content"] |= {EVENT_STREAM: STREAM_CONTENT[EVENT_STREAM]}
MODEL_FIELDS: Final[Schema] = {
    "id": STRING_SCHEMA,
    "object": {"const": "model"},
    "created": {"const": 0},
    "owned_by": STRING_SCHEMA,
}
LIST_FIELDS: Final[Schema] = {
    "object": {"const": "list"},
    "data": build_list_schema(
        build_object_schema(MODEL_FIELDS), "The same models, in OpenAI's format."
    ),
}


class OpenAIDescriber(ModelDescriber):
    """Adds the fields that OpenAI's clients read."""

    model_fields = MODEL_FIELDS
    list_fields = LIST_FIELDS

    def describe_list(self, models: Iterable[str]) -> Mapping[str, Any]:
        return {"object": "list", "data": list(map(build_openai_entry, models))}

    def describe_model(self, services: Services, signature: Signature) -> Mapping[str, Any]:
        return build_openai_entry(signature.model)


def build_openai_entry(name: str) -> dict[str, Any]:
    # OpenAI's clients require a time; Triton does not know when a model was made.
    return {"id": name, "object": "model", "created": 0, "owned_by": "triton"}
