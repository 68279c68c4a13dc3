"""The messages for inputs that do not match the model's signature.

Each names the input, what the model expects (datatype, shape, an example) and what the request holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from gateway.errors import InputMismatch
from gateway.messages import join_names, quote_text
from gateway.tensors.signature import Signature, TensorSpec


def build_input_mismatch(tensor: TensorSpec, received: str) -> InputMismatch:
    datatype = tensor.datatype
    return InputMismatch(
        f"input {quote_text(tensor.name)} expects {datatype.kind.value} ({datatype.name} "
        f"{format_shape(tensor.shape)}, e.g. {format_example_value(tensor)}); got {received}"
    )


def describe_inputs(signature: Signature) -> str:
    return join_names(
        f"{tensor.name} ({tensor.datatype.name} {format_shape(tensor.shape)}"
        f"{', optional' if tensor.is_optional else ''})"
        for tensor in signature.inputs.values()
    )


def describe_array(shape: Sequence[int]) -> str:
    return f"an array of shape {format_shape(shape)}" if shape else "a single value"


def describe_unexpected_value(leaves: Sequence[Any], kinds: set[type]) -> str:
    names = {str: "the string", bytes: "bytes", bool: "the boolean", type(None): "null"}
    leaf = next(leaf for leaf in leaves if type(leaf) in kinds)
    if isinstance(leaf, (bytes, type(None))):
        return names[type(leaf)]
    return f"{names.get(type(leaf), 'the number')} {quote_text(str(leaf), 40)}"


def format_shape(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]" if shape else "a single value"


def format_example_value(tensor: TensorSpec) -> str:
    value = orjson.dumps(tensor.datatype.example).decode()
    if tensor.shape == (1,):
        return value
    for _ in tensor.shape:
        value = f"[{value}, …]"
    return value
