"""TensorFlow Serving's REST API, which KServe calls V1, for models of all kinds on real tritonservers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.errors import assert_error
from tests.support.model_zoo.zoo import Zoo, any_names


@any_names
def test_predict_takes_rows_and_columns(zoo: Zoo, subtests: pytest.Subtests) -> None:
    rows = [zoo.named({"A": [1, 2], "B": [3, 4]}), zoo.named({"A": [0, 0], "B": [5, 6]})]
    predictions = [
        zoo.named({"SUM": [4, 6], "PRODUCT": [3, 8]}),
        zoo.named({"SUM": [5, 6], "PRODUCT": [0, 0]}),
    ]
    table: list[tuple[str, str, Any, Any]] = [
        ("single_BYTES", "instances", ["a", "b"], ["a", "b"]),
        ("single_BYTES", "instances", ["a"], ["a"]),
        ("single_BYTES", "instances", [{"b64": "YQ=="}], ["a"]),
        ("single_INT32", "instances", list(range(20)), list(range(20))),
        ("vector_FP32", "instances", [[1, 2], [3, 4]], [[1, 2], [3, 4]]),
        ("plain_vector_FP32", "instances", [[1, 2], [3, 4, 5]], [[1, 2], [3, 4, 5]]),
        ("plain_FP32", "instances", [[1, 2], [3, 4]], [[1, 2], [3, 4]]),
        ("pair", "instances", rows, predictions),
        ("vector_FP32", "inputs", [[1, 2], [3, 4]], [[1, 2], [3, 4]]),
        ("single_BYTES", "inputs", [{"b64": "YQ=="}, "b"], ["a", "b"]),
        (
            "pair",
            "inputs",
            zoo.named({"A": [[1, 2]], "B": [[3, 4]]}),
            zoo.named({"SUM": [[4, 6]], "PRODUCT": [[3, 8]]}),
        ),
    ]
    for model, field, inputs, expected in table:
        with subtests.test(f"{model} {field} {inputs}"):
            response = zoo.post(model, ":predict", json={field: inputs})
            assert response.status_code == 200, response.text
            key = "predictions" if field == "instances" else "outputs"
            assert response.json()[key] == expected


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "either"),
        ({"instances": [1], "inputs": [1]}, 400, "either"),
        ({"instances": []}, 400, "non-empty list"),
        ({"instances": 1}, 400, "non-empty list"),
        ({"instances": [1], "what": 1}, 400, "unknown key 'what'"),
        ({"instances": ["a", 1]}, 422, "the number '1'"),
        ({"instances": [{"X": "a"}, {"Y": "a"}]}, 422, "have different inputs: X and Y"),
    ],
)
def test_predict_request_that_is_invalid_is_refused(
    zoo: Zoo, body: Any, status: int, words: str
) -> None:
    response = zoo.post("single_BYTES", ":predict", json=body)
    assert response.status_code == status
    assert words in response.json()["error"]


def test_tensorflow_servings_clients_read_the_status_and_the_signature(
    zoo: Zoo,
) -> None:
    zoo.load("vectors")
    model = zoo.client.get("/v1/models/vectors").json()
    assert model["model_version_status"] == [
        {
            "version": "1",
            "state": "AVAILABLE",
            "status": {"error_code": "OK", "error_message": ""},
        }
    ]
    versioned = zoo.client.get("/v1/models/vectors/versions/1").json()
    assert versioned["model_version_status"] == model["model_version_status"]
    for path in ("/v1/models/vectors/metadata", "/v1/models/vectors/versions/1/metadata"):
        document = zoo.client.get(path).json()
        assert document["model_spec"] == {"name": "vectors", "signature_name": "", "version": "1"}
        signature = document["metadata"]["signature_def"]["signature_def"]["serving_default"]
        assert signature["inputs"]["TEXT"] == {
            "name": "TEXT",
            "dtype": "DT_STRING",
            "tensor_shape": {
                "dim": [{"size": "-1", "name": ""}, {"size": "1", "name": ""}],
                "unknown_rank": False,
            },
        }
        assert signature["outputs"]["VECTOR"]["dtype"] == "DT_FLOAT"


def test_other_verb_of_a_model_is_404(zoo: Zoo) -> None:
    for suffix in (":explain", ":classify", "/versions/1:regress", "/labels/stable:explain"):
        response = zoo.post("single_BYTES", suffix, json={"instances": ["a"]})
        verb = suffix[suffix.index(":") :]
        assert_error(response, 404, "NOT_FOUND", f"'{verb}' is not a verb of models")
    assert_error(zoo.post("single_BYTES", ""), 405, "METHOD_NOT_ALLOWED", "only DELETE, GET, HEAD")
