"""The encodings of inferences are compared with those of tritonclient, which needs more passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from tritonclient import grpc
from tritonclient.grpc import service_pb2
from tritonclient.grpc._utils import _get_inference_request

from gateway.errors import BadUpstream
from gateway.http_client.client import CompleteResponse
from gateway.tensors.dtypes import DATATYPES
from gateway.tensors.inputs import InferInputs
from gateway.tensors.signature import build_signature
from gateway.triton.grpc.messages import encode_grpc_request, render_any_result, render_small_result
from gateway.triton.inference import InferRequest, encode_tensor, parse_http_response
from gateway.triton.request_target import RequestTarget
from gateway.triton.sequence import SequenceStep

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


# One example has a tensor of each datatype.
TENSORS = st.fixed_dictionaries({datatype: tensors(datatype) for datatype in DATATYPES})


BYTES_OUTPUT = {"name": "Y", "datatype": "BYTES", "shape": [1]}
NUMBER_OUTPUT = {"name": "Y", "datatype": "INT32", "shape": [1]}


INVALID_OUTPUTS: list[tuple[Any, bytes]] = [
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
]


def parse_response(output: Any, data: bytes, length: str = "") -> None:
    header = orjson.dumps({"outputs": [output]})
    length = length or str(len(header))
    headers = [(b"inference-header-content-length", length.encode())]
    parse_http_response(CompleteResponse(200, headers, header + data))


def test_invalid_response_is_bad_upstream(subtests: pytest.Subtests) -> None:
    for output, data in INVALID_OUTPUTS:
        with subtests.test(str(output)), pytest.raises(BadUpstream):
            parse_response(output, data)
    sound = {**NUMBER_OUTPUT, "parameters": {"binary_data_size": 4}}
    parse_response(sound, bytes(4))
    for length in ("-1", "1000", "five", " "):
        with subtests.test(length), pytest.raises(BadUpstream):
            parse_response(sound, bytes(4), length)


@given(
    TENSORS,
    st.integers(0, 3),
    st.sampled_from([None, SequenceStep(7, True, False), SequenceStep("s", False)]),
)
def test_grpc_request_is_encoded_as_by_tritonclient(
    inputs: dict[str, np.ndarray], count: int, step: SequenceStep | None
) -> None:
    metadata = {
        "name": "m",
        "inputs": [{"name": name, "datatype": name, "shape": [-1]} for name in inputs],
        "outputs": [{"name": "Y", "datatype": "FP32", "shape": [3]}],
    }
    own: dict[str, Any] = {"text": "a", "number": 2, "ratio": 0.5, "flag": True}
    request = InferRequest(
        RequestTarget("m", "3", sequence_step=step),
        build_signature(metadata, {}),
        InferInputs(inputs),
        ("Y",),
        {**own, "classification": count, "priority": 2, "timeout": 5},
        "an id",
        0.0,
        [],
    )
    sequence = step or SequenceStep("", False)
    expected = _get_inference_request(
        "m",
        [
            grpc.InferInput(name, list(array.shape), name).set_data_from_numpy(array)
            for name, array in inputs.items()
        ],
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


@given(st.data())
def test_streamed_result_is_rendered_in_one_pass_as_in_two(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*DATATYPES]))
    array = data.draw(tensors(name))
    output = {"name": "Y", "datatype": name, "shape": data.draw(st.sampled_from([[1], [-1]]))}
    batch_size = data.draw(st.sampled_from([0, 4]))
    metadata = {"name": "m", "versions": ["1"], "inputs": [], "outputs": [output]}
    signature = build_signature(metadata, {"max_batch_size": batch_size})
    inputs = InferInputs({}, is_batched=data.draw(st.booleans()))
    target = RequestTarget("m")
    request = InferRequest(target, signature, inputs, (), {}, "an id", 0.0, [])
    message = service_pb2.ModelStreamInferResponse()
    response = message.infer_response
    response.model_version = "3"
    wrong_shape = data.draw(st.sampled_from([None, [0], [2], [-1], [-1, 1]]))
    response.outputs.add(name="Y", datatype=name, shape=wrong_shape or array.shape)
    response.raw_output_contents.append(bytes(encode_tensor(array)))
    encoded = message.SerializeToString()
    rendered = render_small_result(request, encoded)
    if rendered is not None:
        assert rendered == render_any_result(request, encoded)
    else:
        assert wrong_shape or needs_general_way(name, array)


def needs_general_way(name: str, array: np.ndarray) -> bool:
    if name == "BYTES":
        return array.size != 1 or not is_utf8(array.item()) or array.ndim > 1
    return name == "BF16" or not np.isfinite(array.astype(np.float64)).all()


def is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
