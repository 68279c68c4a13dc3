"""`/v1/models/{model}/infer` for any model and datatype, on the real Triton; see tests/support/model_zoo."""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
import socket
from itertools import product
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest

from gateway.tensors.dtypes import DATATYPES as TABLE
from tests.support.errors import assert_error
from tests.support.hostile_files import FORM_TYPE, field, form, npy, npy_of
from tests.support.model_zoo.zoo import DATATYPES, LABELS, NUMERIC, Zoo, any_names

CURL_TYPE = "application/x-www-form-urlencoded"
NPY = {"Content-Type": "application/x-npy", "Accept": "application/x-npy"}


def load_numpy(body: bytes) -> Any:
    return np.load(io.BytesIO(body), allow_pickle=False)


def list_extremes(datatype: str) -> np.ndarray:
    """Return a row of values that a datatype has, the largest and smallest among them."""
    dtype = TABLE[datatype].numpy_dtype
    if datatype == "BYTES":
        return np.array([[b"", b"a\0b", "é☕".encode()]], "S8")
    if datatype == "BOOL":
        return np.array([[True, False]])
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.array([[limits.min, limits.max, 0, 1]], dtype)
    info = ml_dtypes.finfo(dtype)
    numbers = [info.max, info.min, info.smallest_normal, info.smallest_subnormal, -0.0, 1 / 3]
    return np.array([numbers]).astype(dtype)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_is_returned_bit_for_bit(zoo: Zoo, datatype: str) -> None:
    row = list_extremes(datatype)
    batch = np.stack([row, row[:, ::-1]])
    plain = [row, np.asfortranarray(np.concatenate([row, row])), row[:, :0]]
    if row.dtype.kind == "f":
        plain.append(np.array([[np.nan, np.inf, -np.inf]], row.dtype))
    for model, array in (("batched", batch), *(("plain", each) for each in plain)):
        response = zoo.post(f"{model}_{datatype}", content=npy(array), headers=NPY)
        assert response.status_code == 200, response.text
        answer = load_numpy(response.content)
        assert answer.shape == array.shape
        assert answer.astype(array.dtype.str).tobytes() == array.tobytes()
    for model, array in (("batched", batch), ("plain", row)):
        if datatype == "BYTES":
            array = np.char.decode(array, "utf-8")  # noqa: PLW2901
        values = array.astype(np.float64) if datatype == "BF16" else array
        found = zoo.outputs(zoo.infer(f"{model}_{datatype}", {"X": values.tolist()}))["Y"]
        assert np.array(found, values.dtype).astype(array.dtype).tobytes() == array.tobytes()


# Values in JSON, and the batch dimension.

ONE = [[1.0, 2.0], [3.0, 4.0]]
BATCH = [[[1.0, 2.0]], [[3.0, 4.0]]]
BLOB = base64.b64encode(bytes(range(256))).decode()
TEXTS = ("", "\0", "nul\0inside", "e\u0301", "안녕 ☕🙂", "x" * 1_000_000)
ANSWERS: Final[tuple[tuple[str, Any, Any], ...]] = (
    ("batched_FP32", ONE, ONE),
    ("batched_FP32", BATCH, BATCH),
    # Of single values, a list is a batch.
    ("single_BYTES", ["a"], ["a"]),
    ("single_BYTES", ["a", "b", "c"], ["a", "b", "c"]),
    ("single_BYTES", [["a"], ["b"]], ["a", "b"]),
    ("single_INT32", 5, 5),
    ("single_INT32", -2e3, -2000),
    # Above the model's maximum, it is split, and joined in order.
    *(("single_INT32", list(range(count)), list(range(count))) for count in (2, 8, 9, 33)),
    # A model without a batch dimension.
    ("plain_single_BYTES", "a", ["a"]),
    ("plain_vector_FP32", [1, 2, 3], [1, 2, 3]),
    ("plain_vector_FP32", 7, [7]),
    # Optional inputs.
    ("optional", [1, 2], [1, 2]),
    ("optional", {"X": [1, 2], "FACTOR": 3}, [3, 6]),
    ("optional", {"X": [1, 2], "FACTOR": 3, "OFFSET": 0.5}, [3.5, 6.5]),
    # Texts and bytes, and what JSON cannot represent.
    *(("single_BYTES", text, text) for text in TEXTS),
    ("single_BYTES", {"b64": BLOB}, {"b64": BLOB}),
    ("single_BYTES", {"b64": f"data:;base64,{BLOB}"}, {"b64": BLOB}),
    ("not_utf8", "abc", {"b64": base64.b64encode(b"\xff\xfeabc").decode()}),
    ("json", "abc", {"got": "abc"}),  # declared to be JSON
    ("not_finite", 1, ["NaN", "Infinity", "-Infinity", 1.5]),
)


@pytest.mark.fault("texts that are empty, of 1 MB, with NUL, combining marks, emoji")
@any_names
def test_value_in_json_is_answered_in_json(zoo: Zoo, subtests: pytest.Subtests) -> None:
    for model, inputs, output in ANSWERS:
        with subtests.test(f"{model} {str(inputs)[:40]}"):
            assert zoo.outputs(zoo.infer(model, inputs)) == {"Y": output}


def test_error_in_a_split_batch_names_its_part(zoo: Zoo) -> None:
    values = ["INVALID_ARG:the third is bad"] * 10
    response = zoo.infer("refusing", values)
    assert_error(response, 422, "REFUSED_BY_MODEL", "the third is bad")
    assert "in the part of the batch with items" in response.json()["error"]


@pytest.mark.fault("forms that are truncated or have 2,000 fields, a file called ../../etc/passwd")
def test_files_and_texts_of_a_form_are_a_batch_in_order(zoo: Zoo) -> None:
    files = [("any", (f"../../{number}", str(number))) for number in range(32)]
    expected = [str(number) for number in range(32)]
    assert zoo.outputs(zoo.post("single_BYTES", files=files)) == {"Y": expected}
    fields = [(zoo.names.tensor("X"), (None, text)) for text in ("first", "second")]
    assert zoo.outputs(zoo.post("single_BYTES", files=fields)) == {"Y": ["first", "second"]}


# Names.


@any_names
def test_inputs_and_outputs_are_matched_by_name(zoo: Zoo) -> None:
    a, b, product = map(zoo.names.tensor, ("A", "B", "PRODUCT"))
    outputs = {"SUM": [4, 6], "PRODUCT": [3, 8]}
    inputs = {"A": [1, 2], "B": [3, 4]}
    assert zoo.outputs(zoo.infer("pair", inputs)) == outputs
    selected = zoo.outputs(zoo.infer("pair", inputs, outputs=[product]))
    assert selected == {"PRODUCT": [3, 8]}

    fields = {a: "[1, 2]", b: "[3, 4]"}
    files = [(name, (None, value, "application/json")) for name, value in fields.items()]
    assert zoo.outputs(zoo.post("pair", files=files)) == outputs

    file = io.BytesIO()
    arrays: dict[str, Any] = {a: np.array([1, 2], np.int32), b: np.array([3, 4], np.int64)}
    np.savez(file, **arrays)
    headers = {"Content-Type": "application/x-npz", "Accept": "application/x-npz"}
    response = zoo.post("pair", content=file.getvalue(), headers=headers)
    assert response.status_code == 200, response.text
    assert load_numpy(response.content)[product].tolist() == [3, 8]


@pytest.mark.fault(
    "tensors with missing, unknown or duplicate inputs, ragged, of a wrong type, count"
)
@any_names
def test_unknown_names_are_refused_with_those_of_the_model(
    zoo: Zoo, subtests: pytest.Subtests
) -> None:
    pair = {"A": [1, 2], "B": [3, 4]}
    mismatches: list[tuple[Any, str]] = [
        ({"A": [1, 2]}, "is missing"),
        ({**pair, "C": [5, 6]}, "has no input"),
        ([1, 2], "without an input name"),
    ]
    for inputs, words in mismatches:
        with subtests.test(words):
            response = zoo.infer("pair", inputs)
            assert_error(response, 422, "DOES_NOT_FIT_MODEL", words)
            assert f"{zoo.names.tensor('A')} (INT32 [2])" in response.json()["error"]
    response = zoo.infer("pair", pair, outputs=["nothing"])
    assert_error(response, 422, "DOES_NOT_FIT_MODEL", "no output 'nothing'")
    response = zoo.infer("pair", {"A": [[1, 2], [3, 4]], "B": [1, 2]})
    assert_error(response, 422, "DOES_NOT_FIT_MODEL", "different batch sizes")


# Values that do not fit.


NOT_EXACT = "cannot represent exactly"
MISFITS: Final[tuple[tuple[str, Any, str], ...]] = (
    ("plain_UINT8", [[300]], "300, which is outside 0..255"),
    ("plain_UINT8", [[-1]], "-1, which is outside 0..255"),
    ("plain_INT32", [[1.5]], "1.5, which is not an integer"),
    ("plain_INT32", [[True]], "the boolean 'True'"),
    ("plain_INT32", [["5"]], "the string '5'"),
    ("plain_INT32", [[1, 2], [3]], "ragged lists: lengths 1 and 2"),
    ("plain_INT32", [[1, 2], 3], "ragged lists: values and lists"),
    ("plain_INT32", [[{"a": 1}]], "a JSON object"),
    ("plain_INT32", [[[1]]], "an array of shape [1,1,1]"),
    ("plain_INT32", json.loads("[" * 33 + "1" + "]" * 33), "lists of more than 32 dimensions"),
    ("plain_INT8", [[128]], "128, which is outside -128..127"),
    ("plain_INT64", [["NaN"]], "the string 'NaN'"),
    ("plain_INT64", [[None]], "got null"),
    ("plain_FP16", [[65520]], "65520.0, which is out of range"),
    ("plain_FP32", [[10**39]], "1e+39, which is out of range"),
    ("plain_FP32", [[None]], 'got null; write "NaN" for a missing number'),
    ("plain_FP32", [["nan"]], "the string 'nan'"),
    ("plain_FP32", [["1.5"]], "the string '1.5'"),
    ("plain_INT64", [[9223372036854775808]], "outside"),
    ("plain_UINT64", [[18446744073709551616]], "outside"),
    ("plain_INT64", [[9007199254740993.0]], "write it without a fraction or an exponent"),
    ("plain_INT64", [[-1e18]], "write it without a fraction or an exponent"),
    ("plain_BF16", [[1e39]], "out of range"),
    ("plain_BOOL", [[1]], "the number '1'"),
    ("plain_BYTES", [[1]], "the number '1'"),
    ("plain_BYTES", [[True]], "the boolean"),
    ("plain_FP32", "text", "the string 'text'"),
    ("single_BYTES", [], "an empty batch"),
    ("batched_FP32", np.zeros((0, 2, 2), np.float32), "an empty batch"),
    ("plain_INT32", np.array([[1.5]]), f"1.5, which INT32 {NOT_EXACT}"),
    ("plain_INT32", np.array([[np.nan]]), f"nan, which INT32 {NOT_EXACT}"),
    ("plain_INT64", np.array([[2.0**63]]), NOT_EXACT),
    ("plain_INT8", np.array([[200]], np.uint8), f"200, which INT8 {NOT_EXACT}"),
    ("plain_UINT64", np.array([[-1]]), f"-1, which UINT64 {NOT_EXACT}"),
    ("plain_INT64", np.array([[2**63]], np.uint64), NOT_EXACT),
    ("plain_FP32", np.array([[2**24 + 1]]), f"16777217, which FP32 {NOT_EXACT}"),
    ("plain_FP16", np.array([[1e6]]), "1000000.0, which is out of range"),
    ("plain_BOOL", np.array([[1]]), "an array of dtype int64"),
    ("plain_INT32", np.array([[True]]), "an array of dtype bool"),
    ("plain_FP32", np.array([[1j]]), "an array of dtype complex128"),
    ("plain_FP32", np.array([["a"]]), "an array of dtype <U1"),
    ("plain_BYTES", np.array([[1]]), "an array of dtype int64"),
)


@pytest.mark.fault(
    "tensors with missing, unknown or duplicate inputs, ragged, of a wrong type, count"
)
def test_value_that_would_be_changed_is_refused(zoo: Zoo, subtests: pytest.Subtests) -> None:
    for model, value, words in MISFITS:
        with subtests.test(f"{model} {value!r}"):
            response = (
                zoo.post(model, content=npy(value), headers=NPY)
                if isinstance(value, np.ndarray)
                else zoo.infer(model, {"X": value})
            )
            assert_error(response, 422, "DOES_NOT_FIT_MODEL", words)
            expected = f"input '{zoo.names.tensor('X')}' expects"
            for part in (expected, f"({model.rpartition('_')[2]} [", "e.g."):
                assert part in response.json()["error"]


def test_array_of_another_type_is_converted_if_nothing_is_lost(
    zoo: Zoo, subtests: pytest.Subtests
) -> None:
    values = [[1, 2, 3], [4, 5, 6]]
    for datatype in NUMERIC:
        for dtype in (np.int64, np.float64, np.uint8, np.dtype(">i4"), np.dtype(">f4")):
            if datatype not in ("BOOL", "FP16"):
                with subtests.test(f"{np.dtype(dtype)} to {datatype}"):
                    array = np.asfortranarray(np.array(values, dtype))
                    response = zoo.post(f"plain_{datatype}", content=npy(array), headers=NPY)
                    assert response.status_code == 200, response.text
                    assert load_numpy(response.content).tolist() == values


@pytest.mark.fault("texts that are empty, of 1 MB, with NUL, combining marks, emoji")
def test_bytes_and_texts_of_a_body_are_passed_unchanged(zoo: Zoo) -> None:
    for text in TEXTS:
        headers = {"Content-Type": "text/plain; charset=utf-8"}
        response = zoo.post("single_BYTES", content=text.encode(), headers=headers)
        assert zoo.outputs(response) == {"Y": text}
    headers = {"Content-Type": "text/plain; charset=latin-1"}
    response = zoo.post("single_BYTES", content="Größe".encode("latin-1"), headers=headers)
    assert zoo.outputs(response) == {"Y": "Größe"}
    headers = dict.fromkeys(("Content-Type", "Accept"), "application/octet-stream")
    raw = zoo.post("single_BYTES", content=bytes(range(256)), headers=headers)
    assert raw.content == bytes(range(256))
    assert raw.headers["content-type"] == "application/octet-stream"


# Responses.


def test_accept_header_chooses_the_format_of_the_response(zoo: Zoo) -> None:
    for accept in ("image/png", "image/*", "application/octet-stream", "text/html, image/*;q=0.5"):
        response = zoo.post("picture", json={"inputs": 5}, headers={"Accept": accept})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "image/png"
        assert response.content.startswith(b"\x89PNG")
    assert "b64" in zoo.outputs(zoo.infer("picture", 5))["PNG"]
    accept = "application/json;q=0.5, application/x-npz;q=0.9, text/html"
    body = {"inputs": zoo.named({"A": [1, 2], "B": [1, 2]})}
    response = zoo.post("pair", json=body, headers={"Accept": accept})
    assert response.headers["content-type"] == "application/x-npz"


@any_names
def test_classification_is_requested_in_three_ways(zoo: Zoo) -> None:
    inputs = zoo.named({"X": [0.1, 0.7, 0.2]})
    first = {"score": pytest.approx(0.7), "index": 1, "label": LABELS[1]}
    second = {"score": pytest.approx(0.2), "index": 2, "label": LABELS[2]}
    array = npy(np.array([[0.1, 0.7, 0.2]], np.float32))
    as_npy = {"Content-Type": "application/x-npy"}
    two = {"inputs": inputs, "parameters": {"classification": 2}}
    for model in ("classes", "labelled"):
        assert zoo.outputs(zoo.post(model, json=two))["SCORES"] == [first, second]
    response = zoo.post("classes", "/infer?classification=1", content=array, headers=as_npy)
    assert zoo.outputs(response)["SCORES"] == [[first]]
    # The config of this model requests one class.
    assert zoo.outputs(zoo.post("labelled", json={"inputs": inputs}))["SCORES"] == [first]
    for path, parameters in (("/infer?classification=0", {}), ("/infer", {"classification": 0})):
        document = {"inputs": inputs, "parameters": parameters}
        scores = zoo.outputs(zoo.post("labelled", path, json=document))["SCORES"]
        assert scores == pytest.approx([0.1, 0.7, 0.2])


@any_names
def test_dry_run_describes_the_tensors_and_sends_nothing(zoo: Zoo) -> None:
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


def test_id_of_the_request_is_in_the_response(zoo: Zoo) -> None:
    assert zoo.infer("single_BYTES", "a", id="mine").json()["id"] == "mine"


# Parameters.


PROBABILITIES = [0.1, 0.7, 0.2]
NOT_ACCEPTABLE = 406, "NOT_ACCEPTABLE"
MISMATCH = 422, "DOES_NOT_FIT_MODEL"
MALFORMED = 400, "MALFORMED_REQUEST"
# Model, value, query, parameters, headers, error, words of the error.
REFUSALS: Final[tuple[tuple[str, Any, str, dict[str, Any], dict[str, str], tuple[int, str], str], ...]] = (
    *(
        ("single_BYTES", value, "", {}, {"Accept": accept}, NOT_ACCEPTABLE, "application/json")
        for value, accept in (
            ("a", "text/html"),
            ("a", "application/json;q=0"),
            ("a", "image/png"),
            ({"b64": "YQA="}, "application/x-npy"),  # NumPy would lose the NUL at the end
        )
    ),
    # Several images are not one body.
    ("picture", [5, 6], "", {}, {"Accept": "image/png"}, NOT_ACCEPTABLE, "application/json"),
    *(
        ("classes", PROBABILITIES, query, parameters, {}, error, words)
        for query, parameters, error, words in (
            ("", {"classification": -1}, MISMATCH, "classification"),
            ("", {"classification": "two"}, MISMATCH, "classification"),
            ("", {"timeout": "soon"}, MISMATCH, "timeout"),
            ("", {"triton_x": 1}, MISMATCH, "triton_x"),
            ("", {"time_out": 5}, MALFORMED, "did you mean timeout?"),
            ("dryrun=true", {}, MALFORMED, "unknown query parameter 'dryrun'; did you mean dry_run?"),
            ("classifications=2", {}, MALFORMED, "did you mean classification?"),
            ("x=1", {}, MALFORMED, "unknown query parameter 'x'"),
        )
    ),
    *(
        ("single_BYTES", "a", "", {}, {"X-Request-Timeout": deadline}, MALFORMED, "X-Request-Timeout")
        for deadline in ("0", "-1", "abc", "nan", "inf")
    ),
)  # fmt: skip


@pytest.mark.fault("an `Accept` header that nothing satisfies")
@pytest.mark.fault("deadlines of 0, −1, `abc`, 1e9 s")
def test_header_or_parameter_that_is_invalid_is_refused(
    zoo: Zoo, subtests: pytest.Subtests
) -> None:
    for model, value, query, parameters, headers, error, words in REFUSALS:
        with subtests.test(f"{query} {parameters} {headers}"):
            document = {"inputs": value, "parameters": parameters}
            response = zoo.post(model, f"/infer?{query}", json=document, headers=headers)
            assert_error(response, *error, words)
    headers = {"X-Request-Timeout": "1e9"}  # is lowered
    assert zoo.post("single_BYTES", json={"inputs": "a"}, headers=headers).status_code == 200


def test_parameter_of_a_model_and_query_of_triton_are_accepted(zoo: Zoo) -> None:
    assert zoo.infer("single_BYTES", "a", parameters={"temperature": 5}).status_code == 200
    assert zoo.client.post("/v2/repository/index?unknown=1").status_code == 200


# Errors of models.


@pytest.mark.fault("exceptions provoked in a model")
@any_names
def test_error_of_a_model_has_its_status_and_only_its_reason(
    zoo: Zoo, subtests: pytest.Subtests
) -> None:
    response = zoo.infer("failing", 1)
    assert_error(response, 500, "MODEL_FAULT", "boom")
    for internal in ("/srv", "deadbeef", "model.py", "execute"):
        assert internal not in response.json()["error"]
    for code, status, name in (
        ("INVALID_ARG", 422, "REFUSED_BY_MODEL"),
        ("NOT_FOUND", 404, "NOT_FOUND"),
        ("UNAVAILABLE", 503, "UNAVAILABLE"),
        ("UNSUPPORTED", 422, "REFUSED_BY_MODEL"),
        ("ALREADY_EXISTS", 422, "REFUSED_BY_MODEL"),
        ("UNKNOWN", 422, "REFUSED_BY_MODEL"),
        ("INTERNAL", 500, "MODEL_FAULT"),
    ):
        with subtests.test(code):
            response = zoo.infer("refusing", f"{code}:the moon is in the way")
            assert_error(response, status, name, "the moon is in the way")


def test_mismatch_of_a_client_does_not_read_the_metadata_again(zoo: Zoo) -> None:
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


# Deadlines.


@any_names
def test_deadline_that_passes_is_504(zoo: Zoo) -> None:
    """The model would take a minute; no other test uses it."""
    headers = {"X-Request-Timeout": "0.3"}
    response = zoo.post("patient", json={"inputs": 60.0}, headers=headers)
    assert_error(response, 504, "DEADLINE_PASSED", "within 0.")  # what was left of 0.3 s


# The beginning of a text and of a form.
HALF: Final = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n'.ljust(100_000, b"x")


FRAMINGS = (
    ("Content-Length: 200000", HALF),
    ("Transfer-Encoding: chunked", b"186a0\r\n" + HALF + b"\r\n"),
    ("Content-Length: 100\r\nExpect: 100-continue", b""),
)


@pytest.mark.long
def test_deadline_that_passes_before_the_body_is_complete_is_504(zoo: Zoo) -> None:
    for content_type, (framing, body) in product(("text/plain", FORM_TYPE), FRAMINGS):
        head = (
            f"POST {zoo.path('single_BYTES')} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            f"X-Request-Timeout: 0.3\r\nContent-Type: {content_type}\r\n{framing}\r\n\r\n"
        )
        response = send_bytes(zoo, head.encode() + body)
        response = response.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert response.startswith(b"HTTP/1.1 504 "), (content_type, framing)
        assert b'"code":"DEADLINE_PASSED"' in response


# Bodies that cannot be read.


def npz_of_zeros() -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, X=np.zeros(20_000_000, np.float32))
    return file.getvalue()


INVALID_JSON = (
    b"", b"null", b"[]", b"5", b"{}", b"{", b'{"inputs": NaN}', b'{"inputs": 1e999}',
    b'{"inputs": "\\ud800"}', b'{"inputs": "\xff"}', b'{"inputs": 1, "more": 2}',
    b'{"inputs": {"b64": "***"}}', b'{"inputs": {"b64": "data:image/png;base64"}}',
    b'{"inputs": "a", "outputs": "Y"}', b'{"inputs": "a", "parameters": []}',
    b'{"inputs": "a", "id": 5}', b"[" * 100_000, b'{"inputs":' + b"[" * 90 + b"]" * 90 + b"}",
    b'{"inputs": ' + b"9" * 5000 + b"}", b'{"inputs": [NaN]}', b'{"inputs": [-Infinity]}',
    b'{"inputs": 1, "parameters": {"%s": 1}}' % (b"p" * 257),
    b'{"inputs": 1, "outputs": [%s]}' % b",".join(b'"%d"' % n for n in range(1001)),
)  # fmt: skip


@pytest.mark.fault("JSON with NaN, 1e999, a lone surrogate, invalid UTF-8, a depth of 100,000, an")
@pytest.mark.fault("forms that are truncated or have 2,000 fields, a file called ../../etc/passwd")
@pytest.mark.fault("NumPy files with pickles, or that claim 10 GB")
@pytest.mark.fault("invalid gzip, or 10 MB of gzip that decompress to 10 GB")
def test_body_that_is_not_of_its_type_is_refused(zoo: Zoo, subtests: pytest.Subtests) -> None:
    """One body of each kind; the unit tests of the parsers have more."""
    part = field(b"value")
    malformed = (400, "MALFORMED_REQUEST")
    too_large = (413, "TOO_LARGE")
    unsupported = (415, "UNSUPPORTED_BODY")
    npy_type = "application/x-npy"
    npz_type = "application/x-npz"
    gzipped = "text/plain with gzip"
    zipped = gzip.compress(b"hello")
    for name, content_type, body, (status, code), words in (
        *((repr(body[:40]), "application/json", body, malformed, "") for body in INVALID_JSON),
        ("a form without a boundary", "multipart/form-data", form(part), malformed, ""),
        ("a form that is truncated", FORM_TYPE, form(part)[:-7], malformed, ""),
        ("a form of 2,000 fields", FORM_TYPE, form(*[part] * 2000), too_large, ""),
        ("a form of no fields", FORM_TYPE, form(), (422, "DOES_NOT_FIT_MODEL"), ""),
        ("an empty array", npy_type, b"", malformed, ".npy"),
        ("a truncated array", npy_type, npy(np.zeros(3))[:-1], malformed, ".npy"),
        ("a pickle", npy_type, npy_of("(1,)", "'|O'", bytes(8)), malformed, "pickled"),
        ("no archive", npz_type, b"PK nothing", malformed, ".npz"),
        ("an archive that inflates to 80 MB", npz_type, npz_of_zeros(), too_large, "inflates"),
        ("no gzip", gzipped, b"plain", malformed, "Content-Encoding"),
        ("truncated gzip", gzipped, zipped[:-9], malformed, "compressed"),
        ("empty gzip", gzipped, b"", malformed, "compressed"),
        ("zeros after gzip", gzipped, zipped + bytes(1 << 20), malformed, "Content-Encoding"),
        ("gzip of 100 MiB", gzipped, gzip.compress(bytes(100 << 20)), too_large, "limit"),
        ("an unknown encoding", "text/plain with br", b"x", unsupported, "gzip"),
        ("a form of curl -d", CURL_TYPE, b"name=x&more[0].a-b=", unsupported, "-F NAME=VALUE"),
        ("a form of another kind", "multipart/mixed; boundary=b", b"x", unsupported, "application/json"),
    ):  # fmt: skip
        with subtests.test(name):
            media_type, _, encoding = content_type.partition(" with ")
            headers = {"Content-Type": media_type}
            if encoding:
                headers["Content-Encoding"] = encoding
            model = "plain_FP32" if "np" in media_type else "single_BYTES"
            response = zoo.post(model, content=body, headers=headers)
            assert_error(response, status, code, words)


def test_body_that_is_compressed_is_inflated(zoo: Zoo) -> None:
    headers = {"Content-Type": "text/plain", "Content-Encoding": "gzip"}
    body = gzip.compress(b"one, ") + gzip.compress(b"two")
    assert zoo.outputs(zoo.post("single_BYTES", content=body, headers=headers)) == {"Y": "one, two"}


def send_bytes(zoo: Zoo, request: bytes, end: bytes = b"") -> bytes:
    """Return what the gateway sends until it closes the connection, or up to `end`."""
    url = zoo.client.base_url
    with socket.create_connection((url.host, url.port or 80), 60) as connection:
        connection.sendall(request)
        response = b""
        while not (end and end in response) and (data := connection.recv(65536)):
            response += data
    return response


@pytest.mark.fault("bodies over the limit, with a length or chunked")
def test_body_over_the_limit_is_413_before_all_of_it_is_read(zoo: Zoo) -> None:
    head = f"POST {zoo.path('single_BYTES')} HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n"
    head += f"Content-Length: {(64 << 20) + 1}\r\n\r\n"
    response = send_bytes(zoo, head.encode(), end=b"TOO_LARGE")
    assert response.startswith(b"HTTP/1.1 413 ")
    assert b"TOO_LARGE" in response
    chunks = (bytes(1 << 20) for _ in range(65))
    chunked = zoo.post("single_BYTES", content=chunks, headers={"Content-Type": "text/plain"})
    assert_error(chunked, 413, "TOO_LARGE", "limit")
