"""The calls of Triton's own gRPC example programs, in their order: Triton and the gateway pass alike.

Each function is named after the program of github.com/triton-inference-server/client whose calls it makes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcclient_aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.grpc_gateway import GrpcGateway, failure, grpc_gateway, make_input
from tests.support.keys import ADMIN, entry, written
from tests.support.model_zoo.zoo import (
    COUNTING,
    TICKING,
    Model,
    Names,
    T,
    identity,
    write_repository,
)
from tests.support.servers import triton_with
from tests.support.wait import TIMEOUT_S


def sum_and_difference(name: str, datatype: str) -> Model:
    inputs = tuple(T(f"INPUT{number}", datatype, (16,)) for number in range(2))
    outputs = tuple(T(f"OUTPUT{number}", datatype, (16,)) for number in range(2))
    return Model(name, "sum_and_difference", inputs, outputs, 8)


MODELS = (
    sum_and_difference("simple", "INT32"),
    sum_and_difference("simple_string", "BYTES"),
    COUNTING,
    TICKING,
    identity("managed", "INT32", (-1,)),
)
LOADED = ("simple", "simple_string", "counting", "ticking")
HEADERS = {"authorization": f"Bearer {ADMIN}"}
ONES, NUMBERS = np.ones((1, 16), np.int32), np.arange(16, dtype=np.int32).reshape(1, 16)


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
    folder = tmp_path_factory.mktemp("grpc-examples")
    write_repository(folder, Names(), MODELS)
    with triton_with((folder,), LOADED) as triton:
        yield triton


@pytest.fixture(scope="module")
def gateway(
    triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GrpcGateway]:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys = written(path, [entry(ADMIN, "admin")])
    with grpc_gateway(triton.options.url, keys_file=str(keys)) as gateway:
        yield gateway


@pytest.fixture(params=["triton", "gateway"])
def address(request: pytest.FixtureRequest, triton: EmbeddedTriton, gateway: GrpcGateway) -> str:
    """Of the real Triton, where the calls must pass as well, and of the gateway before it."""
    if request.param == "gateway":
        return gateway.address
    return f"127.0.0.1:{triton.options.grpc_port}"


@pytest.fixture
def client(address: str) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(address) as client:
        yield client


def simple_inputs() -> list[grpcclient.InferInput]:
    return [make_input("INPUT0", NUMBERS, "INT32"), make_input("INPUT1", ONES, "INT32")]


def check_simple(result: grpcclient.InferResult) -> None:
    assert np.array_equal(result.as_numpy("OUTPUT0"), NUMBERS + ONES)
    assert np.array_equal(result.as_numpy("OUTPUT1"), NUMBERS - ONES)


def outputs() -> list[grpcclient.InferRequestedOutput]:
    return [grpcclient.InferRequestedOutput(f"OUTPUT{number}") for number in range(2)]


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_simple_grpc_infer_client(
    client: grpcclient.InferenceServerClient, compression: str | None
) -> None:
    result = client.infer(
        "simple",
        simple_inputs(),
        outputs=outputs(),
        headers={**HEADERS, "test": "1"},
        client_timeout=TIMEOUT_S,
        compression_algorithm=compression,
    )
    check_simple(result)
    statistics = client.get_inference_statistics("simple", headers=HEADERS)
    assert len(statistics.model_stats) == 1
    for name in ("wrong_model_name",):
        code, message = failure(client.get_inference_statistics, name, headers=HEADERS)
        assert code in ("INVALID_ARGUMENT", "NOT_FOUND")
        assert name in message


def test_simple_grpc_string_infer_client(client: grpcclient.InferenceServerClient) -> None:
    texts = [
        make_input(f"INPUT{number}", values.astype(str).astype(object), "BYTES")
        for number, values in enumerate((NUMBERS, ONES))
    ]
    result = client.infer("simple_string", texts, outputs=outputs(), headers=HEADERS)
    assert [int(each) for each in result.as_numpy("OUTPUT0")[0]] == (NUMBERS + ONES)[0].tolist()


def test_simple_grpc_async_infer_client(client: grpcclient.InferenceServerClient) -> None:
    results: Queue[tuple[Any, Any]] = Queue()
    for _ in range(5):
        client.async_infer(
            "simple",
            simple_inputs(),
            lambda result, error: results.put((result, error)),
            outputs=outputs(),
            headers=HEADERS,
        )
    for _ in range(5):
        result, error = results.get(timeout=TIMEOUT_S)
        assert error is None
        check_simple(result)


def test_simple_grpc_aio_infer_client(address: str) -> None:
    async def run() -> grpcclient.InferResult:
        async with grpcclient_aio.InferenceServerClient(address) as client:
            return await client.infer("simple", simple_inputs(), outputs=outputs(), headers=HEADERS)

    check_simple(asyncio.run(run()))


def test_simple_grpc_health_metadata(client: grpcclient.InferenceServerClient) -> None:
    assert client.is_server_live(headers=HEADERS)
    assert client.is_server_ready(headers=HEADERS)
    assert client.is_model_ready("simple", headers=HEADERS)
    assert client.get_server_metadata(headers=HEADERS).name == "triton"
    assert client.get_model_metadata("simple", headers=HEADERS).name == "simple"
    assert client.get_model_config("simple", headers=HEADERS).config.name == "simple"
    _, message = failure(client.get_model_metadata, "wrong_model_name", headers=HEADERS)
    assert "Request for unknown model" in message


def test_simple_grpc_keepalive_client(address: str) -> None:
    options = grpcclient.KeepAliveOptions(
        keepalive_time_ms=2**31 - 1,
        keepalive_timeout_ms=20_000,
        keepalive_permit_without_calls=False,
        http2_max_pings_without_data=2,
    )
    with grpcclient.InferenceServerClient(address, keepalive_options=options) as client:
        check_simple(client.infer("simple", simple_inputs(), headers=HEADERS))


def test_simple_grpc_custom_args_client(address: str) -> None:
    options = [("grpc.lb_policy_name", "round_robin"), ("grpc.max_send_message_length", 1 << 20)]
    with grpcclient.InferenceServerClient(address, channel_args=options) as client:
        check_simple(client.infer("simple", simple_inputs(), headers=HEADERS))


def step(value: int) -> grpcclient.InferInput:
    return make_input("X", np.array([[value]], np.int32), "INT32")


def test_simple_grpc_sequence_sync_infer_client(client: grpcclient.InferenceServerClient) -> None:
    for sequence in (1007, "sequence-1008"):
        counts = [
            client.infer(
                "counting",
                [step(1)],
                sequence_id=sequence,
                sequence_start=number == 0,
                sequence_end=number == 3,
                headers=HEADERS,
            )
            .as_numpy("COUNT")
            .item()
            for number in range(4)
        ]
        assert counts == [1, 2, 3, 4]


def test_simple_grpc_sequence_stream_infer_client(
    client: grpcclient.InferenceServerClient,
) -> None:
    results: Queue[tuple[Any, Any]] = Queue()
    client.start_stream(lambda result, error: results.put((result, error)), headers=HEADERS)
    for number in range(4):
        for sequence in (2007, 2008):
            client.async_stream_infer(
                "counting",
                [step(1)],
                request_id=f"{sequence}_{number}",
                sequence_id=sequence,
                sequence_start=number == 0,
                sequence_end=number == 3,
            )
    client.stop_stream()
    got = [results.get(timeout=TIMEOUT_S) for _ in range(8)]
    assert [error for _, error in got if error is not None] == []
    counts = {result.get_response().id: result.as_numpy("COUNT").item() for result, _ in got}
    assert counts == {f"{each}_{n}": n + 1 for each in (2007, 2008) for n in range(4)}


def test_simple_grpc_aio_sequence_stream_infer_client(address: str) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(4):
            yield {
                "model_name": "counting",
                "inputs": [step(1)],
                "sequence_id": 3007,
                "sequence_start": number == 0,
                "sequence_end": number == 3,
            }

    async def run() -> list[int]:
        async with grpcclient_aio.InferenceServerClient(address) as client:
            counts = []
            async for result, error in client.stream_infer(requests(), headers=HEADERS):
                assert error is None
                counts.append(result.as_numpy("COUNT").item())
            return counts

    assert asyncio.run(run()) == [1, 2, 3, 4]


def test_simple_grpc_custom_repeat(client: grpcclient.InferenceServerClient) -> None:
    results: Queue[tuple[Any, Any]] = Queue()
    client.start_stream(lambda result, error: results.put((result, error)), headers=HEADERS)
    inputs = [
        make_input("COUNT", np.array([4], np.int32), "INT32"),
        make_input("SECONDS", np.array([0], np.float32), "FP32"),
    ]
    client.async_stream_infer("ticking", inputs, request_id="0")
    numbers = []
    for _ in range(4):
        result, error = results.get(timeout=TIMEOUT_S)
        assert error is None
        numbers.append(result.as_numpy("NUMBER").item())
    client.stop_stream()
    assert numbers == [*range(4)] or numbers == [*range(1, 5)]


def test_grpc_client(address: str) -> None:
    """The generated stub, without Triton's library."""
    metadata = [*HEADERS.items()]
    with grpc.insecure_channel(address) as channel:
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        options = {"metadata": metadata, "timeout": TIMEOUT_S}
        assert stub.ServerLive(service_pb2.ServerLiveRequest(), **options).live
        assert stub.ServerReady(service_pb2.ServerReadyRequest(), **options).ready
        request = service_pb2.ModelReadyRequest(name="simple", version="")
        assert stub.ModelReady(request, **options).ready
        assert stub.ServerMetadata(service_pb2.ServerMetadataRequest(), **options).name
        infer = service_pb2.ModelInferRequest(model_name="simple", id="my request id")
        for number, values in enumerate((NUMBERS, ONES)):
            infer.inputs.add(name=f"INPUT{number}", datatype="INT32", shape=[1, 16])
            infer.raw_input_contents.append(values.tobytes())
        infer.outputs.add(name="OUTPUT0")
        response = stub.ModelInfer(infer, **options)
    assert response.id == "my request id"
    assert response.raw_output_contents[0] == (NUMBERS + ONES).tobytes()


@pytest.mark.parametrize("kind", ["int", "byte"])
def test_grpc_explicit_int_content_client_and_grpc_explicit_byte_content_client(
    address: str, kind: str
) -> None:
    model, datatype = {"int": ("simple", "INT32"), "byte": ("simple_string", "BYTES")}[kind]
    request = service_pb2.ModelInferRequest(model_name=model)
    for number, values in enumerate((NUMBERS, ONES)):
        tensor = request.inputs.add(name=f"INPUT{number}", datatype=datatype, shape=[1, 16])
        if kind == "int":
            tensor.contents.int_contents.extend(values.ravel().tolist())
        else:
            tensor.contents.bytes_contents.extend(str(each).encode() for each in values.ravel())
    with grpc.insecure_channel(address) as channel:
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        response = stub.ModelInfer(request, metadata=[*HEADERS.items()], timeout=TIMEOUT_S)
    assert len(response.raw_output_contents) == 2


def test_simple_grpc_model_control(client: grpcclient.InferenceServerClient) -> None:
    client.load_model("managed", headers=HEADERS)
    assert client.is_model_ready("managed", headers=HEADERS)
    client.unload_model("managed", headers=HEADERS)
    code, message = failure(client.load_model, "wrong_model_name", headers=HEADERS)
    assert "failed to load" in message
    assert code in ("INTERNAL", "NOT_FOUND")
