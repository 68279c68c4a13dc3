"""A model's signature, built from Triton's metadata and config of the model. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np

from gateway.callers import Priority
from gateway.errors import ModelFault
from gateway.messages import quote_text
from gateway.tensors.dtypes import Datatype, DatatypeKind, parse_datatype

MAX_DIMENSIONS = 64  # as in NumPy
MAX_TENSORS = 4096  # the limit of the inputs, and of the outputs
MAX_INPUT_EXAMPLES: Final = 8
IMAGE_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
JsonObject = Mapping[str, Any]


class PixelScale(Enum):
    """The range that the values 0..255 of an image's pixels are mapped to."""

    NONE = "none"  # they stay as they are
    ZERO_TO_ONE = "0..1"
    MINUS_ONE_TO_ONE = "-1..1"


class ChannelLayout(str, Enum):
    CHANNELS_FIRST = "NCHW"
    CHANNELS_LAST = "NHWC"
    GREY = "NHW"


@dataclass(frozen=True)
class ImageSpec:
    """The target of decoding an image for an input; -1 keeps the image's own height or width."""

    layout: ChannelLayout
    mode: str
    height: int
    width: int
    keeps_depth: bool = False  # pixels of 16 bits are not reduced to 8


@dataclass(frozen=True)
class TensorSpec:
    """An input or output. `shape` is without Triton's batch dimension; -1 is any size."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    is_optional: bool = False
    layout: ChannelLayout | None = None
    content_type: str = ""
    scale: PixelScale = PixelScale.NONE
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    has_labels: bool = False
    examples: tuple[str, ...] = ()  # texts, JSON, or files as data: URIs
    # The number of classes to return, for requests that do not ask for another number.
    classification: int = 0

    @cached_property
    def is_numeric(self) -> bool:
        return self.datatype.kind in (DatatypeKind.INTEGER, DatatypeKind.FLOAT)

    @cached_property
    def can_be_single(self) -> bool:
        """Return whether the shape allows a tensor of one value."""
        return all(size in (1, -1) for size in self.shape)

    @property
    def can_classify(self) -> bool:
        # tritonserver 2.51 crashes on the classification of BYTES and of an output without elements.
        # A dimension of any size makes such an output possible.
        return self.is_numeric and -1 not in self.shape

    @property
    def has_class_labels(self) -> bool:
        return self.has_labels and self.can_classify

    @cached_property
    def image_spec(self) -> ImageSpec | None:
        """The layout and size of an image for this input, or None if the shape is not an image shape.

        A model without batching may have a batch dimension of its own, e.g. [1, 3, 224, 224].
        """
        if not self.is_numeric:
            return None
        shape = self.shape[1:] if len(self.shape) == 4 and self.shape[0] in (-1, 1) else self.shape
        keeps_depth = self.datatype.numpy_dtype.itemsize > 1
        if len(shape) == 2 and min(shape) not in (0, 1, 2, 3, 4):
            return ImageSpec(ChannelLayout.GREY, "L", *shape, keeps_depth)
        if len(shape) != 3:
            return None
        layout = self.layout or find_channel_layout(shape)
        if layout is ChannelLayout.CHANNELS_FIRST:
            channels, height, width = shape
        elif layout is ChannelLayout.CHANNELS_LAST:
            height, width, channels = shape
        else:
            return None
        # The config says that a dimension of any size has the channels.
        mode = IMAGE_MODES.get(3 if channels == -1 else channels)
        return None if mode is None else ImageSpec(layout, mode, height, width, keeps_depth)

    @cached_property
    def takes_file_bytes(self) -> bool:
        """Return whether the elements are the bytes of a file, as for decoders on a GPU and raw audio."""
        return self.datatype.name in ("UINT8", "INT8") and len(self.shape) == 1


def find_channel_layout(shape: tuple[int, ...]) -> ChannelLayout | None:
    """Return where the shape has 1, 3 or 4 channels; None if nowhere."""
    first = shape[0] in IMAGE_MODES
    last = shape[2] in IMAGE_MODES
    if last and (not first or shape[0] == 1 < shape[2]):
        return ChannelLayout.CHANNELS_LAST
    return ChannelLayout.CHANNELS_FIRST if first else None


@dataclass(frozen=True)
class Signature:
    """The inputs, outputs and properties of a model."""

    model: str
    version: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    max_batch_size: int = 0
    versions: tuple[str, ...] = ()
    platform: str = ""
    is_decoupled: bool = False
    parameters: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    description: str = ""
    steps: frozenset[str] = frozenset()  # the models of an ensemble
    priority: Priority | None = None  # requests of callers without a priority get it

    @cached_property
    def supports_batching(self) -> bool:
        # Triton adds a first dimension, which `shape` omits, to all tensors of such a model.
        return self.max_batch_size > 0

    @property
    def has_batch_dimension(self) -> bool:
        """True if all tensors have a batch dimension: Triton's, or a first dimension of any size."""
        tensors = [*self.inputs.values(), *self.outputs.values()]
        return self.supports_batching or all(len(t.shape) > 1 and t.shape[0] == -1 for t in tensors)

    def count_inferences(self, rows: int) -> int:
        """Return how many inferences a request is: one for each row, or for each batch of rows."""
        if not self.has_batch_dimension:
            return rows
        return math.ceil(rows / self.max_batch_size) if self.supports_batching else 1

    @cached_property
    def default_class_counts(self) -> Mapping[str, int]:
        counts = {name: tensor.classification for name, tensor in self.outputs.items()}
        return {name: count for name, count in counts.items() if count}

    @cached_property
    def is_cancellable(self) -> bool:
        # The inference is cancelled in Triton when the client disconnects.
        return self.has_flag("gateway.cancellable")

    def has_flag(self, parameter: str, value: str = "true") -> bool:
        return self.parameters.get(parameter, "").strip().lower() == value

    @cached_property
    def required_inputs(self) -> list[TensorSpec]:
        return [tensor for tensor in self.inputs.values() if not tensor.is_optional]

    @cached_property
    def unnamed_input(self) -> TensorSpec | None:
        """The input of a value without a name: the only required one, or the only one."""
        tensors = self.required_inputs or list(self.inputs.values())
        return tensors[0] if len(tensors) == 1 else None

    @cached_property
    def takes_bytes_alone(self) -> bool:
        """Return whether a body without a type is the value of an input of BYTES."""
        tensor = self.unnamed_input
        return tensor is not None and tensor.datatype.kind is DatatypeKind.BYTES

    @cached_property
    def only_bytes_input(self) -> TensorSpec | None:
        """The input that takes a text or a file without a name as its only element, if there is one."""
        tensor = self.unnamed_input
        is_single = tensor is not None and tensor.can_be_single
        return tensor if self.takes_bytes_alone and is_single else None

    @cached_property
    def accepts_only_bytes(self) -> bool:
        return all(tensor.datatype.kind is DatatypeKind.BYTES for tensor in self.inputs.values())

    @cached_property
    def takes_any_file(self) -> bool:
        """Return whether the bytes of a body are a value, whatever type they have."""
        tensor = self.unnamed_input
        return self.accepts_only_bytes or (tensor is not None and tensor.takes_file_bytes)

    @cached_property
    def is_splittable(self) -> bool:
        # A larger batch than the maximum is sent in parts.
        return not self.has_flag("gateway.split", "false")

    @cached_property
    def accepts_images(self) -> bool:
        return any(tensor.image_spec is not None for tensor in self.inputs.values())


# Hints: parameters of the model's config that say more than the config itself.


def parse_examples(text: str) -> tuple[str, ...]:
    examples = json.loads(text)
    is_list = isinstance(examples, list) and all(isinstance(each, str) for each in examples)
    if not is_list or len(examples) > MAX_INPUT_EXAMPLES:
        raise ValueError
    return tuple(examples)


def parse_channel_values(text: str) -> tuple[float, ...]:
    """Parse one value per channel, such as `0.485,0.456,0.406`. Raises if a pixel would become infinite."""
    values = tuple(float(part) for part in text.split(",") if part.strip())
    if not np.isfinite(values).all() or np.any(np.abs(values) > np.finfo(np.float32).max):
        raise ValueError
    return values


def parse_channel_divisors(text: str) -> tuple[float, ...]:
    values = parse_channel_values(text)
    with np.errstate(all="ignore"):
        if not np.isfinite(np.float32(255) / np.array(values, np.float32)).all():
            raise ValueError
    return values


class Hint(NamedTuple):
    """The form of a hint, and the function that parses it or raises `ValueError` or `KeyError`."""

    expected: str
    parse: Callable[[str], Any] = str
    pattern: str = ".*"


# By the names of the fields that they set: `gateway.FIELD` and `gateway.FIELD.TENSOR`.
MODEL_HINTS: Final = {
    "title": Hint("a text of at most 100 characters", pattern=".{1,100}"),
    "description": Hint("a text of at most 200 characters", pattern=".{1,200}"),
    "priority": Hint(f"one of {', '.join(Priority.__members__)}", Priority.__getitem__),
}
TENSOR_HINTS: Final = {
    "content_type": Hint("a media type", pattern=r"[!-~]{1,127}(?:; ?[ -~]{1,127})?"),
    "scale": Hint(f"one of {', '.join(scale.value for scale in PixelScale)}", PixelScale),
    "mean": Hint("a list of finite numbers", parse_channel_values),
    "std": Hint("a list of valid divisors", parse_channel_divisors),
    "classification": Hint("a number of classes", int, "[1-9][0-9]{0,8}"),
    "examples": Hint(f"a JSON list of at most {MAX_INPUT_EXAMPLES} strings", parse_examples),
}


def read_hints(
    hints: Mapping[str, Hint], parameters: Mapping[str, str], tensor_name: str = ""
) -> dict[str, Any]:
    """Return the values of the hints that are set. Raises `ModelFault`."""
    suffix = f".{tensor_name}" if tensor_name else ""
    values = {}
    for name, hint in hints.items():
        key = f"gateway.{name}{suffix}"
        text = parameters.get(key, "").strip()
        if not text:
            continue
        try:
            if not re.fullmatch(hint.pattern, text, re.DOTALL):
                raise ValueError
            values[name] = hint.parse(text)
        except (ValueError, KeyError, RecursionError):
            raise ModelFault(
                f"the model's config has {key} = {quote_text(text)}, which is not {hint.expected}"
            ) from None
    return values


def build_signature(metadata: JsonObject, config: JsonObject, version: str = "") -> Signature:
    """Combine `GET /v2/models/M` and `GET /v2/models/M/config` (Model Metadata, Model Configuration)."""
    parameters = {
        key: str(value.get("string_value", ""))
        for key, value in config.get("parameters", {}).items()
    }
    max_batch_size = int(config.get("max_batch_size", 0))

    def tensors(side: str) -> dict[str, TensorSpec]:
        if len(metadata.get(f"{side}s", ())) > MAX_TENSORS:
            raise ModelFault(f"the model has more than {MAX_TENSORS} {side}s")
        configured = {entry["name"]: entry for entry in config.get(side, ())}
        return {
            entry["name"]: build_tensor_spec(
                entry,
                configured.get(entry["name"], {}),
                parameters,
                supports_batching=max_batch_size > 0,
            )
            for entry in metadata.get(f"{side}s", ())
        }

    outputs = tensors("output")
    for output in outputs.values():
        if output.classification and not output.can_classify:
            raise ModelFault(
                f"the model's config has gateway.classification.{output.name}, but the output is not numeric "
                "or not of a fixed shape"
            )
    return Signature(
        model=metadata["name"],
        version=version,
        inputs=tensors("input"),
        outputs=outputs,
        max_batch_size=max_batch_size,
        versions=tuple(metadata.get("versions", ())),
        platform=str(metadata.get("platform") or config.get("backend") or ""),
        is_decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
        parameters=parameters,
        steps=find_ensemble_steps(config),
        **read_hints(MODEL_HINTS, parameters),
    )


def build_tensor_spec(
    metadata: JsonObject,
    config: JsonObject,
    parameters: Mapping[str, str],
    *,
    supports_batching: bool,
) -> TensorSpec:
    name = metadata["name"]
    shape = tuple(int(size) for size in metadata["shape"])
    if len(shape) > MAX_DIMENSIONS:
        raise ModelFault(
            f"tensor {quote_text(name)} has {len(shape)} dimensions; the gateway supports {MAX_DIMENSIONS}"
        )
    layouts = {
        "FORMAT_NCHW": ChannelLayout.CHANNELS_FIRST,
        "FORMAT_NHWC": ChannelLayout.CHANNELS_LAST,
    }

    return TensorSpec(
        name=name,
        datatype=parse_datatype(metadata["datatype"]),
        shape=shape[1:] if supports_batching else shape,
        is_optional=bool(config.get("optional", False)),
        layout=layouts.get(config.get("format", "")),
        has_labels=bool(config.get("label_filename")),
        **read_hints(TENSOR_HINTS, parameters, name),
    )


def find_ensemble_steps(config: Any) -> frozenset[str]:
    """Return the models that are steps of an ensemble, by its config; none for other models."""
    try:
        steps = config.get("ensemble_scheduling", {}).get("step", ())
        return frozenset(str(step.get("model_name", "")) for step in steps)
    except (AttributeError, TypeError):
        # Triton does not describe a model like this.
        return frozenset()
