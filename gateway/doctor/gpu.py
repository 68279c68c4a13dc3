"""The check of the GPU: what the embedded Triton and its models find, in the environment of the shell."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

from gateway.capabilities.capability import OK, WARNING, Finding
from gateway.embedded.log_filter import has_gpu_driver
from gateway.messages import join_names

# Asks the driver's library, as Triton does, in a process of its own: it may hang, or end the process.
PROBE: Final = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
version, count, name, reason = ctypes.c_int(), ctypes.c_int(), (ctypes.c_char * 256)(), ctypes.c_char_p()
cuda.cuGetErrorString(cuda.cuInit(0), ctypes.byref(reason))
cuda.cuDriverGetVersion(ctypes.byref(version))
cuda.cuDeviceGetCount(ctypes.byref(count))
names = [cuda.cuDeviceGetName(name, 256, each) or name.value.decode() for each in range(count.value)]
print(json.dumps({"version": version.value, "reason": (reason.value or b"unknown").decode(), "names": names}))
"""
PROBE_TIMEOUT_S: Final = 20.0
MIN_CUDA_VERSION: Final = 12  # of the driver, for a Triton that was built with CUDA 12


def check_gpu() -> Iterator[Finding]:
    check = "gpu"
    cuda = probe_cuda()
    version = cuda.get("version", 0) // 1000
    if cuda.get("names") and version >= MIN_CUDA_VERSION:
        message = (
            f"{join_names(cuda['names'])}, with a driver for CUDA {version}: the embedded Triton uses it, "
            "and so do Python models whose packages can, such as PyTorch"
        )
        yield Finding(check, OK, message)
        message = "its ONNX models run on the CPU, also with KIND_GPU: its onnxruntime has no CUDA"
        advice = "serve them with the official Triton image to use the GPU"
        yield Finding("onnx", WARNING, message, advice)
    elif cuda.get("names"):
        message = f"the driver is for CUDA {version}; the embedded Triton needs one for 12"
        yield Finding(check, WARNING, message, "install a newer driver")
    elif not has_gpu_driver():
        message = "none: models run on the CPU, and those with kind: KIND_GPU do not load"
        yield Finding(check, OK, message)
    elif cuda:
        message = f"a driver is loaded, but libcuda.so.1 finds no GPU: {cuda['reason']}"
        yield Finding(check, WARNING, message, "see nvidia-smi, and check CUDA_VISIBLE_DEVICES")
    else:
        message = "a driver is loaded, but not libcuda.so.1: Triton and its models run on the CPU"
        advice = "add its folder to LD_LIBRARY_PATH, and in a container compute to NVIDIA_DRIVER_CAPABILITIES"
        yield Finding(check, WARNING, message, advice)


def probe_cuda() -> dict[str, Any]:
    """Return what the driver's library says of its version and devices; nothing without a library."""
    command = [sys.executable, "-I", "-S", "-c", PROBE]
    try:
        run = subprocess.run(command, check=False, capture_output=True, timeout=PROBE_TIMEOUT_S)
        found: dict[str, Any] = json.loads(run.stdout or "{}")
    except subprocess.TimeoutExpired:
        return {"reason": "it does not answer"}
    return found
