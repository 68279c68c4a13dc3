"""Conversion of values (JSON, NumPy arrays, images) to arrays of an input's datatype and shape, without loss.

The functions raise `InputMismatch` for a value that the datatype cannot represent. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import ml_dtypes
import numpy as np
import orjson

from gateway.errors import InputMismatch
from gateway.messages import join_names, quote_text
from gateway.tensors.dtypes import BF16, DatatypeKind, build_bytes_array
from gateway.tensors.images import ImageReader
from gateway.tensors.json_body import decode_base64_text, is_data_uri
from gateway.tensors.npy import MAX_DIMENSIONS, NPY_MAGIC, read_npy
from gateway.tensors.payload import Part, PayloadLimits
from gateway.tensors.signature import ImageSpec, PixelScale, Signature, TensorSpec

# A float of this size or more may be the result of rounding another integer.
FIRST_INEXACT_INTEGER = 1 << 53
PIXEL_SCALES: Mapping[PixelScale, Callable[[np.ndarray], np.ndarray]] = {
    PixelScale.NONE: lambda values: values,
    PixelScale.ZERO_TO_ONE: lambda values: values / np.float32(255),
    PixelScale.MINUS_ONE_TO_ONE: lambda values: values / np.float32(127.5) - np.float32(1),
}


# Files: NumPy's, and images. They become arrays before the shapes of all parts are compared.


def decode_files(parts: Sequence[Part], tensor: TensorSpec, limits: PayloadLimits) -> list[Part]:
    """Return the parts with arrays in place of their files; an element of BYTES is none.

    Raises `InputMismatch`, `BadImage`, `TooLarge`, `MalformedRequest` or `CostlyImages`.
    """
    if tensor.datatype.kind is DatatypeKind.BYTES:
        return list(parts)
    images = [list_image_files(part.value) for part in parts]
    reader = None
    if any(images):
        if tensor.image_spec is None:
            raise build_input_mismatch(tensor, "bytes, but the input's shape is not an image shape")
        reader = ImageReader(tensor.image_spec, limits, tensor.name)
        reader.check_all(list(chain.from_iterable(images)))
    decoded = []
    for part, files in zip(parts, images, strict=True):
        value = part.value
        if files and reader is not None:
            value = convert_images(files, reader, tensor, is_list=isinstance(value, list))
        elif is_npy_file(value):
            value = read_npy(value)
        decoded.append(part._replace(value=value))
    return decoded


def list_image_files(value: Any) -> list[bytes]:
    """Return the images of a part, which are bytes or `data:` URIs; none if it has other values."""
    values = value if isinstance(value, list) else [value]
    if not all(map(is_image_file, values)):
        return []
    return [item if isinstance(item, bytes) else decode_base64_text(item) for item in values]


def is_image_file(value: Any) -> bool:
    if isinstance(value, bytes):
        return not is_npy_file(value)
    return isinstance(value, str) and is_data_uri(value)


def is_npy_file(value: Any) -> bool:
    # curl sends a .npy file as application/octet-stream, so the first bytes decide.
    return isinstance(value, bytes) and value.startswith(NPY_MAGIC)


def convert_images(
    files: Sequence[bytes], reader: ImageReader, tensor: TensorSpec, *, is_list: bool
) -> np.ndarray:
    arrays = [convert_image(reader.read(data), reader.spec, tensor) for data in files]
    if not is_list:
        return arrays[0]
    if len({array.shape for array in arrays}) > 1:
        raise build_input_mismatch(tensor, "images of different sizes, which cannot form a batch")
    return np.stack(arrays)


def convert_image(values: np.ndarray, spec: ImageSpec, tensor: TensorSpec) -> np.ndarray:
    # The order of the elements becomes that of the tensor here, and not when the request is encoded.
    if tensor.scale is PixelScale.NONE and not tensor.mean and not tensor.std:
        if not np.can_cast(np.uint8, tensor.datatype.numpy_dtype):
            raise build_input_mismatch(
                tensor,
                "an image, whose values 0..255 do not fit; set gateway.scale in the model's config",
            )
        return values.astype(tensor.datatype.numpy_dtype, order="C")
    scaled = PIXEL_SCALES[tensor.scale](values.astype(np.float32, order="C"))
    for hint, apply in ((tensor.mean, np.subtract), (tensor.std, np.divide)):
        if hint:
            scaled = apply(scaled, reshape_per_channel(hint, tensor, spec))
    is_integer = tensor.datatype.kind is DatatypeKind.INTEGER
    return convert_array(np.rint(scaled) if is_integer else scaled, tensor)


def reshape_per_channel(
    values: tuple[float, ...], tensor: TensorSpec, spec: ImageSpec
) -> np.ndarray:
    if len(values) not in (1, len(spec.mode)):
        raise build_input_mismatch(
            tensor,
            f"an image of {len(spec.mode)} channels, but gateway.mean or gateway.std in the model's config "
            f"has {len(values)} values",
        )
    shape = (-1, 1, 1) if spec.layout.value == "NCHW" else (-1,)
    return np.asarray(values, np.float32).reshape(shape)


# Values.


def convert_part(part: Part, tensor: TensorSpec) -> np.ndarray:
    value = part.value
    if isinstance(value, np.ndarray):
        return convert_array(value, tensor)
    return convert_nested_lists(value, tensor)


def convert_nested_lists(value: Any, tensor: TensorSpec) -> np.ndarray:
    leaves, shape = flatten_lists(value, tensor)
    kinds = set(map(type, leaves))
    accepted, convert = CONVERTERS[tensor.datatype.kind]
    if unexpected := kinds - accepted:
        raise build_input_mismatch(tensor, describe_unexpected_value(leaves, unexpected))
    return convert(leaves, kinds, tensor).reshape(shape)


def flatten_lists(value: Any, tensor: TensorSpec) -> tuple[list[Any], tuple[int, ...]]:
    """Return the leaves of nested lists and the shape, without a Python call per number."""
    if type(value) not in (list, dict):
        return [value], ()
    level = [value]
    shape: list[int] = []
    while level and set(map(type, level)) == {list}:
        lengths = set(map(len, level))
        if len(lengths) > 1:
            raise build_input_mismatch(
                tensor,
                f"ragged lists: lengths {join_names(map(str, sorted(lengths)))} at the same level",
            )
        shape.append(lengths.pop())
        if len(shape) > MAX_DIMENSIONS:
            raise build_input_mismatch(tensor, f"lists of more than {MAX_DIMENSIONS} dimensions")
        level = list(chain.from_iterable(level))
    if dict in map(type, level):
        raise build_input_mismatch(tensor, "a JSON object")
    if list in map(type, level):
        raise build_input_mismatch(tensor, "ragged lists: values and lists at the same level")
    return level, tuple(shape)


def convert_integers(leaves: list[Any], kinds: set[type], tensor: TensorSpec) -> np.ndarray:
    if float in kinds:
        fractional = next((leaf for leaf in leaves if int(leaf) != leaf), None)
        if fractional is not None:
            raise build_input_mismatch(tensor, f"{fractional!r}, which is not an integer")
    integers = [int(leaf) for leaf in leaves] if float in kinds else leaves
    low, high = tensor.datatype.integer_range
    if integers and (min(integers) < low or max(integers) > high):
        outside = next(leaf for leaf in integers if not low <= leaf <= high)
        raise build_input_mismatch(tensor, f"{outside}, which is outside {low}..{high}")
    if float in kinds:
        floats = (leaf for leaf in leaves if type(leaf) is float)
        inexact = next((leaf for leaf in floats if abs(leaf) >= FIRST_INEXACT_INTEGER), None)
        if inexact is not None:
            hint = "write it without a fraction or an exponent"
            raise build_input_mismatch(tensor, f"{inexact!r}, which may have been rounded; {hint}")
    return np.array(integers, tensor.datatype.numpy_dtype)


def convert_floats(leaves: list[Any], kinds: set[type], tensor: TensorSpec) -> np.ndarray:
    converted = cast_floats(np.array(leaves, np.float64), tensor)
    if int in kinds:
        pairs = zip(leaves, converted.tolist(), strict=True)
        integer = next((a for a, b in pairs if type(a) is int and a != b), None)
        if integer is not None:
            raise build_inexact_error(tensor, f"the integer {integer}")
    return converted


def cast_floats(values: np.ndarray, tensor: TensorSpec) -> np.ndarray:
    # Rounding is allowed, but a finite value must not become infinite.
    with np.errstate(over="ignore", invalid="ignore"):
        converted = values.astype(tensor.datatype.numpy_dtype)
    overflown = np.isinf(converted) & np.isfinite(values)
    if overflown.any():
        raise build_input_mismatch(tensor, f"{values[overflown].flat[0]!s}, which is out of range")
    return converted


def convert_bytes(leaves: list[Any], kinds: set[type], tensor: TensorSpec) -> np.ndarray:
    return build_bytes_array([leaf.encode() if isinstance(leaf, str) else leaf for leaf in leaves])


Converter = Callable[[list[Any], set[type], TensorSpec], np.ndarray]
# The types of JSON values that a kind accepts, and their conversion.
CONVERTERS: Mapping[DatatypeKind, tuple[set[type], Converter]] = {
    DatatypeKind.BOOLEAN: ({bool}, lambda leaves, *_: np.array(leaves, bool)),
    DatatypeKind.INTEGER: ({int, float}, convert_integers),
    DatatypeKind.FLOAT: ({int, float}, convert_floats),
    DatatypeKind.BYTES: ({str, bytes}, convert_bytes),
}


def convert_array(array: np.ndarray, tensor: TensorSpec) -> np.ndarray:
    """Return a NumPy array in the model's datatype. Raises where the cast would change a value."""
    datatype = tensor.datatype
    kind = array.dtype.kind
    if array.dtype == datatype.numpy_dtype:
        return array
    if datatype == BF16 and kind == "V" and array.dtype.itemsize == 2:
        return array.view(ml_dtypes.bfloat16)  # NumPy files store BF16 as 2 raw bytes
    if datatype.kind is DatatypeKind.BYTES and kind in "SU":
        return convert_bytes(array.ravel().tolist(), {str}, tensor).reshape(array.shape)
    if datatype.kind is DatatypeKind.FLOAT and kind == "f":
        return cast_floats(array, tensor)
    if datatype.kind in (DatatypeKind.INTEGER, DatatypeKind.FLOAT) and kind in "iuf":
        return cast_exactly(array, tensor)
    raise build_input_mismatch(tensor, f"an array of dtype {array.dtype}")


def cast_exactly(array: np.ndarray, tensor: TensorSpec) -> np.ndarray:
    with np.errstate(all="ignore"):
        cast = array.astype(tensor.datatype.numpy_dtype)
        wide = cast if cast.dtype.kind in "iuf" else cast.astype(np.float64)
        # A comparison of int64 with float64 rounds, so the cast back to the array's type is compared.
        # `!=` also finds NaN.
        changed = (wide.astype(array.dtype) != array) | ((wide < 0) != (array < 0))
        if array.dtype.kind == "f":
            low, high = tensor.datatype.integer_range
            changed |= ~((array >= low) & (array < float(high) + 1))
    if changed.any():
        raise build_inexact_error(tensor, f"{array[changed].flat[0]!s}")
    return cast


def build_inexact_error(tensor: TensorSpec, value: str) -> InputMismatch:
    name = tensor.datatype.name
    return build_input_mismatch(tensor, f"{value}, which {name} cannot represent exactly")


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
    if all(type(value) is list for value in values):
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
    array = convert_part(part, tensor)
    shape = tensor.shape
    is_json_list = isinstance(part.value, list)
    if not supports_batching:
        return fit_unbatched_array(array, tensor), False
    if array.ndim == 0 and tensor.can_be_single:
        return array.reshape((1,) * (len(shape) + 1)), False
    if shape == (1,) and array.ndim == 1 and (is_json_list or len(array) != 1):
        array = array.reshape(-1, 1)  # a list of single values is a batch
    if array.ndim == len(shape) + 1 and is_compatible_shape(array.shape[1:], shape):
        if len(array) == 0:
            raise build_input_mismatch(tensor, "an empty batch")
        return array, True
    if is_compatible_shape(array.shape, shape):
        return array[np.newaxis], False
    raise build_input_mismatch(tensor, describe_array(array.shape))


def fit_unbatched_array(array: np.ndarray, tensor: TensorSpec) -> np.ndarray:
    # A model without batching may declare a first dimension of its own.
    shape = tensor.shape
    if is_compatible_shape(array.shape, shape):
        return array
    if array.ndim == 0 and tensor.can_be_single:
        return array.reshape((1,) * len(shape))
    if array.ndim == len(shape) - 1 and is_compatible_shape((1, *array.shape), shape):
        return array[np.newaxis]
    raise build_input_mismatch(tensor, describe_array(array.shape))


def is_compatible_shape(shape: Sequence[int], expected: Sequence[int]) -> bool:
    return len(shape) == len(expected) and all(
        b in (-1, a) for a, b in zip(shape, expected, strict=True)
    )


# Messages: each names the input, what the model expects (datatype, shape, an example), and what was received.


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
