"""What a model says of itself: signature, a curl to paste, the same in Python, its own API description."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gateway.fleet.models import OLD_S
from tests.support.errors import assert_error
from tests.support.model_zoo.zoo import MODELS, Names, Zoo, identity, write_repository
from tests.support.servers import gateway_before, triton_on_free_ports

# These answer an error to anything, or wait.
CONTRARY = {"failing", "refusing", "signed"}
WORKING = [model.name for model in MODELS if model.name not in CONTRARY]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an image in it, in which the examples are pasted."""
    folder = tmp_path_factory.mktemp("desk")
    Image.fromarray(np.full((6, 4, 3), 99, np.uint8)).save(folder / "image.png")
    return folder


@pytest.mark.parametrize("model", WORKING)
def test_the_curl_of_a_model_works_as_pasted(zoo: Zoo, desk: Path, model: str) -> None:
    line = zoo.client.get(zoo.path(model, "")).json()["curl"]
    run = subprocess.run(line, shell=True, cwd=desk, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "outputs" in json.loads(run.stdout), (line, run.stdout)


@pytest.mark.parametrize("model", ["single_BYTES", "nhwc", "pair", "large_FP32", "optional"])
def test_the_python_of_a_model_works_as_pasted(zoo: Zoo, desk: Path, model: str) -> None:
    program = zoo.client.get(zoo.path(model, "")).json()["python"]
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=desk, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("{")


def test_a_signature_in_readable_form(zoo: Zoo) -> None:
    told = zoo.client.get(zoo.path("optional", "")).json()
    assert told["name"] == zoo.names.model("optional")
    assert told["versions"] == ["1"]
    assert told["max_batch_size"] == 8
    assert told["inputs"] == [
        {"name": zoo.names.tensor("X"), "datatype": "FP32", "shape": [-1]},
        {"name": zoo.names.tensor("FACTOR"), "datatype": "FP32", "shape": [1], "optional": True},
        {"name": zoo.names.tensor("OFFSET"), "datatype": "FP32", "shape": [1], "optional": True},
    ]
    image = zoo.client.get(zoo.path("nchw", "")).json()["inputs"][0]["image"]
    assert image == {"mode": "RGB", "layout": "NCHW", "height": 6, "width": 4}
    assert_error(zoo.client.get("/v1/models/nobody"), 404, "MODEL_NOT_FOUND", "nobody")
    assert zoo.client.get(zoo.path("pair", "/versions/1")).status_code == 200


def test_the_api_description_of_a_model_has_its_own_schema(zoo: Zoo) -> None:
    document = zoo.client.get(zoo.path("pair", "/openapi.json")).json()
    (path,) = document["paths"]
    assert path == f"/v1/models/{zoo.names.model('pair')}/infer"
    operation = document["paths"][path]["post"]
    body = operation["requestBody"]["content"]["application/json"]
    inputs = body["schema"]["properties"]["inputs"]
    assert inputs["required"] == [zoo.names.tensor("A"), zoo.names.tensor("B")]
    response = zoo.client.post(path, json=body["example"])
    assert response.status_code == 200
    assert {"200", "404", "422", "503"} <= operation["responses"].keys()


def test_the_api_description_shows_every_body_and_error(zoo: Zoo) -> None:
    paths = zoo.client.get("/openapi.json").json()["paths"]
    operation = paths["/v1/models/{model}/infer"]["post"]
    assert {
        "image/*", "application/octet-stream", "text/plain", "multipart/form-data",
        "application/json", "application/x-npy", "application/x-npz",
    } == operation["requestBody"]["content"].keys()  # fmt: skip
    assert {"400", "404", "406", "413", "415", "422", "503", "504"} <= operation["responses"].keys()
    assert zoo.client.get("/docs").status_code == 200


@contextmanager
def changing(folder: Path) -> Iterator[tuple[Zoo, Path, str]]:
    """A model that has served, its config, and where Triton itself loads it again."""
    names = Names()
    write_repository(folder, names, [identity("changing", "INT32", (2,), 8)])
    with triton_on_free_ports(folder) as triton, gateway_before(triton.options.url) as client:
        zoo = Zoo(client, names)
        assert zoo.outputs(zoo.infer("changing", [1, 2])) == {"Y": [1, 2]}
        load = f"http://{triton.options.address}/v2/repository/models/changing/load"
        yield zoo, folder / "changing" / "config.pbtxt", load


def test_a_model_replaced_by_one_of_another_shape_is_seen(tmp_path: Path) -> None:
    with changing(tmp_path) as (zoo, config, direct):
        client = zoo.client
        config.write_text(config.read_text().replace("[2]", "[3]").replace("INT32", "FP32"))

        # Loaded again through the gateway: seen at once.
        assert client.post("/v2/repository/models/changing/load").status_code == 200
        assert zoo.outputs(zoo.infer("changing", [0.5, 2, 3])) == {"Y": [0.5, 2, 3]}
        assert_error(zoo.infer("changing", [1, 2]), 422, "DOES_NOT_FIT_MODEL", "the shape [2]")

        # Loaded again behind its back: seen at the first answer that contradicts.
        config.write_text(config.read_text().replace("[3]", "[4]"))
        assert client.post(direct).status_code == 200
        assert_error(zoo.infer("changing", [1, 2, 3]), 422, "DOES_NOT_FIT_MODEL", "")
        assert zoo.outputs(zoo.infer("changing", [1, 2, 3, 4])) == {"Y": [1, 2, 3, 4]}


@pytest.mark.long
def test_what_is_known_of_a_model_that_nobody_asks_for_is_not_relied_upon(tmp_path: Path) -> None:
    with changing(tmp_path) as (zoo, config, direct):
        client = zoo.client
        config.write_text(config.read_text().replace("[2]", "[3]"))
        assert client.post(direct).status_code == 200
        time.sleep(OLD_S + 1)
        assert zoo.outputs(zoo.infer("changing", [1, 2, 3])) == {"Y": [1, 2, 3]}
