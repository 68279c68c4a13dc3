"""Conversion of a body to a payload, and of its parts to the input tensors of one inference. Pure.

A worker process can run `decode_body` and `decode_json_body`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from gateway.errors import InputMismatch, TooLarge
from gateway.messages import join_names, quote_text
from gateway.tensors.codecs import JSON_CODEC, parse_body_type, to_utf8_json
from gateway.tensors.convert import (
    decode_files,
    describe_inputs,
    fit_part_to_shape,
    have_different_shapes,
    is_absent,
    read_text_part,
    separate_parts,
    stack_parts,
)
from gateway.tensors.json_body import check_json_memory
from gateway.tensors.multipart import Form
from gateway.tensors.payload import Part, Payload, PayloadLimits, PayloadOptions
from gateway.tensors.signature import Signature

# A complete body: a form has been split into its parts.
Body = bytes | Form
# Returns a payload for each inference of a body.
JsonParser = Callable[[bytes, Signature, PayloadLimits], list[Payload]]


class InferInputs(NamedTuple):
    """The tensors of one inference. The first dimension is the batch if the model supports batching."""

    arrays: Mapping[str, np.ndarray]
    batch_size: int = 0
    is_batched: bool = False  # the request has a batch dimension, so the response has one as well
    batch_offset: int = 0  # the position of a sub-batch in the request's batch
    instance_count: int = 0  # more than 0 if the client expects one result per instance
    # One inference for each item, because the items are of different lengths; empty otherwise.
    items: tuple[InferInputs, ...] = ()

    def exceeds(self, max_batch_size: int) -> bool:
        """Return whether these are several inferences."""
        # The size is 0 without a batch dimension.
        return self.batch_size > max_batch_size or bool(self.items)

    @property
    def size_bytes(self) -> int:
        own_bytes = sum(array.nbytes for array in self.arrays.values())
        return own_bytes + sum(item.size_bytes for item in self.items)

    def split(self, max_batch_size: int) -> Iterator[InferInputs]:
        if self.items:
            yield from self.items
            return
        for start in range(0, self.batch_size, max_batch_size):
            end = min(start + max_batch_size, self.batch_size)
            arrays = {name: array[start:end] for name, array in self.arrays.items()}
            yield InferInputs(
                arrays,
                end - start,
                self.is_batched,
                start,
                end - start if self.instance_count else 0,
            )


def read_payload(body: Body, content_type: str, limits: PayloadLimits) -> Payload:
    """Decode a complete body. Raises `MalformedRequest`, `UnsupportedBody` or `TooLarge`."""
    if isinstance(body, Form):
        return body.build_payload(limits)
    body_type = parse_body_type(content_type)
    codec = body_type.codec
    if codec is JSON_CODEC:
        body = to_utf8_json(body, body_type.parameters)
    if codec is not None and codec.read_payload is not None:
        return codec.read_payload(body, limits)
    return Payload({"": [Part(body_type.read_value(body), body_type.media_type)]})


def to_inputs(payload: Payload, signature: Signature, limits: PayloadLimits) -> InferInputs:
    """Return the model's input tensors.

    Raises `InputMismatch`, `BadImage`, `TooLarge`, `MalformedRequest` or `CostlyImages`.
    """
    arrays: dict[str, np.ndarray] = {}
    files: dict[str, list[np.ndarray]] = {}  # of different lengths
    supports_batching = signature.supports_batching
    is_any_batched = False
    rows = payload.instance_count
    is_stacked = rows > 0 and signature.has_batch_dimension
    for name, assigned in assign_parts(payload, signature).items():
        tensor = signature.inputs[name]
        if tensor.is_optional and all(map(is_absent, assigned)):
            continue
        values = [read_text_part(part, tensor, limits) for part in assigned]
        parts = decode_files(values, tensor, limits)
        is_batched = True
        if tensor.takes_file_bytes and have_different_shapes(part.value for part in parts):
            files[name] = separate_parts(parts, tensor, supports_batching)
        elif is_stacked or len(parts) > 1:
            arrays[name] = stack_parts(parts, tensor, supports_batching)
        else:
            arrays[name], is_batched = fit_part_to_shape(parts[0], tensor, supports_batching)
        is_any_batched = is_any_batched or is_batched
    if signature.inputs and not arrays and not files:
        raise InputMismatch(
            f"the request has no inputs; send at least one of {describe_inputs(signature)}"
        )
    if not supports_batching:
        return InferInputs(arrays, instance_count=rows)
    sizes = {name: len(values) for name, values in (arrays | files).items()}
    if len(set(sizes.values())) > 1:
        counts = (f"{quote_text(name)} has {size}" for name, size in sizes.items())
        raise InputMismatch(f"the inputs have different batch sizes: {join_names(counts)}")
    inputs = InferInputs(arrays, max(sizes.values(), default=0), is_any_batched, 0, rows)
    return add_files(inputs, files) if files else inputs


def add_files(inputs: InferInputs, files: Mapping[str, list[np.ndarray]]) -> InferInputs:
    """Return inputs whose items are inferences of their own, because their files cannot form one tensor."""
    items = (
        InferInputs(
            {name: array[index : index + 1] for name, array in inputs.arrays.items()}
            | {name: arrays[index] for name, arrays in files.items()},
            batch_size=1,
            is_batched=True,
            batch_offset=index,
            instance_count=int(inputs.instance_count > 0),
        )
        for index in range(inputs.batch_size)
    )
    return inputs._replace(arrays={}, items=tuple(items))


def convert_single_element(payload: Payload, signature: Signature) -> InferInputs | None:
    """Return the input tensor of a payload that is one text or file, and the element of a BYTES input.

    These are most payloads, and this is much shorter than `to_inputs`, with the same result. Returns None for
    other payloads.
    """
    tensor = signature.only_bytes_input
    if tensor is None or len(payload.parts) != 1 or payload.instance_count:
        return None
    parts = payload.parts.get("", ())
    value = parts[0].value if len(parts) == 1 else None
    if type(value) is str:
        value = value.encode()
    if type(value) is not bytes:
        return None
    is_batch = signature.supports_batching
    array = np.empty((1,) * (len(tensor.shape) + is_batch), object)
    array.fill(value)
    return InferInputs({tensor.name: array}, int(is_batch))


def assign_parts(payload: Payload, signature: Signature) -> dict[str, list[Part]]:
    parts = {name: values for name, values in payload.parts.items() if values}
    unnamed = signature.unnamed_input
    if len(parts) == 1 and unnamed is not None and signature.inputs.keys().isdisjoint(parts):
        return {unnamed.name: next(iter(parts.values()))}
    unknown = [name for name in parts if name not in signature.inputs]
    if unknown:
        problem = (
            f"the model has no input {quote_text(unknown[0])}"
            if unknown[0]
            else "the request has a value without an input name"
        )
        raise InputMismatch(f"{problem}; the model's inputs are {describe_inputs(signature)}")
    missing = [tensor.name for tensor in signature.required_inputs if tensor.name not in parts]
    if missing:
        raise InputMismatch(
            f"input {quote_text(missing[0])} is missing; the model's inputs are "
            f"{describe_inputs(signature)}"
        )
    return parts


class DecodedBody(NamedTuple):
    """The options of a body, and the tensors that its parts became."""

    options: PayloadOptions
    inputs: InferInputs


def decode_body(
    body: Body, content_type: str, signature: Signature, limits: PayloadLimits
) -> DecodedBody:
    """Return the input tensors of a complete body.

    Raises `MalformedRequest`, `UnsupportedBody`, `InputMismatch`, `BadImage`, `TooLarge` or `CostlyImages`.
    """
    payload = read_payload(body, content_type, limits)
    inputs = convert_single_element(payload, signature)
    if inputs is None:
        inputs = to_inputs(payload, signature, limits)
    return DecodedBody(payload.options, inputs)


def check_row_count(signature: Signature, rows: int, limits: PayloadLimits) -> None:
    """Check how many inferences a request becomes. Raises `TooLarge`.

    It takes one place in the admission queue, however many they are.
    """
    if signature.count_inferences(rows) <= limits.max_inferences:
        return
    if signature.supports_batching:
        size = signature.max_batch_size
        raise TooLarge(
            f"a batch of {rows} items is too large for the model, which accepts {size} at a time; send at "
            f"most {limits.max_inferences * size} items"
        )
    raise TooLarge(
        f"the model has no batch dimension, so a request can have at most {limits.max_inferences} items; "
        f"got {rows}"
    )


def decode_json_body(
    parse: JsonParser, body: bytes, content_type: str, signature: Signature, limits: PayloadLimits
) -> list[InferInputs]:
    """Return the input tensors of each inference of a JSON body.

    Raises `TooLarge`, and the errors of `parse` and `to_inputs`.
    """
    body = to_utf8_json(body, parse_body_type(content_type).parameters)
    check_json_memory(body, limits)
    return [to_inputs(payload, signature, limits) for payload in parse(body, signature, limits)]
