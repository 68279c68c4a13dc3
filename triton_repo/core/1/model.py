"""A Python model that runs model.onnx on onnxruntime, for Triton servers without the ONNX backend.

Names, datatypes and shapes come from the configuration, which is checked against the graph; missing
inputs and outputs are completed from the graph. The requests of one `execute` call share a run.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime
import triton_python_backend_utils as pb_utils
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

Tensors = dict[str, npt.NDArray[Any]]

GRAPH = "model.onnx"
PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")

ONNX_TYPES = {
    "TYPE_BOOL": "tensor(bool)",
    "TYPE_UINT8": "tensor(uint8)",
    "TYPE_UINT16": "tensor(uint16)",
    "TYPE_UINT32": "tensor(uint32)",
    "TYPE_UINT64": "tensor(uint64)",
    "TYPE_INT8": "tensor(int8)",
    "TYPE_INT16": "tensor(int16)",
    "TYPE_INT32": "tensor(int32)",
    "TYPE_INT64": "tensor(int64)",
    "TYPE_FP16": "tensor(float16)",
    "TYPE_FP32": "tensor(float)",
    "TYPE_FP64": "tensor(double)",
    "TYPE_STRING": "tensor(string)",
}
TRITON_TYPES = {onnx_type: name for name, onnx_type in ONNX_TYPES.items()}

# The default of Triton's ONNX backend.
DEFAULT_MAX_BATCH_SIZE = 4


class Work(NamedTuple):
    """The position of a request in the call, and its tensors."""

    place: int
    tensors: Tensors


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Add missing inputs or outputs, by the rules of Triton's ONNX backend."""
        declared = config.as_dict()
        if declared["input"] and declared["output"]:
            return config
        session = _session(Path(__file__).with_name(GRAPH), threads=1)
        inputs, outputs = session.get_inputs(), session.get_outputs()
        if declared["max_batch_size"] == 0 and _can_batch([*inputs, *outputs]):
            config.set_max_batch_size(DEFAULT_MAX_BATCH_SIZE)
        batches = declared["max_batch_size"] > 0
        if declared["max_batch_size"] > 1 and "sequence_batching" not in declared:
            config.set_dynamic_batching()
        for tensor in [] if declared["input"] else inputs:
            config.add_input(_described(tensor, batches))
        for tensor in [] if declared["output"] else outputs:
            config.add_output(_described(tensor, batches))
        return config

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self.batches: bool = config["max_batch_size"] > 0
        self.input_names: list[str] = [tensor["name"] for tensor in config["input"]]
        self.output_names: list[str] = [tensor["name"] for tensor in config["output"]]
        path = Path(args["model_repository"]) / args["model_version"] / GRAPH
        self.session = _session(path, _threads(config))
        _check("input", config["input"], self.session.get_inputs(), self.batches)
        _check("output", config["output"], self.session.get_outputs(), self.batches)
        _check_complete(self.session.get_inputs(), self.input_names)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run requests together if their shapes agree apart from the batch dimension."""
        groups: dict[Any, list[Work]] = defaultdict(list)
        for index, request in enumerate(requests):
            tensors = self._tensors(request)
            groups[self._kind(tensors, index)].append(Work(index, tensors))
        responses: list[Any] = [None] * len(requests)
        for group in groups.values():
            for work, response in zip(group, self._run_together(group), strict=True):
                responses[work.place] = response
        return responses

    def _tensors(self, request: Any) -> Tensors:
        inputs = {
            name: pb_utils.get_input_tensor_by_name(request, name) for name in self.input_names
        }
        return {
            name: _for_onnx(tensor.as_numpy())
            for name, tensor in inputs.items()
            if tensor is not None
        }

    def _kind(self, tensors: Tensors, index: int) -> Any:
        # Requests of the same kind can be concatenated, which needs a batch dimension.
        if not self.batches:
            return index
        return tuple((name, values.shape[1:]) for name, values in tensors.items())

    def _run_together(self, group: list[Work]) -> list[Any]:
        if len(group) == 1:
            return [self._run(group[0].tensors)]
        joined = {
            name: np.concatenate([work.tensors[name] for work in group])
            for name in group[0].tensors
        }
        try:
            outputs = self.session.run(self.output_names, joined)
        except Exception as error:  # noqa: BLE001 - onnxruntime's errors share no other base
            # The cause can be a single request, such as an index out of range.
            pb_utils.Logger.log_verbose(f"batched run failed, running each request alone: {error}")
            return [self._run(work.tensors) for work in group]
        sizes = [len(next(iter(work.tensors.values()))) for work in group]
        ends = np.cumsum(sizes)[:-1]
        shares = zip(*(np.split(output, ends) for output in outputs), strict=True)
        return [self._response(share) for share in shares]

    def _run(self, tensors: Tensors) -> Any:
        try:
            return self._response(self.session.run(self.output_names, tensors))
        except Exception as error:  # noqa: BLE001 - onnxruntime's errors share no other base
            return pb_utils.InferenceResponse(error=_failure(error))

    def _response(self, outputs: Any) -> Any:
        tensors = [
            pb_utils.Tensor(name, _for_triton(values))
            for name, values in zip(self.output_names, outputs, strict=True)
        ]
        return pb_utils.InferenceResponse(tensors)


def _for_onnx(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    # Strings are bytes in Triton, but str in onnxruntime.
    if values.dtype != np.object_:
        return values
    texts = [text.decode(errors="replace") for text in values.ravel()]
    return np.array(texts, dtype=np.object_).reshape(values.shape)


def _for_triton(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if values.dtype != np.object_:
        return np.ascontiguousarray(values)
    texts = [text.encode() for text in values.ravel()]
    return np.array(texts, dtype=np.object_).reshape(values.shape)


def _failure(error: Exception) -> Any:
    # onnxruntime's message contains node names and source files, so it goes only to the log.
    pb_utils.Logger.log_error(f"the network failed: {error}")
    if isinstance(error, InvalidArgument):
        message = "the network does not accept these values"
        return pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG)
    return pb_utils.TritonError("the network failed", pb_utils.TritonError.INTERNAL)


def _threads(config: dict[str, Any]) -> int:
    text = config.get("parameters", {}).get("intra_op_threads", {}).get("string_value", "1")
    if not text.isdecimal() or int(text) < 1:
        raise pb_utils.TritonModelException(
            f"intra_op_threads must be a positive integer, not {text!r}"
        )
    return int(text)


def _session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    if not path.is_file():
        raise pb_utils.TritonModelException(
            f"{GRAPH} not found in version folder {path.parent.name}"
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Waiting threads that spin would take CPU time from the other models.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    available = onnxruntime.get_available_providers()
    providers = [name for name in PROVIDERS if name in available]
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # noqa: BLE001 - onnxruntime's errors share no other base
        pb_utils.Logger.log_error(f"onnxruntime cannot load the graph: {error}")
        raise pb_utils.TritonModelException(
            f"onnxruntime {onnxruntime.__version__} cannot load {GRAPH}; see the log for the reason"
        ) from None


def _can_batch(in_graph: list[Any]) -> bool:
    # The first dimension of every tensor must be dynamic.
    return all(tensor.shape and not isinstance(tensor.shape[0], int) for tensor in in_graph)


def _described(tensor: Any, batches: bool) -> dict[str, Any]:
    if tensor.type not in TRITON_TYPES:
        raise pb_utils.TritonModelException(
            f"{tensor.name} is {tensor.type} in the ONNX graph, which Triton does not support"
        )
    dims = [size if isinstance(size, int) else -1 for size in tensor.shape]
    return {
        "name": tensor.name,
        "data_type": TRITON_TYPES[tensor.type],
        "dims": dims[1:] if batches else dims,
    }


def _check(direction: str, declared: list[dict[str, Any]], in_graph: Any, batches: bool) -> None:
    # A mismatch must fail the load instead of the first request.
    graph = {tensor.name: tensor for tensor in in_graph}
    for tensor in declared:
        name = tensor["name"]
        if name not in graph:
            raise pb_utils.TritonModelException(
                f"the ONNX graph has no {direction} {name}; it has {', '.join(graph)}"
            )
        actual_type = graph[name].type
        if ONNX_TYPES.get(tensor["data_type"]) != actual_type:
            raise pb_utils.TritonModelException(
                f"the {direction} {name} is {tensor['data_type']} in the configuration, "
                f"but {actual_type} in the ONNX graph"
            )
        dims = [int(size) for size in tensor["dims"]]
        shape = [-1, *dims] if batches else dims
        if not _agree(shape, graph[name].shape):
            raise pb_utils.TritonModelException(
                f"the {direction} {name} has the shape {shape} in the configuration, "
                f"including the batch dimension, but {graph[name].shape} in the ONNX graph"
            )


def _agree(declared: list[int], in_graph: list[int | str | None]) -> bool:
    # A dynamic dimension of the graph matches any size, a fixed one only its own.
    return len(declared) == len(in_graph) and all(
        not isinstance(actual, int) or actual == expected
        for expected, actual in zip(declared, in_graph, strict=True)
    )


def _check_complete(in_graph: Any, declared: list[str]) -> None:
    missing = [tensor.name for tensor in in_graph if tensor.name not in declared]
    if missing:
        raise pb_utils.TritonModelException(
            f"the ONNX graph requires the input {missing[0]}, which the configuration does not declare"
        )
