"""A model's signature as JSON Schema (draft 2020-12). Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import ml_dtypes

from gateway.media_types import JSON
from gateway.tensors.codecs import OPTIONAL_STRING_SCHEMA, PARAMETERS_SCHEMA
from gateway.tensors.dtypes import Datatype, DatatypeKind
from gateway.tensors.signature import Signature, TensorSpec

Schema = dict[str, Any]
BASE64_SCHEMA: Schema = {
    "type": "object",
    "properties": {"b64": {"type": "string", "contentEncoding": "base64"}},
    "required": ["b64"],
    "additionalProperties": False,
}


def build_object_schema(
    properties: Schema, optional: Collection[str] = (), **fields: Any
) -> Schema:
    """Return the schema of an object in which every property but the optional ones is required."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, **fields}


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
