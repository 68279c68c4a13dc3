"""Shapes that no body could fill, and keys without number: refused before Triton sees them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.errors import DoesNotFit, GatewayError, Malformed
from gateway.triton.shapes import MOST_KEYS, Shapes
from tests.models.zoo import Model, Names, T, write_repository
from tests.servers import gateway_before, triton_on_free_ports


def request(*shapes: object, **more: Any) -> dict[str, Any]:
    inputs = [
        {"name": "X", "shape": shape, "datatype": "FP32", "data": [1.5, 2.5]} for shape in shapes
    ]
    return {"inputs": inputs, **more}


def outcome(body: bytes, room: int, *cuts: int, json_bytes: int | None = None) -> str:
    """What comes of a body that is fed in pieces."""
    shapes = Shapes(room, json_bytes)
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
    assert outcome(body, len(body)) == "DoesNotFit"
    for cut in range(1, len(body)):
        assert outcome(body, len(body), cut) == "DoesNotFit"


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
    assert outcome(body, len(body)) == "Malformed"


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
    shapes = Shapes(1 << 20, None)
    shapes.feed(b'"shape":[' + b"1," * 1000)
    with pytest.raises(Malformed, match="longer than any"):
        shapes.feed(b"1," * 2000)


def test_more_keys_than_any_request_has_are_refused() -> None:
    for count, found in ((MOST_KEYS - 10, "passed"), (MOST_KEYS + 1, "Malformed")):
        body = orjson.dumps(request([1, 2], parameters={f"k{n}": 1 for n in range(count)}))
        assert outcome(body, len(body)) == found
        cuts = range(100, len(body), 100)
        assert outcome(body, len(body), *cuts) == found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("shape"), inner),
)


@given(JSON, st.lists(st.integers(0, 2000), max_size=4))
@example({"shape": [2**62]}, [])
@example({"a": {"shape": [1, 2**62]}}, [9, 10])
def test_it_finds_what_a_parser_finds(document: object, cuts: list[int]) -> None:
    body = json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")
    ends = sorted(min(cut, len(body)) for cut in cuts)
    found = outcome(body, 1000, *ends)
    shapes = list(shapes_in(document))
    if any(map(is_large, shapes)):
        assert found == "DoesNotFit"
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


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("shapes")
    echo = Model("echo", "identity", (T("X", "FP32", (-1,)),), (T("Y", "FP32", (-1,)),))
    write_repository(folder, Names(), [echo])
    with triton_on_free_ports(folder) as triton, gateway_before(triton.options.url) as client:
        yield client


def pieces(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 7):
        yield body[start : start + 7]


@pytest.mark.parametrize("shape", HOSTILE, ids=lambda shape: str(shape)[:30])
@pytest.mark.parametrize("way", ["whole", "in pieces", "compressed", "compressed in pieces"])
def test_triton_never_sees_it(client: httpx.Client, shape: list[int], way: str) -> None:
    body = json.dumps(request(shape)).encode()
    headers = {"Content-Type": "application/json"}
    if "compressed" in way:
        body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
    content = pieces(body) if "pieces" in way else body
    answer = client.post("/v2/models/echo/infer", content=content, headers=headers)
    if way != "whole" and shape == [100_000]:  # how long such a body is, is not known
        assert answer.status_code == 400  # Triton's
    else:
        assert (answer.status_code, answer.json()["code"]) == (422, "DOES_NOT_FIT_MODEL")
    good = client.post("/v2/models/echo/infer", json=request([2]))
    assert good.status_code == 200
    assert good.json()["outputs"][0]["data"] == [1.5, 2.5]


def test_no_more_parameters_than_any_request_has(client: httpx.Client) -> None:
    for count, status in ((1000, 200), (1001, 400)):
        body = {"inputs": [1.5], "parameters": {f"k{n}": 1 for n in range(count)}}
        assert client.post("/v1/models/echo/infer", json=body).status_code == status


def test_the_error_says_what_was_wrong() -> None:
    with pytest.raises(DoesNotFit, match=r"the shape \[1,99999\] has more elements than the body"):
        Shapes(100, None).feed(b'{"shape":[1,99999]}')
