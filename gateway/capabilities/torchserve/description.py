"""The routes of TorchServe's API."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from gateway.media_types import TEXT
from gateway.openapi.infer import INFER_BODY_CONTENT, REQUEST_HEADER_PARAMETERS
from gateway.openapi.responses import (
    ERROR_DESCRIPTIONS,
    RETRY_AFTER_HEADER,
    build_error_responses,
    build_response,
    build_responses,
)
from gateway.openapi.schemas import COUNT_SCHEMA, build_json_content, build_list_schema
from gateway.tensors.codecs import BINARY_SCHEMA, STRING_SCHEMA
from gateway.tensors.schema import Schema, build_object_schema

TORCHSERVE_ERROR_SCHEMA: Final = build_object_schema(
    {"code": {"type": "integer"}, "type": STRING_SCHEMA, "message": STRING_SCHEMA},
    description="An error in the shape of TorchServe's API.",
)
TORCHSERVE_ERROR_REFERENCE: Final[Schema] = {"$ref": "#/components/schemas/TorchServeError"}
STATUS_SCHEMA: Final = build_object_schema({"status": STRING_SCHEMA})
LISTED_MODEL_SCHEMA: Final = build_object_schema(
    {"modelName": STRING_SCHEMA, "modelUrl": STRING_SCHEMA}
)
REGISTERED_MODEL_SCHEMA: Final = build_object_schema(
    {
        **dict.fromkeys(("modelName", "modelVersion", "modelUrl", "runtime"), STRING_SCHEMA),
        "minWorkers": COUNT_SCHEMA,
        "maxWorkers": COUNT_SCHEMA,
        "workers": build_list_schema(
            build_object_schema({"id": STRING_SCHEMA, "status": STRING_SCHEMA}),
            "The replicas that have the version, and its state there.",
        ),
    }
)
build_torchserve_responses = partial(build_responses, error_schema=TORCHSERVE_ERROR_REFERENCE)
PING_RESPONSES: Final = build_torchserve_responses(STATUS_SCHEMA, "The fleet is ready.") | {
    503: build_response(
        "The fleet is not ready.",
        build_json_content({"anyOf": [STATUS_SCHEMA, TORCHSERVE_ERROR_REFERENCE]}),
        RETRY_AFTER_HEADER,
    )
}
PREDICTION_OPENAPI: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": INFER_BODY_CONTENT
        | build_json_content({"description": "A value, or an object of values by input name."}),
    },
    "parameters": REQUEST_HEADER_PARAMETERS,
}
PREDICTION_RESPONSES: Final = build_torchserve_responses(
    {"description": "The value of the only output, or an object with the values of all outputs."},
    "The output.",
    *ERROR_DESCRIPTIONS,
)
PREDICTION_RESPONSES[200]["content"] |= {
    TEXT: {"schema": STRING_SCHEMA},
    "*/*": {"schema": BINARY_SCHEMA},
}
REGISTERED_LIST_RESPONSES: Final = build_torchserve_responses(
    build_object_schema(
        {
            "models": {"type": "array", "items": LISTED_MODEL_SCHEMA},
            "nextPageToken": STRING_SCHEMA,
        },
        optional=("nextPageToken",),
    ),
    "The models.",
)
REGISTERED_MODEL_RESPONSES: Final = build_torchserve_responses(
    {"type": "array", "items": REGISTERED_MODEL_SCHEMA}, "One entry for each version.", 404
)
STATUS_RESPONSES: Final = build_torchserve_responses(
    STATUS_SCHEMA, "It is done.", 404, 409, 422, 502, 504
)
SCALING_RESPONSES: Final = build_error_responses(
    *(404, 501),
    schema=TORCHSERVE_ERROR_REFERENCE,
    descriptions={501: "The model's config decides on the number of instances."},
)
