"""The standard services of the gRPC front end, called with the standard packages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from tritonclient.grpc import service_pb2

from tests.capabilities.grpc_api.support.grpc_gateway import SERVICE, GrpcGateway, grpc_gateway
from tests.support.fleet import url_of, write_echo
from tests.support.servers import Triton
from tests.support.wait import TIMEOUT_S, wait_until

HealthStub: Any = health_pb2_grpc.HealthStub  # has no types
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    folder = tmp_path_factory.mktemp("grpc-services")
    write_echo(folder, "echo")
    with Triton(folder, "echo") as triton:
        triton.wait()
        yield triton


@pytest.fixture(scope="module")
def served(triton: Triton) -> Iterator[GrpcGateway]:
    with grpc_gateway(url_of(triton), poll_interval_s="0.1") as gateway:
        wait_until(lambda: gateway.http.get("/readyz").is_success)
        yield gateway


@pytest.fixture
def channel(served: GrpcGateway) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(served.address) as channel:
        yield channel


def check(channel: grpc.Channel, service: str = "") -> int:
    stub = HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    return int(stub.Check(request, timeout=TIMEOUT_S).status)


def test_health_of_any_service_name_is_that_of_the_fleet(
    channel: grpc.Channel, triton: Triton
) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{triton.options.grpc_port}") as direct:
        for service in ("", SERVICE.removeprefix("/"), "grpc.health.v1.Health", "no.such.Service"):
            assert check(channel, service) == check(direct, service) == SERVING
            request = health_pb2.HealthCheckRequest(service=service)
            watch = HealthStub(channel).Watch(request, timeout=TIMEOUT_S)
            assert next(watch).status == SERVING
            watch.cancel()


def test_watch_follows_the_fleet(tmp_path: Path) -> None:
    write_echo(tmp_path, "echo")
    with Triton(tmp_path, "echo") as triton:
        triton.wait()
        with (
            grpc_gateway(url_of(triton), poll_interval_s="0.1") as gateway,
            grpc.insecure_channel(gateway.address) as channel,
        ):
            wait_until(lambda: check(channel) == SERVING)
            watch = HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            assert next(watch).status == SERVING
            triton.kill()
            assert next(watch).status == NOT_SERVING
            assert check(channel) == check(channel, "no.such.Service") == NOT_SERVING


def test_reflection_describes_all_methods(
    channel: grpc.Channel,
) -> None:
    """As grpcurl does it: without any proto file."""
    database = ProtoReflectionDescriptorDatabase(channel)
    name = SERVICE.removeprefix("/")
    assert set(database.get_services()) == {name, "grpc.health.v1.Health"}
    pool = descriptor_pool.DescriptorPool(database)
    service = pool.FindServiceByName(name)
    original = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert [each.name for each in service.methods] == [each.name for each in original.methods]
    health = pool.FindServiceByName("grpc.health.v1.Health")
    assert sorted(health.methods_by_name) == ["Check", "Watch"]
    with pytest.raises(KeyError):
        pool.FindServiceByName("no.such.Service")
    method = service.FindMethodByName("ModelInfer")
    request = message_factory.GetMessageClass(method.input_type)(model_name="echo")
    request.inputs.add(name="X", datatype="FP32", shape=[2])
    request.inputs[0].contents.fp32_contents.extend([1.5, 2.5])
    response = channel.unary_unary(
        f"{SERVICE}/ModelInfer",
        type(request).SerializeToString,
        message_factory.GetMessageClass(method.output_type).FromString,
    )(request, timeout=TIMEOUT_S)
    assert np.frombuffer(response.raw_output_contents[0], np.float32).tolist() == [1.5, 2.5]


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_finds_the_file_of_a_symbol(channel: grpc.Channel, version: str) -> None:
    files = {
        "inference.GRPCInferenceService": "grpc_service.proto",
        "inference.ModelInferRequest.InferInputTensor": "grpc_service.proto",
        "inference.ModelRateLimiter.Resource": "model_config.proto",
        "grpc.health.v1.Health": "health.proto",
    }
    call = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    requests = [
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=each) for each in files
    ]
    for file, response in zip(files.values(), call(iter(requests), timeout=TIMEOUT_S), strict=True):
        found = response.file_descriptor_response.file_descriptor_proto
        described = descriptor_pb2.FileDescriptorProto.FromString(found[0]).name
        assert Path(described).name == file
