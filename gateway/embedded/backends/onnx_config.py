"""The config of a model with an ONNX graph: its completion, its comparison with the graph, its parameters."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import onnxruntime
import triton_python_backend_utils as pb_utils

ModelConfig = dict[str, Any]  # Triton's message as JSON

DEFAULT_MAX_BATCH_SIZE: Final = 4
# `--backend-config=onnxruntime,…`, which Triton does not pass to Python-based backends.
SETTINGS_VARIABLE: Final = "TRITON_GATEWAY_ONNXRUNTIME_SETTINGS"
MAX_BATCH_SIZE_SETTING: Final = "default-max-batch-size"
DYNAMIC: Final = -1

TRITON_TYPES: Final = {
    "tensor(bool)": "TYPE_BOOL",
    "tensor(uint8)": "TYPE_UINT8",
    "tensor(uint16)": "TYPE_UINT16",
    "tensor(uint32)": "TYPE_UINT32",
    "tensor(uint64)": "TYPE_UINT64",
    "tensor(int8)": "TYPE_INT8",
    "tensor(int16)": "TYPE_INT16",
    "tensor(int32)": "TYPE_INT32",
    "tensor(int64)": "TYPE_INT64",
    "tensor(float16)": "TYPE_FP16",
    "tensor(float)": "TYPE_FP32",
    "tensor(double)": "TYPE_FP64",
    "tensor(string)": "TYPE_STRING",
}
# Advice for types that Triton or its Python backend cannot carry, by the beginning of the type's name.
TYPE_ADVICE: Final = {
    "tensor(": "export the model with FP16 or FP32 in its place",
    "seq(map(": "if scikit-learn's converter wrote it, convert again with the option zipmap=False",
    "": "declare only the tensors in config.pbtxt, or export the model without it",
}
BOOLEANS: Final = {"1": True, "true": True, "0": False, "false": False}


def fail(message: str) -> NoReturn:
    raise pb_utils.TritonModelException(message)


@dataclass(frozen=True)
class GraphTensor:
    """An input or output of an ONNX graph; dynamic dimensions are -1."""

    name: str
    type: str
    shape: tuple[int, ...]


class Graph:
    """The inputs and outputs of an ONNX graph."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self.inputs = [describe_tensor(tensor) for tensor in session.get_inputs()]
        self.outputs = [describe_tensor(tensor) for tensor in session.get_outputs()]
        defaults = session.get_overridable_initializers()
        self.optional_inputs = [describe_tensor(tensor) for tensor in defaults]

    @property
    def all_inputs(self) -> list[GraphTensor]:
        return [*self.inputs, *self.optional_inputs]

    def can_batch(self) -> bool:
        """Return whether the first dimension of every input and output is dynamic."""
        tensors = (each for each in [*self.inputs, *self.outputs] if each.type in TRITON_TYPES)
        return all(tensor.shape[:1] == (DYNAMIC,) for tensor in tensors)


def describe_tensor(tensor: Any) -> GraphTensor:
    sizes = (size if isinstance(size, int) and size >= 0 else DYNAMIC for size in tensor.shape)
    return GraphTensor(tensor.name, tensor.type, tuple(sizes))


def complete_config(config: ModelConfig, graph: Graph) -> None:
    """Add missing declarations to the config; inputs and outputs are added all or not at all."""
    if graph.can_batch():
        config["max_batch_size"] = config["max_batch_size"] or read_default_max_batch_size()
        if config["max_batch_size"] > 1 and "sequence_batching" not in config:
            config.setdefault("dynamic_batching", {})
    elif config["max_batch_size"] > 0:
        fail(
            f"max_batch_size is {config['max_batch_size']}, but the ONNX graph cannot batch: the first "
            "dimension of an input or output is fixed; set max_batch_size to 0, or export it as dynamic"
        )
    is_batching = config["max_batch_size"] > 0
    controls = list_control_inputs(config)
    if not config["input"]:
        inputs = [tensor for tensor in graph.inputs if tensor.name not in controls]
        config["input"] = [declare_tensor("input", tensor, is_batching) for tensor in inputs]
    if not config["output"]:
        config["output"] = [
            declare_tensor("output", tensor, is_batching) for tensor in graph.outputs
        ]


def read_default_max_batch_size() -> int:
    settings = dict(
        setting.split("=", 1) for setting in os.environ.get(SETTINGS_VARIABLE, "").splitlines()
    )
    return read_count(settings, MAX_BATCH_SIZE_SETTING, DEFAULT_MAX_BATCH_SIZE)


def declare_tensor(direction: str, tensor: GraphTensor, is_batching: bool) -> dict[str, Any]:
    """Return the entry of the config. A scalar of Triton has the shape [1]."""
    if tensor.type not in TRITON_TYPES:
        advice = next(TYPE_ADVICE[start] for start in TYPE_ADVICE if tensor.type.startswith(start))
        fail(
            f"the {direction} {tensor.name} is a {tensor.type}, which the onnxruntime backend of the "
            f"embedded Triton does not support; {advice}"
        )
    dims = list(tensor.shape[1:] if is_batching else tensor.shape)
    reshape: ModelConfig = {"reshape": {"shape": []}} if is_batching and not dims else {}
    return {
        "name": tensor.name,
        "data_type": TRITON_TYPES[tensor.type],
        "dims": dims or [1],
        **reshape,
    }


def check_features(config: ModelConfig) -> None:
    """Refuse features that only Triton's C++ backend has. Raises `TritonModelException`."""
    ragged = any(tensor.get("allow_ragged_batch") for tensor in config["input"])
    unsupported = {
        "ragged batches (allow_ragged_batch, batch_input, batch_output)": ragged
        or config.get("batch_input")
        or config.get("batch_output"),
        "implicit state (sequence_batching.state)": config.get("sequence_batching", {}).get(
            "state"
        ),
        "the decoupled mode": config.get("model_transaction_policy", {}).get("decoupled"),
    }
    for feature, is_used in unsupported.items():
        if is_used:
            fail(
                f"the onnxruntime backend of the embedded Triton does not support {feature}; "
                "serve this model with the official Triton image"
            )


def check_graph(config: ModelConfig, graph: Graph) -> None:
    """Compare the config with the graph, so that a mismatch fails the load and not the first request."""
    is_batching = config["max_batch_size"] > 0
    check_tensors("input", config["input"], graph.all_inputs, is_batching)
    check_tensors("output", config["output"], graph.outputs, is_batching)
    declared = {*list_names(config["input"]), *list_control_inputs(config)}
    if missing := [tensor.name for tensor in graph.inputs if tensor.name not in declared]:
        fail(f"the ONNX graph requires the input {missing[0]}, which the config does not declare")


def check_tensors(
    direction: str,
    declared: Iterable[Mapping[str, Any]],
    in_graph: Sequence[GraphTensor],
    is_batching: bool,
) -> None:
    by_name = {tensor.name: tensor for tensor in in_graph}
    for entry in declared:
        name = entry["name"]
        tensor = by_name.get(name)
        if tensor is None:
            fail(f"the ONNX graph has no {direction} {name}; it has {', '.join(by_name)}")
        if TRITON_TYPES.get(tensor.type) != entry["data_type"]:
            fail(
                f"the {direction} {name} is {entry['data_type']} in the config, but {tensor.type} in the "
                "ONNX graph"
            )
        dims = tuple(map(int, entry.get("reshape", entry).get("shape", entry["dims"])))
        shape = (DYNAMIC, *dims) if is_batching else dims
        if not is_same_shape(shape, tensor.shape):
            batch = " including the batch dimension" if is_batching else ""
            fail(
                f"the {direction} {name} has the shape {list(shape)}{batch} in the config, but "
                f"{list(tensor.shape)} in the ONNX graph"
            )


def is_same_shape(declared: tuple[int, ...], in_graph: tuple[int, ...]) -> bool:
    """Compare shapes. A dynamic dimension of the graph allows any size; a scalar is declared as [1]."""
    if not in_graph:
        return set(declared) <= {1}
    return len(declared) == len(in_graph) and all(
        actual in (DYNAMIC, expected) for expected, actual in zip(declared, in_graph, strict=True)
    )


def list_names(tensors: Iterable[Mapping[str, Any]]) -> list[str]:
    return [tensor["name"] for tensor in tensors]


def list_control_inputs(config: ModelConfig) -> list[str]:
    return list_names(config.get("sequence_batching", {}).get("control_input", []))


def read_parameters(config: ModelConfig) -> dict[str, str]:
    return {
        name: value["string_value"].strip() for name, value in config.get("parameters", {}).items()
    }


def read_count(parameters: Mapping[str, str], name: str, default: int) -> int:
    text = parameters.get(name, str(default))
    if not text.isdecimal():
        fail(f"{name} must be a number from 0, not {text!r}")
    return int(text)


def read_boolean(parameters: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = parameters.get(name, str(int(default)))
    if text.lower() not in BOOLEANS:
        fail(f"{name} must be 0 or 1, not {text!r}")
    return BOOLEANS[text.lower()]
