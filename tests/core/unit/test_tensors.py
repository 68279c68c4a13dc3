"""Conversion of bodies and tensors that needs no Triton."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from gateway.errors import InputMismatch, MalformedRequest, ModelFault
from gateway.media_types import JSON, OCTET_STREAM
from gateway.routes.examples import build_example_body, format_curl_example, format_python_example
from gateway.routes.model_openapi import build_model_openapi
from gateway.tensors.codecs import SUPPORTED_CODECS
from gateway.tensors.dtypes import DATATYPES, DatatypeKind
from gateway.tensors.inputs import InferInputs, convert_single_element, read_payload, to_inputs
from gateway.tensors.outputs import InferResult, choose_result_encoder, concatenate_results
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

    def describe(tensors: dict[str, tuple[str, list[int]]]) -> list[dict[str, Any]]:
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
    return build_signature(
        {"name": "m", "inputs": describe(inputs), "outputs": describe(outputs)}, config
    )


def result(model: Signature, *, batched: bool = True, **arrays: np.ndarray) -> InferResult:
    return result_of(model, arrays, batched=batched)


def result_of(
    model: Signature, arrays: Mapping[str, np.ndarray], *, batched: bool = True
) -> InferResult:
    return InferResult(model, dict(arrays), batched)


WORDS = model({"TEXT": ("BYTES", [1])}, {"IDS": ("INT32", [-1])}, batch=32)


INVALID_HINTS = (
    ("std", "0", "not a list of valid divisors"),
    ("std", "0.5,-0.0,0.5", "not a list of valid divisors"),
    ("std", "1e-40", "not a list of valid divisors"),
    ("std", "nan", "not a list of finite numbers"),
    ("std", "inf", "not a list of finite numbers"),
    ("mean", "0.5,nan,0.5", "not a list of finite numbers"),
    ("mean", "-inf", "not a list of finite numbers"),
    ("mean", "1e39", "not a list of finite numbers"),
    ("mean", "half", "not a list of numbers"),
    ("scale", "0..255", "not one of none, 0..1, -1..1"),
    ("examples", "7", "not a JSON list of at most 8 strings"),
    ("examples", "[1]", "not a JSON list of at most 8 strings"),
    ("examples", '["' + '","' * 8 + '"]', "not a JSON list of at most 8 strings"),
    ("content_type", "text/html\r\nSet-Cookie: a=b", "not a media type"),
    ("content_type", "image/é", "not a media type"),
    ("content_type", "a" * 300, "not a media type"),
    ("content_type", "a b", "not a media type"),
)


def test_model_with_an_invalid_hint_or_too_many_dimensions_or_tensors_is_a_fault(
    subtests: pytest.Subtests,
) -> None:
    tensor = {"X": ("FP32", [3, 6, 4])}
    text = {"X": ("BYTES", [1])}
    for kind in ("std", "mean"):
        for valid in ("", "0.5", "0.485, -0.456,1e6,"):
            model(tensor, tensor, 8, hints={f"gateway.{kind}.X": valid})
    for valid in ("", "none", " 0..1", "-1..1"):
        model(tensor, tensor, 8, hints={"gateway.scale.X": valid})
    model({}, text, hints={"gateway.content_type.X": "text/csv; charset=utf-8"})
    spec = model(tensor, tensor, 8, hints={"gateway.examples.X": '["1", "2"]'}).inputs["X"]
    assert spec.examples == ("1", "2")
    with pytest.raises(ModelFault, match="which is not a text of at most 200 characters"):
        model(tensor, tensor, 8, hints={"gateway.description": "a" * 201})
    with pytest.raises(ModelFault, match="at most 100 characters"):
        model(tensor, tensor, 8, hints={"gateway.title": "a" * 101})
    for kind, value, words in INVALID_HINTS:
        with subtests.test(f"{kind} {value[:40]!r}"):
            outputs = text if kind == "content_type" else tensor
            with pytest.raises(ModelFault) as raised:
                model(tensor, outputs, 8, hints={f"gateway.{kind}.X": value})
            assert f"gateway.{kind}.X = " in raised.value.detail
            assert f", which is {words}" in raised.value.detail
    assert format_curl_example(model({"X": ("FP32", [1] * 64)}, {}), "http://here")
    with pytest.raises(ModelFault, match="'X' has 65 dimensions; the gateway supports 64"):
        model({"X": ("FP32", [1] * 65)}, {})
    tensors = {f"X{at}": ("FP32", [1]) for at in range(MAX_TENSORS + 1)}
    with pytest.raises(ModelFault, match="the model has more than 4096 inputs"):
        model(tensors, {})


def test_example_of_optional_inputs_has_one_input() -> None:
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


def test_npz_has_outputs_of_any_name() -> None:
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
def test_missing_output_is_a_model_fault(accept: str) -> None:
    hints = {"gateway.content_type.PNG": "image/png"}
    several = model(
        {"X": ("INT32", [1])}, {"PNG": ("BYTES", [1]), "SIZE": ("INT32", [1])}, hints=hints
    )
    with pytest.raises(ModelFault, match="did not return the requested output"):
        choose_result_encoder(accept, several, ["PNG"])(result(several))


def test_unbatched_result_is_returned_unchanged() -> None:
    for array in (np.array(7), np.zeros((0,)), np.array([1, 2, 3])):
        answer = result(WORDS, batched=False, IDS=array)
        assert np.array_equal(answer.get_array("IDS"), array)


# What is stacked.


def converted(
    payload: Payload, shape: list[int], batch: int, datatype: str = "INT32"
) -> InferInputs:
    tensor = {"X": (datatype, shape)}
    return to_inputs(payload, model(tensor, tensor, batch), PayloadLimits())


def fields(*values: Any) -> Payload:
    return Payload({"X": [Part(value, JSON) for value in values]})


def rows(values: list[Any]) -> Payload:
    return fields(*values)._replace(instance_count=len(values))


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
        # Never one item.
        ([2], 8, [1, 2], "a batch of 2 items, each a single value"),
        ([2, 2], 8, [[1, 2], [3, 4]], r"a batch of 2 items, each an array of shape \[2\]"),
        ([-1, -1], 8, [[1, 2], [3, 4]], r"a batch of 2 items, each an array of shape \[2\]"),
        ([1], 8, [[[1]], [[2]]], r"each an array of shape \[1,1\]"),
        ([-1, 2], 0, [1, 2], "a batch of 2 items, each a single value"),
        ([-1], 8, [[1], [2, 3]], "different shapes"),
    ],
)
def test_values_are_stacked_to_a_batch_or_refused(
    shape: list[int], batch: int, values: list[Any], stacked: list[Any] | str
) -> None:
    for payload in (rows(values), fields(*values)):
        if isinstance(stacked, str):
            with pytest.raises(InputMismatch, match=stacked):
                converted(payload, shape, batch)
            continue
        inputs = converted(payload, shape, batch)
        assert inputs.arrays["X"].tolist() == stacked
        assert inputs.is_batched == bool(batch)
        assert inputs.batch_size == (len(values) if batch else 0)
        first = converted(rows(values[:1]), shape, batch)
        assert first.arrays["X"].tolist() == stacked[:1]


def test_results_of_the_pieces_of_a_batch_are_concatenated_unless_their_shapes_differ() -> None:
    for count, piece_count in ((8000, 1000), (7999, 1000), (8, 1)):
        whole = InferInputs({"X": np.zeros((count, 1))}, count, is_batched=True)
        assert len(list(whole.split(8))) == piece_count
    tensor = {"X": ("INT32", [-1])}
    pair = model(tensor, tensor, 2)
    pieces = list(to_inputs(rows([5, 6, 7]), pair, PayloadLimits()).split(2))
    results = [
        InferResult(pair, piece.arrays, piece.is_batched, instance_count=piece.instance_count)
        for piece in pieces
    ]
    joined = concatenate_results(results)
    assert joined.arrays["X"].tolist() == [[5], [6], [7]]
    assert joined.instance_count == 3
    same = [result(WORDS, IDS=np.ones((2, 3))), result(WORDS, IDS=np.zeros((1, 3)))]
    assert concatenate_results(same).arrays["IDS"].tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    short, scalar = np.ones((2, 2)), np.array(1)
    for other in ({"IDS": short}, {"IDS": scalar}, {}):
        with pytest.raises(
            InputMismatch, match="different shapes; send at most 32 items at a time"
        ):
            concatenate_results([same[0], result_of(WORDS, other)])


@pytest.mark.parametrize("written", ["9007199254740993.0", "-9007199254740993.0", "1e18", "1.0e17"])
def test_integer_that_may_be_rounded_is_refused(written: str) -> None:
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


def test_numpy_file_is_recognised_for_numeric_inputs() -> None:
    file = io.BytesIO()
    np.save(file, np.arange(6, dtype=np.int32).reshape(1, 3, 2))
    whole = file.getvalue()
    for shape in ([3, 2], [1, 3, 2]):  # of which the second is an image's
        tensor = {"X": ("FP32", shape)}
        for payload in (read_payload(whole, OCTET_STREAM, PayloadLimits()), form("X", whole)):
            inputs = to_inputs(payload, model(tensor, tensor, 8), PayloadLimits())
            assert inputs.arrays["X"].ravel().tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(MalformedRequest, match="npy header"):
        converted(form("X", whole[:-1]), [3, 2], 8)
    assert converted(form("X", whole), [1], 8, "BYTES").arrays["X"].item() == whole


def form(name: str, file: bytes) -> Payload:
    """Build the body that `curl -F name=@file` sends."""
    head = f'Content-Disposition: form-data; name="{name}"; filename="a.npy"\r\n'
    part = f"--b\r\n{head}Content-Type: {OCTET_STREAM}\r\n\r\n".encode() + file
    return read_payload(part + b"\r\n--b--\r\n", "multipart/form-data; boundary=b", PayloadLimits())


# Bodies.


def text_of(body: bytes, charset: str) -> Any:
    payload = read_payload(body, f"text/plain; charset={charset}", PayloadLimits())
    return payload.parts[""][0].value


def test_text_of_a_known_charset_becomes_valid_unicode_and_others_are_refused() -> None:
    for name in (
        *("UTF8", "us-ascii", "ISO-8859-1", "iso-8859-15", "Windows-1252", "Shift_JIS"),
        *("EUC-KR", "UTF-16", *SUPPORTED_CODECS),
    ):
        assert text_of("text".encode(name), name) == "text"
    for charset in (
        *("undefined", "utf-7", "unicode_escape", "unicode-escape", "raw_unicode_escape", "idna"),
        *("punycode", "rot13", "hex", "base64", "zlib", "aliases", "os.path", "no", "é", '""'),
        '"a\0b"',
    ):
        for body in (b"text", b"+2AA-", b"\\ud800", b"xn--a"):
            with pytest.raises(MalformedRequest, match=r"unknown charset .*; send UTF-8"):
                text_of(body, charset)
    bodies = [random.Random(seed).randbytes(12) for seed in range(100)]
    for charset in SUPPORTED_CODECS:
        for body in (*bodies, b"\xd8\x00", b"\x00\xd8", b"\xed\xa0\x80", b"\x00\xd8\0\0"):
            with suppress(MalformedRequest):
                text_of(body, charset).encode()


NUMBERS = (DatatypeKind.INTEGER, DatatypeKind.FLOAT)
NUMERIC = [each for each in DATATYPES.values() if each.kind in NUMBERS]


@pytest.mark.parametrize("value", ["a text", "é", "", b"a file", b"\xff\xd8\xff", b"\x93NUMPY"])
def test_single_element_becomes_the_same_tensor_on_the_short_way(value: str | bytes) -> None:
    payload = Payload({"": [Part(value)]})
    for shape in ([1], [-1], [1, -1], []):
        for batch in (0, 8):
            texts = model({"T": ("BYTES", shape)}, {}, batch)
            short = convert_single_element(payload, texts)
            inputs = to_inputs(payload, texts, PayloadLimits())
            assert short is not None
            assert short._replace(arrays={}) == inputs._replace(arrays={})
            assert short.arrays["T"].dtype == inputs.arrays["T"].dtype == object
            assert short.arrays["T"].shape == inputs.arrays["T"].shape
            assert short.arrays["T"].item() == inputs.arrays["T"].item()


def test_other_payloads_do_not_take_the_short_way() -> None:
    text = model({"T": ("BYTES", [1])}, {}, 8)
    pairs, numbers = model({"T": ("BYTES", [2])}, {}), model({"T": ("FP32", [1])}, {})
    both = model({"T": ("BYTES", [1]), "U": ("BYTES", [1])}, {})
    part = Part("a")
    assert all(
        convert_single_element(Payload({"": [part]}), m) is None for m in (pairs, numbers, both)
    )
    for payload in (
        Payload({"T": [part]}),
        Payload({"": [part, part]}),
        Payload({"": [part], "U": [part]}),
        Payload({"": [part]}, instance_count=1),
        Payload({"": [Part(["a"])]}),
    ):
        assert convert_single_element(payload, text) is None


def test_image_keeps_its_values_in_each_datatype_or_is_refused() -> None:
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    payload = Payload({"": [Part(encoded(levels), "image/png")]})
    for datatype in NUMERIC:
        signature = model({"X": (datatype.name, [16, 16])}, {})
        try:
            array = to_inputs(payload, signature, PayloadLimits()).arrays["X"]
        except InputMismatch:
            assert np.array(255).astype(datatype.numpy_dtype) != 255, datatype
        else:
            assert array.astype(np.int64).tolist() == levels.tolist(), datatype
