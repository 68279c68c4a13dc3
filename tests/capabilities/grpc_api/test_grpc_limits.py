"""Limits of the gRPC front end for any client, with and without a key; they need no Triton."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from queue import Queue

import grpc
import pytest
from tritonclient.grpc import service_pb2

from tests.capabilities.grpc_api.support.grpc_gateway import (
    STREAM,
    GrpcGateway,
    call_bytes,
    failure,
    grpc_gateway,
    memory_mib,
)
from tests.capabilities.grpc_api.support.http2 import Http2Connection, encode_message
from tests.support import keys
from tests.support.metrics import metric
from tests.support.servers import free_ports
from tests.support.wait import TIMEOUT_S, wait_until

CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
DEADLINE_EXCEEDED = 4
RESOURCE_EXHAUSTED = 8
UNAUTHENTICATED = 16
MAX_WATCHES = 1024
CALLS_PER_CLIENT = 50
UNKNOWN_FIELD = b"\x78\1"  # number 15, a varint
IN_PROGRESS = 'gateway_requests_in_flight{route="grpc"}'


KEY = (("x-api-key", keys.INFER),)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcGateway]:
    file = tmp_path_factory.mktemp("grpc-limits") / "keys.yaml"
    keys.written(file, keys.ENTRIES)
    (port,) = free_ports(1)
    limits = {
        "keys_file": str(file),
        "max_body_bytes": str(8 << 20),
        "max_bytes_in_flight": str(32 << 20),
        "max_connections_per_client": "0",
    }
    with grpc_gateway(f"http://127.0.0.1:{port}", **limits) as gateway:
        gateway.http.headers["x-api-key"] = keys.METRICS
        yield gateway


@pytest.mark.fault(
    "large messages of thousands of fields, or none, to the health service and reflection"
)
def test_message_of_thousands_of_fields_is_refused(served: GrpcGateway) -> None:
    """Millions of small fields would be searched on the event loop."""
    with grpc.insecure_channel(served.address) as channel:
        for size in (6 << 10, 4 << 20):
            message = UNKNOWN_FIELD * (size // len(UNKNOWN_FIELD))
            call = channel.stream_stream(REFLECTION)
            responses = call(iter([message]), timeout=TIMEOUT_S, metadata=KEY)
            assert failure(list, responses) == (
                "INVALID_ARGUMENT",
                f"the message has {size} bytes; this method accepts at most 4096",
            )


@pytest.mark.fault(
    "gRPC calls without a key that send large or compressed messages, none, or thousands"
)
@pytest.mark.fault(
    "large messages of thousands of fields, or none, to the health service and reflection"
)
def test_message_without_a_key_is_not_read(served: GrpcGateway) -> None:
    bomb = gzip.compress(bytes(64 << 20))
    with Http2Connection(served.address) as client:
        for key in ({}, {"x_api_key": keys.INFER}):
            stream = client.start_call(CHECK, grpc_encoding="gzip", **key)
            client.send_data(stream, encode_message(bomb, is_compressed=True), is_last=True)
            assert client.wait_for_status() == 0
            client.start_call(CHECK, x_request_timeout="300", **key)  # silent
            assert client.wait_for_status() == 0
        client.start_call(REFLECTION)
        assert client.wait_for_status() == UNAUTHENTICATED


@pytest.mark.long
@pytest.mark.fault(
    "large messages of thousands of fields, or none, to the health service and reflection"
)
def test_silent_call_of_reflection_ends_soon(served: GrpcGateway) -> None:
    with Http2Connection(served.address) as client:
        client.start_call(REFLECTION, x_request_timeout="300", x_api_key=keys.INFER)
        assert client.wait_for_status() == DEADLINE_EXCEEDED


@pytest.mark.fault(
    "gRPC calls without a key that send large or compressed messages, none, or thousands"
)
def test_number_of_health_watches_is_limited(served: GrpcGateway) -> None:
    with Http2Connection(served.address) as first, Http2Connection(served.address) as second:
        for client in (first, second):
            client.send(*(client.call(WATCH) for _ in range(MAX_WATCHES // 2)))
        wait_until(lambda: metric(served.http, IN_PROGRESS) == MAX_WATCHES)
        second.send(second.call(WATCH))
        assert second.wait_for_status() == RESOURCE_EXHAUSTED
        assert call_bytes(served.address, CHECK, b"")
    wait_until(lambda: metric(served.http, IN_PROGRESS) == 0)


@pytest.mark.long
@pytest.mark.fault("gRPC streams with thousands of requests in progress, or idle after large ones")
def test_idle_stream_holds_no_message() -> None:
    (port,) = free_ports(1)
    request = service_pb2.ModelInferRequest(
        model_name="absent", raw_input_contents=[bytes(40 << 20)]
    )
    message = request.SerializeToString()
    with (
        grpc_gateway(f"http://127.0.0.1:{port}", max_bytes_in_flight=str(1 << 30)) as served,
        grpc.insecure_channel(served.address) as channel,
    ):
        before = memory_mib(served)
        streams = []
        for _ in range(10):
            requests: Queue[bytes | None] = Queue()
            requests.put(message)
            responses = channel.stream_stream(STREAM)(iter(requests.get, None))
            assert service_pb2.ModelStreamInferResponse.FromString(next(responses)).error_message
            streams.append((requests, responses))
        # Freed memory stays with the process for a while.
        wait_until(lambda: memory_mib(served) < before + 10 * 40 / 2)
        for requests, _ in streams:
            requests.put(None)


@pytest.mark.fault("one client holds gRPC calls open, on any number of connections")
def test_calls_of_one_client_are_limited() -> None:
    (port,) = free_ports(1)
    limits = {"max_connections_per_client": str(CALLS_PER_CLIENT)}
    with grpc_gateway(f"http://127.0.0.1:{port}", **limits) as served:
        with Http2Connection(served.address) as first, Http2Connection(served.address) as second:
            first.send(*(first.call(WATCH) for _ in range(CALLS_PER_CLIENT)))
            wait_until(lambda: metric(served.http, IN_PROGRESS) == CALLS_PER_CLIENT)
            second.send(*(second.call(WATCH) for _ in range(CALLS_PER_CLIENT)))
            statuses = {second.wait_for_status() for _ in range(CALLS_PER_CLIENT)}
            assert statuses == {RESOURCE_EXHAUSTED}
            wait_until(lambda: metric(served.http, IN_PROGRESS) == CALLS_PER_CLIENT)
            with Http2Connection(served.address, source="127.0.0.2") as other:
                other.send(other.call(CHECK))
                assert other.wait_for_status() == 0
        wait_until(lambda: metric(served.http, IN_PROGRESS) == 0)
        assert call_bytes(served.address, CHECK, b"")
