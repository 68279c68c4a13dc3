"""Triton's gRPC API through the gateway, with Triton's own clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2

from gateway.embedded.supervisor import EmbeddedTriton
from tests.capabilities.grpc_api.support.grpc_gateway import (
    INFER,
    SERVICE,
    GrpcGateway,
    call_bytes,
    failure,
    fp32,
    grpc_gateway,
    make_input,
)
from tests.support.model_zoo.zoo import AS_WRITTEN, MODELS, Zoo

NUMPY_TYPES = {
    "BOOL": np.bool_, "BF16": ml_dtypes.bfloat16, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64,
    "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
}  # fmt: skip


@pytest.fixture(scope="module")
def served(zoo_triton: EmbeddedTriton) -> Iterator[GrpcGateway]:
    with grpc_gateway(zoo_triton.options.url, connect_timeout_s="10") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def zoo_models(served: GrpcGateway) -> Zoo:
    return Zoo(served.http, AS_WRITTEN)


@pytest.fixture(scope="module")
def client(served: GrpcGateway) -> Iterator[triton_grpc.InferenceServerClient]:
    with triton_grpc.InferenceServerClient(served.address) as client:
        yield client


@pytest.fixture(scope="module")
def direct(zoo_triton: EmbeddedTriton) -> Iterator[triton_grpc.InferenceServerClient]:
    address = f"127.0.0.1:{zoo_triton.options.grpc_port}"
    with triton_grpc.InferenceServerClient(address) as client:
        yield client


# These fail with a message that the gateway changes, or sleep.
APART = {"failing", "refusing", "sleeping"}
ANY_SIZE = 2


def draw_inputs(metadata: service_pb2.ModelMetadataResponse) -> list[triton_grpc.InferInput]:
    """Return values for all inputs of any model."""
    inputs = []
    for tensor in metadata.inputs:
        if tensor.datatype == "BYTES":
            samples = np.array(["grüße", "", "a\0b"], object)
        else:
            samples = np.array([1, 2, 100]).astype(NUMPY_TYPES[tensor.datatype])
        shape = [ANY_SIZE if size < 0 else size for size in tensor.shape]
        inputs.append(make_input(tensor.name, np.resize(samples, shape), tensor.datatype))
    return inputs


@pytest.mark.long
def test_model_of_any_datatype_and_shape_answers_as_triton_does(
    zoo_models: Zoo,
    client: triton_grpc.InferenceServerClient,
    direct: triton_grpc.InferenceServerClient,
) -> None:
    names = [model.name for model in MODELS if model.name not in APART]
    zoo_models.load(*names)
    for name in names:
        described = [each.get_model_metadata(name) for each in (client, direct)]
        assert described[0] == described[1]
        assert client.get_model_config(name) == direct.get_model_config(name)
        inputs = draw_inputs(described[1])
        results = [each.infer(name, inputs, request_id="one") for each in (client, direct)]
        assert results[0].get_response() == results[1].get_response(), name
        assert results[0].get_response().outputs, name


def test_large_request_and_response_pass_unchanged(
    zoo_models: Zoo,
    client: triton_grpc.InferenceServerClient,
    direct: triton_grpc.InferenceServerClient,
) -> None:
    zoo_models.load("plain_FP32")
    values = np.arange(1_500_000, dtype=np.float32).reshape(3, -1)
    inputs = [make_input("X", values, "FP32")]
    results = [each.infer("plain_FP32", inputs) for each in (client, direct)]
    assert results[0].get_response() == results[1].get_response()
    assert np.array_equal(results[0].as_numpy("Y"), values)


def test_typed_tensor_contents_pass_as_they_do_directly(
    served: GrpcGateway, zoo_models: Zoo, zoo_triton: EmbeddedTriton
) -> None:
    zoo_models.load("plain_INT32", "plain_BYTES")
    direct = f"127.0.0.1:{zoo_triton.options.grpc_port}"
    contents: tuple[tuple[str, str, list[Any]], ...] = (
        ("INT32", "int_contents", [1, 2]),
        ("INT32", "int_contents", list(range(50_000))),
        ("BYTES", "bytes_contents", [b"a", b""]),
    )
    for datatype, field, values in contents:
        request = service_pb2.ModelInferRequest(model_name=f"plain_{datatype}", id="one")
        tensor = request.inputs.add(name="X", datatype=datatype, shape=[1, len(values)])
        getattr(tensor.contents, field).extend(values)
        message = request.SerializeToString()
        responses = [call_bytes(address, INFER, message) for address in (served.address, direct)]
        assert responses[0] == responses[1]


def test_metadata_and_statistics_equal_those_of_triton(
    zoo_models: Zoo,
    client: triton_grpc.InferenceServerClient,
    direct: triton_grpc.InferenceServerClient,
) -> None:
    zoo_models.load("plain_FP32")
    for method, arguments in (
        ("is_server_live", ()),
        ("is_server_ready", ()),
        ("is_model_ready", ("plain_FP32",)),
        ("is_model_ready", ("plain_FP32", "7")),
        ("is_model_ready", ("no_such_model",)),
        ("is_model_ready", ("../plain_FP32",)),
        ("is_model_ready", ("",)),
        ("get_server_metadata", ()),
        ("get_model_metadata", ("plain_FP32",)),
        ("get_model_metadata", ("plain_FP32", "1")),
        ("get_model_config", ("plain_FP32",)),
        ("get_inference_statistics", ("plain_FP32",)),
        ("get_system_shared_memory_status", ()),
        ("get_cuda_shared_memory_status", ()),
        ("unregister_system_shared_memory", ()),
        ("unregister_cuda_shared_memory", ()),
    ):
        answers = [getattr(each, method)(*arguments) for each in (client, direct)]
        assert answers[0] == answers[1], method


def answer(address: str, method: str, message: bytes) -> bytes | tuple[str, str]:
    """The response, or the code and the message of the failure."""
    try:
        return call_bytes(address, method, message)
    except grpc.RpcError as exc:
        return exc.code().name, str(exc.details())


@pytest.mark.parametrize(
    "version", ["x", "x'y", "é", "-1", "+-1", "9" * 20, "1x", " +1", "0" * 30 + "1"]
)
def test_version_that_is_no_number_is_read_as_by_triton(
    served: GrpcGateway, zoo_models: Zoo, zoo_triton: EmbeddedTriton, version: str
) -> None:
    zoo_models.load("plain_FP32")
    request = service_pb2.ModelInferRequest(model_name="plain_FP32", model_version=version)
    request.inputs.add(name="X", datatype="FP32", shape=[1, 1])
    request.raw_input_contents.append(bytes(4))
    calls = [(INFER, request)]
    for method in ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"):
        message_type = getattr(service_pb2, f"{method}Request")
        calls.append((f"{SERVICE}/{method}", message_type(name="plain_FP32", version=version)))
    direct = f"127.0.0.1:{zoo_triton.options.grpc_port}"
    for method, request in calls:
        message = request.SerializeToString()
        answers = [answer(address, method, message) for address in (served.address, direct)]
        assert answers[0] == answers[1], method


REFUSALS = (
    ("no_such_model", "", (1, 2), "NOT_FOUND", "Request for unknown model: 'no_such_model'"),
    ("plain_FP32", "9", (1, 2), "NOT_FOUND", "unknown model: 'plain_FP32' version 9"),
    ("../plain_FP32", "", (1, 2), "NOT_FOUND", "unknown model"),
    ("", "", (1, 2), "NOT_FOUND", "Request for unknown model: '' is not found"),
    ("plain_FP32", "", (2,), "INVALID_ARGUMENT", "unexpected shape for input 'X'"),
    ("ticking", "", (1, 2), "INVALID_ARGUMENT", "decoupled"),
)


@pytest.mark.parametrize(("model", "version", "shape", "code", "words"), REFUSALS)
def test_invalid_request_fails_with_the_status_of_its_http_error(
    zoo_models: Zoo,
    client: triton_grpc.InferenceServerClient,
    model: str,
    version: str,
    shape: tuple[int, ...],
    code: str,
    words: str,
) -> None:
    zoo_models.load("plain_FP32", "ticking")
    got = failure(client.infer, model, [fp32(1, 2, shape=shape)], model_version=version)
    assert got[0] == code
    assert words in got[1]


def test_error_of_a_model_has_its_code_and_no_paths(served: GrpcGateway, zoo_models: Zoo) -> None:
    zoo_models.load("failing")
    request = service_pb2.ModelInferRequest(model_name="failing")
    request.inputs.add(name="X", datatype="FP32", shape=[1, 1])
    request.raw_input_contents.append(np.float32(1).tobytes())
    with grpc.insecure_channel(served.address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(INFER)(
            request.SerializeToString(), timeout=30, metadata=[("x-request-id", "my-id")]
        )
    error = caught.value
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "boom" in error.details()
    assert "/" not in error.details()
    trailers = dict(error.trailing_metadata())
    assert trailers["gateway-error-code"] == "MODEL_FAULT"
    assert trailers["x-request-id"] == "my-id"
    assert b"google.rpc.ErrorInfo" in trailers["grpc-status-details-bin"]


@pytest.mark.fault("bytes that are not the protobuf message of the method, unknown methods")
@pytest.mark.parametrize("method", [f"{SERVICE}/NoSuchMethod", "/other.Service/Call"])
def test_unknown_method_is_unimplemented(served: GrpcGateway, method: str) -> None:
    code, message = failure(call_bytes, served.address, method, b"")
    assert code == "UNIMPLEMENTED"
    assert "unknown gRPC method" in message


def test_registration_of_shared_memory_is_refused(
    client: triton_grpc.InferenceServerClient,
) -> None:
    for register in (
        lambda: client.register_system_shared_memory("region", "/key", 4),
        lambda: client.register_cuda_shared_memory("region", b"aGFuZGxl", 0, 4),
    ):
        code, message = failure(register)
        assert code == "PERMISSION_DENIED"
        assert "shared memory cannot be used through the gateway" in message


async def test_asynchronous_client_gets_concurrent_responses(
    served: GrpcGateway, zoo_models: Zoo
) -> None:
    zoo_models.load("plain_FP32")
    inputs = [fp32(1, 2, shape=(1, 2))]
    async with triton_aio.InferenceServerClient(served.address) as client:
        results = await asyncio.gather(*(client.infer("plain_FP32", inputs) for _ in range(20)))
    assert all(result.as_numpy("Y").tolist() == [[1, 2]] for result in results)


def test_call_is_logged_and_counted(
    served: GrpcGateway, zoo_models: Zoo, client: triton_grpc.InferenceServerClient
) -> None:
    zoo_models.load("plain_FP32")
    headers = {"x-request-id": "call-of-the-log"}
    client.infer("plain_FP32", [fp32(1, 2, shape=(1, 2))], headers=headers)
    line = served.command.wait_for("request_id=call-of-the-log")
    assert f"POST {INFER} 200" in line
    assert "model=plain_FP32" in line
    page = served.http.get("/metrics").text
    name = f'gateway_request_duration_seconds_count{{route="{INFER}",model="plain_FP32"'
    assert name in page
