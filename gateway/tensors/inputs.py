"""Conversion of a body to a payload, and of its parts to the input tensors of one inference. Pure.

A worker process can run `decode_body`, `decode_form` and `decode_json_body`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gateway.errors import InputMismatch, TooLarge
from gateway.media_types import JSON, MULTIPART
from gateway.messages import join_names, quote_text
from gateway.tensors.codecs import parse_body_type
from gateway.tensors.convert import (
    build_input_mismatch,
    describe_inputs,
    fit_part_to_shape,
    list_encoded_images,
    stack_parts,
)
from gateway.tensors.dtypes import DatatypeKind
from gateway.tensors.images.decode import EncodedImage, inspect_image
from gateway.tensors.json_body import check_json_memory, decode_base64_text, is_data_uri
from gateway.tensors.media_type import parse_content_type
from gateway.tensors.multipart import MultipartForm
from gateway.tensors.npy import NPY_MAGIC, read_npy
from gateway.tensors.payload import (
    BYTES_PER_CHARACTER,
    LARGE_ARRAY_BYTES,
    Part,
    Payload,
    PayloadLimits,
    PayloadOptions,
)
from gateway.tensors.signature import ImageSpec, Signature, TensorSpec

FEED_CHUNK_BYTES = 64 << 10
# Opening an image takes time even if the image is small.
MAX_IMAGES = 4096
MAX_INLINE_CHARACTERS = LARGE_ARRAY_BYTES // BYTES_PER_CHARACTER
# Returns a payload for each inference of a body.
JsonParser = Callable[[bytes, Signature, PayloadLimits], list[Payload]]


class InferInputs(NamedTuple):
    """The tensors of one inference. The first dimension is the batch if the model supports batching."""

    arrays: Mapping[str, np.ndarray]
    batch_size: int = 0
    is_batched: bool = False  # the request has a batch dimension, so the response has one as well
    batch_offset: int = 0  # the position of a sub-batch in the request's batch
    instance_count: int = 0  # more than 0 if the client expects one result per instance

    def exceeds(self, max_batch_size: int) -> bool:
        return self.batch_size > max_batch_size  # the size is 0 without a batch dimension

    def split(self, max_batch_size: int) -> Iterator[InferInputs]:
        if not self.exceeds(max_batch_size):
            yield self
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


class InspectedPayload(NamedTuple):
    """The parts of a payload by input, with their images and NumPy files inspected but not decoded.

    The value of a part is an `EncodedImage`, a list of them, or the original value.
    """

    parts: Mapping[str, list[Part]]
    instance_count: int = 0
    decoding_cost: int = 0  # the cost of decoding the images, in pixels
    decoded_bytes: int = 0  # the memory that the decoded images need


def read_payload(body: bytes, content_type: str, limits: PayloadLimits) -> Payload:
    """Decode a complete body. Raises `MalformedRequest`, `UnsupportedBody` or `TooLarge`."""
    body_type = parse_body_type(content_type)
    codec = body_type.codec
    if body_type.media_type == MULTIPART:
        form = MultipartForm(content_type, limits)
        for start in range(0, len(body), FEED_CHUNK_BYTES):
            form.feed(body[start : start + FEED_CHUNK_BYTES])
        return form.build_payload()
    if codec is not None and codec.read_payload is not None:
        return codec.read_payload(body, limits)
    return Payload({"": [Part(body_type.read_value(body), body_type.media_type)]})


def inspect_payload(
    payload: Payload, signature: Signature, limits: PayloadLimits
) -> InspectedPayload:
    """Assign the parts to inputs and check the headers of files, without decoding any data.

    Raises `InputMismatch`, `BadImage`, `TooLarge` or `MalformedRequest`.
    """
    parts: dict[str, list[Part]] = {}
    cost = size_bytes = 0
    for name, assigned_parts in assign_parts(payload, signature).items():
        tensor = signature.inputs[name]
        if len(assigned_parts) == 1:
            check_listed_rows(assigned_parts[0].value, tensor, signature, limits)
        parts[name] = [parse_encoded_part(part, tensor, limits) for part in assigned_parts]
        if (spec := tensor.image_spec) is None:
            continue
        pictures = [image for part in parts[name] for image in list_encoded_images(part.value)]
        if pictures:
            cost += sum(image.header.decoding_cost for image in pictures)
            pixels = count_decoded_pixels(pictures, tensor.name, spec, limits)
            size_bytes += pixels * len(spec.mode) * tensor.datatype.numpy_dtype.itemsize
    return InspectedPayload(parts, payload.instance_count, cost, size_bytes)


def count_decoded_pixels(
    encoded_images: Sequence[EncodedImage],
    input_name: str,
    spec: ImageSpec,
    limits: PayloadLimits,
) -> int:
    """Return the pixels of all decoded images, which are in memory at the same time. Raises `TooLarge`."""
    if len(encoded_images) > MAX_IMAGES:
        raise TooLarge(
            f"input {quote_text(input_name)} accepts at most {MAX_IMAGES} images per request; "
            f"got {len(encoded_images)}"
        )
    if min(spec.height, spec.width) > 0:
        pixels = len(encoded_images) * spec.height * spec.width
    else:
        pixels = sum(image.header.pixels for image in encoded_images)
    if pixels > limits.max_image_pixels and len(encoded_images) > 1:
        raise TooLarge(
            f"the {len(encoded_images)} images for input {quote_text(input_name)} decode to {pixels} pixels; "
            f"the limit is {limits.max_image_pixels} pixels; send fewer images per request"
        )
    return pixels


def to_inputs(payload: Payload, signature: Signature, limits: PayloadLimits) -> InferInputs:
    """Return the model's input tensors. Raises as `inspect_payload` and `convert_payload`."""
    return convert_payload(inspect_payload(payload, signature, limits), signature)


def convert_payload(inspected: InspectedPayload, signature: Signature) -> InferInputs:
    """Return the model's input tensors. Raises `InputMismatch` or `BadImage`."""
    arrays: dict[str, np.ndarray] = {}
    supports_batching = signature.supports_batching
    is_any_batched = False
    rows = inspected.instance_count
    is_stacked = rows > 0 and signature.has_batch_dimension
    for name, parts in inspected.parts.items():
        tensor = signature.inputs[name]
        is_batched = True
        if is_stacked or len(parts) > 1:
            arrays[name] = stack_parts(parts, tensor, supports_batching)
        else:
            arrays[name], is_batched = fit_part_to_shape(parts[0], tensor, supports_batching)
        is_any_batched = is_any_batched or is_batched
    if not supports_batching:
        return InferInputs(arrays, instance_count=rows)
    sizes = set(map(len, arrays.values()))
    if len(sizes) > 1:
        counts = (f"{quote_text(name)} has {len(array)}" for name, array in arrays.items())
        raise InputMismatch(f"the inputs have different batch sizes: {join_names(counts)}")
    return InferInputs(arrays, max(sizes, default=0), is_any_batched, instance_count=rows)


def convert_single_element(payload: Payload, signature: Signature) -> InferInputs | None:
    """Return the input tensor of a payload that is one text or file, and the element of a BYTES input.

    These are most payloads, and this is much shorter than `to_inputs`, with the same result. Returns None for
    other payloads, and for a text that takes long to encode.
    """
    tensor = signature.only_bytes_input
    if tensor is None or len(payload.parts) != 1 or payload.instance_count:
        return None
    parts = payload.parts.get("", ())
    value = parts[0].value if len(parts) == 1 else None
    if type(value) is str and len(value) <= MAX_INLINE_CHARACTERS:
        value = value.encode()
    if type(value) is not bytes:
        return None
    is_batch = signature.supports_batching
    array = np.empty((1,) * (len(tensor.shape) + is_batch), object)
    array.fill(value)
    return InferInputs({tensor.name: array}, int(is_batch))


def parse_encoded_part(part: Part, tensor: TensorSpec, limits: PayloadLimits) -> Part:
    value = part.value
    if tensor.datatype.kind is DatatypeKind.BYTES or isinstance(value, np.ndarray):
        return part
    # curl sends a .npy file as application/octet-stream, so the first bytes decide.
    if isinstance(value, bytes) and value.startswith(NPY_MAGIC):
        return part._replace(value=read_npy(value))
    blobs = extract_image_bytes(value)
    if not blobs:
        return part
    if tensor.image_spec is None:
        raise build_input_mismatch(tensor, "bytes, but the input's shape is not an image shape")
    inspected = [inspect_image(blob, limits, tensor.name) for blob in blobs]
    return Part(inspected if isinstance(value, list) else inspected[0], part.content_type)


def extract_image_bytes(value: Any) -> list[bytes]:
    values = value if isinstance(value, list) else [value]
    if not all(map(is_encoded_image, values)):
        return []
    return [item if isinstance(item, bytes) else decode_base64_text(item) for item in values]


def is_encoded_image(value: Any) -> bool:
    return isinstance(value, bytes) or (isinstance(value, str) and is_data_uri(value))


def assign_parts(payload: Payload, signature: Signature) -> dict[str, list[Part]]:
    parts = {name: values for name, values in payload.parts.items() if values}
    required = signature.required_inputs or list(signature.inputs.values())
    if len(parts) == 1 and len(required) == 1 and signature.inputs.keys().isdisjoint(parts):
        return {required[0].name: next(iter(parts.values()))}
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


@dataclass(frozen=True, slots=True)
class DecodedBody:
    """The options of a body, and the tensors that its parts became."""

    options: PayloadOptions
    inputs: InferInputs


def decode_body(
    body: bytes, content_type: str, signature: Signature, limits: PayloadLimits
) -> DecodedBody:
    """Return the input tensors of a complete body.

    Raises `MalformedRequest`, `UnsupportedBody`, `InputMismatch`, `BadImage` or `TooLarge`.
    """
    if parse_content_type(content_type)[0] == JSON:
        check_json_memory(body, limits)
    return decode_payload(read_payload(body, content_type, limits), signature, limits)


def decode_form(form: MultipartForm, signature: Signature, limits: PayloadLimits) -> DecodedBody:
    form.check_json_memory(limits)
    return decode_payload(form.build_payload(), signature, limits)


def decode_payload(payload: Payload, signature: Signature, limits: PayloadLimits) -> DecodedBody:
    return DecodedBody(payload.options, to_inputs(payload, signature, limits))


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


def check_listed_rows(
    value: Any, tensor: TensorSpec, signature: Signature, limits: PayloadLimits
) -> None:
    """Check how many inferences a list becomes, before it is converted. Raises `TooLarge`."""
    if not isinstance(value, list) or len(value) <= limits.max_inferences:
        return
    depth = 0
    first: Any = value
    while isinstance(first, list) and depth <= len(tensor.shape):
        depth += 1
        first = first[0] if first else None
    is_batch = depth > len(tensor.shape) or tensor.shape == (1,)
    if signature.supports_batching and is_batch:
        check_row_count(signature, len(value), limits)


def decode_json_body(
    parse: JsonParser, body: bytes, signature: Signature, limits: PayloadLimits
) -> list[InferInputs]:
    """Return the input tensors of each inference of a JSON body.

    Raises `TooLarge`, and the errors of `parse` and `to_inputs`.
    """
    check_json_memory(body, limits)
    return [to_inputs(payload, signature, limits) for payload in parse(body, signature, limits)]
