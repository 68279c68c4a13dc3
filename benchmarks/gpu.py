"""The gateway in front of a model on a GPU, measured beside Triton itself.

    python -m benchmarks.gpu ENVIRONMENT

ENVIRONMENT is a virtual environment with torch, torchvision and numpy<2, of the Python that runs Triton's
models. The model is an ensemble: a JPEG is decoded on the CPU, and ResNet-50 with random weights computes on
the GPU. `--on cpu` tries the program without one.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import Final

import httpx
import numpy as np
import psutil
import typer
from PIL import Image

from benchmarks import servers
from benchmarks.requests import Request, encode_jpeg, encode_v2_infer
from benchmarks.run import Run
from benchmarks.tables import Target
from tests.support.servers import triton_on_free_ports

TRITON: Final = "Triton"
MAX_BATCH: Final = 32
DECODE: Final = """
import io

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            files = pb_utils.get_input_tensor_by_name(request, "X").as_numpy().ravel()
            images = [Image.open(io.BytesIO(file)).convert("RGB").resize((224, 224)) for file in files]
            pixels = np.stack([np.asarray(image, np.float32) for image in images]) / 255
            tensor = pb_utils.Tensor("Y", np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses
"""
CORE: Final = """
import json

import torch
import torchvision
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        kind = args["model_instance_kind"]
        self.device = f"cuda:{args['model_instance_device_id']}" if kind == "GPU" else "cpu"
        torch.manual_seed(0)
        self.network = torchvision.models.resnet50(weights=None).eval().to(self.device)

    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(each, "X").as_numpy() for each in requests]
        with torch.inference_mode():
            batch = torch.cat([torch.from_numpy(tensor) for tensor in tensors])
            scores = self.network(batch.to(self.device)).cpu().numpy()
        responses, start = [], 0
        for tensor in tensors:
            rows = scores[start : start + len(tensor)]
            start += len(tensor)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", rows)]))
        return responses
"""
CONFIG: Final = """
name: "{name}"
max_batch_size: {batch}
input [ {{ name: "X" data_type: {input} dims: [ {input_dims} ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ {output_dims} ] }} ]
"""
PYTHON_CONFIG: Final = """
backend: "python"
instance_group [ {{ kind: {kind} count: {count} }} ]
dynamic_batching {{ max_queue_delay_microseconds: 500 }}
"""
ENVIRONMENT_CONFIG: Final = """
parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{environment}" }} }}
"""
STEP: Final = """
  step [ {{ model_name: "{model}" model_version: -1
    input_map {{ key: "X" value: "{source}" }} output_map {{ key: "Y" value: "{result}" }} }} ]"""


class Device(str, Enum):
    gpu = "gpu"
    cpu = "cpu"


def write_models(folder: Path, environment: Path, device: Device) -> None:
    """Write the model repository: `decode`, `core` and their ensemble `photo`."""
    image = {"input": "TYPE_STRING", "input_dims": "1"}
    scores = {"output_dims": "1000"}
    pixels = "3, 224, 224"
    cores = psutil.cpu_count(logical=False) or 1
    configs = {
        "decode": CONFIG.format(name="decode", batch=MAX_BATCH, **image, output_dims=pixels)
        + PYTHON_CONFIG.format(kind="KIND_CPU", count=cores),
        "core": CONFIG.format(
            name="core", batch=MAX_BATCH, input="TYPE_FP32", input_dims=pixels, **scores
        )
        + PYTHON_CONFIG.format(kind=f"KIND_{device.value.upper()}", count=1)
        + ENVIRONMENT_CONFIG.format(environment=environment),
        "photo": CONFIG.format(name="photo", batch=MAX_BATCH, **image, **scores)
        + 'platform: "ensemble"\nensemble_scheduling {'
        + STEP.format(model="decode", source="X", result="pixels")
        + STEP.format(model="core", source="pixels", result="Y")
        + "\n}\n",
    }
    programs = {"decode": DECODE, "core": CORE}
    for name, config in configs.items():
        version = folder / name / "1"
        version.mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
        if name in programs:
            (version / "model.py").write_text(programs[name])


def find_problem(environment: Path, device: Device) -> str:
    """Return in one line what is missing on this machine; empty if nothing is."""
    python = environment / "bin" / "python"
    if device is Device.gpu:
        program = shutil.which("nvidia-smi")
        command = [program or "false", "-L"]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return "this machine has no NVIDIA GPU with its driver (nvidia-smi -L finds none)"
    asked = "torch.cuda.is_available()" if device is Device.gpu else "True"
    check = f"import numpy, torch, torchvision; assert numpy.__version__ < '2'; assert {asked}"
    try:
        run = subprocess.run([python, "-c", check], capture_output=True, text=True, check=False)
    except OSError:
        return f"{environment} is no virtual environment: it has no bin/python"
    if run.returncode:
        reason = run.stderr.strip().rpartition("\n")[2]
        return f"{environment} needs torch with CUDA, torchvision and numpy<2: {reason}"
    return ""


def compare_answers(triton: str, gateway: str, request: Request, path: str) -> None:
    """Check that the gateway passes Triton's answer on unchanged."""
    answers = [
        httpx.post(url + path, content=request.body, headers=request.headers, timeout=60)
        for url in (triton, gateway)
    ]
    for answer in answers:
        answer.raise_for_status()
    if answers[0].content != answers[1].content:
        sys.exit(f"{path}: the gateway's answer is not that of Triton")


def main(
    environment: Path,
    on: Device = Device.gpu,
    connections: str = "1,8,32,64",
    seconds: int = 3,
    count: int = 3,
) -> None:
    if problem := find_problem(environment, on):
        sys.exit(f"error: {problem}")
    jpeg = encode_jpeg()
    pixels = np.asarray(Image.open(io.BytesIO(jpeg)).resize((224, 224)), np.float32) / 255
    tensor = np.ascontiguousarray(pixels.transpose(2, 0, 1)[np.newaxis])
    photo = encode_v2_infer(np.array([[jpeg]], np.object_), "BYTES")
    core = encode_v2_infer(tensor, "FP32")
    run = Run(seconds, count, suite=on.value)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_models(folder, environment.absolute(), on)
        triton = stack.enter_context(triton_on_free_ports(folder))
        url, process = stack.enter_context(servers.gateway(triton.options.url))
        direct = f"http://{triton.options.address}", psutil.Process(triton.reaper_pid)
        photo_path, core_path = "/v2/models/photo/infer", "/v2/models/core/infer"
        compare_answers(direct[0], url, photo, photo_path)
        compare_answers(direct[0], url, core, core_path)
        gateway_v1 = Target(
            "gateway /v1, JPEG",
            f"{url}/v1/models/photo/infer",
            process,
            Request(jpeg, {"Content-Type": "image/jpeg"}),
        )
        for number in map(int, connections.split(",")):
            for path, request in ((photo_path, photo), (core_path, core)):
                targets = [
                    Target(TRITON, direct[0] + path, direct[1], request),
                    Target("gateway /v2", url + path, process, request),
                ]
                if request is photo:
                    targets.append(gateway_v1)
                title = f"{path}, {len(request.body):,} bytes, {number} connections"
                rounds = run.measure(targets, number)
                print(*run.tabulate(title, rounds, TRITON), sep="\n", flush=True)


if __name__ == "__main__":
    typer.run(main)
