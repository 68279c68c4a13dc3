"""`/v1/models/{model}/infer` for any model and datatype, on the real Triton; see tests/support/model_zoo."""

from __future__ import annotations

import base64
import gzip
import io
import re
import socket
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from gateway.routes.infer import find_inference_route
from gateway.tensors.dtypes import DATATYPES as TABLE
from tests.support.errors import assert_error
from tests.support.model_zoo.zoo import DATATYPES, LABELS, NUMERIC, Zoo, any_names

NPY = {"Content-Type": "application/x-npy", "Accept": "application/x-npy"}
PROPERTY = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def loaded(body: bytes) -> Any:
    return np.load(io.BytesIO(body), allow_pickle=False)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Bit for bit; NaN included."""
    return (
        one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    )


def arrays(datatype: str, batched: bool, *, in_json: bool) -> st.SearchStrategy[np.ndarray]:
    """Arrays of the models [-1, -1], with a batch dimension before it."""
    smallest = 1 if in_json else 0  # JSON cannot say that a list of no rows has three columns
    inner = st.tuples(st.integers(smallest, 3), st.integers(smallest, 4))
    shape = (
        inner.flatmap(lambda dims: st.tuples(st.integers(1, 9), *map(st.just, dims)))
        if batched
        else inner
    )
    if datatype == "BYTES":
        values = (
            st.text(max_size=5)
            if in_json
            else st.binary(max_size=5).filter(lambda b: b[-1:] != b"\0")
        )
        dtype = np.dtype(object) if in_json else np.dtype("S5")
        return shape.flatmap(lambda dims: nps.arrays(dtype, dims, elements=values))
    if datatype == "BF16":
        finite = st.floats(width=16, allow_nan=not in_json, allow_infinity=not in_json)
        drawn = shape.flatmap(lambda dims: nps.arrays(np.float32, dims, elements=finite))
        return drawn.map(lambda array: array.astype(ml_dtypes.bfloat16))
    dtype = TABLE[datatype].numpy_dtype
    elements = None
    if dtype.kind == "f":
        elements = nps.from_dtype(dtype, allow_nan=not in_json, allow_infinity=not in_json)
    return shape.flatmap(lambda dims: nps.arrays(dtype, dims, elements=elements))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["batched", "plain"])
@pytest.mark.parametrize("datatype", DATATYPES)
@PROPERTY
@given(data=st.data())
def test_any_array_comes_back_identical_through_json(
    zoo: Zoo, datatype: str, kind: str, data: st.DataObject
) -> None:
    array = data.draw(arrays(datatype, kind == "batched", in_json=True))
    values = array.astype(np.float64).tolist() if datatype == "BF16" else array.tolist()
    answer = zoo.outputs(zoo.infer(f"{kind}_{datatype}", {"X": values}))["Y"]
    assert same(np.array(answer, array.dtype).reshape(array.shape), array) or answer == values


@pytest.mark.parametrize("kind", ["batched", "plain"])
@pytest.mark.parametrize("datatype", DATATYPES)
@PROPERTY
@given(data=st.data())
@any_names
def test_any_array_comes_back_identical_through_npy(
    zoo: Zoo, datatype: str, kind: str, data: st.DataObject
) -> None:
    array = data.draw(arrays(datatype, kind == "batched", in_json=False))
    response = zoo.post(f"{kind}_{datatype}", content=npy(array), headers=NPY)
    assert response.status_code == 200, response.text
    answer = loaded(response.content)
    if datatype == "BYTES":
        assert answer.astype("S5").tolist() == array.tolist()
    elif datatype == "BF16":
        assert same(answer.view(ml_dtypes.bfloat16), array)
    else:
        assert same(answer, array)


# The batch dimension.


def test_a_batch_dimension_is_added_and_taken_away_again(zoo: Zoo) -> None:
    one, batch = [[1.0, 2.0], [3.0, 4.0]], [[[1.0, 2.0]], [[3.0, 4.0]]]
    assert zoo.outputs(zoo.infer("batched_FP32", one)) == {"Y": one}
    assert zoo.outputs(zoo.infer("batched_FP32", batch)) == {"Y": batch}


def test_of_single_values_a_list_is_a_batch(zoo: Zoo) -> None:
    assert zoo.outputs(zoo.infer("single_BYTES", "a")) == {"Y": "a"}
    assert zoo.outputs(zoo.infer("single_BYTES", ["a"])) == {"Y": ["a"]}
    assert zoo.outputs(zoo.infer("single_BYTES", ["a", "b", "c"])) == {"Y": ["a", "b", "c"]}
    assert zoo.outputs(zoo.infer("single_BYTES", [["a"], ["b"]])) == {"Y": ["a", "b"]}
    assert zoo.outputs(zoo.infer("single_INT32", 5)) == {"Y": 5}
    assert zoo.outputs(zoo.infer("single_INT32", [5, 6])) == {"Y": [5, 6]}


def test_a_model_without_a_batch_dimension_gets_none(zoo: Zoo) -> None:
    assert zoo.outputs(zoo.infer("plain_single_BYTES", "a")) == {"Y": ["a"]}
    assert zoo.outputs(zoo.infer("plain_vector_FP32", [1, 2, 3])) == {"Y": [1, 2, 3]}
    assert zoo.outputs(zoo.infer("plain_vector_FP32", 7)) == {"Y": [7]}


@any_names
def test_a_batch_above_the_models_is_cut_and_joined_in_order(zoo: Zoo) -> None:
    for count in (8, 9, 16, 33):
        values = list(range(count))
        assert zoo.outputs(zoo.infer("single_INT32", values)) == {"Y": values}


def test_an_error_in_a_cut_batch_says_where(zoo: Zoo) -> None:
    values = ["INVALID_ARG:the third is bad"] * 10
    response = zoo.infer("refusing", values)
    assert_error(response, 422, "REFUSED_BY_MODEL", "the third is bad")
    assert "in the part of the batch with items" in response.json()["error"]


def test_32_files_in_one_form_are_32_answers_in_order(zoo: Zoo) -> None:
    files = [("any", (f"{number}.txt", str(number))) for number in range(32)]
    expected = [str(number) for number in range(32)]
    assert zoo.outputs(zoo.post("single_BYTES", files=files)) == {"Y": expected}


def test_texts_of_a_form_are_a_batch_too(zoo: Zoo) -> None:
    fields = [(zoo.names.tensor("X"), (None, text)) for text in ("first", "second")]
    assert zoo.outputs(zoo.post("single_BYTES", files=fields)) == {"Y": ["first", "second"]}


def test_batches_of_different_sizes_do_not_fit(zoo: Zoo) -> None:
    response = zoo.infer("pair", {"A": [[1, 2], [3, 4]], "B": [1, 2]})
    assert_error(response, 422, "DOES_NOT_FIT_MODEL", "different batch sizes")


@pytest.mark.fault(
    "tensors with missing, unknown or duplicate inputs, ragged, of a wrong type, count"
)
def test_an_empty_batch_does_not_fit(zoo: Zoo) -> None:
    assert_error(zoo.infer("single_BYTES", []), 422, "DOES_NOT_FIT_MODEL", "an empty batch")
    response = zoo.post("batched_FP32", content=npy(np.zeros((0, 2, 2), np.float32)), headers=NPY)
    assert_error(response, 422, "DOES_NOT_FIT_MODEL", "an empty batch")


def test_dimensions_of_size_zero_pass(zoo: Zoo) -> None:
    response = zoo.post("batched_INT16", content=npy(np.zeros((2, 0, 3), np.int16)), headers=NPY)
    assert loaded(response.content).shape == (2, 0, 3)


# Names.


@any_names
def test_several_inputs_go_by_name(zoo: Zoo) -> None:
    outputs = zoo.outputs(zoo.infer("pair", {"A": [1, 2], "B": [3, 4]}))
    assert outputs == {"SUM": [4, 6], "PRODUCT": [3, 8]}


@any_names
def test_only_the_requested_outputs_come(zoo: Zoo) -> None:
    wanted = [zoo.names.tensor("PRODUCT")]
    response = zoo.infer("pair", {"A": [1, 2], "B": [3, 4]}, outputs=wanted)
    assert zoo.outputs(response) == {"PRODUCT": [3, 8]}


@pytest.mark.fault(
    "tensors with missing, unknown or duplicate inputs, ragged, of a wrong type, count"
)
@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"A": [1, 2]}, "is missing"),
        ({"A": [1, 2], "B": [3, 4], "C": [5, 6]}, "has no input"),
        ([1, 2], "without an input name"),
    ],
)
@any_names
def test_names_that_do_not_fit_are_answered_with_those_that_do(
    zoo: Zoo, inputs: Any, words: str
) -> None:
    response = zoo.infer("pair", inputs)
    assert_error(response, 422, "DOES_NOT_FIT_MODEL", words)
    assert f"{zoo.names.tensor('A')} (INT32 [2])" in response.json()["error"]


def test_an_unknown_output_does_not_fit(zoo: Zoo) -> None:
    response = zoo.infer("pair", {"A": [1, 2], "B": [3, 4]}, outputs=["nothing"])
    assert_error(response, 422, "DOES_NOT_FIT_MODEL", "no output 'nothing'")


@any_names
def test_optional_inputs_may_be_missing(zoo: Zoo) -> None:
    assert zoo.outputs(zoo.infer("optional", [1, 2])) == {"Y": [1, 2]}
    assert zoo.outputs(zoo.infer("optional", {"X": [1, 2], "FACTOR": 3})) == {"Y": [3, 6]}
    both = {"X": [1, 2], "FACTOR": 3, "OFFSET": 0.5}
    assert zoo.outputs(zoo.infer("optional", both)) == {"Y": [3.5, 6.5]}


@any_names
def test_a_form_goes_by_name_too(zoo: Zoo) -> None:
    fields = {zoo.names.tensor("A"): "[1, 2]", zoo.names.tensor("B"): "[3, 4]"}
    files = [(name, (None, value, "application/json")) for name, value in fields.items()]
    assert zoo.outputs(zoo.post("pair", files=files))["SUM"] == [4, 6]


@any_names
def test_an_archive_of_numpy_goes_by_name(zoo: Zoo) -> None:
    file = io.BytesIO()
    arrays: dict[str, Any] = {
        zoo.names.tensor("A"): np.array([1, 2], np.int32),
        zoo.names.tensor("B"): np.array([3, 4], np.int64),
    }
    np.savez(file, **arrays)
    headers = {"Content-Type": "application/x-npz", "Accept": "application/x-npz"}
    response = zoo.post("pair", content=file.getvalue(), headers=headers)
    assert response.status_code == 200, response.text
    answer = loaded(response.content)
    assert answer[zoo.names.tensor("PRODUCT")].tolist() == [3, 8]


# Values that do not fit.


@pytest.mark.fault(
    "tensors with missing, unknown or duplicate inputs, ragged, of a wrong type, count"
)
@pytest.mark.parametrize(
    ("model", "value", "words"),
    [
        ("plain_UINT8", [[300]], "300, which is outside 0..255"),
        ("plain_UINT8", [[-1]], "-1, which is outside 0..255"),
        ("plain_INT32", [[1.5]], "1.5, which is not an integer"),
        ("plain_INT32", [[True]], "the boolean 'True'"),
        ("plain_INT32", [["5"]], "the string '5'"),
        ("plain_INT32", [[None]], "null"),
        ("plain_INT32", [[1, 2], [3]], "ragged lists: lengths 1 and 2"),
        ("plain_INT32", [[1, 2], 3], "ragged lists: values and lists"),
        ("plain_INT32", [[{"a": 1}]], "a JSON object"),
        ("plain_INT32", [[[1]]], "an array of shape [1,1,1]"),
        ("plain_INT64", [[9223372036854775808]], "outside"),
        ("plain_UINT64", [[18446744073709551616]], "outside"),
        ("plain_FP16", [[70000.0]], "70000.0, which is out of range"),
        ("plain_BF16", [[1e39]], "out of range"),
        ("plain_FP32", [[1e39]], "out of range"),
        ("plain_FP32", [[16777217]], "the integer 16777217, which FP32 cannot represent exactly"),
        ("plain_FP64", [[9007199254740993]], "cannot represent exactly"),
        ("plain_BOOL", [[1]], "the number '1'"),
        ("plain_BYTES", [[1]], "the number '1'"),
        ("plain_BYTES", [[True]], "the boolean"),
        ("plain_FP32", "text", "the string 'text'"),
        ("vector_FP32", {"b64": "AAAA"}, "the input's shape is not an image shape"),
    ],
)
def test_a_value_that_does_not_fit_is_named(zoo: Zoo, model: str, value: Any, words: str) -> None:
    response = zoo.infer(model, {"X": value})
    assert_error(response, 422, "DOES_NOT_FIT_MODEL", words)
    datatype = model.rpartition("_")[2]
    assert f"input '{zoo.names.tensor('X')}' expects" in response.json()["error"]
    assert f"({datatype} [" in response.json()["error"]
    assert "e.g." in response.json()["error"]


@pytest.mark.fault(
    "tensors with missing, unknown or duplicate inputs, ragged, of a wrong type, count"
)
@pytest.mark.parametrize(
    ("model", "array", "words"),
    [
        ("plain_INT32", np.array([[1.5]]), "1.5, which INT32 cannot represent exactly"),
        ("plain_INT32", np.array([[np.nan]]), "nan, which INT32 cannot represent exactly"),
        ("plain_INT64", np.array([[2.0**63]]), "cannot represent exactly"),
        ("plain_INT8", np.array([[200]], np.uint8), "200, which INT8 cannot represent exactly"),
        ("plain_UINT64", np.array([[-1]]), "-1, which UINT64 cannot represent exactly"),
        ("plain_INT64", np.array([[2**63]], np.uint64), "cannot represent exactly"),
        ("plain_FP32", np.array([[2**24 + 1]]), "16777217, which FP32 cannot represent exactly"),
        ("plain_FP16", np.array([[1e6]]), "1000000.0, which is out of range"),
        ("plain_BOOL", np.array([[1]]), "an array of dtype int64"),
        ("plain_INT32", np.array([[True]]), "an array of dtype bool"),
        ("plain_FP32", np.array([[1j]]), "an array of dtype complex128"),
        ("plain_FP32", np.array([["a"]]), "an array of dtype <U1"),
        ("plain_BYTES", np.array([[1]]), "an array of dtype int64"),
    ],
)
def test_an_array_that_would_be_changed_is_refused(
    zoo: Zoo, model: str, array: np.ndarray, words: str
) -> None:
    response = zoo.post(model, content=npy(array), headers=NPY)
    assert_error(response, 422, "DOES_NOT_FIT_MODEL", words)


@pytest.mark.parametrize("datatype", [name for name in NUMERIC if name not in ("BOOL", "FP16")])
def test_an_array_of_another_type_is_converted_when_nothing_is_lost(
    zoo: Zoo, datatype: str
) -> None:
    for dtype in (np.int64, np.float64, np.uint8, np.dtype(">i4"), np.dtype(">f4")):
        array = np.asfortranarray(np.array([[1, 2, 3], [4, 5, 6]], dtype))
        response = zoo.post(f"plain_{datatype}", content=npy(array), headers=NPY)
        assert response.status_code == 200, response.text
        assert loaded(response.content).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_not_a_number_is_a_floating_point_value(zoo: Zoo) -> None:
    """JSON has no way to send it; arrays are taken as they are, and an answer names what JSON lacks."""
    assert zoo.outputs(zoo.infer("not_finite", 1))["Y"] == ["NaN", "Infinity", "-Infinity", 1.5]


# Bytes and texts.


@pytest.mark.fault("texts that are empty, of 1 MB, with NUL, combining marks, emoji")
def test_bytes_pass_as_they_are(zoo: Zoo) -> None:
    blob = bytes(range(256))
    encoded = base64.b64encode(blob).decode()
    headers = {"Content-Type": "application/octet-stream"}
    for response in (
        zoo.post("single_BYTES", content=blob, headers=headers),
        zoo.infer("single_BYTES", {"b64": encoded}),
        zoo.infer("single_BYTES", {"b64": f"data:;base64,{encoded}"}),
    ):
        assert zoo.outputs(response) == {"Y": {"b64": encoded}}
    raw = zoo.post(
        "single_BYTES", content=blob, headers={**headers, "Accept": "application/octet-stream"}
    )
    assert raw.content == blob
    assert raw.headers["content-type"] == "application/octet-stream"


@pytest.mark.fault("texts that are empty, of 1 MB, with NUL, combining marks, emoji")
@pytest.mark.parametrize("text", ["", "\0", "nul\0inside", "e\u0301", "안녕 ☕🙂", "x" * 1_000_000])
def test_texts_pass_as_utf8(zoo: Zoo, text: str) -> None:
    assert zoo.outputs(zoo.infer("single_BYTES", text)) == {"Y": text}
    headers = {"Content-Type": "text/plain; charset=utf-8"}
    assert zoo.outputs(zoo.post("single_BYTES", content=text.encode(), headers=headers)) == {
        "Y": text
    }


def test_a_text_in_another_charset_is_understood(zoo: Zoo) -> None:
    headers = {"Content-Type": "text/plain; charset=latin-1"}
    response = zoo.post("single_BYTES", content="Größe".encode("latin-1"), headers=headers)
    assert zoo.outputs(response) == {"Y": "Größe"}


@any_names
def test_an_output_that_is_not_utf8_is_base64(zoo: Zoo) -> None:
    expected = base64.b64encode(b"\xff\xfeabc").decode()
    assert zoo.outputs(zoo.infer("not_utf8", "abc")) == {"Y": {"b64": expected}}


def test_an_output_declared_to_be_json_is_parsed(zoo: Zoo) -> None:
    assert zoo.outputs(zoo.infer("json", "abc")) == {"Y": {"got": "abc"}}


def test_bytes_with_a_nul_at_the_end_do_not_go_into_a_numpy_file(zoo: Zoo) -> None:
    """NumPy's fixed-width bytes would lose it."""
    body = {"inputs": {"b64": base64.b64encode(b"a\0").decode()}}
    response = zoo.post("single_BYTES", json=body, headers={"Accept": "application/x-npy"})
    assert_error(response, 406, "NOT_ACCEPTABLE", "application/json")


# Answers.


def test_an_image_out_of_a_model_can_be_had_raw(zoo: Zoo) -> None:
    for accept in ("image/png", "image/*", "application/octet-stream", "text/html, image/*;q=0.5"):
        response = zoo.post("picture", json={"inputs": 5}, headers={"Accept": accept})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "image/png"
        assert response.content.startswith(b"\x89PNG")
    assert "b64" in zoo.outputs(zoo.infer("picture", 5))["PNG"]


def test_several_raw_images_have_no_one_body(zoo: Zoo) -> None:
    response = zoo.post("picture", json={"inputs": [5, 6]}, headers={"Accept": "image/png"})
    assert_error(response, 406, "NOT_ACCEPTABLE", "application/json")


@pytest.mark.fault("an `Accept` header that nothing satisfies")
def test_an_accept_that_nothing_satisfies_is_406(zoo: Zoo) -> None:
    for accept in ("text/html", "application/json;q=0", "image/png"):
        response = zoo.post("single_BYTES", json={"inputs": "a"}, headers={"Accept": accept})
        assert_error(response, 406, "NOT_ACCEPTABLE", "application/json")


def test_accept_goes_by_preference(zoo: Zoo) -> None:
    accept = "application/json;q=0.5, application/x-npz;q=0.9, text/html"
    response = zoo.post(
        "pair", json={"inputs": zoo.named({"A": [1, 2], "B": [1, 2]})}, headers={"Accept": accept}
    )
    assert response.headers["content-type"] == "application/x-npz"


@any_names
def test_classification_gives_labels(zoo: Zoo) -> None:
    response = zoo.infer("classes", {"X": [0.1, 0.7, 0.2]}, parameters={"classification": 2})
    assert zoo.outputs(response)["SCORES"] == [
        {"score": pytest.approx(0.7), "index": 1, "label": LABELS[1]},
        {"score": pytest.approx(0.2), "index": 2, "label": LABELS[2]},
    ]


@pytest.mark.parametrize(
    "parameters",
    [{"classification": -1}, {"classification": "two"}, {"timeout": "soon"}, {"triton_x": 1}],
)
def test_parameters_that_cannot_be_are_422(zoo: Zoo, parameters: dict[str, Any]) -> None:
    response = zoo.infer("classes", {"X": [0.1, 0.7, 0.2]}, parameters=parameters)
    assert_error(response, 422, "DOES_NOT_FIT_MODEL", next(iter(parameters)))


@any_names
def test_a_dry_run_tells_the_tensors_and_sends_nothing(zoo: Zoo) -> None:
    response = zoo.post("failing", "/infer?dry_run=true", json={"inputs": 1.5})
    assert response.json()["inputs"] == [
        {
            "name": zoo.names.tensor("X"),
            "datatype": "FP32",
            "shape": [1, 1],
            "bytes": 4,
            "first_values": [1.5],
        }
    ]


def test_the_requests_id_comes_back(zoo: Zoo) -> None:
    response = zoo.infer("single_BYTES", "a", id="mine")
    assert response.json()["id"] == "mine"


# Parameters in the query.


def test_the_number_of_classes_may_be_in_the_query_with_any_body(zoo: Zoo) -> None:
    array = np.array([[0.1, 0.7, 0.2]], np.float32)
    file = io.BytesIO()
    np.save(file, array)
    headers = {"Content-Type": "application/x-npy"}
    response = zoo.post(
        "classes", "/infer?classification=1", content=file.getvalue(), headers=headers
    )
    assert zoo.outputs(response)["SCORES"] == [
        [{"score": pytest.approx(0.7), "index": 1, "label": LABELS[1]}]
    ]


def test_the_models_config_may_ask_for_classes(zoo: Zoo) -> None:
    best = {"score": pytest.approx(0.7), "index": 1, "label": LABELS[1]}
    inputs = zoo.named({"X": [0.1, 0.7, 0.2]})
    response = zoo.post("labelled", json={"inputs": inputs})
    assert zoo.outputs(response)["SCORES"] == [best]
    for path, parameters in (
        ("/infer?classification=0", {}),
        ("/infer", {"classification": 0}),
    ):
        document = {"inputs": inputs, "parameters": parameters}
        scores = zoo.outputs(zoo.post("labelled", path, json=document))["SCORES"]
        assert scores == pytest.approx([0.1, 0.7, 0.2])
    two = zoo.post("labelled", json={"inputs": inputs, "parameters": {"classification": 2}})
    assert len(zoo.outputs(two)["SCORES"]) == 2


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("dryrun=true", "unknown query parameter 'dryrun'; did you mean dry_run?"),
        ("classifications=2", "did you mean classification?"),
        ("x=1", "unknown query parameter 'x'"),
    ],
)
def test_an_unknown_query_parameter_is_refused(zoo: Zoo, query: str, words: str) -> None:
    response = zoo.post("single_BYTES", f"/infer?{query}", json={"inputs": "a"})
    assert_error(response, 400, "MALFORMED_REQUEST", words)


def test_a_query_on_tritons_own_paths_is_ignored_as_by_triton(zoo: Zoo) -> None:
    assert zoo.client.post("/v2/repository/index?unknown=1").status_code == 200


def test_a_misspelt_parameter_is_refused_and_a_models_own_is_not(zoo: Zoo) -> None:
    response = zoo.infer("single_BYTES", "a", parameters={"time_out": 5})
    assert_error(response, 400, "MALFORMED_REQUEST", "did you mean timeout?")
    assert zoo.infer("single_BYTES", "a", parameters={"temperature": 5}).status_code == 200


def test_a_body_without_a_type_is_the_text_of_a_model_of_texts(zoo: Zoo) -> None:
    text = "a text, as curl -X POST -T sends it"
    path = zoo.path("single_BYTES")
    request = httpx.Request("POST", f"{zoo.client.base_url}{path}", content=text.encode())
    assert "content-type" not in request.headers
    assert zoo.outputs(zoo.client.send(request))["Y"] == text
    numbers = zoo.path("single_INT32")
    request = httpx.Request("POST", f"{zoo.client.base_url}{numbers}", content=b"7")
    assert_error(zoo.client.send(request), 415, "UNSUPPORTED_BODY", "Content-Type is missing")


# What a model's fault tells.


@pytest.mark.fault("exceptions provoked in a model")
@any_names
def test_an_exception_in_a_model_tells_its_reason_and_nothing_else(zoo: Zoo) -> None:
    response = zoo.infer("failing", 1)
    assert_error(response, 500, "MODEL_FAULT", "boom")
    for leaked in ("/srv", "deadbeef", "model.py", "execute"):
        assert leaked not in response.json()["error"]


@pytest.mark.parametrize(
    ("code", "status", "name"),
    [
        ("INVALID_ARG", 422, "REFUSED_BY_MODEL"),
        ("NOT_FOUND", 404, "NOT_FOUND"),
        ("UNAVAILABLE", 503, "UNAVAILABLE"),
        ("UNSUPPORTED", 422, "REFUSED_BY_MODEL"),
        ("ALREADY_EXISTS", 422, "REFUSED_BY_MODEL"),
        ("UNKNOWN", 422, "REFUSED_BY_MODEL"),
        ("INTERNAL", 500, "MODEL_FAULT"),
    ],
)
def test_a_models_own_error_has_its_status_and_its_words(
    zoo: Zoo, code: str, status: int, name: str
) -> None:
    response = zoo.infer("refusing", f"{code}:the moon is in the way")
    assert_error(response, status, name, "the moon is in the way")


def test_a_mismatch_of_the_clients_own_does_not_read_the_metadata_again(zoo: Zoo) -> None:
    """Each reading would be two requests to Triton; one is due every two seconds in any case."""

    def attempts() -> float:
        page = zoo.client.get("/metrics").text
        counts = re.findall(r"^gateway_upstream_attempts_total\{.*\} (\S+)$", page, re.MULTILINE)
        return sum(map(float, counts))

    body = {"inputs": "a", "parameters": {"timeout": "soon"}}
    assert zoo.post("single_BYTES", json=body).status_code == 422
    before = attempts()
    for _ in range(50):
        assert zoo.post("single_BYTES", json=body).status_code == 422
    assert attempts() - before < 50


@any_names
def test_a_deadline_that_passes_is_504(zoo: Zoo) -> None:
    """The model would take a minute; no other test uses it."""
    headers = {"X-Request-Timeout": "0.3"}
    response = zoo.post("patient", json={"inputs": 60.0}, headers=headers)
    assert_error(response, 504, "DEADLINE_PASSED", "within 0.")  # what was left of 0.3 s


@pytest.mark.long
@pytest.mark.parametrize("sent", ["half", "chunk", "nothing"])
@pytest.mark.parametrize("content_type", ["text/plain", "multipart/form-data; boundary=b"])
def test_a_deadline_that_passes_before_the_body_is_complete_is_504(
    zoo: Zoo, content_type: str, sent: str
) -> None:
    framing, body = {
        "half": ("Content-Length: 200000", b"x" * 100_000),
        "chunk": ("Transfer-Encoding: chunked", b"186a0\r\n" + b"x" * 100_000 + b"\r\n"),
        "nothing": ("Content-Length: 100\r\nExpect: 100-continue", b""),
    }[sent]
    head = (
        f"POST {zoo.path('single_BYTES')} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"X-Request-Timeout: 0.3\r\nContent-Type: {content_type}\r\n{framing}\r\n\r\n"
    )
    answer = raw_answer(zoo, head.encode() + body)
    answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 504 ")
    assert b'"code":"DEADLINE_PASSED"' in answer


@pytest.mark.fault("deadlines of 0, −1, `abc`, 1e9 s")
@pytest.mark.parametrize("deadline", ["0", "-1", "abc", "nan", "inf"])
def test_a_deadline_that_cannot_be_is_400(zoo: Zoo, deadline: str) -> None:
    headers = {"X-Request-Timeout": deadline}
    response = zoo.post("single_BYTES", json={"inputs": "a"}, headers=headers)
    assert_error(response, 400, "MALFORMED_REQUEST", "X-Request-Timeout")


@pytest.mark.fault("deadlines of 0, −1, `abc`, 1e9 s")
def test_a_deadline_that_is_too_long_is_clamped(zoo: Zoo) -> None:
    response = zoo.post("single_BYTES", json={"inputs": "a"}, headers={"X-Request-Timeout": "1e9"})
    assert response.status_code == 200


# KServe's V1 dialect.


@any_names
def test_rows_become_predictions(zoo: Zoo) -> None:
    def predictions(model: str, instances: Any) -> Any:
        response = zoo.post(model, ":predict", json={"instances": instances})
        assert response.status_code == 200, response.text
        return response.json()["predictions"]

    assert predictions("single_BYTES", ["a", "b"]) == ["a", "b"]
    assert predictions("single_BYTES", ["a"]) == ["a"]
    assert predictions("single_BYTES", [{"b64": "YQ=="}]) == ["a"]
    assert predictions("single_INT32", list(range(20))) == list(range(20))
    assert predictions("vector_FP32", [[1, 2], [3, 4]]) == [[1, 2], [3, 4]]
    assert predictions("plain_vector_FP32", [[1, 2], [3, 4, 5]]) == [[1, 2], [3, 4, 5]]
    assert predictions("plain_FP32", [[1, 2], [3, 4]]) == [[1, 2], [3, 4]]
    rows = [zoo.named({"A": [1, 2], "B": [3, 4]}), zoo.named({"A": [0, 0], "B": [5, 6]})]
    assert predictions("pair", rows) == [
        zoo.named({"SUM": [4, 6], "PRODUCT": [3, 8]}),
        zoo.named({"SUM": [5, 6], "PRODUCT": [0, 0]}),
    ]


def test_columns_become_outputs(zoo: Zoo) -> None:
    def outputs(model: str, inputs: Any) -> Any:
        response = zoo.post(model, ":predict", json={"inputs": inputs})
        assert response.status_code == 200, response.text
        return response.json()["outputs"]

    assert outputs("vector_FP32", [[1, 2], [3, 4]]) == [[1, 2], [3, 4]]
    columns = zoo.named({"A": [[1, 2]], "B": [[3, 4]]})
    assert outputs("pair", columns) == zoo.named({"SUM": [[4, 6]], "PRODUCT": [[3, 8]]})


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "either"),
        ({"instances": [1], "inputs": [1]}, 400, "either"),
        ({"instances": []}, 400, "non-empty list"),
        ({"instances": 1}, 400, "non-empty list"),
        ({"instances": [1], "what": 1}, 400, "unknown key 'what'"),
        ({"instances": ["a", 1]}, 422, "the number '1'"),
    ],
)
def test_a_bad_prediction_request_says_what_is_wrong(
    zoo: Zoo, body: Any, status: int, words: str
) -> None:
    response = zoo.post("single_BYTES", ":predict", json=body)
    assert response.status_code == status
    assert words in response.json()["error"]


# Bodies that are not what they say.


@pytest.mark.fault("JSON with NaN, 1e999, a lone surrogate, invalid UTF-8, a depth of 100,000, an")
@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"5", b"{}", b"{", b'{"inputs": NaN}', b'{"inputs": 1e999}',
        b'{"inputs": "\\ud800"}', b'{"inputs": "\xff"}', b'{"inputs": 1, "more": 2}',
        b'{"inputs": {"b64": "***"}}', b'{"inputs": {"b64": "data:image/png;base64"}}',
        b'{"inputs": "a", "outputs": "Y"}', b'{"inputs": "a", "parameters": []}',
        b'{"inputs": "a", "id": 5}', b"[" * 100_000, b'{"inputs":' + b"[" * 90 + b"]" * 90 + b"}",
    ],
)  # fmt: skip
def test_json_that_is_none_is_400(zoo: Zoo, body: bytes) -> None:
    response = zoo.post("single_BYTES", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["code"] == "MALFORMED_REQUEST"


@pytest.mark.fault("JSON with NaN, 1e999, a lone surrogate, invalid UTF-8, a depth of 100,000, an")
def test_an_integer_of_5000_digits_does_no_harm(zoo: Zoo) -> None:
    body = b'{"inputs": ' + b"9" * 5000 + b"}"
    response = zoo.post("single_INT32", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 422)


def form(*parts: bytes, end: bytes = b"--b--\r\n") -> bytes:
    return b"".join(b"--b\r\n" + part + b"\r\n" for part in parts) + end


FIELD = b'Content-Disposition: form-data; name="x"\r\n\r\nvalue'


@pytest.mark.fault("forms that are truncated or have 2,000 fields, a file called ../../etc/passwd")
@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("multipart/form-data", form(FIELD), 400),
        ("multipart/form-data; boundary=b", form(FIELD, end=b""), 400),
        ("multipart/form-data; boundary=b", form(FIELD)[:30], 400),
        ("multipart/form-data; boundary=b", b"", 400),
        ("multipart/form-data; boundary=b", b"garbage", 400),
        ("multipart/form-data; boundary=b", form(b"\r\nno headers"), 400),
        ("multipart/form-data; boundary=b", form(b"Content-Disposition: form-data\r\n\r\nx"), 400),
        ("multipart/form-data; boundary=b", form(*[FIELD] * 129), 413),
        ("multipart/form-data; boundary=b", form(*[FIELD] * 2000), 413),
        ("multipart/form-data; boundary=b", form(), 422),
    ],
)
def test_a_form_that_is_none(zoo: Zoo, content_type: str, body: bytes, status: int) -> None:
    response = zoo.post("single_BYTES", content=body, headers={"Content-Type": content_type})
    assert response.status_code == status, response.text


@pytest.mark.fault("forms that are truncated or have 2,000 fields, a file called ../../etc/passwd")
def test_a_file_name_is_only_a_name(zoo: Zoo) -> None:
    files = {"x": ("../../etc/passwd", b"harmless")}
    assert zoo.outputs(zoo.post("single_BYTES", files=files)) == {"Y": "harmless"}


def header_of(shape: str, descr: str = "'<f4'") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


@pytest.mark.fault("NumPy files with pickles, or that claim 10 GB")
@pytest.mark.parametrize(
    "body",
    [
        b"", b"\x93NUMPY", b"not numpy", npy(np.zeros(3))[:-1], npy(np.zeros(3)) + b"x",
        header_of("(100000, 100000)"), header_of("(-1,)"), header_of("(1,)", "'|O'") + b"x" * 8,
        header_of("(1,)", "'<U1', __import__('os')"), header_of("((1,),)"), header_of("(1e3,)"),
    ],
)  # fmt: skip
def test_a_numpy_file_that_is_none_is_400(zoo: Zoo, body: bytes) -> None:
    response = zoo.post("plain_FP32", content=body, headers={"Content-Type": "application/x-npy"})
    assert_error(response, 400, "MALFORMED_REQUEST", ".npy")


@pytest.mark.fault("NumPy files with pickles, or that claim 10 GB")
def test_pickles_are_not_taken(zoo: Zoo) -> None:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], object), allow_pickle=True)
    response = zoo.post(
        "plain_FP32", content=file.getvalue(), headers={"Content-Type": "application/x-npy"}
    )
    assert_error(response, 400, "MALFORMED_REQUEST", "pickled")


@pytest.mark.fault("NumPy files with pickles, or that claim 10 GB")
def test_an_archive_that_inflates_beyond_the_limit_is_413(zoo: Zoo) -> None:
    file = io.BytesIO()
    np.savez_compressed(file, X=np.zeros(20_000_000, np.float32))
    response = zoo.post(
        "plain_FP32", content=file.getvalue(), headers={"Content-Type": "application/x-npz"}
    )
    assert_error(response, 413, "TOO_LARGE", "inflates")


@pytest.mark.fault("NumPy files with pickles, or that claim 10 GB")
def test_an_archive_that_is_none_is_400(zoo: Zoo) -> None:
    response = zoo.post(
        "plain_FP32", content=b"PK nothing", headers={"Content-Type": "application/x-npz"}
    )
    assert_error(response, 400, "MALFORMED_REQUEST", ".npz")


def test_a_compressed_body_is_inflated(zoo: Zoo) -> None:
    headers = {"Content-Type": "text/plain", "Content-Encoding": "gzip"}
    response = zoo.post("single_BYTES", content=gzip.compress(b"hello"), headers=headers)
    assert zoo.outputs(response) == {"Y": "hello"}


@pytest.mark.fault("invalid gzip, or 10 MB of gzip that decompress to 10 GB")
def test_a_compressed_body_that_is_none_is_400_and_a_bomb_413(zoo: Zoo) -> None:
    headers = {"Content-Type": "text/plain", "Content-Encoding": "gzip"}
    for body in (b"plain", gzip.compress(b"hello")[:-9], b""):
        response = zoo.post("single_BYTES", content=body, headers=headers)
        assert_error(
            response,
            400,
            "MALFORMED_REQUEST",
            "compressed" if body[:1] != b"p" else "Content-Encoding",
        )
    bomb = gzip.compress(bytes(100 << 20))
    assert_error(zoo.post("single_BYTES", content=bomb, headers=headers), 413, "TOO_LARGE", "limit")
    headers["Content-Encoding"] = "br"
    assert_error(
        zoo.post("single_BYTES", content=b"x", headers=headers), 415, "UNSUPPORTED_BODY", "gzip"
    )


def test_several_gzip_members_are_one_body_and_garbage_is_none(zoo: Zoo) -> None:
    headers = {"Content-Type": "text/plain", "Content-Encoding": "gzip"}
    body = gzip.compress(b"one, ") + gzip.compress(b"two")
    assert zoo.outputs(zoo.post("single_BYTES", content=body, headers=headers)) == {"Y": "one, two"}
    garbage = gzip.compress(b"one") + bytes(1 << 20)
    response = zoo.post("single_BYTES", content=garbage, headers=headers)
    assert_error(response, 400, "MALFORMED_REQUEST", "Content-Encoding")


def raw_answer(zoo: Zoo, request: bytes) -> bytes:
    """All that the gateway answers to these bytes, until it closes."""
    url = zoo.client.base_url
    with socket.create_connection((url.host, url.port or 80), 60) as connection:
        connection.sendall(request)
        answer = b""
        while data := connection.recv(65536):
            answer += data
    return answer


@pytest.mark.fault("request smuggling through nginx, in upgrades, in trailers")
def test_an_upgrade_is_refused_before_its_body_is_taken_for_a_request(zoo: Zoo) -> None:
    path = zoo.path("single_BYTES")
    request = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Content-Type: text/plain\r\nContent-Length: 40\r\n\r\nGET /livez HTTP/1.1\r\nHost: smuggled\r\n\r\n"
    )
    answer = raw_answer(zoo, request.encode())
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert b'"code":"MALFORMED_REQUEST"' in answer


def test_what_is_no_http_is_answered_in_the_same_shape(zoo: Zoo) -> None:
    answer = raw_answer(zoo, b"NONSENSE\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"MALFORMED_REQUEST"' in answer


@pytest.mark.fault("request smuggling through nginx, in upgrades, in trailers")
def test_trailers_do_not_become_headers(zoo: Zoo) -> None:
    request = (
        f"POST {zoo.path('single_BYTES')} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
        "Content-Type: text/plain\r\nConnection: close\r\n\r\n"
        "5\r\nhello\r\n0\r\nX-Request-Timeout: never\r\nX-Request-ID: trailing\r\n\r\n"
    )
    answer = raw_answer(zoo, request.encode())
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"trailing" not in answer


@pytest.mark.fault("bodies over the limit, with a length or chunked")
def test_a_body_over_the_limit_is_413_before_it_is_read(zoo: Zoo) -> None:
    url, path = zoo.client.base_url, zoo.path("single_BYTES")
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n"
    with socket.create_connection((url.host, url.port or 80), 60) as connection:
        connection.sendall(f"{head}Content-Length: {(64 << 20) + 1}\r\n\r\n".encode())
        answer = b""
        while b"TOO_LARGE" not in answer and (data := connection.recv(4096)):
            answer += data
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"TOO_LARGE" in answer


@pytest.mark.fault("bodies over the limit, with a length or chunked")
def test_a_chunked_body_over_the_limit_is_413_at_the_limit(zoo: Zoo) -> None:
    chunks = (bytes(1 << 20) for _ in range(65))
    response = zoo.post("single_BYTES", content=chunks, headers={"Content-Type": "text/plain"})
    assert_error(response, 413, "TOO_LARGE", "limit")


@pytest.mark.parametrize("content_type", ["text/html", "application/x-www-form-urlencoded", "x"])
def test_a_body_of_another_type_is_415(zoo: Zoo, content_type: str) -> None:
    headers = {"Content-Type": content_type}
    response = zoo.post("single_BYTES", content=b"x", headers=headers)
    assert_error(response, 415, "UNSUPPORTED_BODY", "application/json")


@pytest.mark.fault("names with ../, %00, CR and LF, of 300 characters; invalid versions")
@pytest.mark.parametrize(
    "name", ["..%2f..%2fv2%2frepository", "%00", "%0d%0aX: y", "x" * 300, "%F0%9F%99%82"]
)
def test_a_name_that_is_none_is_404(zoo: Zoo, name: str) -> None:
    response = zoo.client.post(f"/v1/models/{name}/infer", json={"inputs": 1})
    assert response.status_code == 404, response.text
    assert response.json()["code"] in ("MODEL_NOT_FOUND", "NOT_FOUND")


# What a model says of itself.


# A request with a query is served by the framework, any other by the same handler without it.

VERBS = ("/infer", "/versions/1/infer", ":predict", "/versions/1:predict", "/labels/1:predict")
JSON_REQUESTS: dict[str, dict[str, Any]] = {
    "rows or inputs": {"json": {"inputs": [[[1.0, 2.0]]]}},
    "no JSON": {"content": b"{", "headers": {"Content-Type": "application/json"}},
    "wrong values": {"json": {"inputs": "text"}},
    "another type": {"content": b"x", "headers": {"Content-Type": "x/y"}},
    "a wrong header": {"json": {"inputs": [[1.0]]}, "headers": {"X-Request-Timeout": "-1"}},
    "a wrong method": {"method": "GET"},
}


def comparable(response: httpx.Response) -> tuple[int, Any, dict[str, str]]:
    """Status, document and headers, without those that differ between two requests."""
    document = response.json()
    for key in ("id", "request_id"):
        document.pop(key, None)
    headers = {name: value for name, value in response.headers.items() if name != "x-request-id"}
    return response.status_code, document, headers


@pytest.mark.parametrize("request_name", JSON_REQUESTS)
@pytest.mark.parametrize("verb", VERBS)
def test_both_ways_to_a_handler_answer_alike(zoo: Zoo, verb: str, request_name: str) -> None:
    options = {"method": "POST", **JSON_REQUESTS[request_name]}
    path = zoo.path("batched_FP32", verb)
    answers = [comparable(zoo.client.request(url=url, **options)) for url in (path, f"{path}?&")]
    assert answers[0] == answers[1]
    assert answers[0][0] in (200, 400, 404, 405, 415, 422)


def test_both_ways_know_the_same_models(zoo: Zoo) -> None:
    for verb in VERBS:
        path = f"/v1/models/nothing-like-it{verb}"
        answers = [comparable(zoo.client.post(url)) for url in (path, f"{path}?&")]
        assert answers[0] == answers[1]
        assert answers[0][0] == 404


def test_every_inference_in_the_description_is_served_without_the_framework(zoo: Zoo) -> None:
    paths = zoo.client.get("/openapi.json").json()["paths"]
    described = {
        path for path, item in paths.items() if "inference" in str(item.get("post", {}).get("tags"))
    }
    assert described == {
        route.template
        for path in described
        if (route := find_inference_route(path.format(model="m", version="1"))) is not None
    }
    assert len(described) == len(VERBS)
