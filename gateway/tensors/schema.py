"""JSON Schema (draft 2020-12) and OpenAPI 3.1 documents of a model's signature. Pure."""

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
        "error": {"type": "string", "description": "a readable message"},
        "code": {"type": "string", "description": "a stable error code"},
        "request_id": {"type": "string"},
    },
    "required": ["error", "code", "request_id"],
}
STATUS_DESCRIPTIONS = {
    "400": "The request is malformed.",
    "401": "The API key is missing or unknown.",
    "403": "The caller is not allowed to do this.",
    "404": "The model or version was not found.",
    "406": "The response is not available in a format that Accept allows.",
    "408": "The request was not received in time.",
    "409": "The request conflicts with the model management mode, or its sequence is not running.",
    "413": "The body or an image is too large.",
    "414": "The URL is too long.",
    "415": "The Content-Type is not supported.",
    "422": "The request does not match the model's inputs; the message says what the model expects.",
    "429": "The gateway or Triton's queue is full, or the key exceeds its rate limit.",
    "431": "The request header is too large.",
    "500": "The model or the gateway failed.",
    "502": "The replica sent an invalid response.",
    "503": "No replica can serve the model now.",
    "504": "The response was not ready in time.",
}
SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
SECURITY: list[dict[str, list[str]]] = [{name: []} for name in SECURITY_SCHEMES]
STREAM_CONTENT: Schema = {
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

# The body of `POST /v1/models/{model}/infer` in the general API document, which covers all models.
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
    item = element_schema(tensor.datatype, is_input=is_input)
    if supports_batching and tensor.shape == (1,):
        single = item
    else:
        single = item
        for size in reversed(tensor.shape):
            single = {"type": "array", "items": single}
            if size >= 0:
                single |= {"minItems": size, "maxItems": size}
    forms = [single]
    if supports_batching:
        forms.append({"type": "array", "items": single, "minItems": 1})
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
        # An output that the model declares as JSON can have any type.
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
        "summary": f"Run inference with {signature.model}",
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
