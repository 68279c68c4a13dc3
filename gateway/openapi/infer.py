"""The route `/infer`."""

from __future__ import annotations

from gateway.media_types import NPY, NPZ
from gateway.openapi.responses import ERROR_DESCRIPTIONS, build_responses
from gateway.openapi.schemas import (
    BINARY_CONTENT,
    COUNT_SCHEMA,
    STREAM_CONTENT,
    TIMEOUT_PARAMETER,
    build_header_parameter,
)
from gateway.tensors.codecs import CODECS, STRING_SCHEMA
from gateway.tensors.dtypes import DATATYPES
from gateway.tensors.schema import build_object_schema
from gateway.tensors.sequence import MAX_SEQUENCE_ID_BYTES

INFER_RESPONSE_SCHEMA = build_object_schema(
    {
        "id": STRING_SCHEMA,
        "model": STRING_SCHEMA,
        "version": STRING_SCHEMA,
        "outputs": {"type": "object", "description": "Values by output name."},
    }
)
DRY_RUN_INPUT_SCHEMA = build_object_schema(
    {
        "name": STRING_SCHEMA,
        "datatype": {"enum": list(DATATYPES)},
        "shape": {"type": "array", "items": COUNT_SCHEMA},
        "bytes": COUNT_SCHEMA,
        "first_values": {"type": "array"},
    }
)
DRY_RUN_SCHEMA = build_object_schema(
    {
        "model": STRING_SCHEMA,
        "version": STRING_SCHEMA,
        "inputs": {"type": "array", "items": DRY_RUN_INPUT_SCHEMA},
    },
    description="The tensors, if `dry_run` is true.",
)
LABEL_HEADER = {
    "X-Model-Version": {
        "description": "The version that answered, if a label decided on it.",
        "required": False,
        "schema": STRING_SCHEMA,
    }
}
INFER_RESPONSES = build_responses(
    {"anyOf": [INFER_RESPONSE_SCHEMA, DRY_RUN_SCHEMA]},
    "The model's outputs.",
    *ERROR_DESCRIPTIONS,
    headers=LABEL_HEADER,
)
INFER_RESPONSES[200]["content"] |= {
    NPY: BINARY_CONTENT,
    NPZ: BINARY_CONTENT,
    **STREAM_CONTENT,
    # A single output in the content type that the model declares.
    "*/*": BINARY_CONTENT,
}
REQUEST_HEADER_PARAMETERS = [
    TIMEOUT_PARAMETER,
    build_header_parameter(
        "X-Request-ID", "ID of the request in the response and in the logs.", STRING_SCHEMA
    ),
]
INFER_HEADER_PARAMETERS = [
    *REQUEST_HEADER_PARAMETERS,
    build_header_parameter(
        "X-Sequence-ID",
        "ID of the request's sequence: a number or a string.",
        {"type": "string", "maxLength": MAX_SEQUENCE_ID_BYTES},
    ),
    build_header_parameter(
        "X-Sequence",
        "Set to start or end the sequence with this request.",
        {"type": "string", "examples": ["start", "end", "start, end"]},
    ),
    build_header_parameter(
        "X-Split-Key",
        "A user or session that keeps its version if the version is a label with several.",
        STRING_SCHEMA,
    ),
]
# Any body that `/infer` accepts; each model accepts a part of it.
INFER_BODY_CONTENT = {codec.media_type: {"schema": codec.schema} for codec in CODECS}
INFER_OPENAPI = {
    "requestBody": {"required": True, "content": INFER_BODY_CONTENT},
    "parameters": INFER_HEADER_PARAMETERS,
}
