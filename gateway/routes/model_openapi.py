"""The API description of inferences: their bodies, and the requests and responses of one model. Pure."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes

from gateway.media_types import ANY_IMAGE, JSON, MULTIPART, NPY, NPZ, OCTET_STREAM, TEXT
from gateway.routes.examples import (
    build_example_inputs,
    build_infer_path,
    choose_example_tensors,
    count_example_values,
)
from gateway.routes.openapi import (
    BINARY_CONTENT,
    BINARY_SCHEMA,
    ERROR_DESCRIPTIONS,
    ERROR_REFERENCE,
    ERROR_SCHEMA,
    SECURITY,
    SECURITY_SCHEMES,
    STREAM_CONTENT,
    STRING_CONTENT,
    STRING_SCHEMA,
    Schema,
    build_json_content,
    build_object_schema,
)
from gateway.tensors.codecs import CODECS_BY_TYPE
from gateway.tensors.dtypes import Datatype, DatatypeKind
from gateway.tensors.signature import Signature, TensorSpec

OPTIONAL_STRING_SCHEMA: Final[Schema] = {"type": ["string", "null"]}
FORM_SCHEMA: Final[Schema] = {"type": "object", "additionalProperties": BINARY_SCHEMA}
PARAMETERS_SCHEMA: Final[Schema] = {
    "type": ["object", "null"],
    "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
}
JSON_SCHEMA: Final[Schema] = {
    "type": "object",
    "properties": {
        "inputs": {"description": "A value, or an object of values by input name."},
        "outputs": {"type": ["array", "null"], "items": STRING_SCHEMA},
        "parameters": PARAMETERS_SCHEMA,
        "id": OPTIONAL_STRING_SCHEMA,
    },
    "required": ["inputs"],
    "additionalProperties": False,
}
# Any body that an inference request can have; each model accepts a part of it.
BODY_SCHEMAS: Final = {JSON: JSON_SCHEMA, MULTIPART: FORM_SCHEMA, TEXT: STRING_SCHEMA}
INFER_BODY_CONTENT: Final = {
    name: {"schema": BODY_SCHEMAS.get(name, BINARY_SCHEMA)} for name in CODECS_BY_TYPE
}
BASE64_SCHEMA: Schema = {
    "type": "object",
    "properties": {"b64": {"type": "string", "contentEncoding": "base64"}},
    "required": ["b64"],
    "additionalProperties": False,
}
MAX_EXAMPLE_VALUES: Final = 4096


def build_element_schema(datatype: Datatype, *, is_input: bool) -> Schema:
    if datatype.kind is DatatypeKind.BYTES:
        return {"anyOf": [{"type": "string"}, BASE64_SCHEMA]}
    if datatype.kind is DatatypeKind.BOOLEAN:
        return {"type": "boolean"}
    if datatype.kind is DatatypeKind.INTEGER:
        low, high = datatype.integer_range
        return {"type": "integer", "minimum": low, "maximum": high}
    number: Schema = {"type": "number"}
    if is_input:
        info = ml_dtypes.finfo(datatype.numpy_dtype)
        number |= {"minimum": float(info.min), "maximum": float(info.max)}
    return {"anyOf": [number, {"enum": ["NaN", "Infinity", "-Infinity"]}]}


def build_value_schema(tensor: TensorSpec, *, supports_batching: bool, is_input: bool) -> Schema:
    single = item = build_element_schema(tensor.datatype, is_input=is_input)
    if not supports_batching or tensor.shape != (1,):
        for size in reversed(tensor.shape):
            single = {"type": "array", "items": single}
            if size >= 0:
                single |= {"minItems": size, "maxItems": size}
    forms = [single]
    if supports_batching:
        forms.append({"type": "array", "items": single, "minItems": 1})
    if is_input and tensor.can_be_single:
        forms.append(item)
    if is_input and (tensor.image_spec is not None or tensor.takes_file_bytes):
        forms.append(BASE64_SCHEMA)
    if is_input and tensor.is_optional:
        forms.append({"type": "null"})
    distinct = [form for position, form in enumerate(forms) if form not in forms[:position]]
    return distinct[0] if len(distinct) == 1 else {"anyOf": distinct}


def build_request_schema(signature: Signature) -> Schema:
    values = {
        name: build_value_schema(
            tensor, supports_batching=signature.supports_batching, is_input=True
        )
        for name, tensor in signature.inputs.items()
    }
    required = [tensor.name for tensor in signature.required_inputs]
    optional = values.keys() - required
    named = build_object_schema(values, optional, additionalProperties=False)
    inputs = {"anyOf": [named, values[required[0]]]} if len(required) == 1 else named
    properties = {
        "inputs": inputs,
        "outputs": {"type": ["array", "null"], "items": {"enum": list(signature.outputs)}},
        "parameters": PARAMETERS_SCHEMA,
        "id": OPTIONAL_STRING_SCHEMA,
    }
    optional = properties.keys() - {"inputs"}
    return build_object_schema(properties, optional, additionalProperties=False)


def build_response_schema(signature: Signature) -> Schema:
    values = {
        # An output that the model declares as JSON can have any value.
        name: {}
        if tensor.content_type == JSON
        else build_value_schema(
            tensor, supports_batching=signature.supports_batching, is_input=False
        )
        for name, tensor in signature.outputs.items()
    }
    return build_object_schema(
        {
            "id": {"type": "string"},
            "model": {"const": signature.model},
            "version": {"type": "string"},
            "outputs": {"type": "object", "properties": values},
        }
    )


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
    if len(signature.required_inputs) == 1:
        (tensor,) = signature.required_inputs
        is_text = tensor.datatype.kind is DatatypeKind.BYTES
        if is_text or tensor.image_spec is not None or tensor.takes_file_bytes:
            content |= {ANY_IMAGE: BINARY_CONTENT, OCTET_STREAM: BINARY_CONTENT}
        if is_text:
            content[TEXT] = STRING_CONTENT
        content[NPY] = BINARY_CONTENT
    content[NPZ] = BINARY_CONTENT
    return content


def build_result_content(signature: Signature) -> Schema:
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
