"""TorchServe's API: the curls of its documents, as its users type them, on a real Triton."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from fastapi.routing import APIRoute

from gateway.capabilities.torchserve.routes import router
from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.fake_triton import ask, port_of
from tests.support.images import encoded
from tests.support.keys import (
    ADMIN,
    ENTRIES,
    FREE,
    INFER,
    INFERENCE,
    MANAGEMENT,
    MAY,
    METRICS,
    SECRETS,
    TEXTS_ADMIN,
    bearer,
    written,
)
from tests.support.model_zoo.zoo import AS_WRITTEN, Model, T, identity, image, write_repository
from tests.support.servers import free_ports, gateway_before, triton_with

BYTES = T("X", "BYTES", (1,))
ALL_VERSIONS = "version_policy { all { } }"
MODELS = (
    Model("text", "identity", (BYTES,), (T("Y", "BYTES", (1,)),), 8, extra=ALL_VERSIONS),
    identity("numbers", "FP32", (-1,), 8),
    Model(
        "classes", "identity", (T("X", "FP32", (3,)),),
        (T("SCORES", "FP32", (3,), labels=("cat", "dog", "a bird")),), 8,
    ),
    Model(
        "pair", "arithmetic",
        (T("A", "INT32", (2,)), T("B", "INT32", (2,))),
        (T("SUM", "INT32", (2,)), T("PRODUCT", "INT32", (2,))), 8,
    ),
    image("pictures", (6, 4, 3), datatype="UINT8"),
    Model(
        "picture", "picture", (T("WIDTH", "INT32", (1,)),), (T("PNG", "BYTES", (1,)),), 8,
        {"content_type.PNG": "image/png"},
    ),
    identity("later", "INT32", (-1,)),
)  # fmt: skip
LOADED = ("text", "numbers", "classes", "pair", "pictures", "picture")
DIALECTS = {"dialects": "torchserve"}
PICTURE = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3)
FILES = {
    "kitten.txt": b"a small cat\n",
    "kitten.jpg": b"\xff\xd8\xff picture",
    "picture.png": encoded(PICTURE),
    "numbers.json": b'{"data": [1, 2.5]}',
    "scores.json": b'{"data": [0.125, 0.375, 0.5]}',
    "batch.json": b'{"data": [[1, 0, 0], [0, 0, 2]]}',
    "many.json": json.dumps({"data": [1.0] * 100_000}).encode(),
    "pair.json": b'{"A": [1, 2], "B": [3, 4]}',
    "broken.json": b"{broken",
}


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
    folder = tmp_path_factory.mktemp("models")
    write_repository(folder, AS_WRITTEN, MODELS)
    shutil.copytree(folder / "text" / "1", folder / "text" / "2")
    with triton_with((folder,), LOADED) as triton:
        yield triton


@pytest.fixture(scope="module")
def client(triton: EmbeddedTriton) -> Iterator[httpx.Client]:
    with gateway_before(triton.options.url, **DIALECTS) as client:
        yield client


class Curl(NamedTuple):
    """A command, and what it prints: bytes, JSON, or the type and words of an error."""

    arguments: str
    status: int
    expected: Any


JSON_TYPE = "-H Content-Type:application/json"
FORM_TYPE = "-H Content-Type:application/x-www-form-urlencoded"
NOT_FOUND = ("ModelNotFoundException", "")
BAD = "BadRequestException"
SCORES = {"a bird": 0.5, "dog": 0.375, "cat": 0.125}
BATCH = [{"cat": 1, "dog": 0, "a bird": 0}, {"a bird": 2, "cat": 0, "dog": 0}]
DEFAULT_IS_1 = {"status": 'Default version updated for model "text" to "1"'}


def registered(version: str, *states: str, model: str = "text") -> dict[str, Any]:
    return {
        "modelName": model,
        "modelVersion": version,
        "modelUrl": model,
        "runtime": "triton",
        "minWorkers": len(states),
        "maxWorkers": len(states),
        "workers": [{"id": ..., "status": state} for state in states],
    }


# One after the other, as a user of TorchServe types them.
CONVERSATION = (
    Curl("/ping", 200, {"status": "Healthy"}),
    Curl("/models", 200, {"models": [{"modelName": n, "modelUrl": n} for n in sorted(LOADED)]}),
    Curl("-X POST /models?url=later.mar&initial_workers=1", 200, {"status": 'Model "later" registered'}),
    Curl("-X POST /models?url=other.mar&model_name=later", 200, {"status": 'Model "later" registered'}),
    Curl("-X POST /models?url=https://host.test/nobody.mar", 404, NOT_FOUND),
    Curl("-X POST /models", 400, (BAD, "url or model_name is required")),
    Curl("/predictions/later -d [1,2]", 200, [1, 2]),
    Curl("/models/later", 200, [registered("1", "READY", model="later")]),
    Curl("-X DELETE /models/later/2.0", 404, NOT_FOUND),
    Curl("-X DELETE /models/later/1.0", 200, {"status": 'Model "later" unregistered'}),
    Curl("/predictions/later -d [1]", 503, ("ServiceUnavailableException", "")),
    Curl("/predictions/text -T kitten.txt", 200, b"a small cat\n"),
    Curl("-X POST /predictions/text -T kitten.txt", 200, b"a small cat\n"),
    Curl("/predictions/text/1.0 -T kitten.txt", 200, b"a small cat\n"),
    Curl("/predictions/text/2.0 -F data=@kitten.txt", 200, b"a small cat\n"),
    Curl("/predictions/text -F data=kitten", 200, b"kitten"),
    Curl("/predictions/text -T numbers.json", 200, b'{"data": [1, 2.5]}'),
    Curl("/predictions/text -T kitten.jpg", 200, b"\xff\xd8\xff picture"),
    Curl("/predictions/text -d data=kitten", 415, (BAD, "")),
    Curl("/predictions/text/9.0 -T kitten.txt", 404, NOT_FOUND),
    Curl("/predictions/text/.0 -T kitten.txt", 404, NOT_FOUND),
    Curl("/predictions/nobody -T kitten.txt", 404, NOT_FOUND),
    Curl("/predictions/nobody/1/2", 404, ("ResourceNotFoundException", "")),
    Curl("/predictions/text", 405, ("MethodNotAllowedException", "this path supports only POST and PUT")),
    Curl("/predictions/numbers -T numbers.json", 200, [1, 2.5]),
    Curl(f"/predictions/numbers {JSON_TYPE} -d @numbers.json", 200, [1, 2.5]),
    Curl(f"/predictions/numbers {FORM_TYPE} -d [1,2.5]", 200, [1, 2.5]),
    Curl(f"/predictions/numbers {JSON_TYPE} -d @many.json", 200, [1.0] * 100_000),
    Curl("/predictions/classes -T scores.json", 200, SCORES),
    Curl("/predictions/classes -T batch.json", 200, BATCH),
    Curl("/predictions/pair -T pair.json", 200, {"SUM": [4, 6], "PRODUCT": [3, 8]}),
    Curl("/predictions/pair -T numbers.json", 422, (BAD, "inputs are A (INT32 [2]) and B")),
    Curl("/predictions/pair -T broken.json", 400, (BAD, "not valid JSON")),
    Curl("/predictions/pictures -T picture.png", 200, {"Y": PICTURE.tolist(), "MEAN": ...}),
    Curl("/models/text/1.0", 200, [registered("1", "READY")]),
    Curl("/models/text/all", 200, [registered("2", "READY"), registered("1", "READY")]),
    Curl("/models/text/9", 404, NOT_FOUND),
    Curl("/models/nobody", 404, NOT_FOUND),
    Curl("-X DELETE /models/text/1.0", 409, ("ConflictStatusException", "versions 1 and 2")),
    Curl("-X DELETE /models/nobody", 404, NOT_FOUND),
    Curl("-X PUT /models/text/1.0/set-default", 200, DEFAULT_IS_1),
    Curl("/models/text", 200, [registered("1", "READY")]),
    Curl("-X PUT /models/text/7/set-default", 409, ("ConflictStatusException", "")),
    Curl("-X PUT /models/text?min_worker=3", 405, ("MethodNotAllowedException", "")),
    Curl("/modelsx", 404, {"error": ..., "code": "NOT_FOUND", "request_id": ...}),
)  # fmt: skip


def assert_fits(value: Any, expected: Any) -> None:
    """Compare JSON, in which `...` stands for any value."""
    if isinstance(expected, dict) and isinstance(value, dict):
        assert value.keys() == expected.keys()
        for key, each in expected.items():
            assert_fits(value[key], each)
    elif isinstance(expected, list) and expected and isinstance(expected[0], dict):
        for each, other in zip(value, expected, strict=True):
            assert_fits(each, other)
    elif expected is not ...:
        assert value == expected


def test_curl_commands_get_torchserves_responses(
    client: httpx.Client, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    for arguments, status, expected in CONVERSATION:
        words = [f"{client.base_url}{w}" if w[0] == "/" else w for w in arguments.split()]
        command = ["curl", "-s", "-w", "\n%{http_code}", *words]
        ended = subprocess.run(command, capture_output=True, cwd=tmp_path, check=True, timeout=120)
        body, _, found = ended.stdout.rpartition(b"\n")
        with subtests.test(arguments):
            assert int(found) == status, body
            if isinstance(expected, bytes):
                assert body == expected
            elif isinstance(expected, tuple):
                kind, words_of_message = expected
                error = json.loads(body)
                assert_fits(error, {"code": status, "type": kind, "message": ...})
                assert words_of_message in error["message"]
            else:
                assert_fits(json.loads(body), expected)


def test_default_version_is_a_label(client: httpx.Client) -> None:
    assert client.put("/models/text/1.0/set-default").status_code == 200
    response = client.put("/predictions/text", content=b"a")
    assert response.headers["x-model-version"] == "1"
    assert client.delete("/v1/models/text/labels/default").json()["version"] == "1"


def test_output_of_one_file_is_the_file_and_runs_no_script(client: httpx.Client) -> None:
    file = client.put("/predictions/picture", json=5)
    assert (file.headers["content-type"], file.content[:4]) == ("image/png", b"\x89PNG")
    text = client.put("/predictions/text", content=b"<b>a</b>")
    assert (text.text, text.headers["content-type"]) == ("<b>a</b>", "text/plain; charset=utf-8")
    for answer in (file, text, client.put("/predictions/nobody", content=b"a")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"] == "sandbox; default-src 'none'"


def test_fleet_that_is_not_ready_is_unhealthy() -> None:
    with gateway_before(f"http://127.0.0.1:{free_ports(1)[0]}", **DIALECTS) as client:
        response = client.get("/ping")
    assert (response.status_code, response.json()) == (503, {"status": "Unhealthy"})
    assert response.headers["retry-after"] == "1"


def test_unknown_dialect_is_refused_at_the_start(triton: EmbeddedTriton) -> None:
    with (
        pytest.raises(AssertionError, match="GATEWAY_DIALECTS"),
        gateway_before(triton.options.url, dialects="torchserv"),
    ):
        pass


# Whose each route is, and its status for who may call it; nothing is changed here.
WHOSE = {
    "GET /ping": (FREE, 200),
    "PUT /predictions/{model}": (INFERENCE, 200),
    "POST /predictions/{model}": (INFERENCE, 200),
    "PUT /predictions/{model}/{model_version}": (INFERENCE, 200),
    "POST /predictions/{model}/{model_version}": (INFERENCE, 200),
    "GET /models": (MANAGEMENT, 200),
    "GET /models/{model}": (MANAGEMENT, 200),
    "GET /models/{model}/{model_version}": (MANAGEMENT, 200),
    "POST /models": (MANAGEMENT, 400),
    "DELETE /models/{model}/{model_version}": (MANAGEMENT, 409),
    "PUT /models/{model}/{model_version}/set-default": (MANAGEMENT, 200),
    "DELETE /models/{model}": (MANAGEMENT, 200),  # the last
}


@pytest.mark.long
def test_every_route_checks_the_role_and_the_model(triton: EmbeddedTriton, tmp_path: Path) -> None:
    routes = [route for route in router.routes if isinstance(route, APIRoute)]
    listed = {f"{method} {route.path}" for route in routes for method in route.methods or ()}
    assert listed == WHOSE.keys()
    with gateway_before(triton.options.url) as client:
        for name in WHOSE:
            method, path = name.split()
            response = client.request(method, path.format(model="text", model_version="1"))
            assert (response.status_code, response.json()["code"]) == (404, "NOT_FOUND")
    keys_file = str(written(tmp_path / "keys.yaml", ENTRIES))
    with gateway_before(triton.options.url, keys_file=keys_file, **DIALECTS) as client:
        for key in ("", "tgw_nobody", INFER, METRICS, ADMIN):
            for name, (whose, status) in WHOSE.items():
                method, path = name.split()
                url = path.format(model="text", model_version="1")
                content = None if method in ("GET", "DELETE") else b"a"
                answer = client.request(method, url, content=content, headers=bearer(key))
                refused = 403 if key in SECRETS else 401
                is_allowed = whose == FREE or key in MAY[whose]
                assert answer.status_code == (status if is_allowed else refused), (name, key)
        for name in WHOSE:  # of a model that the key does not see
            method, path = name.split()
            if "{model}" in path:
                url = path.format(model="numbers", model_version="1")
                answer = client.request(method, url, headers=bearer(TEXTS_ADMIN))
                assert answer.json()["type"] == "ModelNotFoundException", name
        hidden = client.post("/models?model_name=numbers", headers=bearer(TEXTS_ADMIN))
        assert hidden.json()["type"] == "ModelNotFoundException"
        assert ask(port_of(client), "GET", "/ping%0a").status == 401
        client.post("/models?url=text", headers=bearer(ADMIN))
