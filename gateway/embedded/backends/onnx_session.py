"""Sessions of onnxruntime with the options and execution providers of a model's config."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final

import onnxruntime
import triton_python_backend_utils as pb_utils
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidProtobuf

from .onnx_config import ModelConfig, read_boolean, read_count, read_parameters
from .onnx_errors import explain_error, fail

DEFAULT_FILENAME: Final = "model.onnx"
LFS_POINTER: Final = b"version https://git-lfs"
CUDA: Final = "CUDAExecutionProvider"
CPU: Final = "CPUExecutionProvider"
TENSORRT: Final = "TensorrtExecutionProvider"
GPU_ACCELERATORS: Final = {"tensorrt": TENSORRT, "cuda": CUDA}
CPU_ACCELERATORS: Final = {"openvino": "OpenVINOExecutionProvider"}
# Parameters of the accelerator "tensorrt" that have other names in ONNX Runtime.
TENSORRT_OPTIONS: Final = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
TENSORRT_PRECISIONS: Final[dict[str, dict[str, str]]] = {
    "FP32": {},
    "FP16": {"trt_fp16_enable": "1"},
    "INT8": {"trt_int8_enable": "1"},
}
# Parameters of the model that are options of CUDA; where they are numbers, the values that these stand for.
CUDA_PARAMETERS: Final[dict[str, tuple[str, ...]]] = {
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
    "gpu_mem_limit": (),
    "do_copy_in_default_stream": (),
}
GRAPH_LEVELS: Final = {
    -1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    0: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
ARENA_SHRINKAGE: Final = "memory.enable_memory_arena_shrinkage"


def find_model_file(path: Path) -> Path:
    """Return the ONNX file itself: of a model with its weights in a folder, `FOLDER/model.onnx`."""
    if path.is_dir():
        path /= DEFAULT_FILENAME
    if not path.is_file():
        fail(f"{path.name} not found in the folder of version {path.parent.name}")
    return path.resolve()  # external weights are beside the file, and not beside a link to it


def create_session(
    path: Path, options: onnxruntime.SessionOptions, providers: list[Any]
) -> onnxruntime.InferenceSession:
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=providers)
    except InvalidProtobuf:
        with path.open("rb") as file:
            is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
        advice = "a pointer of Git LFS: run `git lfs pull`" if is_pointer else "or it is incomplete"
        fail(f"{path.name} is not an ONNX file, {advice}")
    except Exception as error:  # noqa: BLE001 - onnxruntime's errors share no other base
        pb_utils.Logger.log_verbose(f"onnxruntime cannot load {path}: {error}")
        fail(
            f"onnxruntime {onnxruntime.__version__} cannot load {path.name}: {explain_error(error)}"
        )


def create_options(config: ModelConfig) -> onnxruntime.SessionOptions:
    parameters = read_parameters(config)
    options = onnxruntime.SessionOptions()
    level = int(config.get("optimization", {}).get("graph", {}).get("level", 0))
    options.graph_optimization_level = GRAPH_LEVELS.get(level, GRAPH_LEVELS[0])
    # 0: the number of cores. Waiting threads that spin would take CPU time from the other models.
    options.intra_op_num_threads = read_count(parameters, "intra_op_thread_count", 0)
    options.inter_op_num_threads = read_count(parameters, "inter_op_thread_count", 0)
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    if read_boolean(parameters, "execution_mode", default=False):
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    options.enable_cpu_mem_arena = read_boolean(parameters, "enable_mem_arena", default=True)
    options.enable_mem_pattern = read_boolean(parameters, "enable_mem_pattern", default=True)
    register_operators(options, config)
    return options


def register_operators(options: onnxruntime.SessionOptions, config: ModelConfig) -> None:
    for library in config.get("model_operations", {}).get("op_library_filename", []):
        try:
            options.register_custom_ops_library(library)
        except Exception as error:  # noqa: BLE001 - onnxruntime's errors share no other base
            fail(
                f"the operator library {Path(library).name} cannot be loaded: {explain_error(error)}"
            )


def create_run_options(config: ModelConfig) -> onnxruntime.RunOptions:
    options = onnxruntime.RunOptions()
    if shrinkage := read_parameters(config).get(ARENA_SHRINKAGE):
        options.add_run_config_entry(ARENA_SHRINKAGE, shrinkage)
    return options


def choose_providers(config: ModelConfig, kind: str, device: int) -> list[Any]:
    """Return the execution providers in order; those that this onnxruntime lacks are left out."""
    requested = list_providers(config, kind, device)
    available = onnxruntime.get_available_providers()
    for name in requested.keys() - set(available):
        pb_utils.Logger.log_warn(f"onnxruntime has no {name}: {config['name']} runs without it")
    return [*((name, requested[name]) for name in requested if name in available), CPU]


def list_providers(config: ModelConfig, kind: str, device: int) -> dict[str, dict[str, str]]:
    accelerators = config.get("optimization", {}).get("execution_accelerators", {})
    on_gpu = accelerators.get("gpu_execution_accelerator", []) if kind == "GPU" else []
    on_cpu = accelerators.get("cpu_execution_accelerator", [])
    providers: dict[str, dict[str, str]] = {}
    for accelerator, known in chain(
        ((entry, GPU_ACCELERATORS) for entry in on_gpu),
        ((entry, CPU_ACCELERATORS) for entry in on_cpu),
    ):
        name = accelerator["name"]
        if name not in known:
            fail(f"unknown execution accelerator {name!r}; available: {', '.join(known)}")
        providers[known[name]] = accelerator.get("parameters", {})
    if kind != "GPU":
        return providers
    place = {"device_id": str(device)}
    if TENSORRT in providers:
        providers[TENSORRT] = place | translate_tensorrt(providers[TENSORRT])
    # CUDA runs the operators that an accelerator cannot.
    providers[CUDA] = place | read_cuda_parameters(config) | providers.pop(CUDA, {})
    return providers


def translate_tensorrt(parameters: Mapping[str, str]) -> dict[str, str]:
    precision = parameters.get("precision_mode", "FP32")
    if precision not in TENSORRT_PRECISIONS:
        fail(f"precision_mode must be {', '.join(TENSORRT_PRECISIONS)}, not {precision!r}")
    options = {
        TENSORRT_OPTIONS.get(name, name): value
        for name, value in parameters.items()
        if name != "precision_mode"
    }
    return {**options, **TENSORRT_PRECISIONS[precision]}


def read_cuda_parameters(config: ModelConfig) -> dict[str, str]:
    parameters = read_parameters(config)
    options = {}
    for name, values in CUDA_PARAMETERS.items():
        if name in parameters:
            number = read_count(parameters, name, 0)
            if values and number >= len(values):
                fail(f"{name} must be between 0 and {len(values) - 1}, not {number}")
            options[name] = values[number] if values else parameters[name]
    return options
