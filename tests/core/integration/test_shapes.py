"""Hostile JSON for Triton: shapes larger than the body, classes of what has none, depth, many keys."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from typing import Any

import httpx
import orjson
import pytest

from tests.support.model_zoo.zoo import Zoo


def request(*shapes: object, **more: Any) -> dict[str, Any]:
    inputs = [
        {"name": "X", "shape": shape, "datatype": "FP32", "data": [1.5, 2.5]} for shape in shapes
    ]
    return {"inputs": inputs, **more}


HOSTILE = [
    [2**62], [1, 2**40, 1], [1, 2**31, 2**31], [1, 2**32, 2**32], [0, 2**62], [10**400], [2**63, 2],
    [100_000], [-(2**40)],
]  # fmt: skip
TEXTS_ABOUT_SHAPES = [
    '"shape": [99999999999]', "\\u0073hape", '\\"shape\\": [99999999999]', "shape", '{"shape":[9e9]}',
]  # fmt: skip
DISGUISED_KEYS = [
    '"sh\\u0061pe"', '"\\u0073\\u0068\\u0061\\u0070\\u0065"', '"shap\\u0065"', '"\\u0073hape"',
]  # fmt: skip


# Of these, tritonserver 2.51 would die.

ECHO, TEXTS, SCORED = "plain_vector_FP32", "single_BYTES", "scores"
WAYS = ("whole", "in pieces", "compressed", "compressed in pieces")
TEXT: dict[str, object] = {"name": "X", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}
SCORES: dict[str, object] = {
    "name": "X", "shape": [1, 3], "datatype": "FP32", "data": [1.5, 3.5, 2.5],
}  # fmt: skip
CLASSES = {"name": "Y", "parameters": {"classification": 2}}


@pytest.fixture(scope="module")
def client(zoo: Zoo) -> httpx.Client:
    zoo.load(ECHO, TEXTS, SCORED)
    return zoo.client


def post(client: httpx.Client, path: str, body: bytes, way: str) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    if "compressed" in way:
        body = gzip.compress(body)
        headers["Content-Encoding"] = "gzip"
    piece = max(7, len(body) // 100)
    pieces = (body[start : start + piece] for start in range(0, len(body), piece))
    content: bytes | Iterable[bytes] = pieces if "pieces" in way else body
    return client.post(f"/v2/models/{path}", content=content, headers=headers)


def assert_refused(answer: httpx.Response, words: str, status: int = 400) -> None:
    assert (answer.status_code, answer.json()["code"]) == (status, "DOES_NOT_FIT_MODEL")
    assert words in answer.json()["error"]


def is_alive(client: httpx.Client) -> bool:
    good = client.post(f"/v2/models/{ECHO}/infer", json=request([2]))
    return good.status_code == 200 and good.json()["outputs"][0]["data"] == [1.5, 2.5]


@pytest.mark.fault(
    "tensors with missing, unknown or duplicate inputs, ragged, of a wrong type, count"
)
@pytest.mark.parametrize("way", WAYS)
def test_shape_larger_than_the_body_never_reaches_triton(client: httpx.Client, way: str) -> None:
    for shape in HOSTILE:
        answer = post(client, f"{ECHO}/infer", json.dumps(request(shape)).encode(), way)
        assert_refused(answer, "")
        assert is_alive(client)
    for key in DISGUISED_KEYS:
        body = json.dumps(request([2**62])).replace('"shape"', key).encode()
        answer = post(client, f"{ECHO}/infer", body, way)
        assert (answer.status_code, answer.json()["code"]) == (400, "MALFORMED_REQUEST")
    assert is_alive(client)


@pytest.mark.parametrize("way", WAYS)
def test_classes_of_texts_or_of_no_values_never_reach_triton(
    client: httpx.Client, way: str
) -> None:
    for model, tensor in ((TEXTS, TEXT), (ECHO, {**SCORES, "shape": [0], "data": []})):
        body = json.dumps({"inputs": [tensor], "outputs": [CLASSES]}, indent=1).encode()
        answer = post(client, f"{model}/infer", body, way)
        assert_refused(answer, "classification requires numeric outputs")
        assert is_alive(client)


def test_classes_of_texts_in_disguise_or_by_v1_never_reach_triton(client: httpx.Client) -> None:
    for outputs in (
        '[{"name":"Y","parameters":{"classification":2,"classification":0}}]',
        '[{"name":"Y","name":"Z","parameters":{"classification":2}}]',
        '[{"name":"Y","parameters":{"classificati\\u006fn":2}}]',
        '[{"name":"\\u0059","parameters":{"classification" : 2}}]',
        '[{"name":"Y","parameters":{"classification":2}}],"outputs":[]',
    ):
        body = f'{{"inputs":[{json.dumps(TEXT)}],"outputs":{outputs}}}'
        answer = client.post(f"/v2/models/{TEXTS}/infer", content=body)
        assert answer.status_code == 400, outputs
        assert is_alive(client)
    values: dict[str, object] = {TEXTS: "a", ECHO: []}
    for model, value in values.items():
        document = {"inputs": {"X": value}, "parameters": {"classification": 2}}
        assert_refused(client.post(f"/v1/models/{model}/infer", json=document), "", 422)
    assert is_alive(client)


def test_classes_of_scores_and_texts_that_name_what_is_refused_reach_triton(
    client: httpx.Client,
) -> None:
    body = orjson.dumps({"inputs": [SCORES], "outputs": [CLASSES]})
    for way in ("whole", "in pieces"):
        answer = post(client, f"{SCORED}/infer", body, way)
        assert answer.json()["outputs"][0]["data"] == ["3.500000:1", "2.500000:2"]
    for word in ("classification", *TEXTS_ABOUT_SHAPES):
        tensor = {**TEXT, "data": [word]}
        answer = client.post(f"/v2/models/{TEXTS}/infer", json={"inputs": [tensor]})
        assert answer.json()["outputs"][0]["data"] == [word]
    # In Triton's protocol, this parameter is one of outputs.
    of_request = {"inputs": [TEXT], "parameters": {"classification": 2}}
    assert client.post(f"/v2/models/{TEXTS}/infer", json=of_request).status_code == 200


@pytest.mark.parametrize("verb", ["infer", "generate", "generate_stream"])
def test_json_of_any_depth_never_reaches_triton(client: httpx.Client, verb: str) -> None:
    deep = "[" * 60_000 + "]" * 60_000
    body = f'{{"X": "a\\"[", "inputs": [{{"name": "X", "data": {deep}}}]}}'.encode()
    for way in ("whole", "in pieces", "compressed"):
        answer = post(client, f"{SCORED}/{verb}", body, way)
        assert (answer.status_code, answer.json()["code"]) == (400, "MALFORMED_REQUEST")
        assert "nested deeper" in answer.json()["error"]
        assert is_alive(client)


def test_parameters_of_v1_above_a_thousand_are_refused(client: httpx.Client) -> None:
    for count, status in ((1000, 200), (1001, 400)):
        body = {"inputs": [1.5], "parameters": {f"k{n}": 1 for n in range(count)}}
        assert client.post(f"/v1/models/{ECHO}/infer", json=body).status_code == status
