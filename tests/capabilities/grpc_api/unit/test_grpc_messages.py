"""Parsing of gRPC messages, and the statuses of errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from gateway import errors
from gateway.capabilities.grpc_api.infer_request import (
    MAX_DECODED_BYTES,
    MAX_HEAD_BYTES,
    RAW_CONTENTS,
    TYPED_CONTENTS,
    InferHead,
    change_version,
    read_infer_request,
)
from gateway.capabilities.grpc_api.status import GRPC_CODES, describe_failure
from gateway.capabilities.grpc_api.wire import (
    encode_field,
    encode_varint,
    iterate_fields,
    remove_fields,
)
from gateway.errors import Forbidden, GatewayError, InputMismatch, MalformedRequest, Overloaded
from gateway.triton.grpc.byte_channel import SAFE_CANCEL_VERSION, parse_server_version
from gateway.triton.sequence import SequenceStep

NAMES = st.text(max_size=20)


@st.composite
def infer_requests(draw: st.DrawFn) -> Any:
    request = service_pb2.ModelInferRequest(
        model_name=draw(NAMES), model_version=draw(NAMES), id=draw(NAMES)
    )
    for name in draw(st.lists(NAMES, max_size=3)):
        request.parameters[name].string_param = draw(NAMES)
    for name in draw(st.lists(NAMES, max_size=4)):
        tensor = request.inputs.add(name=name, datatype="FP32", shape=[draw(st.integers(0, 9))])
        tensor.contents.fp32_contents.extend([1.0] * draw(st.integers(0, 5)))
        tensor.contents.bytes_contents.extend(draw(st.lists(st.binary(max_size=9), max_size=3)))
        request.raw_input_contents.append(draw(st.binary(max_size=400)))
    for name in draw(st.lists(NAMES, max_size=3)):
        request.outputs.add(name=name).parameters["classification"].int64_param = 2
    return request


@given(infer_requests())
def test_request_without_its_tensors_is_otherwise_unchanged(request: Any) -> None:
    head = service_pb2.ModelInferRequest.FromString(
        remove_fields(request.SerializeToString(), RAW_CONTENTS, TYPED_CONTENTS, MAX_HEAD_BYTES)
    )
    del request.raw_input_contents[:]
    for tensor in request.inputs:
        tensor.ClearField("contents")
    assert head == request


@given(st.binary(max_size=300))
def test_fields_cover_a_message_or_it_is_refused(data: bytes) -> None:
    try:
        spans = list(iterate_fields(data, 0, len(data)))
    except MalformedRequest:
        return
    assert b"".join(data[span.start : span.end] for span in spans) == data


@given(st.integers(0, 2**63), st.binary(max_size=300))
def test_fields_are_encoded_as_by_protobuf(number: int, value: bytes) -> None:
    request = service_pb2.ModelInferRequest(raw_input_contents=[value])
    assert encode_field(7, value) == request.SerializeToString()
    parameter = service_pb2.InferParameter(uint64_param=number)
    assert b"\x28" + encode_varint(number) == parameter.SerializeToString()


def large(request: Any) -> bytes:
    """The request with a tensor that is too large to be decoded."""
    request.raw_input_contents.append(bytes(MAX_DECODED_BYTES))
    return bytes(request.SerializeToString())


def small(request: Any) -> bytes:
    return bytes(request.SerializeToString())


@pytest.mark.parametrize("encode", [small, large])
@pytest.mark.parametrize("shape", [[2, 3], [0], [], [1] * 4096], ids=len)
def test_request_of_any_size_is_read_without_its_tensors(encode: Any, shape: list[int]) -> None:
    request = service_pb2.ModelInferRequest(model_name="m", model_version="3", id="mine")
    request.parameters["sequence_id"].int64_param = -1
    request.parameters["sequence_start"].bool_param = True
    request.inputs.add(name="X", datatype="INT8", shape=shape)
    request.outputs.add(name="Y").parameters["classification"].int64_param = 1
    request.outputs.add(name="Z")
    request.raw_input_contents.append(bytes(6))
    message = encode(request)
    head = read_infer_request(message)
    step = SequenceStep((1 << 64) - 1, is_start=True)
    assert head == InferHead("m", "3", "mine", step, ("Y",))
    assert len(remove_fields(message, RAW_CONTENTS, TYPED_CONTENTS, MAX_HEAD_BYTES)) < 200 + len(
        shape
    )


def test_last_of_several_values_counts_as_in_protobuf() -> None:
    message = service_pb2.ModelInferRequest(model_name="m", model_version="1").SerializeToString()
    assert change_version(message, "1", "1") == message
    changed = change_version(message, "1", "42")
    assert read_infer_request(changed).version == "42"
    assert service_pb2.ModelInferRequest.FromString(changed).model_version == "42"


def with_shape(shape: list[int]) -> Any:
    request = service_pb2.ModelInferRequest(model_name="m")
    request.inputs.add(name="X", datatype="INT8", shape=shape)
    request.raw_input_contents.append(bytes(6))
    return request


def list_refused_requests() -> Iterator[tuple[str, Any, type[GatewayError], str]]:
    """Return names of requests, the requests, and their errors."""
    yield "overflow", with_shape([1 << 62, 4]), InputMismatch, "more elements"
    yield "negative", with_shape([-1]), InputMismatch, "a negative dimension"
    yield "empty but huge", with_shape([0, 1 << 62]), InputMismatch, "more elements"
    yield "4097 dimensions", with_shape([1] * 4097), MalformedRequest, "at most 4096 dimensions"
    # Refused before it is decoded.
    millions = with_shape([1] * 2_000_000)
    yield "millions of dimensions", millions, MalformedRequest, "more than 262144 bytes"
    parameters, inputs, tensor = (service_pb2.ModelInferRequest() for _ in range(3))
    for number in range(1001):
        parameters.parameters[str(number)].bool_param = True
        inputs.inputs.add(name=str(number))
    tensor.inputs.add(name="X").parameters["p" * 300].bool_param = True
    yield "parameters", parameters, MalformedRequest, "at most 1000 parameters"
    yield "inputs", inputs, MalformedRequest, "at most 1000 inputs"
    yield "a long name of a parameter", tensor, MalformedRequest, "at most 256 characters"
    for place in ("inputs", "outputs"):
        request = service_pb2.ModelInferRequest(model_name="m")
        shared = getattr(request, place).add(name="X").parameters["shared_memory_region"]
        shared.string_param = "any"
        yield f"shared memory in {place}", request, Forbidden, "shared memory"


def test_invalid_request_is_refused(subtests: pytest.Subtests) -> None:
    for name, request, error, words in list_refused_requests():
        for encode in (small, large):
            with subtests.test(name, encode=encode.__name__), pytest.raises(error, match=words):
                read_infer_request(encode(request))
    with pytest.raises(MalformedRequest, match="more than 4096 fields"):
        read_infer_request(large(with_shape([6])) + encode_field(7, b"") * 5000)


def family(kind: type[GatewayError]) -> set[type[GatewayError]]:
    return {kind, *(each for child in kind.__subclasses__() for each in family(child))}


def test_every_status_has_a_grpc_code() -> None:
    statuses = {each.status for each in family(errors.GatewayError)}
    assert {status for status in statuses if status >= 400} <= GRPC_CODES.keys()


def test_details_of_an_error_are_those_of_google_rpc() -> None:
    status = describe_failure(Overloaded("too much ü", headers={"Retry-After": "7"}), "my-id")
    assert (status.http_status, status.code) == (429, grpc.StatusCode.RESOURCE_EXHAUSTED)
    trailers = dict(status.trailers)
    details = trailers.pop("grpc-status-details-bin")
    assert trailers == {
        "x-request-id": "my-id",
        "gateway-error-code": "OVERLOADED",
        "grpc-retry-pushback-ms": "7000",
    }
    assert isinstance(details, bytes)
    rich = status_pb2.Status.FromString(details)
    assert (rich.code, rich.message) == (8, "too much ü")
    reason = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    assert rich.details[0].Unpack(reason)
    assert (reason.reason, reason.domain) == ("OVERLOADED", "triton-gateway")
    assert rich.details[1].Unpack(retry)
    assert retry.retry_delay.seconds == 7


def test_unexpected_error_is_internal_and_shows_no_details() -> None:
    status = describe_failure(ValueError("a secret"), "my-id")
    assert (status.http_status, status.code) == (500, grpc.StatusCode.INTERNAL)
    assert "secret" not in str(status)
    memory = describe_failure(MemoryError(), "my-id")
    assert memory.code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("version", "parsed"),
    [("2.51.0", (2, 51, 0)), ("2.59.1-rc", (2, 59, 1)), ("2.100.0", (2, 100, 0)), ("new", ())],
)
def test_version_of_triton_decides_how_calls_are_cancelled(
    version: str, parsed: tuple[int, ...]
) -> None:
    metadata = service_pb2.ServerMetadataResponse(name="triton", version=version)
    assert parse_server_version(metadata.SerializeToString()) == parsed
    assert parse_server_version(b"\xff") == ()
    assert (parsed >= SAFE_CANCEL_VERSION) == (parsed[1:2] > (58,))
