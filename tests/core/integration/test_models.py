"""Descriptions of models: signature, a curl line, the same in Python, an OpenAPI document."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from gateway.embedded.supervisor import EmbeddedTriton
from gateway.fleet.signatures import STALE_AFTER_S
from tests.support.errors import assert_error
from tests.support.model_zoo.zoo import (
    DATATYPES,
    MODELS,
    Zoo,
    any_names,
    identity,
    write_repository,
)

# The first answer an error to anything; the others differ from the plain datatypes only by their batch.
OMITTED = {"failing", "refusing", "signed", *(f"batched_{name}" for name in DATATYPES)}
MODELS_WITH_EXAMPLES = [model.name for model in MODELS if model.name not in OMITTED]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an image in it, in which the examples are pasted."""
    folder = tmp_path_factory.mktemp("desk")
    Image.fromarray(np.full((6, 4, 3), 99, np.uint8)).save(folder / "image.png")
    return folder


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS_WITH_EXAMPLES)
def test_curl_of_a_model_works_as_pasted(zoo: Zoo, desk: Path, model: str) -> None:
    line = zoo.client.get(zoo.path(model, "")).json()["curl"]
    run = subprocess.run(line, shell=True, cwd=desk, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "outputs" in json.loads(run.stdout), (line, run.stdout)


@pytest.mark.long
@pytest.mark.parametrize("model", ["single_BYTES", "nhwc", "pair", "large_FP32", "optional"])
def test_python_of_a_model_works_as_pasted(zoo: Zoo, desk: Path, model: str) -> None:
    program = zoo.client.get(zoo.path(model, "")).json()["python"]
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=desk, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("{")


@any_names
def test_model_is_described_with_its_signature(zoo: Zoo) -> None:
    description = zoo.client.get(zoo.path("optional", "")).json()
    assert description["name"] == zoo.names.model("optional")
    assert description["ready"] is True
    assert description["versions"] == ["1"]
    assert description["max_batch_size"] == 8
    assert description["inputs"] == [
        {"name": zoo.names.tensor("X"), "datatype": "FP32", "shape": [-1]},
        {"name": zoo.names.tensor("FACTOR"), "datatype": "FP32", "shape": [1], "optional": True},
        {"name": zoo.names.tensor("OFFSET"), "datatype": "FP32", "shape": [1], "optional": True},
    ]
    image = zoo.client.get(zoo.path("nchw", "")).json()["inputs"][0]["image"]
    assert image == {"mode": "RGB", "layout": "NCHW", "height": 6, "width": 4}
    assert_error(zoo.client.get("/v1/models/nobody"), 404, "MODEL_NOT_FOUND", "nobody")
    assert zoo.client.get(zoo.path("pair", "/versions/1")).json()["ready"] is True


def test_openapi_documents_describe_the_model_and_every_body_and_error(zoo: Zoo) -> None:
    document = zoo.client.get(zoo.path("pair", "/openapi.json")).json()
    (path,) = document["paths"]
    assert path == f"/v1/models/{zoo.names.model('pair')}/infer"
    of_model = document["paths"][path]["post"]
    body = of_model["requestBody"]["content"]["application/json"]
    inputs = body["schema"]["properties"]["inputs"]
    assert inputs["required"] == [zoo.names.tensor("A"), zoo.names.tensor("B")]
    assert zoo.client.post(path, json=body["example"]).status_code == 200

    paths = zoo.client.get("/openapi.json").json()["paths"]
    of_any = paths["/v1/models/{model}/infer"]["post"]
    assert {
        "image/*", "application/octet-stream", "text/plain", "multipart/form-data",
        "application/json", "application/x-npy", "application/x-npz",
    } == of_any["requestBody"]["content"].keys()  # fmt: skip
    for operation in (of_model, of_any):
        errors = {"400", "404", "406", "413", "415", "422", "503", "504"}
        assert errors <= operation["responses"].keys()
    assert zoo.client.get("/docs").status_code == 200


@dataclass(frozen=True)
class Changing:
    """A model that has answered, of which the config changes."""

    zoo: Zoo
    name: str
    config: Path
    load_url: str  # Triton's own, behind the gateway's back

    @classmethod
    def of(cls, zoo: Zoo, triton: EmbeddedTriton, name: str) -> Changing:
        folder = Path(triton.options.model_repositories[0])
        write_repository(folder, zoo.names, [identity(name, "INT32", (2,), 8)])
        assert zoo.outputs(zoo.infer(name, [1, 2])) == {"Y": [1, 2]}
        url = f"http://{triton.options.address}/v2/repository/models/{name}/load"
        return cls(zoo, name, folder / name / "config.pbtxt", url)

    def change(self, old: str, new: str) -> None:
        self.config.write_text(self.config.read_text().replace(old, new))

    def load_directly(self) -> None:
        assert httpx.post(self.load_url, timeout=60).status_code == 200

    def infer(self, values: list[float]) -> httpx.Response:
        return self.zoo.infer(self.name, values)


@pytest.mark.fault("a model is replaced by one of another shape")
def test_model_that_changes_its_shape_is_described_again(
    zoo: Zoo, zoo_triton: EmbeddedTriton
) -> None:
    model = Changing.of(zoo, zoo_triton, "changing")
    outputs = zoo.outputs

    # Loaded again through the gateway: seen at once.
    model.change("[2]", "[3]")
    model.change("INT32", "FP32")
    load = zoo.client.post("/v2/repository/models/changing/load")
    assert load.status_code == 200
    assert outputs(model.infer([0.5, 2, 3])) == {"Y": [0.5, 2, 3]}
    assert_error(model.infer([1, 2]), 422, "DOES_NOT_FIT_MODEL", "an array of shape [2]")

    # Loaded again behind its back: seen at the first answer that contradicts.
    model.change("[3]", "[4]")
    model.load_directly()
    assert_error(model.infer([1, 2, 3]), 422, "DOES_NOT_FIT_MODEL", "")
    assert outputs(model.infer([1, 2, 3, 4])) == {"Y": [1, 2, 3, 4]}


@pytest.mark.long
def test_description_of_an_unused_model_expires(zoo: Zoo, zoo_triton: EmbeddedTriton) -> None:
    """Takes 3 s: as long as a request relies on it, and a second more."""
    model = Changing.of(zoo, zoo_triton, "left_alone")
    model.change("[2]", "[3]")
    model.load_directly()
    time.sleep(STALE_AFTER_S + 1)
    assert zoo.outputs(model.infer([1, 2, 3])) == {"Y": [1, 2, 3]}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (
            "/v1/models/{model}/infer?dry_run=perhaps",
            {"inputs": "a"},
            "invalid query parameter 'dry_run': send true or false",
        ),
        ("/v2/repository/index", {"ready": "true"}, '"ready" must be'),
        (
            "/v2/repository/models/{model}/unload",
            {"parameters": {"unload_dependents": "false"}},
            "unload_dependents must be",
        ),
    ],
)
def test_flag_that_is_neither_true_nor_false_is_400(
    zoo: Zoo, path: str, body: dict[str, Any], words: str
) -> None:
    path = path.format(model=zoo.names.model("single_BYTES"))
    assert_error(zoo.client.post(path, json=body), 400, "MALFORMED_REQUEST", words)


@any_names
def test_models_are_listed_in_pages(zoo: Zoo) -> None:
    whole = [model["name"] for model in zoo.client.get("/v1/models").json()["models"]]
    assert whole == sorted(whole)
    pages: list[list[str]] = []
    while not pages or pages[-1]:
        after = pages[-1][-1] if pages else ""
        page = zoo.client.get("/v1/models", params={"limit": 7, "after": after}).json()["models"]
        pages.append([model["name"] for model in page])
    assert [name for page in pages for name in page] == whole
    assert {len(page) for page in pages[:-2]} == {7}


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/v1/models?limt=1", 400, "unknown query parameter 'limt'; did you mean limit?"),
        ("/v1/models?limit=0", 400, "invalid query parameter 'limit'"),
        ("/v1/models/single_BYTES?x=1", 400, "unknown query parameter 'x'"),
        ("/v1/replicas?limit=1", 400, "unknown query parameter 'limit'"),
        ("/v1/events?until=1", 400, "unknown query parameter 'until'"),
        ("/v2/models?x=1", 200, ""),
        ("/livez?x=1", 200, ""),
    ],
)
def test_unknown_query_parameter_is_refused_on_the_gateways_own_paths(
    zoo_as_written: Zoo, path: str, status: int, words: str
) -> None:
    response = zoo_as_written.client.get(path)
    assert response.status_code == status, response.text
    if words:
        assert_error(response, status, "MALFORMED_REQUEST", words)


PROBLEM = "application/problem+json"


@pytest.mark.parametrize(
    ("method", "path", "accept", "is_problem"),
    [
        ("GET", "/v1/models/missing", PROBLEM, True),
        ("GET", "/v1/models/missing", f"application/json, {PROBLEM};q=0.5", True),
        ("POST", "/v1/models/missing/infer", PROBLEM, True),
        ("POST", "/v2/repository/models/missing/load", PROBLEM, True),
        ("GET", "/nothing", PROBLEM, True),
        ("GET", "/v1/models/missing", f"{PROBLEM};q=0", False),
        ("GET", "/v1/models/missing", "*/*", False),
        ("POST", "/v1/embeddings", PROBLEM, False),
    ],
)
def test_error_is_a_problem_document_if_accept_asks_for_it(
    zoo_as_written: Zoo, method: str, path: str, accept: str, is_problem: bool
) -> None:
    plain = zoo_as_written.client.request(method, path, json={})
    response = zoo_as_written.client.request(method, path, json={}, headers={"Accept": accept})
    assert response.status_code == plain.status_code >= 400
    if not is_problem:
        assert response.headers["content-type"] == "application/json"
        assert response.json().keys() == plain.json().keys()
        return
    assert response.headers["content-type"] == PROBLEM
    document = response.json()
    assert document.pop("request_id") == response.headers["x-request-id"]
    expected = plain.json()
    del expected["request_id"]
    code = expected.pop("code")
    detail = expected.pop("error")
    assert document == {
        "type": f"/guide/reference/errors#{code}",
        "title": plain.reason_phrase,
        "status": plain.status_code,
        "detail": detail,
        "code": code,
        **expected,
    }


def test_error_of_a_long_accept_is_a_problem_document(zoo_as_written: Zoo) -> None:
    zoo_as_written.load("single_BYTES")
    headers = {"Accept": PROBLEM + ", image/png" * 1000}
    path = "/v1/models/single_BYTES/infer"
    response = zoo_as_written.client.post(path, json={"inputs": "a"}, headers=headers)
    assert (response.status_code, response.headers["content-type"]) == (400, PROBLEM)
    assert "the Accept header is longer than 2048 characters" in response.json()["detail"]
