"""Triton's ONNX Runtime backend as a Python-based backend, for servers without the C++ one.

It follows the conventions of the C++ backend: file names, completion of the config, parameters and execution
accelerators. The requests of one `execute` call share a run.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime
import triton_python_backend_utils as pb_utils
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from .onnx_config import (
    Graph,
    ModelConfig,
    check_features,
    check_graph,
    complete_config,
    list_control_inputs,
    list_names,
)
from .onnx_session import (
    DEFAULT_FILENAME,
    GRAPH_LEVELS,
    create_options,
    create_run_options,
    create_session,
    explain_error,
    find_model_file,
    register_operators,
    warn_of_accelerators,
)

Array = npt.NDArray[Any]


Work: TypeAlias = (
    "tuple[int, dict[str, Array]]"  # the position of a request in the call, and its tensors
)


class TritonPythonModel:
    """A model whose version folder contains an ONNX file."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Add missing inputs, outputs and batching, by the rules of the C++ backend."""
        settings: ModelConfig = config.as_dict()
        check_features(settings)
        if not (settings["input"] and settings["output"]):
            name = Path(settings["default_model_filename"] or DEFAULT_FILENAME).name
            path = find_model_file(Path(pb_utils.get_model_dir()) / name)
            options = onnxruntime.SessionOptions()
            options.graph_optimization_level = GRAPH_LEVELS[2]  # the graph is only read
            register_operators(options, settings)
            graph = Graph(create_session(path, options))
            complete_config(settings, graph)
            check_graph(settings, graph)
        return config

    def initialize(self, args: dict[str, str]) -> None:
        config: ModelConfig = json.loads(args["model_config"])
        check_features(config)
        folder = Path(args["model_repository"]) / args["model_version"]
        path = find_model_file(folder / (config["default_model_filename"] or DEFAULT_FILENAME))
        warn_of_accelerators(config, args["model_instance_kind"])
        self._session = create_session(path, create_options(config))
        self._run_options = create_run_options(config)
        graph = Graph(self._session)
        check_graph(config, graph)
        self._is_batching: bool = config["max_batch_size"] > 0
        self._input_names = [*list_names(config["input"]), *list_control_inputs(config)]
        self._output_names = list_names(config["output"])
        self._scalars = {tensor.name for tensor in graph.all_inputs if not tensor.shape}

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run requests together if their shapes agree apart from the batch dimension."""
        responses: list[Any] = [None] * len(requests)
        groups: dict[Any, list[Work]] = defaultdict(list)
        for place, request in enumerate(requests):
            try:
                tensors = self._read_tensors(request)
            except UnicodeDecodeError:
                responses[place] = refuse_request("a string in the request is not valid UTF-8")
            else:
                groups[self._group_key(tensors, place)].append((place, tensors))
        for group in groups.values():
            for (place, _), response in zip(group, self._run_together(group), strict=True):
                responses[place] = response
        return responses

    def _read_tensors(self, request: Any) -> dict[str, Array]:
        tensors = {}
        for name in self._input_names:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is not None:
                values = convert_strings(tensor.as_numpy(), bytes.decode)
                # Triton's shape of a scalar is [1].
                tensors[name] = values.reshape(()) if name in self._scalars else values
        return tensors

    def _group_key(self, tensors: dict[str, Array], place: int) -> Any:
        # Without a batch dimension, requests cannot be concatenated.
        if not self._is_batching:
            return place
        return tuple((name, values.shape[1:]) for name, values in tensors.items())

    def _run_together(self, group: list[Work]) -> list[Any]:
        requests = [tensors for _, tensors in group]
        if len(requests) == 1:
            return [self._run(requests[0])]
        joined = {
            name: np.concatenate([tensors[name] for tensors in requests]) for name in requests[0]
        }
        sizes = [len(next(iter(tensors.values()))) for tensors in requests]
        try:
            outputs = self._session.run(self._output_names, joined, self._run_options)
            shares = [split_rows(output, sizes) for output in outputs]
        except Exception as error:  # noqa: BLE001 - onnxruntime's errors share no other base
            # The cause can be a single request, such as an index out of range.
            pb_utils.Logger.log_verbose(f"batched run failed, running each request alone: {error}")
            return [self._run(tensors) for tensors in requests]
        return [self._create_response(share) for share in zip(*shares, strict=True)]

    def _run(self, tensors: dict[str, Array]) -> Any:
        try:
            outputs = self._session.run(self._output_names, tensors, self._run_options)
        except InvalidArgument as error:
            return refuse_request(f"the model does not accept these values: {explain_error(error)}")
        except Exception as error:  # noqa: BLE001 - onnxruntime's errors share no other base
            pb_utils.Logger.log_error(f"the model failed: {error}")
            message = f"the model failed: {explain_error(error)}"
            failure = pb_utils.TritonError(message, pb_utils.TritonError.INTERNAL)
            return pb_utils.InferenceResponse(error=failure)
        return self._create_response(outputs)

    def _create_response(self, outputs: Iterable[Any]) -> Any:
        tensors = [
            pb_utils.Tensor(name, convert_strings(np.atleast_1d(values), str.encode))
            for name, values in zip(self._output_names, outputs, strict=True)
        ]
        return pb_utils.InferenceResponse(tensors)


def refuse_request(message: str) -> Any:
    error = pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG)
    return pb_utils.InferenceResponse(error=error)


def convert_strings(values: Array, convert: Callable[[Any], Any]) -> Array:
    """Convert the bytes of Triton's strings for onnxruntime, or back. Raises `UnicodeDecodeError`."""
    if values.dtype != np.object_:
        return np.ascontiguousarray(values)
    texts = np.empty(values.size, np.object_)
    texts[:] = [convert(text) for text in values.ravel()]
    return texts.reshape(values.shape)


def split_rows(values: Array, sizes: Sequence[int]) -> list[Array]:
    """Split the output of a batch. Raises `ValueError` if it has another number of rows."""
    if len(values) != sum(sizes):
        raise ValueError(f"an output has {len(values)} rows for a batch of {sum(sizes)}")
    return np.split(values, np.cumsum(sizes)[:-1])
