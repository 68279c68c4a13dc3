"""Shapes that no body could fill, and keys without number: refused before Triton sees them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from gateway.errors import GatewayError, InputMismatch, MalformedRequest
from gateway.triton.json_guard import INFER_RULES, MAX_JSON_DEPTH, MAX_KEY_BYTES, JsonGuard
from tests.support.model_zoo.zoo import Zoo

# However slow the machine is.
PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def request(*shapes: object, **more: Any) -> dict[str, Any]:
    inputs = [
        {"name": "X", "shape": shape, "datatype": "FP32", "data": [1.5, 2.5]} for shape in shapes
    ]
    return {"inputs": inputs, **more}


def outcome(body: bytes, room: int, *cuts: int, json_bytes: int | None = None) -> str:
    """What comes of a body that is fed in pieces."""
    shapes = JsonGuard(room, json_bytes)
    try:
        for start, end in zip((0, *cuts), (*cuts, len(body)), strict=True):
            shapes.feed(body[start:end])
    except GatewayError as exc:
        return type(exc).__name__
    return "passed"


HOSTILE = [
    [2**62], [1, 2**40, 1], [1, 2**31, 2**31], [1, 2**32, 2**32], [0, 2**62], [10**400], [2**63, 2],
    [100_000], [-(2**40)],
]  # fmt: skip


@pytest.mark.parametrize("shape", HOSTILE, ids=lambda shape: str(shape)[:30])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_shape_that_no_body_could_fill_is_refused(shape: list[int], indent: int | None) -> None:
    body = json.dumps(request([1, 2], shape), indent=indent).encode()
    assert outcome(body, len(body)) == "InputMismatch"
    for cut in range(1, len(body)):
        assert outcome(body, len(body), cut) == "InputMismatch"


@pytest.mark.parametrize("shape", [[1, 2], [2], [], [0, 256], [1, 64], ["a"], "a", None, [[1, 2]]])
def test_any_other_is_tritons_business(shape: object) -> None:
    body = orjson.dumps(request(shape))
    assert outcome(body, len(body)) == "passed"


@pytest.mark.parametrize(
    "key",
    ['"sh\\u0061pe"', '"\\u0073\\u0068\\u0061\\u0070\\u0065"', '"shap\\u0065"', '"\\u0073hape"'],
)
def test_a_disguised_key_is_refused(key: str) -> None:
    body = json.dumps(request([2**62])).replace('"shape"', key).encode()
    assert json.loads(body) == request([2**62])
    assert outcome(body, len(body)) == "MalformedRequest"


@pytest.mark.parametrize(
    "text",
    [
        '"shape": [99999999999]',
        "\\u0073hape",
        '\\"shape\\": [99999999999]',
        "shape",
        '{"shape":[9e9]}',
    ],
)
def test_a_text_that_speaks_of_shapes_is_only_a_text(text: str) -> None:
    inputs = [{"name": "X", "shape": [1], "datatype": "BYTES", "data": [text, "shape", text]}]
    body = orjson.dumps({"inputs": inputs})
    assert outcome(body, len(body)) == "passed"
    for cut in range(1, len(body)):
        assert outcome(body, len(body), cut) == "passed"


def test_what_is_binary_is_not_read() -> None:
    head = orjson.dumps(request([1, 2]))
    body = head + b'"shape":[99999999999] \\u0073'
    assert outcome(body, len(body), json_bytes=len(head)) == "passed"
    assert outcome(body, len(body)) != "passed"


def test_a_shape_without_an_end_is_refused_and_not_kept() -> None:
    shapes = JsonGuard(1 << 20)
    shapes.feed(b'"shape":[' + b"1," * 1000)
    with pytest.raises(MalformedRequest, match="longer than 4096 bytes"):
        shapes.feed(b"1," * 2000)


def test_more_keys_than_any_request_has_are_refused() -> None:
    for count, found in (
        (INFER_RULES.total_keys - 20, "passed"),
        (INFER_RULES.total_keys + 1, "MalformedRequest"),
    ):
        objects = [
            {f"k{n}": 1 for n in range(start, min(start + 900, count))}
            for start in range(0, count, 900)
        ]
        body = orjson.dumps(request([1, 2], objects=objects))
        assert outcome(body, len(body)) == found
        cuts = range(100, len(body), 100)
        assert outcome(body, len(body), *cuts) == found


LONGEST_ESCAPE = len(r"\u0000")
KEY = st.text(max_size=MAX_KEY_BYTES // LONGEST_ESCAPE) | st.just("shape")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(KEY, inner),
)


@PROPERTY
@given(JSON, st.lists(st.integers(0, 2000), max_size=4))
@example({"shape": [2**62]}, [])
@example({"a": {"shape": [1, 2**62]}}, [9, 10])
def test_it_finds_what_a_parser_finds(document: object, cuts: list[int]) -> None:
    body = json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")
    ends = sorted(min(cut, len(body)) for cut in cuts)
    found = outcome(body, 1000, *ends)
    shapes = list(shapes_in(document))
    if any(map(is_large, shapes)):
        assert found == "InputMismatch"
    elif found != "passed":  # a list that Triton would not take for a shape
        assert any(isinstance(shape, list) and not is_plain(shape) for shape in shapes)


def shapes_in(document: object) -> Iterator[object]:
    if isinstance(document, dict):
        for key, value in document.items():
            if key == "shape":
                yield value
            yield from shapes_in(value)
    elif isinstance(document, list):
        for value in document:
            yield from shapes_in(value)


def is_plain(shape: list[object]) -> bool:
    return all(type(size) is int for size in shape)


def is_large(shape: object) -> bool:
    """Of numbers alone; what else there is, Triton refuses."""
    if not isinstance(shape, list) or not is_plain(shape):
        return False
    product = 1
    for size in shape:
        product *= abs(size) or 1
    return product > (1 << 40 if 0 in shape else 1000)


# The gateway, and a tritonserver that goes on.


ECHO, TEXTS, SCORED = "plain_vector_FP32", "single_BYTES", "scores"


@pytest.fixture(scope="module")
def client(zoo: Zoo) -> httpx.Client:
    zoo.load(ECHO, TEXTS, SCORED)
    return zoo.client


def pieces(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 7):
        yield body[start : start + 7]


@pytest.mark.fault(
    "tensors with missing, unknown or duplicate inputs, ragged, of a wrong type, count"
)
@pytest.mark.parametrize("shape", HOSTILE, ids=lambda shape: str(shape)[:30])
@pytest.mark.parametrize("way", ["whole", "in pieces", "compressed", "compressed in pieces"])
def test_triton_never_sees_it(client: httpx.Client, shape: list[int], way: str) -> None:
    body = json.dumps(request(shape)).encode()
    headers = {"Content-Type": "application/json"}
    if "compressed" in way:
        body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
    content = pieces(body) if "pieces" in way else body
    answer = client.post(f"/v2/models/{ECHO}/infer", content=content, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (422, "DOES_NOT_FIT_MODEL")
    good = client.post(f"/v2/models/{ECHO}/infer", json=request([2]))
    assert good.status_code == 200
    assert good.json()["outputs"][0]["data"] == [1.5, 2.5]


def test_no_more_parameters_than_any_request_has(client: httpx.Client) -> None:
    for count, status in ((1000, 200), (1001, 400)):
        body = {"inputs": [1.5], "parameters": {f"k{n}": 1 for n in range(count)}}
        assert client.post(f"/v1/models/{ECHO}/infer", json=body).status_code == status


def test_the_error_says_what_was_wrong() -> None:
    with pytest.raises(
        InputMismatch, match=r"the shape \[1,99999\] has more elements than the body"
    ):
        JsonGuard(100).feed(b'{"shape":[1,99999]}')


# What else tritonserver 2.51 dies of.

TEXT: dict[str, object] = {"name": "X", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}
SCORES: dict[str, object] = {
    "name": "X",
    "shape": [1, 3],
    "datatype": "FP32",
    "data": [1.5, 3.5, 2.5],
}
CLASSES = {"name": "Y", "parameters": {"classification": 2}}


def lives(client: httpx.Client) -> bool:
    good = client.post(f"/v2/models/{ECHO}/infer", json=request([2]))
    return good.status_code == 200 and good.json()["outputs"][0]["data"] == [1.5, 2.5]


@pytest.mark.parametrize("way", ["whole", "in pieces", "compressed", "compressed in pieces"])
@pytest.mark.parametrize("model", [TEXTS, ECHO])
def test_there_are_no_classes_of_what_has_none(client: httpx.Client, model: str, way: str) -> None:
    """BYTES, and an output that may be empty."""
    given = TEXT if model == TEXTS else {**SCORES, "shape": [0], "data": []}
    body = json.dumps({"inputs": [given], "outputs": [CLASSES]}, indent=1).encode()
    headers = {"Content-Type": "application/json"}
    if "compressed" in way:
        body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
    content = pieces(body) if "pieces" in way else body
    answer = client.post(f"/v2/models/{model}/infer", content=content, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (422, "DOES_NOT_FIT_MODEL")
    assert "classification requires numeric outputs" in answer.json()["error"]
    assert lives(client)


@pytest.mark.parametrize(
    "outputs",
    [
        '[{"name":"Y","parameters":{"classification":2,"classification":0}}]',
        '[{"name":"Y","name":"Z","parameters":{"classification":2}}]',
        '[{"name":"Y","parameters":{"classificati\\u006fn":2}}]',
        '[{"name":"\\u0059","parameters":{"classification" : 2}}]',
        '[{"name":"Y","parameters":{"classification":2}}],"outputs":[]',
    ],
)
def test_nor_in_any_disguise(client: httpx.Client, outputs: str) -> None:
    body = f'{{"inputs":[{json.dumps(TEXT)}],"outputs":{outputs}}}'
    answer = client.post(f"/v2/models/{TEXTS}/infer", content=body)
    assert answer.status_code in (400, 422)
    assert lives(client)


def test_through_v1_neither(client: httpx.Client) -> None:
    values: dict[str, object] = {TEXTS: "a", ECHO: []}
    for model, value in values.items():
        body = {"inputs": {"X": value}, "parameters": {"classification": 2}}
        answer = client.post(f"/v1/models/{model}/infer", json=body)
        assert (answer.status_code, answer.json()["code"]) == (422, "DOES_NOT_FIT_MODEL")
    assert lives(client)


def test_classes_of_scores_and_a_text_that_is_called_so(client: httpx.Client) -> None:
    body = {"inputs": [SCORES], "outputs": [CLASSES]}
    for content in (orjson.dumps(body), pieces(orjson.dumps(body))):
        answer = client.post(f"/v2/models/{SCORED}/infer", content=content)
        assert answer.json()["outputs"][0]["data"] == ["3.500000:1", "2.500000:2"]
    word = {**TEXT, "data": ["classification"]}
    answer = client.post(f"/v2/models/{TEXTS}/infer", json={"inputs": [word]})
    assert answer.json()["outputs"][0]["data"] == ["classification"]
    word = {
        "inputs": [TEXT],
        "parameters": {"classification": 2},
    }  # Triton's parameters are of outputs
    assert client.post(f"/v2/models/{TEXTS}/infer", json=word).status_code == 200


@pytest.mark.parametrize("path", ["infer", "generate", "generate_stream"])
@pytest.mark.parametrize("way", ["whole", "in pieces", "compressed"])
def test_json_of_any_depth_reaches_nobody(client: httpx.Client, path: str, way: str) -> None:
    deep = "[" * 60_000 + "]" * 60_000
    body = f'{{"X": "a\\"[", "inputs": [{{"name": "X", "data": {deep}}}]}}'.encode()
    headers = {"Content-Encoding": "gzip"} if way == "compressed" else {}
    content = gzip.compress(body) if way == "compressed" else body
    parts = [content[at : at + 50_000] for at in range(0, len(content), 50_000)]
    given = iter(parts) if way == "in pieces" else content
    answer = client.post(f"/v2/models/{SCORED}/{path}", content=given, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (400, "MALFORMED_REQUEST")
    assert "nested deeper" in answer.json()["error"]
    assert lives(client)


@PROPERTY
@given(JSON, st.lists(st.integers(0, 2000), max_size=4), st.integers(0, 2 * MAX_JSON_DEPTH))
def test_the_depth_that_is_found_is_a_parsers(inner: object, cuts: list[int], more: int) -> None:
    text = json.dumps(inner, ensure_ascii=False).encode("utf-8", "surrogatepass")
    body = b'{"a":' * (more % 2) + b"[" * more + text + b"]" * more + b"}" * (more % 2)
    nesting = JsonGuard(len(body), rules=INFER_RULES._replace(has_tensors=False))
    ends = sorted(min(cut, len(body)) for cut in cuts)
    too_deep = False
    try:
        for start, end in zip((0, *ends), (*ends, len(body)), strict=True):
            nesting.feed(body[start:end])
    except MalformedRequest as exc:
        assume("nested deeper" in exc.detail)  # and no key is too long
        too_deep = True
    assert too_deep == (more + more % 2 + depth(inner) > MAX_JSON_DEPTH)


def depth(document: object) -> int:
    if isinstance(document, dict | list):
        values = document.values() if isinstance(document, dict) else document
        return 1 + max(map(depth, values), default=0)
    return 0
