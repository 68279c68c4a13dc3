"""Conversion of a payload's parts to the input tensors of one inference, with the batch dimension. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from gateway.errors import InputMismatch, TooLarge
from gateway.messages import join_names, quote_text
from gateway.tensors import images
from gateway.tensors.convert import (
    convert_nested_lists,
    convert_part,
    flatten_lists,
    list_encoded_images,
)
from gateway.tensors.data_uri import decode_base64_text, is_data_uri
from gateway.tensors.dtypes import DatatypeKind
from gateway.tensors.mismatch import (
    build_input_mismatch,
    describe_array,
    describe_inputs,
    format_shape,
)
from gateway.tensors.npy import NPY_MAGIC, read_npy
from gateway.tensors.payload import Part, Payload
from gateway.tensors.signature import ImageSpec, Signature, TensorSpec

# Opening an image takes time even if the image is small.
MAX_IMAGES = 4096
# A batch takes one place in the admission queue, however many inferences it is split into.
MAX_SUB_BATCHES = 1000


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
        """Yield sub-batches of at most `max_batch_size` items, in order. Raises `TooLarge`."""
        if not self.exceeds(max_batch_size):
            yield self
            return
        if self.batch_size > MAX_SUB_BATCHES * max_batch_size:
            raise TooLarge(
                f"a batch of {self.batch_size} items is too large for the model, which accepts "
                f"{max_batch_size} at a time; send at most {MAX_SUB_BATCHES * max_batch_size} items"
            )
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
    is_stacked: bool = False
    instance_count: int = 0
    decoding_cost: int = 0  # of the images, in pixels
    decoded_bytes: int = 0  # the memory that the decoded images need


def inspect_payload(
    payload: Payload, signature: Signature, limits: images.ImageLimits
) -> InspectedPayload:
    """Assign the parts to inputs and check the headers of files, without decoding any data.

    Raises `InputMismatch`, `BadImage`, `TooLarge` or `MalformedRequest`.
    """
    parts: dict[str, list[Part]] = {}
    cost = size_bytes = 0
    for name, assigned_parts in assign_parts(payload, signature).items():
        tensor = signature.inputs[name]
        parts[name] = [parse_encoded_part(part, tensor, limits) for part in assigned_parts]
        pictures = [image for part in parts[name] for image in list_encoded_images(part.value)]
        if pictures and tensor.image_spec is not None:
            cost += sum(image.header.decoding_cost for image in pictures)
            pixels = count_decoded_pixels(pictures, tensor.name, tensor.image_spec, limits)
            size_bytes += (
                pixels * len(tensor.image_spec.mode) * tensor.datatype.numpy_dtype.itemsize
            )
    rows = max(map(len, payload.parts.values()), default=0) if payload.is_stacked else 0
    return InspectedPayload(parts, payload.is_stacked, rows, cost, size_bytes)


def count_decoded_pixels(
    encoded_images: Sequence[images.EncodedImage],
    input_name: str,
    spec: ImageSpec,
    limits: images.ImageLimits,
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
    if pixels > limits.max_pixels and len(encoded_images) > 1:
        raise TooLarge(
            f"the {len(encoded_images)} images for input {quote_text(input_name)} decode to {pixels} pixels; "
            f"the limit is {limits.max_pixels} pixels; send fewer images per request"
        )
    return pixels


def to_inputs(payload: Payload, signature: Signature, limits: images.ImageLimits) -> InferInputs:
    """Return the model's input tensors.

    Raises `InputMismatch`, `BadImage`, `TooLarge` or `MalformedRequest`.
    """
    return convert_payload(inspect_payload(payload, signature, limits), signature)


def convert_payload(inspected: InspectedPayload, signature: Signature) -> InferInputs:
    """Return the model's input tensors. Raises `InputMismatch` or `BadImage`."""
    arrays: dict[str, np.ndarray] = {}
    batched: dict[str, bool] = {}
    for name, parts in inspected.parts.items():
        tensor = signature.inputs[name]
        if inspected.is_stacked or len(parts) > 1:
            arrays[name], batched[name] = (
                stack_parts(parts, tensor, signature.supports_batching),
                True,
            )
        else:
            arrays[name], batched[name] = fit_part_to_shape(
                parts[0], tensor, signature.supports_batching
            )
    rows = inspected.instance_count
    if not signature.supports_batching:
        return InferInputs(arrays, instance_count=rows)
    sizes = {name: len(array) for name, array in arrays.items()}
    if len(set(sizes.values())) > 1:
        counts = join_names(f"{quote_text(name)} has {size}" for name, size in sizes.items())
        raise InputMismatch(f"the inputs have different batch sizes: {counts}")
    return InferInputs(
        arrays, next(iter(sizes.values()), 0), any(batched.values()), instance_count=rows
    )


def parse_encoded_part(part: Part, tensor: TensorSpec, limits: images.ImageLimits) -> Part:
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
    inspected = [images.inspect_image(blob, limits, tensor.name) for blob in blobs]
    return part._replace(value=inspected if isinstance(value, list) else inspected[0])


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
    if len(parts) == 1 and len(required) == 1 and not parts.keys() & signature.inputs.keys():
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


def stack_parts(parts: Sequence[Part], tensor: TensorSpec, supports_batching: bool) -> np.ndarray:
    array = stack_values([part.value for part in parts], parts, tensor)
    expected = (-1, *tensor.shape) if supports_batching else tensor.shape
    if array.ndim == 1 and all(size in (1, -1) for size in expected[1:]):
        array = array.reshape(-1, *(1 for _ in expected[1:]))
    if not is_compatible_shape(array.shape, expected):
        raise build_input_mismatch(
            tensor, f"a batch of {len(parts)} items, each {describe_array(array.shape[1:])}"
        )
    return array


def stack_values(values: list[Any], parts: Sequence[Part], tensor: TensorSpec) -> np.ndarray:
    # Lists are converted together, because converting a short list takes about as long as a long one.
    if all(type(value) is list and not list_encoded_images(value) for value in values):
        check_equal_shapes(find_list_shapes(values, tensor), tensor)
        return convert_nested_lists(values, tensor)
    arrays = [convert_part(part, tensor) for part in parts]
    check_equal_shapes({array.shape for array in arrays}, tensor)
    return np.stack(arrays)


def find_list_shapes(values: Sequence[list[Any]], tensor: TensorSpec) -> set[tuple[int, ...]]:
    """Return the shapes of the lists; at most two of them if the lengths differ."""
    lengths = list(map(len, values))
    other = next((index for index, length in enumerate(lengths) if length != lengths[0]), 0)
    rows = [values[0], values[other]] if other else values
    if not other and list not in map(type, chain.from_iterable(rows)):
        rows = values[:1]
    return {flatten_lists(row, tensor)[1] for row in rows}


def check_equal_shapes(shapes: set[tuple[int, ...]], tensor: TensorSpec) -> None:
    if len(shapes) > 1:
        raise build_input_mismatch(
            tensor, f"values of different shapes: {join_names(map(format_shape, sorted(shapes)))}"
        )


def fit_part_to_shape(
    part: Part, tensor: TensorSpec, supports_batching: bool
) -> tuple[np.ndarray, bool]:
    """Return the array with the dimensions that Triton expects, and whether the part is a batch."""
    array, shape = convert_part(part, tensor), tensor.shape
    is_json_list = isinstance(part.value, list)
    if not supports_batching:
        return fit_unbatched_array(array, tensor), False
    if shape == (1,) and array.ndim == 1 and (is_json_list or len(array) != 1):
        array = array.reshape(-1, 1)  # a list of single values is a batch
    if array.ndim == len(shape) + 1 and is_compatible_shape(array.shape[1:], shape):
        if len(array) == 0:
            raise build_input_mismatch(tensor, "an empty batch")
        return array, True
    if is_compatible_shape(array.shape, shape):
        return array[np.newaxis], False
    if array.ndim == 0 and all(size in (1, -1) for size in shape):
        return array.reshape((1,) * (len(shape) + 1)), False
    raise build_input_mismatch(tensor, describe_array(array.shape))


def fit_unbatched_array(array: np.ndarray, tensor: TensorSpec) -> np.ndarray:
    # A model without batching may declare a first dimension of its own.
    shape = tensor.shape
    if is_compatible_shape(array.shape, shape):
        return array
    if array.ndim == 0 and all(size in (1, -1) for size in shape):
        return array.reshape((1,) * len(shape))
    if array.ndim == len(shape) - 1 and is_compatible_shape((1, *array.shape), shape):
        return array[np.newaxis]
    raise build_input_mismatch(tensor, describe_array(array.shape))


def is_compatible_shape(shape: Sequence[int], expected: Sequence[int]) -> bool:
    return len(shape) == len(expected) and all(
        b in (-1, a) for a, b in zip(shape, expected, strict=True)
    )
