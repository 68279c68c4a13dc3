"""The routes of models and replicas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from gateway.fleet.health import HealthState
from gateway.fleet.index import TF_SERVING_STATES
from gateway.media_types import JSON, MULTIPART, NPY, NPZ, OCTET_STREAM
from gateway.openapi.responses import (
    ERROR_DESCRIPTIONS,
    ERROR_REFERENCE,
    ERROR_SCHEMA,
    OpenApiResponses,
    build_responses,
)
from gateway.openapi.schemas import (
    BINARY_CONTENT,
    COUNT_SCHEMA,
    SECURITY,
    SECURITY_SCHEMES,
    STREAM_CONTENT,
    build_json_content,
    build_list_schema,
    build_map_schema,
)
from gateway.services import ModelDescriber
from gateway.tensors.codecs import BINARY_SCHEMA, CODECS, STRING_SCHEMA
from gateway.tensors.dtypes import DATATYPES, DatatypeKind
from gateway.tensors.examples import (
    build_example_inputs,
    build_infer_path,
    choose_example_tensors,
    count_example_values,
)
from gateway.tensors.schema import (
    Schema,
    build_object_schema,
    build_request_schema,
    build_response_schema,
)
from gateway.tensors.signature import Signature

VERSION_SCHEMA = build_object_schema(
    {"version": STRING_SCHEMA, "state": STRING_SCHEMA, "reason": STRING_SCHEMA},
    optional=("reason",),
)
READY_SCHEMA = {"type": "boolean", "description": "At least one replica can serve it."}
LISTED_MODEL_FIELDS: Final = {
    "name": STRING_SCHEMA,
    "versions": {"type": "array", "items": VERSION_SCHEMA},
    "ready": READY_SCHEMA,
    "declared": {"const": True, "description": "The models file contains the model."},
    "wished": {
        "enum": ["loaded", "unloaded"],
        "description": "Desired state set through the API.",
    },
    "replicas": build_map_schema(
        STRING_SCHEMA,
        "State on each replica, by address (only with the right to see the fleet).",
    ),
    "behind": build_list_schema(
        STRING_SCHEMA, "Replicas without the last load (only with the right to see the fleet)."
    ),
    "last_error": STRING_SCHEMA | {"description": "Reason and replica of the last failed load."},
    "conflicts": build_list_schema(
        STRING_SCHEMA,
        "Replicas on which something else loads or unloads the model against the desired state.",
    ),
}
REQUIRED_FIELDS: Final = {"name", "versions", "ready"}
REPLICA_SCHEMA = build_object_schema(
    {
        "address": STRING_SCHEMA,
        "state": {"enum": [state.name for state in HealthState]},
        "outstanding": COUNT_SCHEMA | {"description": "Requests in progress."},
        "slowness": {"type": "number", "description": "Latency relative to the other replicas."},
        "models": build_map_schema(
            STRING_SCHEMA, "State of each model, by name. Empty if the replica is DOWN."
        ),
        "cordoned": {"const": True, "description": "The replica gets no new requests."},
        "ejected_for_s": {"type": "number", "description": "Seconds until the ejection ends."},
        "failing_models": build_list_schema(
            STRING_SCHEMA,
            "Models whose requests fail on this replica and not on the others; it gets few of them.",
        ),
        "reason": STRING_SCHEMA,
    },
    optional=("cordoned", "ejected_for_s", "failing_models", "reason"),
)
IMAGE_SCHEMA = build_object_schema(
    {
        "mode": STRING_SCHEMA,
        "layout": STRING_SCHEMA,
        "height": {"type": ["integer", "null"]},
        "width": {"type": ["integer", "null"]},
    }
)
TENSOR_SCHEMA = build_object_schema(
    {
        "name": STRING_SCHEMA,
        "datatype": {"enum": list(DATATYPES)},
        "shape": build_list_schema(
            {"type": "integer", "minimum": -1},
            "Shape without the batch dimension. -1 means any size.",
        ),
        "optional": {"const": True},
        "content_type": STRING_SCHEMA,
        "image": IMAGE_SCHEMA,
        "labels": {"const": True, "description": "`classification` returns labels of this output."},
        "example": {
            "type": "string",
            "description": "A sample value: a text, JSON, or a file as a data: URI.",
        },
    },
    optional=("optional", "content_type", "image", "labels", "example"),
)
VERSION_STATUS_SCHEMA = build_object_schema(
    {
        "version": STRING_SCHEMA,
        "state": {"enum": [*TF_SERVING_STATES.values(), "UNKNOWN"]},
        "status": build_object_schema(
            {"error_code": STRING_SCHEMA, "error_message": STRING_SCHEMA}
        ),
    }
)
MODEL_FIELDS: Final = {
    "name": STRING_SCHEMA,
    "ready": READY_SCHEMA,
    "versions": {"type": "array", "items": STRING_SCHEMA},
    "platform": STRING_SCHEMA,
    "max_batch_size": COUNT_SCHEMA,
    "decoupled": {
        "type": "boolean",
        "description": "A request may have any number of responses.",
    },
    "inputs": {"type": "array", "items": TENSOR_SCHEMA},
    "outputs": {"type": "array", "items": TENSOR_SCHEMA},
    "curl": {"type": "string", "description": "Example request with curl."},
    "python": {"type": "string", "description": "Example request in Python."},
}
OPENAPI_SCHEMA = build_object_schema(
    {
        "openapi": {"type": "string", "pattern": "^3\\.1\\."},
        "info": {"type": "object"},
        "paths": {"type": "object"},
    }
)


MODEL_ERRORS: Final = (404, 502, 504)
READY_MODELS_RESPONSES = build_responses(
    build_object_schema({"models": {"type": "array", "items": STRING_SCHEMA}}),
    "The names of the ready models.",
)
REPLICA_LIST_RESPONSES = build_responses(
    build_object_schema({"replicas": {"type": "array", "items": REPLICA_SCHEMA}}), "The replicas."
)
OPENAPI_RESPONSES = build_responses(OPENAPI_SCHEMA, "An OpenAPI 3.1 document.", *MODEL_ERRORS)


def build_list_responses(describers: Iterable[ModelDescriber]) -> OpenApiResponses:
    fields: Schema = {}
    model_fields: Schema = dict(LISTED_MODEL_FIELDS)
    for describer in describers:
        fields |= describer.list_fields
        model_fields |= describer.listed_model_fields
    model = build_object_schema(model_fields, model_fields.keys() - REQUIRED_FIELDS)
    document = {"models": {"type": "array", "items": model}, **fields}
    return build_responses(build_object_schema(document), "The models that the caller may access.")


def build_model_responses(describers: Iterable[ModelDescriber]) -> OpenApiResponses:
    fields: Schema = {}
    for describer in describers:
        fields |= describer.model_fields
    schema = build_object_schema(fields | MODEL_FIELDS)
    return build_responses(schema, "The model's inputs and outputs.", *MODEL_ERRORS)


MAX_EXAMPLE_VALUES: Final = 4096


def build_model_openapi(signature: Signature, *, requires_key: bool = False) -> dict[str, Any]:
    error_content = build_json_content(ERROR_REFERENCE)
    infer = {
        "operationId": "infer",
        "summary": f"Run inference with {signature.model}",
        "requestBody": {"required": True, "content": build_body_content(signature)},
        "responses": {
            "200": {
                "description": "The model's outputs.",
                "content": build_result_content(signature),
            },
            **{
                str(status): {"description": text, "content": error_content}
                for status, text in ERROR_DESCRIPTIONS.items()
            },
        },
    }
    components: dict[str, Any] = {"schemas": {"Error": ERROR_SCHEMA}}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": signature.model, "version": signature.version or "latest"},
        "paths": {build_infer_path(signature): {"post": infer}},
        "components": components,
    }
    if requires_key:
        components["securitySchemes"] = SECURITY_SCHEMES
        document["security"] = SECURITY
    return document


def build_body_content(signature: Signature) -> Schema:
    json_content: Schema = {"schema": build_request_schema(signature)}
    tensors = choose_example_tensors(signature)
    if count_example_values(tensors) <= MAX_EXAMPLE_VALUES:
        json_content["example"] = {"inputs": build_example_inputs(tensors)}
    form = {"type": "object", "properties": dict.fromkeys(signature.inputs, BINARY_SCHEMA)}
    content: Schema = {JSON: json_content, MULTIPART: {"schema": form}}
    required = signature.required_inputs
    for codec in CODECS:
        if codec.read_payload or (len(required) == 1 and codec.is_accepted(required[0])):
            content.setdefault(codec.media_type, {"schema": codec.schema})
    return content


def build_result_content(signature: Signature) -> Schema:
    """Return the result in every content type; `Accept` selects one."""
    if signature.is_decoupled:
        return STREAM_CONTENT
    json_content = {"schema": build_response_schema(signature)}
    content: Schema = {JSON: json_content, NPZ: BINARY_CONTENT, **STREAM_CONTENT}
    if len(signature.outputs) == 1:
        content[NPY] = BINARY_CONTENT
    for tensor in signature.outputs.values():
        if tensor.datatype.kind is DatatypeKind.BYTES:
            content[OCTET_STREAM] = BINARY_CONTENT
            content.setdefault(tensor.content_type or OCTET_STREAM, BINARY_CONTENT)
    return content
