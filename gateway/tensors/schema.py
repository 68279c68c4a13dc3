"""A model's signature as JSON Schema (draft 2020-12) and OpenAPI 3.1. Pure."""

from __future__ import annotations

from typing import Any

import ml_dtypes

from gateway.tensors.dtypes import Datatype, DatatypeKind
from gateway.tensors.examples import build_example_inputs, build_infer_path
from gateway.tensors.payload import EVENT_STREAM, JSON, MULTIPART, NDJSON, NPY, NPZ, OCTET_STREAM
from gateway.tensors.signature import Signature, TensorSpec

Schema = dict[str, Any]
BASE64_SCHEMA: Schema = {
    "type": "object",
    "properties": {"b64": {"type": "string", "contentEncoding": "base64"}},
    "required": ["b64"],
    "additionalProperties": False,
}
PARAMETERS_SCHEMA: Schema = {
    "type": ["object", "null"],
    "additionalProperties": {"type": ["string", "number", "boolean"]},
}
BINARY_SCHEMA: Schema = {"type": "string", "format": "binary"}
ERROR_SCHEMA: Schema = {
    "type": "object",
    "properties": {
        "error": {"type": "string", "description": "one sentence"},
        "code": {"type": "string", "description": "a stable name"},
        "request_id": {"type": "string"},
    },
    "required": ["error", "code", "request_id"],
}
STATUS_DESCRIPTIONS = {
    "400": "The request is malformed.",
    "401": "There is no key, or one that nobody has.",
    "403": "The caller may not do this.",
    "404": "The model or version is not known.",
    "406": "The answer has no form that Accept allows.",
    "408": "The request did not come in time.",
    "409": "It conflicts with how the models are managed, or its sequence is not running.",
    "413": "The body or an image is too large.",
    "414": "The URL is too long.",
    "415": "The body's type is not taken.",
    "422": "The request does not fit the model; the sentence says what does.",
    "429": "Triton's queue is full, the gateway is, or the key asks too often.",
    "431": "The header is too large.",
    "500": "The model or the gateway failed.",
    "502": "The replica answered nonsense.",
    "503": "Nothing can serve the model now.",
    "504": "There was no answer in time.",
}
# How a key is sent, where keys are asked for.
SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
SECURITY: list[dict[str, list[str]]] = [{name: []} for name in SECURITY_SCHEMES]
STREAM_CONTENT: Schema = {
    EVENT_STREAM: {
        "schema": {"type": "string", "description": "An event for each answer, as it is made."}
    },
    NDJSON: {"schema": {"type": "string", "description": "The same as lines of JSON."}},
}

# What `POST /v1/models/{model}/infer` takes, before the model is known.
ANY_BODY_CONTENT = {
    "image/*": {"schema": BINARY_SCHEMA},
    OCTET_STREAM: {"schema": BINARY_SCHEMA},
    "text/plain": {"schema": {"type": "string"}},
    MULTIPART: {"schema": {"type": "object", "additionalProperties": BINARY_SCHEMA}},
    JSON: {
        "schema": {
            "type": "object",
            "properties": {
                "inputs": {"description": "A value, or an object of values by input name."},
                "outputs": {"type": ["array", "null"], "items": {"type": "string"}},
                "parameters": PARAMETERS_SCHEMA,
                "id": {"type": "string"},
            },
            "required": ["inputs"],
            "additionalProperties": False,
        }
    },
    NPY: {"schema": BINARY_SCHEMA},
    NPZ: {"schema": BINARY_SCHEMA},
}


def error_responses() -> dict[int | str, dict[str, Any]]:
    content = {JSON: {"schema": ERROR_SCHEMA}}
    return {
        status: {"description": text, "content": content}
        for status, text in STATUS_DESCRIPTIONS.items()
    }


def element_schema(datatype: Datatype, *, is_input: bool) -> Schema:
    if datatype.kind is DatatypeKind.BYTES:
        return {"anyOf": [{"type": "string"}, BASE64_SCHEMA]}
    if datatype.kind is DatatypeKind.BOOLEAN:
        return {"type": "boolean"}
    if datatype.kind is DatatypeKind.INTEGER:
        low, high = datatype.integer_range
        return {"type": "integer", "minimum": low, "maximum": high}
    if is_input:
        info = ml_dtypes.finfo(datatype.numpy_dtype)  # type: ignore[no-untyped-call]
        return {"type": "number", "minimum": float(info.min), "maximum": float(info.max)}
    return {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}


def value_schema(tensor: TensorSpec, *, supports_batching: bool, is_input: bool) -> Schema:
    """A value of the tensor alone; for a batching model, a batch as well."""
    item = element_schema(tensor.datatype, is_input=is_input)
    if supports_batching and tensor.shape == (1,):
        one = item
    else:
        one = item
        for size in reversed(tensor.shape):
            one = {"type": "array", "items": one}
            if size >= 0:
                one |= {"minItems": size, "maxItems": size}
    forms = [one, {"type": "array", "items": one, "minItems": 1}] if supports_batching else [one]
    if is_input and all(size in (1, -1) for size in tensor.shape):
        forms.append(item)
    if is_input and tensor.image_spec is not None:
        forms.append(BASE64_SCHEMA)
    distinct = [form for position, form in enumerate(forms) if form not in forms[:position]]
    return distinct[0] if len(distinct) == 1 else {"anyOf": distinct}


def request_schema(signature: Signature) -> Schema:
    values = {
        name: value_schema(tensor, supports_batching=signature.supports_batching, is_input=True)
        for name, tensor in signature.inputs.items()
    }
    named: Schema = {
        "type": "object",
        "properties": values,
        "required": [tensor.name for tensor in signature.required_inputs],
        "additionalProperties": False,
    }
    required = signature.required_inputs
    inputs = {"anyOf": [named, values[required[0].name]]} if len(required) == 1 else named
    return {
        "type": "object",
        "properties": {
            "inputs": inputs,
            "outputs": {"type": ["array", "null"], "items": {"enum": list(signature.outputs)}},
            "parameters": PARAMETERS_SCHEMA,
            "id": {"type": "string"},
        },
        "required": ["inputs"],
        "additionalProperties": False,
    }


def response_schema(signature: Signature) -> Schema:
    values = {
        # What a model declares to be JSON can be anything.
        name: {}
        if tensor.content_type == JSON
        else value_schema(tensor, supports_batching=signature.supports_batching, is_input=False)
        for name, tensor in signature.outputs.items()
    }
    return {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "model": {"const": signature.model},
            "version": {"type": "string"},
            "outputs": {"type": "object", "properties": values},
        },
        "required": ["id", "model", "version", "outputs"],
    }


def build_model_openapi(signature: Signature, *, requires_key: bool = False) -> dict[str, Any]:
    """The document of this one model."""
    content: dict[str, Any] = {
        JSON: {
            "schema": request_schema(signature),
            "example": {"inputs": build_example_inputs(signature)},
        },
        NPZ: {"schema": BINARY_SCHEMA},
        MULTIPART: {
            "schema": {
                "type": "object",
                "properties": dict.fromkeys(signature.inputs, BINARY_SCHEMA),
            }
        },
    }
    if len(signature.required_inputs) == 1:
        (tensor,) = signature.required_inputs
        content[NPY] = {"schema": BINARY_SCHEMA}
        if tensor.datatype.kind is DatatypeKind.BYTES or tensor.image_spec is not None:
            content |= {
                "image/*": {"schema": BINARY_SCHEMA},
                OCTET_STREAM: {"schema": BINARY_SCHEMA},
            }
        if tensor.datatype.kind is DatatypeKind.BYTES:
            content["text/plain"] = {"schema": {"type": "string"}}
    infer = {
        "operationId": "infer",
        "summary": f"Inference with {signature.model}",
        "requestBody": {"required": True, "content": content},
        "responses": {"200": success_response(signature), **error_responses()},
    }
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": signature.model, "version": signature.version or "latest"},
        "paths": {build_infer_path(signature): {"post": infer}},
    }
    if requires_key:
        document |= {"components": {"securitySchemes": SECURITY_SCHEMES}, "security": SECURITY}
    return document


def success_response(signature: Signature) -> Schema:
    """What it answers, in every form: `Accept` says which."""
    content: dict[str, Any] = dict(STREAM_CONTENT)
    if not signature.is_decoupled:
        content = {
            JSON: {"schema": response_schema(signature)},
            NPZ: {"schema": BINARY_SCHEMA},
            **content,
        }
        if len(signature.outputs) == 1:
            content[NPY] = {"schema": BINARY_SCHEMA}
        for tensor in signature.outputs.values():
            if tensor.datatype.kind is DatatypeKind.BYTES:
                content[OCTET_STREAM] = {"schema": BINARY_SCHEMA}
                content.setdefault(tensor.content_type or OCTET_STREAM, {"schema": BINARY_SCHEMA})
    return {"description": "The model's outputs.", "content": content}
