"""What becomes of bodies and tensors, where no Triton is needed to judge it."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson
import pytest

from gateway.errors import InputMismatch, MalformedRequest, ModelFault, NotAcceptable
from gateway.media_types import JSON, OCTET_STREAM
from gateway.openapi.model_document import build_model_openapi
from gateway.tensors.codecs import SUPPORTED_CODECS
from gateway.tensors.dtypes import DATATYPES, Datatype, DatatypeKind
from gateway.tensors.examples import build_example_body, format_curl_example, format_python_example
from gateway.tensors.inputs import InferInputs, inspect_payload, read_payload, to_inputs
from gateway.tensors.kserve_v1 import encode_predictions, payload_from_rows
from gateway.tensors.outputs import (
    InferResult,
    choose_result_encoder,
    concatenate_results,
    list_accepted_types,
)
from gateway.tensors.payload import Part, Payload, PayloadLimits
from gateway.tensors.signature import MAX_TENSORS, Signature, build_signature
from tests.support.images import encoded


def model(
    inputs: dict[str, tuple[str, list[int]]],
    outputs: dict[str, tuple[str, list[int]]],
    batch: int = 0,
    *,
    optional: bool = False,
    hints: Mapping[str, str] = MappingProxyType({}),
) -> Signature:
    """A signature as it is read from Triton; the shapes are the model's own."""

    def told(tensors: dict[str, tuple[str, list[int]]]) -> list[dict[str, Any]]:
        first = [-1] if batch else []
        return [
            {"name": name, "datatype": datatype, "shape": first + shape}
            for name, (datatype, shape) in tensors.items()
        ]

    config = {
        "max_batch_size": batch,
        "input": [{"name": name, "optional": optional} for name in inputs],
        "parameters": {key: {"string_value": value} for key, value in hints.items()},
    }
    return build_signature({"name": "m", "inputs": told(inputs), "outputs": told(outputs)}, config)


def result(model: Signature, *, batched: bool = True, **arrays: np.ndarray) -> InferResult:
    return result_of(model, arrays, batched=batched)


def result_of(
    model: Signature, arrays: Mapping[str, np.ndarray], *, batched: bool = True
) -> InferResult:
    return InferResult(model, dict(arrays), batched)


WORDS = model({"TEXT": ("BYTES", [1])}, {"IDS": ("INT32", [-1])}, batch=32)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("std", "0", "not a list of valid divisors"),
        ("std", "0.5,-0.0,0.5", "not a list of valid divisors"),
        ("std", "1e-40", "not a list of valid divisors"),
        ("std", "nan", "not a list of finite numbers"),
        ("std", "inf", "not a list of finite numbers"),
        ("mean", "0.5,nan,0.5", "not a list of finite numbers"),
        ("mean", "-inf", "not a list of finite numbers"),
        ("mean", "1e39", "not a list of finite numbers"),
        ("mean", "half", "not a list of numbers"),
    ],
)
def test_a_hint_that_cannot_be_is_named(kind: str, text: str, words: str) -> None:
    tensor = {"X": ("FP32", [3, 6, 4])}
    for usable in ("", "0.5", "0.485, -0.456,1e6,"):
        model(tensor, tensor, 8, hints={f"gateway.{kind}.X": usable})
    with pytest.raises(ModelFault) as raised:
        model(tensor, tensor, 8, hints={f"gateway.{kind}.X": text})
    assert f"gateway.{kind}.X = '{text}', which is {words}" in raised.value.detail


@pytest.mark.parametrize("text", ["text/html\r\nSet-Cookie: a=b", "image/é", "a" * 300, "a b"])
def test_a_content_type_that_cannot_be_a_header_is_named(text: str) -> None:
    tensor = {"X": ("BYTES", [1])}
    assert model({}, tensor, hints={"gateway.content_type.X": "text/csv; charset=utf-8"})
    with pytest.raises(ModelFault, match=r"gateway.content_type.X = .*, which is not a media type"):
        model({}, tensor, hints={"gateway.content_type.X": text})


def test_a_tensor_has_as_many_dimensions_as_numpy_supports() -> None:
    assert format_curl_example(model({"X": ("FP32", [1] * 64)}, {}), "http://here")
    with pytest.raises(ModelFault, match="'X' has 65 dimensions; the gateway supports 64"):
        model({"X": ("FP32", [1] * 65)}, {})


def test_a_model_has_a_bounded_number_of_tensors() -> None:
    tensors = {f"X{at}": ("FP32", [1]) for at in range(MAX_TENSORS + 1)}
    with pytest.raises(ModelFault, match="the model has more than 4096 inputs"):
        model(tensors, {})


def test_of_inputs_that_are_all_optional_the_example_gives_one() -> None:
    answers = {"Y": ("FP32", [1])}
    several = model({"A": ("INT32", [2]), "B": ("BYTES", [1])}, answers, 8, optional=True)
    assert [tensor.name for tensor in build_example_body(several).tensors] == ["A"]
    assert '{"inputs":{"A":[1,1]}}' in format_curl_example(several, "http://here")
    assert "{'inputs': {'A': [1] * 2}}" in format_python_example(several, "http://here")
    assert "'example': {'inputs': {'A': [1, 1]}}" in str(build_model_openapi(several))
    only = model({"B": ("BYTES", [1])}, answers, 8, optional=True)
    shown = build_example_body(only)
    inputs = to_inputs(
        read_payload(shown.text.encode(), shown.content_type, PayloadLimits()),
        only,
        PayloadLimits(),
    )
    assert inputs.arrays["B"].tolist() == [[b"some text"]]
    without = format_curl_example(model({}, answers, 8), "http://here")
    assert '{"inputs":{}}' in without


def test_answers_of_different_widths_are_no_batch_and_the_sentence_says_what_is() -> None:
    same = [result(WORDS, IDS=np.ones((2, 3))), result(WORDS, IDS=np.zeros((1, 3)))]
    assert concatenate_results(same).arrays["IDS"].tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    short, scalar = np.ones((2, 2)), np.array(1)
    for other in ({"IDS": short}, {"IDS": scalar}, {}):
        with pytest.raises(
            InputMismatch, match="different shapes; send at most 32 items at a time"
        ):
            concatenate_results([same[0], result_of(WORDS, other)])


def test_an_archive_takes_any_name_for_an_output() -> None:
    names = ["file", "allow_pickle", "args", "a/b", "../c", "d.npy", "é ☕"]
    arrays = {name: np.array([[number]], np.int32) for number, name in enumerate(names)}
    arrays["text"] = np.array([[b"x"]], object)
    plain = model({"X": ("INT32", [1])}, dict.fromkeys(arrays, ("INT32", [-1, 1])))
    render = choose_result_encoder("application/x-npz", plain, list(arrays))
    body = render(result_of(plain, arrays)).body
    with np.load(io.BytesIO(body)) as loaded:
        assert {name: loaded[name].tolist() for name in names} == {
            name: [[number]] for number, name in enumerate(names)
        }
        assert loaded["text"].tolist() == [[b"x"]]
    assert set(read_payload(body, "application/x-npz", PayloadLimits()).parts) >= set(names)


@pytest.mark.parametrize("accept", ["application/x-npy", "application/octet-stream", "image/png"])
def test_an_output_that_the_model_leaves_out_is_its_fault(accept: str) -> None:
    hints = {"gateway.content_type.PNG": "image/png"}
    several = model(
        {"X": ("INT32", [1])}, {"PNG": ("BYTES", [1]), "SIZE": ("INT32", [1])}, hints=hints
    )
    with pytest.raises(ModelFault, match="did not return the requested output"):
        choose_result_encoder(accept, several, ["PNG"])(result(several))


def test_an_answer_without_a_batch_dimension_is_given_as_it_is() -> None:
    for array in (np.array(7), np.zeros((0,)), np.array([1, 2, 3])):
        answer = result(WORDS, batched=False, IDS=array)
        assert np.array_equal(answer.get_array("IDS"), array)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "application/json"),
        (", ,", "application/json"),
        ("*/*", "application/json"),
        ("text/html, */*;q=0.1", "application/json"),
        ("application/*", "application/json"),
        ("application/x-npz, application/json", "application/x-npz"),
        ("application/json, application/x-npz", "application/json"),
        ("application/json;q=0.5, application/x-npz;q=0.9", "application/x-npz"),
        ("application/json;q=0, */*", "application/x-npz"),
        ("*/*, application/json;q=0", "application/x-npz"),
        ("*/*, application/json;q=0, application/x-npz;q=0.0", "application/x-npy"),
        ("application/json;q=0.1, */*;q=0.5", "application/x-npz"),
        ("application/*;q=0, image/*", "image/png"),
        ("image/png;q=soon", "image/png"),
        ("application/json;q=0", None),
        ("application/*;q=0, text/html", None),
        ("*/*;q=0", None),
    ],
)
def test_accept_goes_by_the_most_specific_range(accept: str, content_type: str | None) -> None:
    hints = {"gateway.content_type.PNG": "image/png"}
    pictures = model({"X": ("INT32", [1])}, {"PNG": ("BYTES", [1])}, hints=hints)
    if content_type is None:
        with pytest.raises(NotAcceptable):
            choose_result_encoder(accept, pictures, ["PNG"])
        return
    render = choose_result_encoder(accept, pictures, ["PNG"])
    assert render(result(pictures, PNG=np.array([b"x"], object))).content_type == content_type


def test_the_ranges_of_accept_are_in_the_order_of_preference() -> None:
    assert list_accepted_types("a/a;q=0.5, b/b, c/c;q=0, d/d, e/e;q=0.9") == [
        "b/b",
        "d/d",
        "e/e",
        "a/a",
    ]


# What is stacked.


def converted(
    payload: Payload, shape: list[int], batch: int, datatype: str = "INT32"
) -> InferInputs:
    tensor = {"X": (datatype, shape)}
    return to_inputs(payload, model(tensor, tensor, batch), PayloadLimits())


def fields(*values: Any) -> Payload:
    return Payload({"X": [Part(value, JSON) for value in values]})


@pytest.mark.parametrize(
    ("shape", "batch", "values", "stacked"),
    [
        ([-1], 8, [1, 2, 3], [[1], [2], [3]]),
        ([1], 8, [1, 2, 3], [[1], [2], [3]]),
        ([], 8, [1, 2, 3], [1, 2, 3]),
        ([-1, 1], 8, [1, 2], [[[1]], [[2]]]),
        ([-1, -1], 8, [[[1]], [[2]]], [[[1]], [[2]]]),
        ([-1], 8, [[1, 2], [3, 4]], [[1, 2], [3, 4]]),
        ([-1, -1], 0, [1, 2, 3], [[1], [2], [3]]),
        ([-1, 2], 0, [[1, 2], [3, 4]], [[1, 2], [3, 4]]),
    ],
)
def test_what_is_stacked_is_a_batch(
    shape: list[int], batch: int, values: list[Any], stacked: list[Any]
) -> None:
    for payload in (payload_from_rows(values), fields(*values)):
        inputs = converted(payload, shape, batch)
        assert inputs.arrays["X"].tolist() == stacked
        assert inputs.is_batched == bool(batch)
        assert inputs.batch_size == (len(values) if batch else 0)
    assert (
        converted(payload_from_rows(values[:1]), shape, batch).arrays["X"].tolist() == stacked[:1]
    )


@pytest.mark.parametrize(
    ("shape", "batch", "values", "words"),
    [
        ([2], 8, [1, 2], "a batch of 2 items, each a single value"),
        ([2, 2], 8, [[1, 2], [3, 4]], r"a batch of 2 items, each an array of shape \[2\]"),
        ([-1, -1], 8, [[1, 2], [3, 4]], r"a batch of 2 items, each an array of shape \[2\]"),
        ([1], 8, [[[1]], [[2]]], r"each an array of shape \[1,1\]"),
        ([-1, 2], 0, [1, 2], "a batch of 2 items, each a single value"),
        ([-1], 8, [[1], [2, 3]], "different shapes"),
    ],
)
def test_what_is_stacked_is_never_one_item(
    shape: list[int], batch: int, values: list[Any], words: str
) -> None:
    for payload in (payload_from_rows(values), fields(*values)):
        with pytest.raises(InputMismatch, match=words):
            converted(payload, shape, batch)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"IDS": np.ones((2, 4))}, "returned 2 values for 3 instances in output 'IDS'"),
        ({"IDS": np.ones((4, 4))}, "returned 4 values for 3 instances"),
        ({"IDS": np.array(1)}, "returned a single value for 3 instances"),
        (
            {"IDS": np.ones((3, 4)), "MORE": np.ones(2)},
            "2 values for 3 instances in output 'MORE'",
        ),
        ({"MORE": np.array(1)}, "returned a single value for 3 instances"),
        ({}, "returned no outputs"),
    ],
)
def test_a_model_that_does_not_answer_each_instance_is_at_fault(
    answer: dict[str, np.ndarray], words: str
) -> None:
    several = model({"TEXT": ("BYTES", [1])}, {"IDS": ("INT32", [-1]), "MORE": ("INT32", [1])}, 2)
    with pytest.raises(ModelFault, match=words):
        encode_predictions([InferResult(several, answer, is_batched=True, instance_count=3)])


def test_pieces_of_a_batch_of_instances_are_counted_together() -> None:
    tensor = {"X": ("INT32", [-1])}
    pair = model(tensor, tensor, 2)
    pieces = list(to_inputs(payload_from_rows([5, 6, 7]), pair, PayloadLimits()).split(2))
    results = [
        InferResult(pair, piece.arrays, piece.is_batched, instance_count=piece.instance_count)
        for piece in pieces
    ]
    answer = orjson.loads(encode_predictions([concatenate_results(results)]).body)
    assert answer == {"predictions": [[5], [6], [7]]}


@pytest.mark.parametrize("written", ["9007199254740993.0", "-9007199254740993.0", "1e18", "1.0e17"])
def test_an_integer_that_may_have_been_rounded_is_refused(written: str) -> None:
    def sent(number: str, datatype: str = "INT64") -> Any:
        payload = read_payload(f'{{"inputs": [{number}]}}'.encode(), JSON, PayloadLimits())
        return converted(payload, [1], 8, datatype).arrays["X"].item()

    with pytest.raises(InputMismatch, match="write it without a fraction or an exponent"):
        sent(written)
    assert sent("9007199254740993") == 9007199254740993
    assert sent("18446744073709551615", "UINT64") == 18446744073709551615
    assert sent("9007199254740991.0") == 9007199254740991
    assert sent("-2e3") == -2000
    with pytest.raises(InputMismatch, match="outside"):
        sent("1e18", "INT32")


def test_for_numbers_a_numpy_file_is_one_whatever_its_type() -> None:
    file = io.BytesIO()
    np.save(file, np.arange(6, dtype=np.int32).reshape(1, 3, 2))
    whole = file.getvalue()
    for shape in ([3, 2], [1, 3, 2]):  # of which the second is an image's
        tensor = {"X": ("FP32", shape)}
        for payload in (read_payload(whole, OCTET_STREAM, PayloadLimits()), form("X", whole)):
            inputs = to_inputs(payload, model(tensor, tensor, 8), PayloadLimits())
            assert inputs.arrays["X"].ravel().tolist() == [0, 1, 2, 3, 4, 5]
            assert not inspect_payload(
                payload, model(tensor, tensor, 8), PayloadLimits()
            ).decoding_cost
    with pytest.raises(MalformedRequest, match="npy header"):
        converted(form("X", whole[:-1]), [3, 2], 8)
    assert converted(form("X", whole), [1], 8, "BYTES").arrays["X"].item() == whole


def form(name: str, file: bytes) -> Payload:
    """What `curl -F name=@file` sends."""
    head = f'Content-Disposition: form-data; name="{name}"; filename="a.npy"\r\n'
    part = f"--b\r\n{head}Content-Type: {OCTET_STREAM}\r\n\r\n".encode() + file
    return read_payload(part + b"\r\n--b--\r\n", "multipart/form-data; boundary=b", PayloadLimits())


# Bodies.


def text_of(body: bytes, charset: str) -> Any:
    payload = read_payload(body, f"text/plain; charset={charset}", PayloadLimits())
    return payload.parts[""][0].value


@pytest.mark.parametrize(
    "charset",
    [
        "undefined", "utf-7", "unicode_escape", "unicode-escape", "raw_unicode_escape", "idna",
        "punycode", "rot13", "hex", "base64", "zlib", "aliases", "os.path", "no", "é", '""', '"a\0b"',
    ],
)  # fmt: skip
def test_what_is_no_encoding_of_characters_is_no_charset(charset: str) -> None:
    for body in (b"text", b"+2AA-", b"\\ud800", b"xn--a"):
        with pytest.raises(MalformedRequest, match=r"unknown charset .*; send UTF-8"):
            text_of(body, charset)


@pytest.mark.parametrize(
    "name",
    [
        "UTF8",
        "us-ascii",
        "ISO-8859-1",
        "iso-8859-15",
        "Windows-1252",
        "Shift_JIS",
        "EUC-KR",
        "UTF-16",
    ],
)
def test_a_charset_goes_by_the_names_that_people_know(name: str) -> None:
    assert text_of("text".encode(name), name) == "text"


def test_whatever_a_charset_makes_is_unicode() -> None:
    bodies = [random.Random(seed).randbytes(12) for seed in range(100)]
    for charset in SUPPORTED_CODECS:
        assert text_of("abc".encode(charset), charset) == "abc"
        for body in (*bodies, b"\xd8\x00", b"\x00\xd8", b"\xed\xa0\x80", b"\x00\xd8\0\0"):
            with suppress(MalformedRequest):
                text_of(body, charset).encode()


def test_a_boundary_that_is_too_long_is_malformed() -> None:
    for length, told in ((300, "boundary is too long"), (70, "ends before its closing boundary")):
        with pytest.raises(MalformedRequest, match=told):
            read_payload(b"", f"multipart/form-data; boundary={'b' * length}", PayloadLimits())


NUMBERS = (DatatypeKind.INTEGER, DatatypeKind.FLOAT)
NUMERIC = [each for each in DATATYPES.values() if each.kind in NUMBERS]


@pytest.mark.parametrize("datatype", NUMERIC, ids=lambda datatype: datatype.name)
def test_an_image_keeps_its_values_in_any_datatype_or_is_refused(datatype: Datatype) -> None:
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    signature = model({"X": (datatype.name, [16, 16])}, {})
    payload = Payload({"": [Part(encoded(levels), "image/png")]})
    try:
        array = to_inputs(payload, signature, PayloadLimits()).arrays["X"]
    except InputMismatch:
        assert np.array(255).astype(datatype.numpy_dtype) != 255
    else:
        assert array.astype(np.int64).tolist() == levels.tolist()
