"""TorchServe's API: the curls of its documents get the same from a real TorchServe and from the gateway."""

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
from tests.capabilities.torchserve.support.torchserve import COMMAND, MISSING, Addresses, torchserve
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
    identity("never_loaded", "INT32", (-1,)),
)  # fmt: skip
LOADED = ("text", "numbers", "classes", "pair", "pictures", "picture")
DIALECTS = {"dialects": "torchserve"}
NOT_FOUND = {"code": 404, "type": "ModelNotFoundException"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_repository(folder, AS_WRITTEN, MODELS)
    shutil.copytree(folder / "text" / "1", folder / "text" / "2")
    return folder


@pytest.fixture(scope="module")
def triton(repository: Path) -> Iterator[EmbeddedTriton]:
    with triton_with((repository,), LOADED) as triton:
        yield triton


@pytest.fixture(scope="module")
def client(triton: EmbeddedTriton) -> Iterator[httpx.Client]:
    with gateway_before(triton.options.url, **DIALECTS) as client:
        yield client


@pytest.fixture(
    scope="module",
    params=[
        "gateway",
        pytest.param("TorchServe", marks=pytest.mark.skipif(not COMMAND.exists(), reason=MISSING)),
    ],
)
def addresses(
    request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Addresses]:
    if request.param == "TorchServe":
        with torchserve(tmp_path_factory.mktemp("torchserve")) as addresses:
            yield addresses
    else:
        with (
            triton_with((repository,), ("pair",)) as triton,
            gateway_before(triton.options.url, **DIALECTS) as client,
        ):
            url = str(client.base_url).rstrip("/")
            yield Addresses(url, url)


class Curl(NamedTuple):
    """A command without its first word, and what it prints: text, or JSON with at least these fields."""

    arguments: str
    status: int
    expected: Any


SCORES = {"a bird": 0.5, "dog": 0.375, "cat": 0.125}
STATUS = {"status": ...}
# One after the other, as a user of TorchServe types them. {i} and {m} are the two APIs.
CONVERSATION = (
    Curl("{i}/ping", 200, {"status": "Healthy"}),
    Curl("-X POST {m}/models?url=text.mar&initial_workers=1&synchronous=true", 200, STATUS),
    Curl("-X POST {m}/models?url=numbers.mar&initial_workers=1&synchronous=true", 200, STATUS),
    Curl("-X POST {m}/models?url=classes.mar&initial_workers=1&synchronous=true", 200, STATUS),
    Curl("-X POST {m}/models?url=nobody.mar", 404, NOT_FOUND),
    Curl("-X POST {m}/models", 400, {"code": 400, "type": "BadRequestException"}),
    Curl(
        "-X POST {m}/models?url=text-2.mar&model_name=text&initial_workers=1&synchronous=true",
        200, STATUS,
    ),
    Curl("{i}/predictions/text -T kitten.txt", 200, "a small cat\n"),
    Curl("-X POST {i}/predictions/text -T kitten.txt", 200, "a small cat\n"),
    Curl("{i}/predictions/text/1.0 -T kitten.txt", 200, "a small cat\n"),
    Curl("{i}/predictions/text/2.0 -F data=@kitten.txt", 200, "a small cat\n"),
    Curl("{i}/predictions/text -F data=kitten", 200, "kitten"),
    Curl("{i}/predictions/text/9.0 -T kitten.txt", 404, {"code": 404}),
    Curl("{i}/predictions/nobody -T kitten.txt", 404, NOT_FOUND),
    Curl("{i}/predictions/text -T kitten.jpg", 200, "\xff\xd8\xff picture"),
    Curl("{i}/predictions/numbers -H Content-Type:application/json -d @numbers.json", 200, [1, 2.5]),
    Curl("{i}/predictions/numbers -H Content-Type:application/json -d [1,2.5]", 200, [1, 2.5]),
    Curl("{i}/predictions/classes -H Content-Type:application/json -d @scores.json", 200, SCORES),
    Curl("{m}/models", 200, {"models": ...}),
    Curl("{m}/models?limit=1&next_page_token=0", 200, {"models": ..., "nextPageToken": "1"}),
    Curl(
        "{m}/models/numbers", 200,
        [{"modelName": "numbers", "modelVersion": "1", "workers": [{"status": "READY"}]}],
    ),
    Curl("{m}/models/text/1.0", 200, [{"modelName": "text", "modelVersion": "1"}]),
    Curl("{m}/models/text/all", 200, [{"modelVersion": ...}, {"modelVersion": ...}]),
    Curl("{m}/models/text/9", 404, {"code": 404}),
    Curl("{m}/models/nobody", 404, NOT_FOUND),
    Curl("-X PUT {m}/models/text/1.0/set-default", 200, STATUS),
    Curl("{m}/models/text", 200, [{"modelName": "text", "modelVersion": "1"}]),
    Curl("-X PUT {m}/models/text/2.0/set-default", 200, STATUS),
    Curl("{m}/models/text", 200, [{"modelName": "text", "modelVersion": "2"}]),
    Curl("-X DELETE {m}/models/numbers/1.0", 200, STATUS),
    Curl("-X DELETE {m}/models/classes", 200, STATUS),
    Curl("-X DELETE {m}/models/nobody", 404, NOT_FOUND),
    Curl("{i}/predictions/nobody/1/2", 404, {"code": 404}),
)  # fmt: skip
FILES = {
    "kitten.txt": b"a small cat\n",
    "kitten.jpg": b"\xff\xd8\xff picture",
    "numbers.json": b'{"data": [1, 2.5]}',
    "scores.json": json.dumps({"data": [0.125, 0.375, 0.5]}).encode(),
}


def run_curl(arguments: list[str], folder: Path) -> tuple[int, bytes]:
    command = ["curl", "-s", "-w", "\n%{http_code}", *arguments]
    ended = subprocess.run(command, capture_output=True, cwd=folder, check=True, timeout=120)
    body, _, status = ended.stdout.rpartition(b"\n")
    return int(status), body


def assert_fits(value: Any, expected: Any) -> None:
    """JSON that has at least the expected fields; a version is compared as a number."""
    if isinstance(expected, dict):
        for key, field in expected.items():
            if key == "modelVersion" and isinstance(field, str):
                assert float(value[key]) == float(field)
            else:
                assert_fits(value[key], field)
    elif isinstance(expected, list):
        assert len(value) == len(expected)
        for one, other in zip(value, expected, strict=True):
            assert_fits(one, other)
    elif expected is not ...:
        assert value == expected


@pytest.mark.long
def test_curl_commands_of_torchserves_documents_get_its_responses(
    addresses: Addresses, tmp_path: Path
) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    places = {"i": addresses.inference, "m": addresses.management}
    for curl in CONVERSATION:
        arguments = [
            word.replace("{i}", places["i"]).replace("{m}", places["m"])
            for word in curl.arguments.split()
        ]
        status, body = run_curl(arguments, tmp_path)
        assert status == curl.status, (curl.arguments, body)
        if isinstance(curl.expected, str):
            assert body == curl.expected.encode("latin-1"), curl.arguments
        else:
            assert_fits(json.loads(body), curl.expected)
            if status >= 400:
                assert json.loads(body).keys() == {"code", "type", "message"}, curl.arguments


# What is the gateway's own.


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()
    assert error.keys() == {"code", "type", "message"}
    assert error["code"] == response.status_code
    return error["code"], error["type"], error["message"]


@pytest.mark.long
def test_paths_do_not_exist_without_the_setting(triton: EmbeddedTriton) -> None:
    with gateway_before(triton.options.url) as client:
        for route in router.routes:
            assert isinstance(route, APIRoute)
            path = route.path.format(model="text", model_version="1")
            for method in sorted(route.methods or ()):
                response = client.request(method, path)
                assert response.status_code == 404
                assert response.json()["code"] == "NOT_FOUND"
        assert not [
            path
            for path in client.get("/openapi.json").json()["paths"]
            if "predict" in path and "/v1" not in path
        ]


def test_unknown_dialect_is_refused_at_the_start(triton: EmbeddedTriton) -> None:
    with (
        pytest.raises(AssertionError, match="GATEWAY_DIALECTS"),
        gateway_before(triton.options.url, dialects="torchserv"),
    ):
        pass


def picture() -> np.ndarray:
    return np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3)


def npy(array: np.ndarray, folder: Path) -> bytes:
    np.save(folder / "array.npy", array)
    return (folder / "array.npy").read_bytes()


def test_body_without_a_type_is_recognized_by_its_first_bytes(
    client: httpx.Client, tmp_path: Path
) -> None:
    as_png, as_npy = encoded(picture()), npy(picture(), tmp_path)
    for body in (as_png, as_npy, iter(bytes([byte]) for byte in as_png)):
        response = client.put("/predictions/pictures", content=body)
        assert response.status_code == 200, response.text
        assert response.json()["Y"] == picture().tolist()
    headers = {"Expect": "100-continue"}
    response = client.post("/predictions/pictures", content=as_png, headers=headers)
    assert response.json()["Y"] == picture().tolist()
    for body in (b'{"data": [1, 2]}', b" [1, 2]"):
        assert client.put("/predictions/numbers", content=body).json() == [1, 2]
        assert client.put("/predictions/text", content=body).content == body
    compressed = client.put(
        "/predictions/pictures", content=b"\x1f\x8b", headers={"Content-Encoding": "gzip"}
    )
    assert error_of(compressed)[0] == 400


def test_default_content_type_of_curl_is_read_as_json_or_refused(client: httpx.Client) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    sent = client.post("/predictions/numbers", content=b'{"data": [3]}', headers=form)
    assert sent.json() == [3]
    refused = client.post("/predictions/text", content=b"data=a", headers=form)
    assert error_of(refused)[:2] == (415, "BadRequestException")


def test_json_is_a_value_or_values_by_name(client: httpx.Client) -> None:
    both = client.post("/predictions/pair", json={"A": [1, 2], "B": [3, 4]})
    assert both.json() == {"SUM": [4, 6], "PRODUCT": [3, 8]}
    batch = client.post("/predictions/classes", json={"data": [[1, 0, 0], [0, 0, 2]]})
    assert next(iter(batch.json()[0])) == "cat"
    assert batch.json()[1]["a bird"] == 2
    numbers = list(range(100_000))
    assert client.put("/predictions/numbers", json={"data": numbers}).json() == numbers
    status, _, message = error_of(client.post("/predictions/pair", json={"data": [1, 2]}))
    assert status == 422
    assert "inputs are A (INT32 [2]) and B" in message
    assert error_of(client.post("/predictions/pair", content=b"{broken"))[0] == 400


def test_output_of_one_file_is_the_file(client: httpx.Client) -> None:
    response = client.put("/predictions/picture", json=5)
    assert response.headers["content-type"] == "image/png"
    assert response.content.startswith(b"\x89PNG")
    text = client.put("/predictions/text", content=b"<b>a</b>")
    assert (text.text, text.headers["content-type"]) == ("<b>a</b>", "text/plain; charset=utf-8")
    for answer in (response, text, client.put("/predictions/nobody", content=b"a")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"] == "sandbox; default-src 'none'"


def test_default_version_answers_requests_without_one(client: httpx.Client) -> None:
    assert client.put("/models/text/1.0/set-default").status_code == 200
    response = client.put("/predictions/text", content=b"a")
    assert response.headers["x-model-version"] == "1"
    assert client.delete("/v1/models/text/labels/default").json()["version"] == "1"
    assert client.put("/predictions/text/.0", content=b"a").status_code == 404
    assert error_of(client.put("/models/text/7/set-default"))[:2] == (
        409,
        "ConflictStatusException",
    )


def test_unsupported_request_says_what_triton_does_instead(client: httpx.Client) -> None:
    for path in ("/models/text", "/models/text/1.0"):
        status, kind, message = error_of(client.put(path, params={"min_worker": 3}))
        assert (status, kind) == (501, "InternalServerException")
        assert "instance_group" in message
    status, _, message = error_of(client.delete("/models/text/1.0"))
    assert status == 409
    assert "versions 1 and 2" in message
    assert "/v1/models/NAME/versions/VERSION" in message
    url = "https://torchserve.pytorch.org/mar_files/squeezenet1_1.mar"
    status, _, message = error_of(client.post("/models", params={"url": url}))
    assert status == 400
    assert "PUT /v1/models/NAME" in message
    loaded = client.post("/models", params={"url": "numbers.mar", "batch_size": 8})
    assert "dynamic_batching" in loaded.json()["status"]


def test_model_of_the_repository_is_loaded_and_unloaded(client: httpx.Client) -> None:
    def list_names(**page: int) -> list[str]:
        return [each["modelName"] for each in client.get("/models", params=page).json()["models"]]

    assert "never_loaded" not in list_names()
    assert client.post("/models", params={"model_name": "never_loaded"}).status_code == 200
    assert client.put("/predictions/never_loaded", json=[1, 2]).json() == [1, 2]
    names = list_names()
    assert "never_loaded" in names
    assert list_names(limit=2, next_page_token=2) == names[2:4]
    (entry,) = client.get("/models/never_loaded").json()
    assert [worker["status"] for worker in entry["workers"]] == ["READY"]
    assert client.delete("/models/never_loaded/1.0").status_code == 200
    assert error_of(client.put("/predictions/never_loaded", json=[1]))[1] == (
        "ServiceUnavailableException"
    )


def test_paths_and_errors_are_described_and_errors_have_torchserves_format(
    client: httpx.Client,
) -> None:
    document = client.get("/openapi.json").json()
    assert "TorchServeError" in document["components"]["schemas"]
    for route in router.routes:
        assert isinstance(route, APIRoute)
        assert route.path in document["paths"]
    refused = client.get("/predictions/text")
    message = "this path supports only POST and PUT"
    assert error_of(refused) == (405, "MethodNotAllowedException", message)
    assert refused.headers["allow"] == "POST, PUT"
    assert error_of(client.get("/models", params={"limit": "x"}))[0] == 400
    assert client.get("/nothing").json()["code"] == "NOT_FOUND"
    assert client.get("/modelsx").json()["code"] == "NOT_FOUND"


def test_fleet_that_is_not_ready_is_unhealthy() -> None:
    with gateway_before(f"http://127.0.0.1:{free_ports(1)[0]}", **DIALECTS) as client:
        response = client.get("/ping")
    assert (response.status_code, response.json()) == (503, {"status": "Unhealthy"})
    assert response.headers["retry-after"] == "1"


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
    "DELETE /models/{model}": (MANAGEMENT, 200),
    "DELETE /models/{model}/{model_version}": (MANAGEMENT, 409),
    "PUT /models/{model}/{model_version}/set-default": (MANAGEMENT, 200),
    "PUT /models/{model}": (MANAGEMENT, 501),
    "PUT /models/{model}/{model_version}": (MANAGEMENT, 501),
}


def list_calls() -> list[tuple[str, str, str]]:
    calls = [
        (method, route.path, f"{method} {route.path}")
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in sorted(route.methods or ())
    ]
    assert {name for _, _, name in calls} == WHOSE.keys()
    return sorted(calls, key=lambda call: call[0] == "DELETE" and call[1].endswith("{model}"))


@pytest.mark.long
def test_every_route_checks_the_role_and_the_model(triton: EmbeddedTriton, tmp_path: Path) -> None:
    path = written(tmp_path / "keys.yaml", ENTRIES)
    with gateway_before(triton.options.url, keys_file=str(path), **DIALECTS) as client:
        for key in ("", "tgw_nobody", INFER, METRICS, ADMIN):
            for method, template, name in list_calls():
                whose, status = WHOSE[name]
                url = template.format(model="text", model_version="1")
                content = None if method in ("GET", "DELETE") else b"a"
                answer = client.request(method, url, content=content, headers=bearer(key))
                if whose == FREE or key in MAY[whose]:
                    assert answer.status_code == status, (name, answer.text)
                else:
                    assert error_of(answer)[0] == (403 if key in SECRETS else 401), name
        for method, template, name in list_calls():  # of a model that the key does not see
            if "{model}" in template:
                url = template.format(model="numbers", model_version="1")
                answer = client.request(method, url, headers=bearer(TEXTS_ADMIN))
                assert error_of(answer)[:2] == (404, "ModelNotFoundException"), name
        hidden = client.post("/models?model_name=numbers", headers=bearer(TEXTS_ADMIN))
        assert error_of(hidden)[:2] == (404, "ModelNotFoundException")
        assert ask(port_of(client), "GET", "/ping%0a").status == 401
        client.post("/models?url=text", headers=bearer(ADMIN))
