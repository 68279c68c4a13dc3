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

from gateway.errors import DoesNotFit, TooLarge
from gateway.tensors import images
from gateway.tensors.data_uri import from_base64, is_data_uri
from gateway.tensors.dtypes import BF16, Datatype, Kind
from gateway.tensors.npy import MAGIC, MAX_DIMENSIONS, read_npy
from gateway.tensors.payload import Part, Payload
from gateway.tensors.signature import ImageSpec, Signature, Tensor
from gateway.words import listed, quoted

# However small they are, each takes its time to open.
MAX_IMAGES = 4096
# Inferences that one batch may become: they hold the place of one.
MAX_PIECES = 1000
# From here on a JSON number that is read as floating point may have been another integer.
LARGEST_EXACT = 1 << 53
SCALES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "": lambda values: values,
    "none": lambda values: values,
    "0..1": lambda values: values / np.float32(255),
    "-1..1": lambda values: values / np.float32(127.5) - np.float32(1),
}


@dataclass(frozen=True)
class Inputs:
    """The tensors of one inference. Those of a batching model have the batch as first dimension."""

    arrays: Mapping[str, np.ndarray]
    batch_size: int = 0
    batched: bool = False  # the request had a batch dimension, and so will its answer
    offset: int = 0  # of a piece, in the batch that it was cut from
    rows: int = 0  # of a request that wants an answer for each

    def cut(self, max_batch_size: int) -> Iterator[Inputs]:
        """The same in pieces that Triton takes, in order. Raises `TooLarge`."""
        if not self.batch_size or self.batch_size <= max_batch_size:
            yield self
            return
        if self.batch_size > MAX_PIECES * max_batch_size:
            raise TooLarge(
                f"a batch of {self.batch_size} items is too large for the model, which takes "
                f"{max_batch_size} at a time; send at most {MAX_PIECES * max_batch_size} items"
            )
        for start in range(0, self.batch_size, max_batch_size):
            end = min(start + max_batch_size, self.batch_size)
            piece = {name: array[start:end] for name, array in self.arrays.items()}
            yield Inputs(piece, end - start, self.batched, start, end - start if self.rows else 0)


@dataclass(frozen=True)
class ScreenedPayload:
    """The parts of a payload by input, their images and NumPy files looked at but not decoded.

    A value is an `EncodedImage`, a list of these, or what it was.
    """

    parts: Mapping[str, list[Part]]
    is_stacked: bool = False
    rows: int = 0
    decoding_cost: int = 0  # of its images, in pixels
    decoded_bytes: int = 0  # what these become


def screen(payload: Payload, signature: Signature, limits: images.ImageLimits) -> ScreenedPayload:
    """Assign the parts to inputs, and check what files declare. Nothing is decoded.

    Raises `DoesNotFit`, `BadImage`, `TooLarge` or `Malformed`.
    """
    parts: dict[str, list[Part]] = {}
    cost = size_bytes = 0
    for name, found in named(payload, signature).items():
        tensor = signature.inputs[name]
        parts[name] = [recognised(part, tensor, limits) for part in found]
        pictures = [image for part in parts[name] for image in encoded_images(part.value)]
        if pictures and tensor.image is not None:
            cost += sum(image.header.decoding_cost for image in pictures)
            pixels = decoded_pixels(pictures, tensor.name, tensor.image, limits)
            size_bytes += pixels * len(tensor.image.mode) * tensor.datatype.numpy.itemsize
    rows = max(map(len, payload.parts.values()), default=0) if payload.stacked else 0
    return ScreenedPayload(parts, payload.stacked, rows, cost, size_bytes)


def decoded_pixels(
    pictures: Sequence[images.EncodedImage], name: str, spec: ImageSpec, limits: images.ImageLimits
) -> int:
    """The pixels that a request's images become, which are held all at once. Raises `TooLarge`."""
    if len(pictures) > MAX_IMAGES:
        raise TooLarge(
            f"{quoted(name)} takes at most {MAX_IMAGES} images at a time; got {len(pictures)}"
        )
    if min(spec.height, spec.width) > 0:
        pixels = len(pictures) * spec.height * spec.width
    else:
        pixels = sum(image.header.pixels for image in pictures)
    if pixels > limits.max_pixels and len(pictures) > 1:
        raise TooLarge(
            f"the {len(pictures)} images for {quoted(name)} become {pixels} pixels; "
            f"the limit is {limits.max_pixels} pixels; send fewer at a time"
        )
    return pixels


def encoded_images(value: Any) -> Sequence[images.EncodedImage]:
    """The images that a screened value holds."""
    if isinstance(value, images.EncodedImage):
        return [value]
    if isinstance(value, list) and value and isinstance(value[0], images.EncodedImage):
        return value
    return ()


def to_inputs(payload: Payload, signature: Signature, limits: images.ImageLimits) -> Inputs:
    """The tensors that the model is sent. Raises `DoesNotFit`, `BadImage`, `TooLarge` or `Malformed`."""
    return convert(screen(payload, signature, limits), signature)


def convert(screened: ScreenedPayload, signature: Signature) -> Inputs:
    """The tensors that the model is sent. Raises `DoesNotFit` or `BadImage`."""
    arrays: dict[str, np.ndarray] = {}
    batched: dict[str, bool] = {}
    for name, parts in screened.parts.items():
        tensor = signature.inputs[name]
        if screened.is_stacked or len(parts) > 1:
            arrays[name], batched[name] = stacked(parts, tensor, signature.batching), True
        else:
            arrays[name], batched[name] = fitted(parts[0], tensor, signature.batching)
    rows = screened.rows
    if not signature.batching:
        return Inputs(arrays, rows=rows)
    sizes = {name: len(array) for name, array in arrays.items()}
    if len(set(sizes.values())) > 1:
        counts = listed(f"{quoted(name)} has {size}" for name, size in sizes.items())
        raise DoesNotFit(f"the inputs are batches of different sizes: {counts}")
    return Inputs(arrays, next(iter(sizes.values()), 0), any(batched.values()), rows=rows)


def recognised(part: Part, tensor: Tensor, limits: images.ImageLimits) -> Part:
    """The part with a value that can be converted. For numbers, bytes are a file of NumPy's, which curl gives
    no better type, or else an image."""
    value = part.value
    if tensor.datatype.kind is Kind.BYTES or isinstance(value, np.ndarray):
        return part
    if isinstance(value, bytes) and value.startswith(MAGIC):
        return replace(part, value=read_npy(value))
    blobs = encoded(value)
    if not blobs:
        return part
    if tensor.image is None:
        raise misfit(tensor, "bytes, and its shape is not an image's")
    screened = [images.screen_image(blob, limits, tensor.name) for blob in blobs]
    return replace(part, value=screened if isinstance(value, list) else screened[0])


def named(payload: Payload, signature: Signature) -> dict[str, list[Part]]:
    parts = {name: found for name, found in payload.parts.items() if found}
    required = signature.required or list(signature.inputs.values())
    if len(parts) == 1 and len(required) == 1 and not parts.keys() & signature.inputs.keys():
        return {required[0].name: next(iter(parts.values()))}
    unknown = [name for name in parts if name not in signature.inputs]
    if unknown:
        what = f"the input {quoted(unknown[0])}" if unknown[0] else "a value without a name"
        raise DoesNotFit(
            f"the model has no place for {what}; its inputs are {described(signature)}"
        )
    missing = [tensor.name for tensor in signature.required if tensor.name not in parts]
    if missing:
        raise DoesNotFit(
            f"the input {quoted(missing[0])} is missing; the model's inputs are {described(signature)}"
        )
    return parts


def described(signature: Signature) -> str:
    return listed(
        f"{tensor.name} ({tensor.datatype.name} {shape_text(tensor.shape)}"
        f"{', optional' if tensor.optional else ''})"
        for tensor in signature.inputs.values()
    )


def stacked(parts: Sequence[Part], tensor: Tensor, batching: bool) -> np.ndarray:
    """A batch of the parts, each of which is one item, with the dimensions that Triton wants."""
    array = stack([part.value for part in parts], parts, tensor)
    wanted = (-1, *tensor.shape) if batching else tensor.shape
    if array.ndim == 1 and all(size in (1, -1) for size in wanted[1:]):
        array = array.reshape(-1, *(1 for _ in wanted[1:]))
    if not agrees(array.shape, wanted):
        raise misfit(tensor, f"a batch of {len(parts)}, each {item_text(array.shape[1:])}")
    return array


def stack(values: list[Any], parts: Sequence[Part], tensor: Tensor) -> np.ndarray:
    """The values as one array. Lists of numbers are converted together: thousands of short ones would each
    take as long as a long one."""
    if all(type(value) is list and not encoded_images(value) for value in values):
        check_shapes(list_shapes(values, tensor), tensor)
        return from_nested(values, tensor)
    arrays = [one_array(part, tensor) for part in parts]
    check_shapes({array.shape for array in arrays}, tensor)
    return np.stack(arrays)


def list_shapes(values: Sequence[list[Any]], tensor: Tensor) -> set[tuple[int, ...]]:
    """The shapes of lists; no more than two of them where their lengths differ."""
    lengths = list(map(len, values))
    other = next((at for at, length in enumerate(lengths) if length != lengths[0]), 0)
    rows = [values[0], values[other]] if other else values
    if not other and list not in map(type, chain.from_iterable(rows)):
        rows = values[:1]
    return {flattened(row, tensor)[1] for row in rows}


def check_shapes(shapes: set[tuple[int, ...]], tensor: Tensor) -> None:
    """Raises `DoesNotFit` for more than one."""
    if len(shapes) > 1:
        raise misfit(
            tensor, f"values of the different shapes {listed(map(shape_text, sorted(shapes)))}"
        )


def one_array(part: Part, tensor: Tensor) -> np.ndarray:
    value, spec = part.value, tensor.image
    if isinstance(value, np.ndarray):
        return from_array(value, tensor)
    found = encoded_images(value)
    if not found or spec is None:
        return from_nested(value, tensor)
    decoded = [from_image(image, tensor, spec) for image in found]
    if not isinstance(value, list):
        return decoded[0]
    if len({array.shape for array in decoded}) > 1:
        raise misfit(tensor, "images of different sizes, which no batch can hold")
    return np.stack(decoded)


def encoded(value: Any) -> list[bytes]:
    """The encoded images that a value for a numeric input is, or none."""
    values = value if isinstance(value, list) else [value]
    if not all(map(is_encoded, values)):
        return []
    return [item if isinstance(item, bytes) else from_base64(item) for item in values]


def is_encoded(value: Any) -> bool:
    return isinstance(value, bytes) or (isinstance(value, str) and is_data_uri(value))


def from_image(image: images.EncodedImage, tensor: Tensor, spec: ImageSpec) -> np.ndarray:
    """A decoded image, scaled as the model's config hints."""
    values = images.decode_image(image, spec, tensor.name)
    if tensor.scale not in SCALES:
        raise misfit(tensor, f"an image, and its gateway.scale is {quoted(tensor.scale)}")
    if tensor.scale in ("", "none") and not tensor.mean and not tensor.std:
        if tensor.datatype.name == "INT8":
            raise misfit(tensor, "an image, whose values 0..255 do not fit without gateway.scale")
        return values.astype(tensor.datatype.numpy)
    scaled = SCALES[tensor.scale](values.astype(np.float32))
    for hint, apply in ((tensor.mean, np.subtract), (tensor.std, np.divide)):
        if hint:
            scaled = apply(scaled, per_channel(hint, tensor, spec))
    return from_array(np.rint(scaled) if tensor.datatype.kind is Kind.INTEGER else scaled, tensor)


def per_channel(values: tuple[float, ...], tensor: Tensor, spec: ImageSpec) -> np.ndarray:
    if len(values) not in (1, len(spec.mode)):
        raise misfit(
            tensor, f"an image of {len(spec.mode)} channels, and its config hints {len(values)}"
        )
    shape = (-1, 1, 1) if spec.layout.value == "NCHW" else (-1,)
    return np.asarray(values, np.float32).reshape(shape)


def from_nested(value: Any, tensor: Tensor) -> np.ndarray:
    """What JSON holds, as an array of the model's datatype."""
    leaves, shape = flattened(value, tensor)
    kinds = set(map(type, leaves))
    converted = CONVERSIONS[tensor.datatype.kind](leaves, kinds, tensor)
    return converted.reshape(shape)


def flattened(value: Any, tensor: Tensor) -> tuple[list[Any], tuple[int, ...]]:
    """The leaves of nested lists, and their shape; no Python call per number."""
    level, shape = [value], []
    while level and set(map(type, level)) == {list}:
        lengths = set(map(len, level))
        if len(lengths) > 1:
            raise misfit(
                tensor, f"ragged lists: lengths {listed(map(str, sorted(lengths)))} side by side"
            )
        shape.append(lengths.pop())
        if len(shape) > MAX_DIMENSIONS:
            raise misfit(tensor, f"lists in lists of more than {MAX_DIMENSIONS} dimensions")
        level = list(chain.from_iterable(level))
    if dict in map(type, level):
        raise misfit(tensor, "an object, which is no value")
    if list in map(type, level):
        raise misfit(tensor, "ragged lists: values and lists side by side")
    return level, tuple(shape)


def booleans(leaves: list[Any], kinds: set[type], tensor: Tensor) -> np.ndarray:
    if kinds - {bool}:
        raise misfit(tensor, came(leaves, kinds - {bool}))
    return np.array(leaves, bool)


def integers(leaves: list[Any], kinds: set[type], tensor: Tensor) -> np.ndarray:
    if kinds - {int, float}:
        raise misfit(tensor, came(leaves, kinds - {int, float}))
    if float in kinds:
        fractional = next((leaf for leaf in leaves if int(leaf) != leaf), None)
        if fractional is not None:
            raise misfit(tensor, f"{fractional!r}, which is not whole")
    whole = [int(leaf) for leaf in leaves] if float in kinds else leaves
    low, high = tensor.datatype.range
    if whole and (min(whole) < low or max(whole) > high):
        outside = next(leaf for leaf in whole if not low <= leaf <= high)
        raise misfit(tensor, f"{outside}, which is outside {low}..{high}")
    if float in kinds:
        rounded = (leaf for leaf in leaves if type(leaf) is float and abs(leaf) >= LARGEST_EXACT)
        if (inexact := next(rounded, None)) is not None:
            raise misfit(
                tensor, f"{inexact!r}, written with a fraction or an exponent, which may be rounded"
            )
    return np.array(whole, tensor.datatype.numpy)


def floats(leaves: list[Any], kinds: set[type], tensor: Tensor) -> np.ndarray:
    if kinds - {int, float}:
        raise misfit(tensor, came(leaves, kinds - {int, float}))
    converted = in_range(np.array(leaves, np.float64), tensor)
    if int in kinds:
        lossy = (
            a for a, b in zip(leaves, converted.tolist(), strict=True) if type(a) is int and a != b
        )
        whole = next(lossy, None)
        if whole is not None:
            raise misfit(
                tensor, f"the integer {whole}, which {tensor.datatype.name} cannot hold exactly"
            )
    return converted


def in_range(values: np.ndarray, tensor: Tensor) -> np.ndarray:
    """Floats rounded to the model's precision; what would become infinite is refused."""
    with np.errstate(over="ignore", invalid="ignore"):
        converted = values.astype(tensor.datatype.numpy)
    overflown = np.isinf(converted) & np.isfinite(values)
    if overflown.any():
        raise misfit(tensor, f"{values[overflown].flat[0]!s}, which is out of range")
    return converted


def blobs(leaves: list[Any], kinds: set[type], tensor: Tensor) -> np.ndarray:
    if kinds - {str, bytes}:
        raise misfit(tensor, came(leaves, kinds - {str, bytes}))
    array = np.empty(len(leaves), object)
    array[:] = [leaf.encode() if isinstance(leaf, str) else leaf for leaf in leaves]
    return array


CONVERSIONS: Mapping[Kind, Callable[[list[Any], set[type], Tensor], np.ndarray]] = {
    Kind.BOOLEAN: booleans,
    Kind.INTEGER: integers,
    Kind.FLOAT: floats,
    Kind.BYTES: blobs,
}


def from_array(array: np.ndarray, tensor: Tensor) -> np.ndarray:
    """A NumPy array in the model's datatype; refused where a value would change."""
    wanted = tensor.datatype
    if array.dtype == wanted.numpy:
        return array
    if wanted == BF16 and array.dtype.kind == "V" and array.dtype.itemsize == 2:
        return array.view(ml_dtypes.bfloat16)  # how NumPy stores BF16 in a file: as 2 raw bytes
    kind = array.dtype.kind
    if wanted.kind is Kind.BYTES and kind in "SU":
        return blobs(array.ravel().tolist(), {str}, tensor).reshape(array.shape)
    if wanted.kind is Kind.FLOAT and kind == "f":
        return in_range(array, tensor)
    if wanted.kind in (Kind.INTEGER, Kind.FLOAT) and kind in "iuf":
        return exactly(array, tensor)
    raise misfit(tensor, f"an array of {array.dtype}")


def exactly(array: np.ndarray, tensor: Tensor) -> np.ndarray:
    """The array cast, when the cast changes no value; `!=` also finds what is not a number."""
    with np.errstate(all="ignore"):
        cast = array.astype(tensor.datatype.numpy)
        wide = cast if cast.dtype.kind in "iuf" else cast.astype(np.float64)
        # Comparing int64 with float64 rounds: go back to the array's own type as well.
        changed = (wide.astype(array.dtype) != array) | ((wide < 0) != (array < 0))
        if array.dtype.kind == "f":
            low, high = tensor.datatype.range
            changed |= ~((array >= low) & (array < float(high) + 1))
    if changed.any():
        raise misfit(
            tensor, f"{array[changed].flat[0]!s}, which {tensor.datatype.name} cannot hold exactly"
        )
    return cast


def fitted(part: Part, tensor: Tensor, batching: bool) -> tuple[np.ndarray, bool]:
    """The array with the dimensions that Triton wants; and whether it came as a batch."""
    array, shape = one_array(part, tensor), tensor.shape
    listed_in_json = isinstance(part.value, list)
    if not batching:
        return unbatched(array, tensor), False
    if shape == (1,) and array.ndim == 1 and (listed_in_json or len(array) != 1):
        array = array.reshape(-1, 1)  # of single values, a list is a batch
    if array.ndim == len(shape) + 1 and agrees(array.shape[1:], shape):
        if len(array) == 0:
            raise misfit(tensor, "a batch of 0")
        return array, True
    if agrees(array.shape, shape):
        return array[np.newaxis], False
    if array.ndim == 0 and all(size in (1, -1) for size in shape):
        return array.reshape((1,) * (len(shape) + 1)), False
    raise misfit(tensor, f"the shape {shape_text(array.shape)}")


def unbatched(array: np.ndarray, tensor: Tensor) -> np.ndarray:
    """For a model that Triton does not batch; it may still have a first dimension of its own."""
    shape = tensor.shape
    if agrees(array.shape, shape):
        return array
    if array.ndim == 0 and all(size in (1, -1) for size in shape):
        return array.reshape((1,) * len(shape))
    if array.ndim == len(shape) - 1 and agrees((1, *array.shape), shape):
        return array[np.newaxis]
    raise misfit(tensor, f"the shape {shape_text(array.shape)}")


def agrees(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    return len(shape) == len(wanted) and all(
        b in (-1, a) for a, b in zip(shape, wanted, strict=True)
    )


def shape_text(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]" if shape else "a single value"


def item_text(shape: Sequence[int]) -> str:
    return f"of the shape {shape_text(shape)}" if shape else "a single value"


def came(leaves: Sequence[Any], kinds: set[type]) -> str:
    names = {str: "the text", bytes: "bytes", bool: "the boolean", type(None): "null"}
    leaf = next(leaf for leaf in leaves if type(leaf) in kinds)
    if isinstance(leaf, (bytes, type(None))):
        return names[type(leaf)]
    return f"{names.get(type(leaf), 'the number')} {quoted(str(leaf), 40)}"


def example(tensor: Tensor) -> str:
    """A small value of the datatype and shape, as JSON would hold it."""
    value = orjson.dumps(tensor.datatype.example).decode()
    if tensor.shape == (1,):
        return value
    for _ in tensor.shape:
        value = f"[{value}, …]"
    return value


def misfit(tensor: Tensor, what_came: str) -> DoesNotFit:
    datatype: Datatype = tensor.datatype
    return DoesNotFit(
        f"the input {quoted(tensor.name)} takes {datatype.kind.value} ({datatype.name} "
        f"{shape_text(tensor.shape)}, for example {example(tensor)}); what came is {what_came}"
    )
