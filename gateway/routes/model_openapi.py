"""The API description of one model, with its own inputs and outputs. Pure."""

from __future__ import annotations

from typing import Any, Final

from gateway.media_types import JSON, MULTIPART, NPY, NPZ, OCTET_STREAM
from gateway.routes.openapi import (
    BINARY_CONTENT,
    ERROR_DESCRIPTIONS,
    ERROR_REFERENCE,
    ERROR_SCHEMA,
    SECURITY,
    SECURITY_SCHEMES,
    STREAM_CONTENT,
    build_json_content,
)
from gateway.tensors.codecs import BINARY_SCHEMA, CODECS
from gateway.tensors.dtypes import DatatypeKind
from gateway.tensors.examples import (
    build_example_inputs,
    build_infer_path,
    choose_example_tensors,
    count_example_values,
)
from gateway.tensors.schema import Schema, build_request_schema, build_response_schema
from gateway.tensors.signature import Signature

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
