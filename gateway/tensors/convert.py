"""Conversion of values (JSON, NumPy arrays, images) to arrays of an input's datatype and shape, without loss.

The functions raise `InputMismatch` for a value that the datatype cannot represent. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import ml_dtypes
import numpy as np
import orjson

from gateway.errors import InputMismatch, TooLarge
from gateway.media_types import NPY, TEXT
from gateway.messages import join_names, quote_text
from gateway.tensors.dtypes import BF16, DatatypeKind, build_bytes_array
from gateway.tensors.images import ImageReader
from gateway.tensors.json_body import check_json_memory, decode_base64_text, is_data_uri
from gateway.tensors.npy import MAX_DIMENSIONS, NPY_MAGIC, read_npy
from gateway.tensors.payload import Part, PayloadLimits
from gateway.tensors.signature import ImageSpec, PixelScale, Signature, TensorSpec

# Opening a file takes time even if the file is small.
MAX_FILES = 4096
# 16 bits have this many values for each of 8 bits: 65535 is 255.
PER_8_BIT_VALUE = 257
# As responses have them. They are no tokens of JSON.
FLOATS_BY_NAME = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# How programs write values into the fields of a form, in lower case.
WORDS: Mapping[str, bool | str] = {
    "true": True,
    "false": False,
    "nan": "NaN",
    "inf": "Infinity",
    "infinity": "Infinity",
    "-inf": "-Infinity",
    "-infinity": "-Infinity",
}
# A float of this size or more may be the result of rounding another integer.
FIRST_INEXACT_INTEGER = 1 << 53
PIXEL_SCALES: Mapping[PixelScale, Callable[[np.ndarray], np.ndarray]] = {
    PixelScale.NONE: lambda values: values,
    PixelScale.ZERO_TO_ONE: lambda values: values / np.float32(255),
    PixelScale.MINUS_ONE_TO_ONE: lambda values: values / np.float32(127.5) - np.float32(1),
}


# Texts of forms, whose language has no other values.


def read_text_part(part: Part, tensor: TensorSpec, limits: PayloadLimits) -> Part:
    """Return the part with numbers or booleans in place of a text, for an input that has no texts.

    Raises `TooLarge`.
    """
    if part.content_type != TEXT or tensor.datatype.kind is DatatypeKind.BYTES:
        return part
    text = part.value.strip()
    encoded = text.encode()
    check_json_memory(encoded, limits)
    try:
        value = orjson.loads(encoded)
    except orjson.JSONDecodeError:
        value = WORDS.get(text.lower(), text)
    is_text = value is None or isinstance(value, dict)  # which no field means
    return part._replace(value=text if is_text else value)


def is_absent(part: Part) -> bool:
    """Return whether a part stands for no value: null, or a field of a form that is left empty."""
    return part.value is None or (part.value == "" and part.content_type == TEXT)


# Files: NumPy's, images, and the bytes of others. They become arrays before the shapes of all parts are
# compared.


def decode_files(parts: Sequence[Part], tensor: TensorSpec, limits: PayloadLimits) -> list[Part]:
    """Return the parts with arrays in place of their files; an element of BYTES is none.

    A list of files is one batch, or several parts if their lengths differ.
    Raises `InputMismatch`, `BadImage`, `TooLarge`, `MalformedRequest` or `CostlyImages`.
    """
    if tensor.datatype.kind is DatatypeKind.BYTES:
        return list(parts)
    files = [list_files(part.value) for part in parts]
    decode = build_file_decoder(list(chain.from_iterable(files)), tensor, limits)
    decoded: list[Part] = []
    for part, contents in zip(parts, files, strict=True):
        values = [decode(content) for content in contents]
        if not contents:
            values = [read_npy(part.value) if is_npy_file(part.value) else part.value]
        elif isinstance(part.value, list) and not (
            tensor.takes_file_bytes and have_different_shapes(values)
        ):
            values = [stack_arrays(values, tensor)]
        decoded += (part._replace(value=value) for value in values)
    return decoded


def build_file_decoder(
    files: Sequence[bytes], tensor: TensorSpec, limits: PayloadLimits
) -> Callable[[bytes], np.ndarray]:
    """Return what decodes each of the files of an input. Raises the errors of `decode_files`."""
    if len(files) > MAX_FILES:
        raise TooLarge(
            f"input {quote_text(tensor.name)} accepts at most {MAX_FILES} files per request; got {len(files)}"
        )
    if tensor.takes_file_bytes or not files:
        return partial(np.frombuffer, dtype=tensor.datatype.numpy_dtype)
    if tensor.image_spec is None:
        raise build_input_mismatch(
            tensor,
            "bytes, but the input's shape is not an image shape, which has 1, 3 or 4 channels first or "
            f"last, or where the format in the model's config says; send an array as {NPY}",
        )
    reader = ImageReader(tensor.image_spec, limits, tensor.name)
    reader.check_all(files)
    return partial(convert_image, reader, tensor)


def list_files(value: Any) -> list[bytes]:
    """Return the files of a part, which are bytes or `data:` URIs; none if it has other values."""
    values = value if isinstance(value, list) else [value]
    if not all(map(is_file, values)):
        return []
    return [item if isinstance(item, bytes) else decode_base64_text(item) for item in values]


def is_file(value: Any) -> bool:
    if isinstance(value, bytes):
        return not is_npy_file(value)
    return isinstance(value, str) and is_data_uri(value)


def is_npy_file(value: Any) -> bool:
    # curl sends a .npy file as application/octet-stream, so the first bytes decide.
    return isinstance(value, bytes) and value.startswith(NPY_MAGIC)


def convert_image(reader: ImageReader, tensor: TensorSpec, content: bytes) -> np.ndarray:
    values = reader.read(content)
    dtype = tensor.datatype.numpy_dtype
    is_integer = tensor.datatype.kind is DatatypeKind.INTEGER
    # The order of the elements becomes that of the tensor here, and not when the request is encoded.
    if is_integer and tensor.scale is PixelScale.NONE and not tensor.mean and not tensor.std:
        highest = np.iinfo(values.dtype).max
        largest = np.iinfo(dtype).max
        if highest > largest and (values.dtype == np.uint8 or values.max() > largest):
            raise build_input_mismatch(
                tensor,
                f"an image, whose values 0..{highest} do not fit; set gateway.scale in the model's config",
            )
        return values.astype(dtype, order="C")
    scaled = values.astype(np.float32, order="C")
    if values.dtype == np.uint16:
        scaled /= np.float32(PER_8_BIT_VALUE)
    scaled = PIXEL_SCALES[tensor.scale](scaled)
    for hint, apply in ((tensor.mean, np.subtract), (tensor.std, np.divide)):
        if hint:
            scaled = apply(scaled, reshape_per_channel(hint, tensor, reader.spec))
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


def convert_value(value: Any, tensor: TensorSpec) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return convert_array(value, tensor)
    return convert_nested_lists(value, tensor)


def convert_nested_lists(value: Any, tensor: TensorSpec) -> np.ndarray:
    leaves, shape = flatten_lists(value, tensor)
    kinds = set(map(type, leaves))
    accepted, convert = CONVERTERS[tensor.datatype.kind]
    if unexpected := kinds - accepted:
        raise build_input_mismatch(tensor, describe_unexpected_value(leaves, unexpected, tensor))
    return convert(leaves, kinds, tensor).reshape(shape)


def flatten_lists(value: Any, tensor: TensorSpec) -> tuple[list[Any], tuple[int, ...]]:
    """Return the leaves of nested lists and the shape, without a Python call per number."""
    nested = np.array(value, object)
    leaves = nested.ravel().tolist()
    kinds = set(map(type, leaves))
    problem = ""
    if dict in kinds:
        problem = "a JSON object"
    elif nested.ndim > MAX_DIMENSIONS:
        problem = f"lists of more than {MAX_DIMENSIONS} dimensions"
    elif kinds == {list}:
        lengths = join_names(map(str, sorted(set(map(len, leaves)))))
        problem = f"ragged lists: lengths {lengths} at the same level"
    elif list in kinds:
        problem = "ragged lists: values and lists at the same level"
    if problem:
        raise build_input_mismatch(tensor, problem)
    return leaves, nested.shape


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
    if str in kinds:
        unknown = next(
            (leaf for leaf in leaves if type(leaf) is str and leaf not in FLOATS_BY_NAME), None
        )
        if unknown is not None:
            raise build_input_mismatch(tensor, describe_unexpected_value([unknown], {str}, tensor))
        leaves = [FLOATS_BY_NAME[leaf] if type(leaf) is str else leaf for leaf in leaves]
    return cast_floats(np.array(leaves, np.float64), tensor)


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
    DatatypeKind.FLOAT: ({int, float, str}, convert_floats),
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
        value = array[changed].flat[0]
        raise build_input_mismatch(
            tensor, f"{value!s}, which {tensor.datatype.name} cannot represent exactly"
        )
    return cast


# Shapes.


def stack_parts(parts: Sequence[Part], tensor: TensorSpec, supports_batching: bool) -> np.ndarray:
    """Return a batch of which each part is an item."""
    values = [part.value for part in parts]
    if any(isinstance(value, np.ndarray) for value in values):
        array = stack_arrays([convert_value(value, tensor) for value in values], tensor)
    else:  # together, because converting a short list takes about as long as a long one
        array = convert_nested_lists(values, tensor)
    expected = (-1, *tensor.shape) if supports_batching else tensor.shape
    if array.ndim == 1 and all(size in (1, -1) for size in expected[1:]):
        array = array.reshape(-1, *(1 for _ in expected[1:]))
    if not is_compatible_shape(array.shape, expected):
        raise build_input_mismatch(
            tensor, f"a batch of {len(parts)} items, each {describe_array(array.shape[1:])}"
        )
    return array


def stack_arrays(arrays: Sequence[np.ndarray], tensor: TensorSpec) -> np.ndarray:
    if have_different_shapes(arrays):
        shapes = join_names(map(format_shape, sorted({array.shape for array in arrays})))
        raise build_input_mismatch(
            tensor, f"values of different shapes, which cannot form a batch: {shapes}"
        )
    return np.stack(arrays)


def have_different_shapes(values: Iterable[Any]) -> bool:
    return len({value.shape for value in values if isinstance(value, np.ndarray)}) > 1


def separate_parts(
    parts: Sequence[Part], tensor: TensorSpec, supports_batching: bool
) -> list[np.ndarray]:
    """Return the array of each part, with a batch dimension of one item."""
    if not supports_batching:
        raise build_input_mismatch(
            tensor,
            f"{len(parts)} files of different lengths, and the model has no batch dimension; send one file "
            "per request",
        )
    return [fit_part_to_shape(part, tensor, supports_batching)[0] for part in parts]


def fit_part_to_shape(
    part: Part, tensor: TensorSpec, supports_batching: bool
) -> tuple[np.ndarray, bool]:
    """Return the array with the dimensions that Triton expects, and whether the part is a batch."""
    array = convert_value(part.value, tensor)
    expected = (-1, *tensor.shape) if supports_batching else tensor.shape
    if array.ndim == 0 and tensor.can_be_single:
        return array.reshape((1,) * len(expected)), False
    is_list = isinstance(part.value, list) or array.shape != (1,)
    if supports_batching and tensor.shape == (1,) and array.ndim == 1 and is_list:
        array = array.reshape(-1, 1)  # a list of single values is a batch
    if is_compatible_shape(array.shape, expected):
        if supports_batching and len(array) == 0:
            raise build_input_mismatch(tensor, "an empty batch")
        return array, supports_batching
    # The batch dimension is missing: Triton's, or one that a model without batching declares.
    if is_compatible_shape((1, *array.shape), expected):
        return array[np.newaxis], False
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


def describe_unexpected_value(leaves: Sequence[Any], kinds: set[type], tensor: TensorSpec) -> str:
    leaf = next(leaf for leaf in leaves if type(leaf) in kinds)
    if leaf is None:
        is_float = tensor.datatype.kind is DatatypeKind.FLOAT
        return 'null; write "NaN" for a missing number' if is_float else "null"
    if isinstance(leaf, bytes):
        return "bytes"
    names = {str: "the string", bool: "the boolean"}
    text = f"{names.get(type(leaf), 'the number')} {quote_text(str(leaf), 40)}"
    takes_files = tensor.image_spec is not None or tensor.takes_file_bytes
    hint = '; send a file as {"b64": "BASE64"}' if takes_files and isinstance(leaf, str) else ""
    return text + hint


def format_shape(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]" if shape else "a single value"


def format_example_value(tensor: TensorSpec) -> str:
    value = orjson.dumps(tensor.datatype.example).decode()
    if tensor.shape == (1,):
        return value
    for _ in tensor.shape:
        value = f"[{value}, …]"
    return value
