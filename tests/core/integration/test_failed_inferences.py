"""Inferences that a model fails: run once, and without effect on others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.errors import assert_error
from tests.support.metrics import held_memory
from tests.support.model_folders import write_model_folder
from tests.support.servers import Triton, gateway_before
from tests.support.wait import wait_until

CONFIG = """backend: "python"
max_batch_size: %d
input [{ name: "X" data_type: TYPE_STRING dims: [1] }]
output [{ name: "Y" data_type: TYPE_%s dims: [%d] }]
"""
# A text `CODE:reason` is an error of Triton's API, `raise:reason` an exception, and all others take a while.
MOODY = """import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "X").as_numpy().ravel()[0].decode()
        with Path(__file__).with_name("runs").open("a") as file:
            file.write(".")
        code, _, reason = text.partition(":")
        if code == "raise":
            raise RuntimeError(reason)
        if reason:
            error = pb_utils.TritonError(reason, getattr(pb_utils.TritonError, code))
            return pb_utils.InferenceResponse(error=error)
        time.sleep(0.01)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.zeros(4096, np.float32))])
"""
FLAT = """import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(each, "X")) for each in requests]

    def answer(self, tensor):
        texts = np.array([b"a"] * len(tensor.as_numpy()), dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", texts)])
"""
TWICE = """import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        outputs = [pb_utils.Tensor("Y", np.full(1, value, np.float32)) for value in (1, 2)]
        return [pb_utils.InferenceResponse(outputs) for _ in requests]
"""
MODELS = {
    "twice": (CONFIG % (0, "FP32", 1), TWICE),
    "moody": (CONFIG % (0, "FP32", -1), MOODY),
    "flat": (CONFIG % (4, "STRING", 1), FLAT),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two repositories with the same models."""
    folders = [tmp_path_factory.mktemp("repository") for _ in range(2)]
    for folder in folders:
        for name, (config, code) in MODELS.items():
            write_model_folder(folder / name, config, {"1/model.py": code})
    return folders


@pytest.fixture(scope="module")
def client(folders: list[Path]) -> Iterator[httpx.Client]:
    with ExitStack() as stack:
        tritons = [stack.enter_context(Triton(folder, "*")) for folder in folders]
        for triton in tritons:
            triton.wait()
        urls = [f"http://{each.address}?grpc={each.options.grpc_port}" for each in tritons]
        client = stack.enter_context(gateway_before(*urls, on_demand_models="*"))
        wait_until(lambda: '"UP"' in client.get("/v1/replicas").text)
        yield client


def count_runs(folders: list[Path]) -> int:
    files = (folder / "moody/1/runs" for folder in folders)
    return sum(len(file.read_text()) for file in files if file.exists())


def infer_v2(text: str) -> dict[str, Any]:
    return {"inputs": [{"name": "X", "shape": [1], "datatype": "BYTES", "data": [text]}]}


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        ("raise:the camera is not ready", 500, "MODEL_FAULT"),
        ("raise:Request for unknown model: 'moody' is not found", 500, "MODEL_FAULT"),
        ("INTERNAL:the camera is not ready", 500, "MODEL_FAULT"),
        ("INTERNAL:Model 'other' is not ready.", 500, "MODEL_FAULT"),
        ("INTERNAL:Request for unknown model: 'other' is not found", 500, "MODEL_FAULT"),
        ("UNAVAILABLE:the driver is unloaded", 503, "UNAVAILABLE"),
        ("NOT_FOUND:no such unknown model of a car", 404, "NOT_FOUND"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models/moody/infer", "/v2/models/moody/infer"])
def test_error_of_a_model_is_not_taken_for_one_of_triton(
    client: httpx.Client, folders: list[Path], path: str, text: str, status: int, code: str
) -> None:
    before = count_runs(folders)
    body = infer_v2(text) if path.startswith("/v2") else {"inputs": text}
    assert_error(client.post(path, json=body), status, code)
    assert count_runs(folders) == before + 1
    assert client.post("/v1/models/moody/infer", json={"inputs": "fine"}).status_code == 200


def test_error_that_begins_a_stream_is_no_reason_to_run_the_model_again(
    client: httpx.Client, folders: list[Path]
) -> None:
    before = count_runs(folders)
    text = "NOT_FOUND:Request for unknown model: 'moody' is not found"
    answer = client.post("/v2/models/moody/generate_stream", json={"X": text})
    assert answer.status_code == 404
    assert count_runs(folders) == before + 1
    headers = {"Accept": "text/event-stream"}
    answer = client.post("/v1/models/moody/infer", json={"inputs": text}, headers=headers)
    assert answer.status_code == 404
    assert count_runs(folders) == before + 2
    assert client.post("/v1/models/moody/infer", json={"inputs": "fine"}).status_code == 200


def test_rows_after_one_that_fails_do_not_run_and_hold_no_memory(
    client: httpx.Client, folders: list[Path]
) -> None:
    before = count_runs(folders)
    rows = ["INVALID_ARG:no", *["fine"] * 300]
    answer = client.post("/v1/models/moody:predict", json={"instances": rows})
    assert_error(answer, 422, "REFUSED_BY_MODEL")
    assert count_runs(folders) < before + 150
    wait_until(lambda: set(held_memory(client).values()) == {0})


@pytest.mark.parametrize("accept", ["application/json", "application/x-npy"])
def test_texts_without_the_batch_dimension_are_rendered(client: httpx.Client, accept: str) -> None:
    answer = client.post("/v1/models/flat/infer", json={"inputs": "x"}, headers={"Accept": accept})
    assert answer.status_code == 200, answer.text
    if accept == "application/json":
        assert answer.json()["outputs"] == {"Y": "a"}
    assert client.post("/v1/models/flat/infer", json={"inputs": ["x", "y"]}).status_code == 200


@pytest.mark.parametrize("accept", ["application/json", "application/x-npz", "text/event-stream"])
def test_two_outputs_of_one_name_are_refused(client: httpx.Client, accept: str) -> None:
    answer = client.post("/v1/models/twice/infer", json={"inputs": "a"}, headers={"Accept": accept})
    assert_error(answer, 502, "BAD_UPSTREAM", "response is invalid")
