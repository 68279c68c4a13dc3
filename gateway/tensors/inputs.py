"""Parts and a signature become tensors: the batch dimension found, nothing lost on the way. Pure.

Every refusal names the input, what the model expects (datatype, shape, an example) and what came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import ml_dtypes
import numpy as np
import orjson

from gateway.errors import InputMismatch, TooLarge
from gateway.messages import join_names, quote_text
from gateway.tensors import images
from gateway.tensors.data_uri import decode_base64_text, is_data_uri
from gateway.tensors.dtypes import BF16, Datatype, DatatypeKind
from gateway.tensors.npy import MAX_DIMENSIONS, NPY_MAGIC, read_npy
from gateway.tensors.payload import Part, Payload
from gateway.tensors.signature import ImageSpec, Signature, TensorSpec

# However small they are, each takes its time to open.
MAX_IMAGES = 4096
# Inferences that one batch may become: they hold the place of one.
MAX_SUB_BATCHES = 1000
# From here on a JSON number that is read as floating point may have been another integer.
FIRST_INEXACT_INTEGER = 1 << 53
IMAGE_SCALES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "": lambda values: values,
    "none": lambda values: values,
    "0..1": lambda values: values / np.float32(255),
    "-1..1": lambda values: values / np.float32(127.5) - np.float32(1),
}


@dataclass(frozen=True)
class InferInputs:
    """The tensors of one inference. Those of a batching model have the batch as first dimension."""

    arrays: Mapping[str, np.ndarray]
    batch_size: int = 0
    is_batched: bool = False  # the request had a batch dimension, and so will its answer
    batch_offset: int = 0  # of a piece, in the batch that it was cut from
    instance_count: int = 0  # of a request that wants an answer for each

    def split(self, max_batch_size: int) -> Iterator[InferInputs]:
        """The same in pieces that Triton takes, in order. Raises `TooLarge`."""
        if not self.batch_size or self.batch_size <= max_batch_size:
            yield self
            return
        if self.batch_size > MAX_SUB_BATCHES * max_batch_size:
            raise TooLarge(
                f"a batch of {self.batch_size} items is too large for the model, which takes "
                f"{max_batch_size} at a time; send at most {MAX_SUB_BATCHES * max_batch_size} items"
            )
        for start in range(0, self.batch_size, max_batch_size):
            end = min(start + max_batch_size, self.batch_size)
            piece = {name: array[start:end] for name, array in self.arrays.items()}
            yield InferInputs(
                piece,
                end - start,
                self.is_batched,
                start,
                end - start if self.instance_count else 0,
            )


@dataclass(frozen=True)
class InspectedPayload:
    """The parts of a payload by input, their images and NumPy files looked at but not decoded.

    A value is an `EncodedImage`, a list of these, or what it was.
    """

    parts: Mapping[str, list[Part]]
    is_stacked: bool = False
    instance_count: int = 0
    decoding_cost: int = 0  # of its images, in pixels
    decoded_bytes: int = 0  # what these become


def inspect_payload(
    payload: Payload, signature: Signature, limits: images.ImageLimits
) -> InspectedPayload:
    """Assign the parts to inputs, and check what files declare. Nothing is decoded.

    Raises `DoesNotFit`, `BadImage`, `TooLarge` or `Malformed`.
    """
    parts: dict[str, list[Part]] = {}
    cost = size_bytes = 0
    for name, found in assign_parts(payload, signature).items():
        tensor = signature.inputs[name]
        parts[name] = [parse_encoded_part(part, tensor, limits) for part in found]
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
    """The pixels that a request's images become, which are held all at once. Raises `TooLarge`."""
    if len(encoded_images) > MAX_IMAGES:
        raise TooLarge(
            f"{quote_text(input_name)} takes at most {MAX_IMAGES} images at a time; got {len(encoded_images)}"
        )
    if min(spec.height, spec.width) > 0:
        pixels = len(encoded_images) * spec.height * spec.width
    else:
        pixels = sum(image.header.pixels for image in encoded_images)
    if pixels > limits.max_pixels and len(encoded_images) > 1:
        raise TooLarge(
            f"the {len(encoded_images)} images for {quote_text(input_name)} become {pixels} pixels; "
            f"the limit is {limits.max_pixels} pixels; send fewer at a time"
        )
    return pixels


def list_encoded_images(value: Any) -> Sequence[images.EncodedImage]:
    """The images that a screened value holds."""
    if isinstance(value, images.EncodedImage):
        return [value]
    if isinstance(value, list) and value and isinstance(value[0], images.EncodedImage):
        return value
    return ()


def to_inputs(payload: Payload, signature: Signature, limits: images.ImageLimits) -> InferInputs:
    """The tensors that the model is sent. Raises `DoesNotFit`, `BadImage`, `TooLarge` or `Malformed`."""
    return convert_payload(inspect_payload(payload, signature, limits), signature)


def convert_payload(inspected: InspectedPayload, signature: Signature) -> InferInputs:
    """The tensors that the model is sent. Raises `DoesNotFit` or `BadImage`."""
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
        raise InputMismatch(f"the inputs are batches of different sizes: {counts}")
    return InferInputs(
        arrays, next(iter(sizes.values()), 0), any(batched.values()), instance_count=rows
    )


def parse_encoded_part(part: Part, tensor: TensorSpec, limits: images.ImageLimits) -> Part:
    """The part with a value that can be converted. For numbers, bytes are a file of NumPy's, which curl gives
    no better type, or else an image."""
    value = part.value
    if tensor.datatype.kind is DatatypeKind.BYTES or isinstance(value, np.ndarray):
        return part
    if isinstance(value, bytes) and value.startswith(NPY_MAGIC):
        return replace(part, value=read_npy(value))
    blobs = extract_image_bytes(value)
    if not blobs:
        return part
    if tensor.image_spec is None:
        raise build_input_mismatch(tensor, "bytes, and its shape is not an image's")
    screened = [images.inspect_image(blob, limits, tensor.name) for blob in blobs]
    return replace(part, value=screened if isinstance(value, list) else screened[0])


def assign_parts(payload: Payload, signature: Signature) -> dict[str, list[Part]]:
    parts = {name: found for name, found in payload.parts.items() if found}
    required = signature.required_inputs or list(signature.inputs.values())
    if len(parts) == 1 and len(required) == 1 and not parts.keys() & signature.inputs.keys():
        return {required[0].name: next(iter(parts.values()))}
    unknown = [name for name in parts if name not in signature.inputs]
    if unknown:
        what = f"the input {quote_text(unknown[0])}" if unknown[0] else "a value without a name"
        raise InputMismatch(
            f"the model has no place for {what}; its inputs are {describe_inputs(signature)}"
        )
    missing = [tensor.name for tensor in signature.required_inputs if tensor.name not in parts]
    if missing:
        raise InputMismatch(
            f"the input {quote_text(missing[0])} is missing; the model's inputs are "
            f"{describe_inputs(signature)}"
        )
    return parts


def describe_inputs(signature: Signature) -> str:
    return join_names(
        f"{tensor.name} ({tensor.datatype.name} {format_shape(tensor.shape)}"
        f"{', optional' if tensor.is_optional else ''})"
        for tensor in signature.inputs.values()
    )


def stack_parts(parts: Sequence[Part], tensor: TensorSpec, supports_batching: bool) -> np.ndarray:
    """A batch of the parts, each of which is one item, with the dimensions that Triton wants."""
    array = stack_values([part.value for part in parts], parts, tensor)
    wanted = (-1, *tensor.shape) if supports_batching else tensor.shape
    if array.ndim == 1 and all(size in (1, -1) for size in wanted[1:]):
        array = array.reshape(-1, *(1 for _ in wanted[1:]))
    if not is_compatible_shape(array.shape, wanted):
        raise build_input_mismatch(
            tensor, f"a batch of {len(parts)}, each {format_item_shape(array.shape[1:])}"
        )
    return array


def stack_values(values: list[Any], parts: Sequence[Part], tensor: TensorSpec) -> np.ndarray:
    """The values as one array. Lists of numbers are converted together: thousands of short ones would each
    take as long as a long one."""
    if all(type(value) is list and not list_encoded_images(value) for value in values):
        check_equal_shapes(find_list_shapes(values, tensor), tensor)
        return convert_nested_lists(values, tensor)
    arrays = [convert_part(part, tensor) for part in parts]
    check_equal_shapes({array.shape for array in arrays}, tensor)
    return np.stack(arrays)


def find_list_shapes(values: Sequence[list[Any]], tensor: TensorSpec) -> set[tuple[int, ...]]:
    """The shapes of lists; no more than two of them where their lengths differ."""
    lengths = list(map(len, values))
    other = next((at for at, length in enumerate(lengths) if length != lengths[0]), 0)
    rows = [values[0], values[other]] if other else values
    if not other and list not in map(type, chain.from_iterable(rows)):
        rows = values[:1]
    return {flatten_lists(row, tensor)[1] for row in rows}


def check_equal_shapes(shapes: set[tuple[int, ...]], tensor: TensorSpec) -> None:
    """Raises `DoesNotFit` for more than one."""
    if len(shapes) > 1:
        raise build_input_mismatch(
            tensor,
            f"values of the different shapes {join_names(map(format_shape, sorted(shapes)))}",
        )


def convert_part(part: Part, tensor: TensorSpec) -> np.ndarray:
    value, spec = part.value, tensor.image_spec
    if isinstance(value, np.ndarray):
        return convert_array(value, tensor)
    found = list_encoded_images(value)
    if not found or spec is None:
        return convert_nested_lists(value, tensor)
    decoded = [convert_image(image, tensor, spec) for image in found]
    if not isinstance(value, list):
        return decoded[0]
    if len({array.shape for array in decoded}) > 1:
        raise build_input_mismatch(tensor, "images of different sizes, which no batch can hold")
    return np.stack(decoded)


def extract_image_bytes(value: Any) -> list[bytes]:
    """The encoded images that a value for a numeric input is, or none."""
    values = value if isinstance(value, list) else [value]
    if not all(map(is_encoded_image, values)):
        return []
    return [item if isinstance(item, bytes) else decode_base64_text(item) for item in values]


def is_encoded_image(value: Any) -> bool:
    return isinstance(value, bytes) or (isinstance(value, str) and is_data_uri(value))


def convert_image(image: images.EncodedImage, tensor: TensorSpec, spec: ImageSpec) -> np.ndarray:
    """A decoded image, scaled as the model's config hints."""
    values = images.decode_image(image, spec, tensor.name)
    if tensor.scale not in IMAGE_SCALES:
        raise build_input_mismatch(
            tensor, f"an image, and its gateway.scale is {quote_text(tensor.scale)}"
        )
    if tensor.scale in ("", "none") and not tensor.mean and not tensor.std:
        if tensor.datatype.name == "INT8":
            raise build_input_mismatch(
                tensor, "an image, whose values 0..255 do not fit without gateway.scale"
            )
        return values.astype(tensor.datatype.numpy_dtype)
    scaled = IMAGE_SCALES[tensor.scale](values.astype(np.float32))
    for hint, apply in ((tensor.mean, np.subtract), (tensor.std, np.divide)):
        if hint:
            scaled = apply(scaled, reshape_per_channel(hint, tensor, spec))
    return convert_array(
        np.rint(scaled) if tensor.datatype.kind is DatatypeKind.INTEGER else scaled, tensor
    )


def reshape_per_channel(
    values: tuple[float, ...], tensor: TensorSpec, spec: ImageSpec
) -> np.ndarray:
    if len(values) not in (1, len(spec.mode)):
        raise build_input_mismatch(
            tensor, f"an image of {len(spec.mode)} channels, and its config hints {len(values)}"
        )
    shape = (-1, 1, 1) if spec.layout.value == "NCHW" else (-1,)
    return np.asarray(values, np.float32).reshape(shape)


def convert_nested_lists(value: Any, tensor: TensorSpec) -> np.ndarray:
    """What JSON holds, as an array of the model's datatype."""
    leaves, shape = flatten_lists(value, tensor)
    kinds = set(map(type, leaves))
    converted = CONVERTERS[tensor.datatype.kind](leaves, kinds, tensor)
    return converted.reshape(shape)


def flatten_lists(value: Any, tensor: TensorSpec) -> tuple[list[Any], tuple[int, ...]]:
    """The leaves of nested lists, and their shape; no Python call per number."""
    level, shape = [value], []
    while level and set(map(type, level)) == {list}:
        lengths = set(map(len, level))
        if len(lengths) > 1:
            raise build_input_mismatch(
                tensor,
                f"ragged lists: lengths {join_names(map(str, sorted(lengths)))} side by side",
            )
        shape.append(lengths.pop())
        if len(shape) > MAX_DIMENSIONS:
            raise build_input_mismatch(
                tensor, f"lists in lists of more than {MAX_DIMENSIONS} dimensions"
            )
        level = list(chain.from_iterable(level))
    if dict in map(type, level):
        raise build_input_mismatch(tensor, "an object, which is no value")
    if list in map(type, level):
        raise build_input_mismatch(tensor, "ragged lists: values and lists side by side")
    return level, tuple(shape)


def convert_booleans(leaves: list[Any], kinds: set[type], tensor: TensorSpec) -> np.ndarray:
    if kinds - {bool}:
        raise build_input_mismatch(tensor, describe_unexpected_value(leaves, kinds - {bool}))
    return np.array(leaves, bool)


def convert_integers(leaves: list[Any], kinds: set[type], tensor: TensorSpec) -> np.ndarray:
    if kinds - {int, float}:
        raise build_input_mismatch(tensor, describe_unexpected_value(leaves, kinds - {int, float}))
    if float in kinds:
        fractional = next((leaf for leaf in leaves if int(leaf) != leaf), None)
        if fractional is not None:
            raise build_input_mismatch(tensor, f"{fractional!r}, which is not whole")
    whole = [int(leaf) for leaf in leaves] if float in kinds else leaves
    low, high = tensor.datatype.integer_range
    if whole and (min(whole) < low or max(whole) > high):
        outside = next(leaf for leaf in whole if not low <= leaf <= high)
        raise build_input_mismatch(tensor, f"{outside}, which is outside {low}..{high}")
    if float in kinds:
        rounded = (
            leaf for leaf in leaves if type(leaf) is float and abs(leaf) >= FIRST_INEXACT_INTEGER
        )
        if (inexact := next(rounded, None)) is not None:
            raise build_input_mismatch(
                tensor, f"{inexact!r}, written with a fraction or an exponent, which may be rounded"
            )
    return np.array(whole, tensor.datatype.numpy_dtype)


def convert_floats(leaves: list[Any], kinds: set[type], tensor: TensorSpec) -> np.ndarray:
    if kinds - {int, float}:
        raise build_input_mismatch(tensor, describe_unexpected_value(leaves, kinds - {int, float}))
    converted = cast_floats(np.array(leaves, np.float64), tensor)
    if int in kinds:
        lossy = (
            a for a, b in zip(leaves, converted.tolist(), strict=True) if type(a) is int and a != b
        )
        whole = next(lossy, None)
        if whole is not None:
            raise build_input_mismatch(
                tensor, f"the integer {whole}, which {tensor.datatype.name} cannot hold exactly"
            )
    return converted


def cast_floats(values: np.ndarray, tensor: TensorSpec) -> np.ndarray:
    """Floats rounded to the model's precision; what would become infinite is refused."""
    with np.errstate(over="ignore", invalid="ignore"):
        converted = values.astype(tensor.datatype.numpy_dtype)
    overflown = np.isinf(converted) & np.isfinite(values)
    if overflown.any():
        raise build_input_mismatch(tensor, f"{values[overflown].flat[0]!s}, which is out of range")
    return converted


def convert_bytes(leaves: list[Any], kinds: set[type], tensor: TensorSpec) -> np.ndarray:
    if kinds - {str, bytes}:
        raise build_input_mismatch(tensor, describe_unexpected_value(leaves, kinds - {str, bytes}))
    array = np.empty(len(leaves), object)
    array[:] = [leaf.encode() if isinstance(leaf, str) else leaf for leaf in leaves]
    return array


CONVERTERS: Mapping[DatatypeKind, Callable[[list[Any], set[type], TensorSpec], np.ndarray]] = {
    DatatypeKind.BOOLEAN: convert_booleans,
    DatatypeKind.INTEGER: convert_integers,
    DatatypeKind.FLOAT: convert_floats,
    DatatypeKind.BYTES: convert_bytes,
}


def convert_array(array: np.ndarray, tensor: TensorSpec) -> np.ndarray:
    """A NumPy array in the model's datatype; refused where a value would change."""
    wanted = tensor.datatype
    if array.dtype == wanted.numpy_dtype:
        return array
    if wanted == BF16 and array.dtype.kind == "V" and array.dtype.itemsize == 2:
        return array.view(ml_dtypes.bfloat16)  # how NumPy stores BF16 in a file: as 2 raw bytes
    kind = array.dtype.kind
    if wanted.kind is DatatypeKind.BYTES and kind in "SU":
        return convert_bytes(array.ravel().tolist(), {str}, tensor).reshape(array.shape)
    if wanted.kind is DatatypeKind.FLOAT and kind == "f":
        return cast_floats(array, tensor)
    if wanted.kind in (DatatypeKind.INTEGER, DatatypeKind.FLOAT) and kind in "iuf":
        return cast_exactly(array, tensor)
    raise build_input_mismatch(tensor, f"an array of {array.dtype}")


def cast_exactly(array: np.ndarray, tensor: TensorSpec) -> np.ndarray:
    """The array cast, when the cast changes no value; `!=` also finds what is not a number."""
    with np.errstate(all="ignore"):
        cast = array.astype(tensor.datatype.numpy_dtype)
        wide = cast if cast.dtype.kind in "iuf" else cast.astype(np.float64)
        # Comparing int64 with float64 rounds: go back to the array's own type as well.
        changed = (wide.astype(array.dtype) != array) | ((wide < 0) != (array < 0))
        if array.dtype.kind == "f":
            low, high = tensor.datatype.integer_range
            changed |= ~((array >= low) & (array < float(high) + 1))
    if changed.any():
        raise build_input_mismatch(
            tensor, f"{array[changed].flat[0]!s}, which {tensor.datatype.name} cannot hold exactly"
        )
    return cast


def fit_part_to_shape(
    part: Part, tensor: TensorSpec, supports_batching: bool
) -> tuple[np.ndarray, bool]:
    """The array with the dimensions that Triton wants; and whether it came as a batch."""
    array, shape = convert_part(part, tensor), tensor.shape
    listed_in_json = isinstance(part.value, list)
    if not supports_batching:
        return fit_unbatched_array(array, tensor), False
    if shape == (1,) and array.ndim == 1 and (listed_in_json or len(array) != 1):
        array = array.reshape(-1, 1)  # of single values, a list is a batch
    if array.ndim == len(shape) + 1 and is_compatible_shape(array.shape[1:], shape):
        if len(array) == 0:
            raise build_input_mismatch(tensor, "a batch of 0")
        return array, True
    if is_compatible_shape(array.shape, shape):
        return array[np.newaxis], False
    if array.ndim == 0 and all(size in (1, -1) for size in shape):
        return array.reshape((1,) * (len(shape) + 1)), False
    raise build_input_mismatch(tensor, f"the shape {format_shape(array.shape)}")


def fit_unbatched_array(array: np.ndarray, tensor: TensorSpec) -> np.ndarray:
    """For a model that Triton does not batch; it may still have a first dimension of its own."""
    shape = tensor.shape
    if is_compatible_shape(array.shape, shape):
        return array
    if array.ndim == 0 and all(size in (1, -1) for size in shape):
        return array.reshape((1,) * len(shape))
    if array.ndim == len(shape) - 1 and is_compatible_shape((1, *array.shape), shape):
        return array[np.newaxis]
    raise build_input_mismatch(tensor, f"the shape {format_shape(array.shape)}")


def is_compatible_shape(shape: Sequence[int], expected: Sequence[int]) -> bool:
    return len(shape) == len(expected) and all(
        b in (-1, a) for a, b in zip(shape, expected, strict=True)
    )


def format_shape(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]" if shape else "a single value"


def format_item_shape(shape: Sequence[int]) -> str:
    return f"of the shape {format_shape(shape)}" if shape else "a single value"


def describe_unexpected_value(leaves: Sequence[Any], kinds: set[type]) -> str:
    names = {str: "the text", bytes: "bytes", bool: "the boolean", type(None): "null"}
    leaf = next(leaf for leaf in leaves if type(leaf) in kinds)
    if isinstance(leaf, (bytes, type(None))):
        return names[type(leaf)]
    return f"{names.get(type(leaf), 'the number')} {quote_text(str(leaf), 40)}"


def format_example_value(tensor: TensorSpec) -> str:
    """A small value of the datatype and shape, as JSON would hold it."""
    value = orjson.dumps(tensor.datatype.example).decode()
    if tensor.shape == (1,):
        return value
    for _ in tensor.shape:
        value = f"[{value}, …]"
    return value


def build_input_mismatch(tensor: TensorSpec, received: str) -> InputMismatch:
    datatype: Datatype = tensor.datatype
    return InputMismatch(
        f"the input {quote_text(tensor.name)} takes {datatype.kind.value} ({datatype.name} "
        f"{format_shape(tensor.shape)}, for example {format_example_value(tensor)}); what came is {received}"
    )
