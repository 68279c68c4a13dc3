"""The encodings of inferences are compared with those of tritonclient, which needs more passes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from tritonclient import grpc
from tritonclient.grpc import service_pb2
from tritonclient.grpc._utils import _get_inference_request
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput, InferResult

from gateway.errors import BadUpstream
from gateway.http_client.client import CompleteResponse
from gateway.tensors.dtypes import DATATYPES
from gateway.tensors.inputs import InferInputs
from gateway.tensors.sequence import SequenceStep
from gateway.tensors.signature import build_signature
from gateway.triton.error_mapping import RequestTarget
from gateway.triton.grpc.messages import encode_grpc_request
from gateway.triton.inference import (
    MAX_SEPARATE_ELEMENTS,
    BinaryInput,
    InferRequest,
    build_request_document,
    decode_infer_response,
    parse_http_response,
)

SHAPES = array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


@st.composite
def tensors(draw: st.DrawFn, datatype: str) -> np.ndarray:
    """Arrays of a datatype, also empty, scalar and not contiguous ones."""
    dtype = DATATYPES[datatype].numpy_dtype
    shape = draw(SHAPES)
    if dtype.kind == "O":
        size = int(np.prod(shape))
        values = draw(st.lists(st.binary(max_size=9), min_size=size, max_size=size))
        array = np.array([*values, None], object)[:-1].reshape(shape)
    else:
        raw = draw(arrays(np.uint8, (*shape, dtype.itemsize)))
        if datatype == "BOOL":
            raw %= 2
        array = raw.view(dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


@pytest.mark.parametrize("datatype", DATATYPES)
@settings(max_examples=15)
@given(data=st.data())
def test_a_request_is_what_tritonclient_sends(datatype: str, data: st.DataObject) -> None:
    values = data.draw(st.lists(tensors(datatype), min_size=1, max_size=3))
    counts = data.draw(st.dictionaries(st.text(max_size=4), st.integers(0, 3), max_size=2))
    parameters = {"timeout": 5, "own": data.draw(st.text(max_size=4) | st.booleans())}
    ours = [BinaryInput(f"X{i}", array, datatype) for i, array in enumerate(values)]
    document = build_request_document(ours, counts, parameters, "an id")
    sent = b"".join(buffer for each in ours for buffer in each.buffers)
    expected, expected_length = InferenceServerClient.generate_request_body(
        [
            InferInput(f"X{i}", list(array.shape), datatype).set_data_from_numpy(array)
            for i, array in enumerate(values)
        ],
        outputs=[InferRequestedOutput(name, class_count=count) for name, count in counts.items()],
        request_id="an id",
        timeout=5,
        parameters={"own": parameters["own"]},
    )
    assert sent == expected[expected_length:]
    assert orjson.loads(orjson.dumps(document)) == json.loads(expected[:expected_length])


def build_response(datatype: str, arrays: list[np.ndarray]) -> tuple[bytes, int]:
    inputs = [BinaryInput(f"Y{i}", array, datatype) for i, array in enumerate(arrays)]
    document = {"model_version": "7", "outputs": [each.describe() for each in inputs]}
    header = orjson.dumps(document)
    return b"".join([header, *(buffer for each in inputs for buffer in each.buffers)]), len(header)


@pytest.mark.parametrize("datatype", DATATYPES)
@settings(max_examples=15)
@given(data=st.data())
def test_a_response_is_what_tritonclient_reads(datatype: str, data: st.DataObject) -> None:
    body, length = build_response(datatype, data.draw(st.lists(tensors(datatype), max_size=3)))
    version, outputs = decode_infer_response(body, length)
    expected = InferResult.from_response_body(body, header_length=length)
    assert version == "7"
    assert [*outputs] == [entry["name"] for entry in expected.get_response()["outputs"]]
    for name, array in outputs.items():
        other = expected.as_numpy(name)
        assert (array.dtype, array.shape) == (other.dtype, other.shape)
        assert array.flags.aligned
        assert array.tolist() == other.tolist() or array.tobytes() == other.tobytes()  # NaN


@pytest.mark.parametrize("datatype", DATATYPES)
def test_values_in_json_are_read_as_tritonclient_does(datatype: str) -> None:
    values = {"BOOL": [[True], [False]], "BYTES": [["ä"], [""]]}.get(datatype, [[1], [0]])
    entry = {"name": "Y", "datatype": datatype, "shape": [2, 1], "data": values}
    body = orjson.dumps({"outputs": [entry]})
    _, outputs = decode_infer_response(body, None)
    expected = InferResult.from_response_body(body).as_numpy("Y").tolist()
    if datatype == "BYTES":  # tritonclient returns strings here, and bytes elsewhere
        expected = [[text.encode()] for [text] in expected]
    assert outputs["Y"].dtype == DATATYPES[datatype].numpy_dtype
    assert outputs["Y"].tolist() == expected


@pytest.mark.parametrize("count", [1, MAX_SEPARATE_ELEMENTS, MAX_SEPARATE_ELEMENTS + 1])
def test_a_few_large_elements_are_not_copied(count: int) -> None:
    value = bytes(1000)
    array = np.full((count,), value, object)
    copied = [each for each in BinaryInput("X", array, "BYTES").buffers if len(each) > 4]
    assert all(each is value for each in copied) is (count <= MAX_SEPARATE_ELEMENTS)


def test_numbers_are_not_copied() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    (buffer,) = BinaryInput("X", array, "FP32").buffers
    assert np.shares_memory(np.frombuffer(buffer, np.float32), array)


BYTES_OUTPUT = {"name": "Y", "datatype": "BYTES", "shape": [1]}
NUMBER_OUTPUT = {"name": "Y", "datatype": "INT32", "shape": [1]}


@pytest.mark.parametrize(
    ("output", "data"),
    [
        ({**NUMBER_OUTPUT, "parameters": {"binary_data_size": 4}}, b"abc"),
        ({**NUMBER_OUTPUT, "parameters": {"binary_data_size": 3}}, b"abc"),
        ({**NUMBER_OUTPUT, "parameters": {"binary_data_size": -4}}, b"abcd"),
        ({**NUMBER_OUTPUT, "parameters": {"binary_data_size": "4"}}, b"abcd"),
        ({**NUMBER_OUTPUT, "parameters": []}, b"abcd"),
        ({**NUMBER_OUTPUT, "parameters": {"binary_data_size": 8}}, b"abcdabcd"),
        ({**NUMBER_OUTPUT, "datatype": "INT5"}, b""),
        ({**NUMBER_OUTPUT, "name": 5}, b""),
        ({**NUMBER_OUTPUT, "shape": {}, "data": [1]}, b""),
        ({**NUMBER_OUTPUT, "data": ["a"]}, b""),
        ({**NUMBER_OUTPUT, "data": [1 << 40]}, b""),
        (NUMBER_OUTPUT, b""),
        ({**BYTES_OUTPUT, "parameters": {"binary_data_size": 3}}, b"abc"),
        ({**BYTES_OUTPUT, "parameters": {"binary_data_size": 5}}, b"\2\0\0\0a"),
        ({**BYTES_OUTPUT, "data": [5]}, b""),
        ("an output", b""),
    ],
)
def test_an_invalid_response_is_the_replicas_fault(output: Any, data: bytes) -> None:
    header = orjson.dumps({"outputs": [output]})
    headers = [(b"inference-header-content-length", str(len(header)).encode())]
    with pytest.raises(BadUpstream):
        parse_http_response(CompleteResponse(200, headers, header + data))


@pytest.mark.parametrize("length", ["-1", "1000", "five", ""])
def test_an_invalid_length_of_the_header_is_the_replicas_fault(length: str) -> None:
    header = orjson.dumps({"outputs": [{**NUMBER_OUTPUT, "parameters": {"binary_data_size": 4}}]})
    headers = [(b"inference-header-content-length", length.encode())]
    with pytest.raises(BadUpstream):
        parse_http_response(CompleteResponse(200, headers, header + b"\0" * 4))


@pytest.mark.parametrize("datatype", DATATYPES)
@settings(max_examples=15)
@given(data=st.data())
def test_a_grpc_request_is_what_tritonclient_sends(datatype: str, data: st.DataObject) -> None:
    array = data.draw(tensors(datatype))
    metadata = {
        "name": "m",
        "inputs": [{"name": "X", "datatype": datatype, "shape": [-1]}],
        "outputs": [{"name": "Y", "datatype": "FP32", "shape": [3]}],
    }
    count = data.draw(st.integers(0, 3))
    own: dict[str, Any] = {"text": "a", "number": 2, "ratio": 0.5, "flag": True}
    step = data.draw(
        st.sampled_from([None, SequenceStep(7, True, False), SequenceStep("s", False)])
    )
    request = InferRequest(
        RequestTarget("m", "3", sequence_step=step),
        build_signature(metadata, {}),
        InferInputs({"X": array}),
        ("Y",),
        {**own, "classification": count, "priority": 2, "timeout": 5},
        "an id",
        0.0,
        [],
    )
    sequence = step or SequenceStep("", False)
    expected = _get_inference_request(
        "m",
        [grpc.InferInput("X", list(array.shape), datatype).set_data_from_numpy(array)],
        "3",
        "an id",
        [grpc.InferRequestedOutput("Y", class_count=count)],
        *sequence.values,
        priority=2,
        timeout=5,
        parameters=own,
    )
    message = service_pb2.ModelInferRequest.FromString(encode_grpc_request(request, 1.0))
    assert message == expected
