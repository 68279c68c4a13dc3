"""A model with several versions, each of which a test can make slow, wrong or faulty."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx

from tests.support.fleet import post_to
from tests.support.model_folders import write_model_folder
from tests.support.servers import Triton

NAME = "split"
# Answers its input times a factor. It fails, waits and multiplies as the file "behaviour-VERSION" says.
SOURCE = """
import json, os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.place = os.path.join(args["model_repository"], "behaviour-" + args["model_version"])
        self.count = 0
        if self.behaviour().get("broken"):
            raise RuntimeError("the weights are broken")

    def behaviour(self):
        return json.load(open(self.place)) if os.path.exists(self.place) else {}

    def execute(self, requests):
        answers = []
        for request in requests:
            behaviour = self.behaviour()
            self.count += 1
            time.sleep(behaviour.get("sleep_s", 0))
            value = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            if "factor" in behaviour:
                value = value * value.dtype.type(behaviour["factor"])
            every = behaviour.get("fail_every", 0)
            if every and self.count % every == 0:
                answers.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("it failed")))
            else:
                answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", value)]))
        return answers
"""
CONFIG = """
backend: "python"
max_batch_size: 4
version_policy { all { } }
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
V1_BODY = {"inputs": {"X": [1.0, 2.0]}}
V2_BODY = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
LABELS = f"/v1/models/{NAME}/labels"


def write_version(
    repository: Path,
    version: int,
    name: str = NAME,
    datatype: str = "FP32",
    policy: str = "all { }",
) -> None:
    config = CONFIG.replace("FP32", datatype).replace("all { }", policy)
    write_model_folder(repository / name, config, {f"{version}/model.py": SOURCE})


def write_versions(repository: Path, versions: Iterable[int] = (1, 2, 3)) -> Path:
    for version in versions:
        write_version(repository, version)
    return repository


def set_behaviour(repository: Path, version: int, **behaviour: Any) -> None:
    place = repository / NAME / f"behaviour-{version}"
    new = place.with_suffix(".new")
    new.write_text(json.dumps(behaviour))
    new.replace(place)


def remove_version(triton: Triton, version: int) -> None:
    """Unload one version, behind the gateway's back: Triton unloads what the folder lacks."""
    shutil.rmtree(triton.repository / NAME / str(version))
    post_to(triton, f"models/{NAME}/load")


def add_version(triton: Triton, version: int) -> None:
    write_version(triton.repository, version)
    post_to(triton, f"models/{NAME}/load")


def count_versions(client: httpx.Client, path: str, count: int, **options: Any) -> Counter[str]:
    """Return how often each version answered."""
    body = V1_BODY if path.startswith("/v1") else V2_BODY
    versions: Counter[str] = Counter()
    for _ in range(count):
        answer = client.post(path, json=body, **options)
        assert answer.status_code == 200, answer.text
        document = answer.json()
        versions[document.get("version") or document["model_version"]] += 1
        assert answer.headers["x-model-version"] in versions
    return versions
