"""Sessions of onnxruntime with the options of a model's config, on the CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import onnxruntime
import triton_python_backend_utils as pb_utils
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidProtobuf

from .onnx_config import ModelConfig, fail, read_boolean, read_count, read_parameters

# ONNX Runtime's errors: a code, then often the file or node, the C++ source, and at last the reason.
ERROR_CODE: Final = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
ERROR_PLACE: Final = re.compile(r"^.*?(?: failed:|Status Message: |Error: )", re.DOTALL)
ERROR_SOURCE: Final = re.compile(r"\S+\.(?:cc|h):\d+ (?:[^()]*\([^()]*\) )?")
FOLDER: Final = re.compile(r"/[^\s\"']*/")
ERROR_ADVICE: Final = " Please fix either the inputs/outputs or the model."
DEFAULT_FILENAME: Final = "model.onnx"
LFS_POINTER: Final = b"version https://git-lfs"
CPU: Final = "CPUExecutionProvider"
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


def create_session(path: Path, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=[CPU])
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


def warn_of_accelerators(config: ModelConfig, kind: str) -> None:
    """Log what the config asks for in vain: this onnxruntime runs on the CPU."""
    accelerators = config.get("optimization", {}).get("execution_accelerators", {})
    missing = ["CUDA"] if kind == "GPU" else []
    for group in ("gpu", "cpu") if kind == "GPU" else ("cpu",):
        missing += [each["name"] for each in accelerators.get(f"{group}_execution_accelerator", [])]
    if missing:
        pb_utils.Logger.log_warn(
            f"{config['name']} runs on the CPU: the embedded Triton's onnxruntime has no {', '.join(missing)}"
        )


def explain_error(error: Exception) -> str:
    """Return the reason that an error of onnxruntime gives, without names of nodes and source files."""
    text = ERROR_PLACE.sub("", ERROR_CODE.sub("", str(error)))
    text = FOLDER.sub("", ERROR_SOURCE.sub("", text))
    return " ".join(text.split()).removesuffix(ERROR_ADVICE).rstrip(".")
