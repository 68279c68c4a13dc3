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
from gateway.media_types import JSON
from gateway.routes.examples import format_curl_example, format_python_example
from gateway.routes.model_openapi import build_model_openapi
from gateway.tensors.codecs import SUPPORTED_CODECS
from gateway.tensors.dtypes import DATATYPES, DatatypeKind
from gateway.tensors.inputs import InferInputs, read_payload, to_inputs
from gateway.tensors.outputs import InferResult, choose_result_encoder, encode_npz_result
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


INVALID_HINTS = (
    ("std.X", "0.5,-0.0,0.5", "a list of valid divisors"),
    ("std.X", "1e-40", "a list of valid divisors"),
    ("std.X", "nan", "a list of valid divisors"),
    ("mean.X", "0.5,nan,0.5", "a list of finite numbers"),
    ("mean.X", "1e39", "a list of finite numbers"),
    ("mean.X", "half", "a list of finite numbers"),
    ("scale.X", "0..255", "one of none, 0..1, -1..1"),
    ("examples.X", "[1]", "a JSON list of at most 8 strings"),
    ("examples.X", '["' + '","' * 8 + '"]', "a JSON list of at most 8 strings"),
    ("examples.X", "[" * 90_000, "a JSON list of at most 8 strings"),
    ("content_type.X", "text/html\r\nSet-Cookie: a=b", "a media type"),
    ("content_type.X", "image/é", "a media type"),
    ("content_type.X", "a" * 300, "a media type"),
    ("classification.X", "0", "a number of classes"),
    ("title", "a" * 101, "a text of at most 100 characters"),
    ("description", "a" * 201, "a text of at most 200 characters"),
    ("priority", "highest", "one of background, normal, interactive"),
)
PIXELS = {"X": ("FP32", [3, 6, 4])}


def test_invalid_hint_of_a_model_is_a_fault(subtests: pytest.Subtests) -> None:
    for name, text, words in INVALID_HINTS:
        with subtests.test(f"{name} {text[:40]!r}"), pytest.raises(ModelFault) as raised:
            model(PIXELS, PIXELS, 8, hints={f"gateway.{name}": text})
        assert raised.value.detail.startswith(f"the model's config has gateway.{name} = ")
        assert raised.value.detail.endswith(f", which is not {words}")
    with pytest.raises(ModelFault, match="the output is not numeric or not of a fixed shape"):
        model({}, {"X": ("FP32", [-1])}, hints={"gateway.classification.X": "5"})


def test_model_with_too_many_dimensions_or_tensors_is_a_fault() -> None:
    assert format_curl_example(model({"X": ("FP32", [1] * 64)}, {}), "http://here")
    with pytest.raises(ModelFault, match="'X' has 65 dimensions; the gateway supports 64"):
        model({"X": ("FP32", [1] * 65)}, {})
    tensors = {f"X{at}": ("FP32", [1]) for at in range(MAX_TENSORS + 1)}
    with pytest.raises(ModelFault, match="the model has more than 4096 inputs"):
        model(tensors, {})


def test_example_of_optional_inputs_has_one_input() -> None:
    several = model({"A": ("INT32", [2]), "B": ("BYTES", [1])}, {}, 8, optional=True)
    assert '{"inputs":{"A":[1,1]}}' in format_curl_example(several, "http://here")
    assert "{'inputs': {'A': [1] * 2}}" in format_python_example(several, "http://here")
    assert "'example': {'inputs': {'A': [1, 1]}}" in str(build_model_openapi(several))
    only = model({"B": ("BYTES", [1])}, {}, 8, optional=True)
    assert "-d 'some text' -H 'Content-Type: text/plain'" in format_curl_example(
        only, "http://here"
    )
    assert '{"inputs":{}}' in format_curl_example(model({}, {}, 8), "http://here")


def test_npz_has_outputs_of_any_name() -> None:
    names = ("file", "allow_pickle", "args", "a/b", "../c", "d.npy", "é ☕")
    arrays = {name: np.array([[number]]) for number, name in enumerate(names)}
    arrays["text"] = np.array([[b"x"]], object)
    body = encode_npz_result(InferResult(model({}, {}), arrays, is_batched=True)).body
    with np.load(io.BytesIO(body)) as loaded:
        assert {name: loaded[name].tolist() for name in arrays} == {
            name: array.tolist() for name, array in arrays.items()
        }


def test_missing_output_is_a_model_fault() -> None:
    pictures = model({}, {"PNG": ("BYTES", [1])}, hints={"gateway.content_type.PNG": "image/png"})
    for accept in ("application/x-npy", "application/octet-stream", "image/png"):
        with pytest.raises(ModelFault, match="did not return the requested output"):
            choose_result_encoder(accept, pictures, ["PNG"])(InferResult(pictures, {}, True))


# What is stacked.


def convert(values: list[Any], shape: list[int], batch: int, count: int = 0) -> InferInputs:
    """Convert parts; so many instances if `count` is given."""
    tensor = {"X": ("INT32", shape)}
    payload = Payload({"X": [Part(value, JSON) for value in values]}, instance_count=count)
    return to_inputs(payload, model(tensor, tensor, batch), PayloadLimits())


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
        ([-1], 8, [[1], [2, 3]], "ragged lists: lengths 1 and 2 at the same level"),
    ],
)
def test_values_are_stacked_to_a_batch_or_refused(
    shape: list[int], batch: int, values: list[Any], stacked: list[Any] | str
) -> None:
    for count in (0, len(values)):
        if isinstance(stacked, str):
            with pytest.raises(InputMismatch, match=stacked):
                convert(values, shape, batch, count)
            continue
        inputs = convert(values, shape, batch, count)
        assert inputs.arrays["X"].tolist() == stacked
        assert inputs.is_batched == bool(batch)
        assert inputs.batch_size == (len(values) if batch else 0)
        first = convert(values[:1], shape, batch, 1)
        assert first.arrays["X"].tolist() == stacked[:1]


# Bodies.


def text_of(body: bytes, charset: str) -> Any:
    payload = read_payload(body, f"text/plain; charset={charset}", PayloadLimits())
    return payload.parts[""][0].value


def test_text_of_a_known_charset_becomes_valid_unicode_and_others_are_refused() -> None:
    for name in ("UTF8", "us-ascii", "Windows-1252", "Shift_JIS", "UTF-16", *SUPPORTED_CODECS):
        assert text_of("text".encode(name), name) == "text"
        for body in (random.Random(1).randbytes(12), b"\xd8\0", b"\xed\xa0\x80", b"\0\xd8\0\0"):
            with suppress(MalformedRequest):
                text_of(body, name).encode()
    for charset in ("utf-7", "unicode-escape", "idna", "rot13", "zlib", "os.path", "é", '""'):
        with pytest.raises(MalformedRequest, match=r"unknown charset .*; send UTF-8"):
            text_of(b"text", charset)


NUMBERS = (DatatypeKind.INTEGER, DatatypeKind.FLOAT)
NUMERIC = [each for each in DATATYPES.values() if each.kind in NUMBERS]


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
