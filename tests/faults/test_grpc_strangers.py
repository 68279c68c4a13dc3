"""Clients without a key, or with too many calls, at the gRPC front end. Refusing them needs no Triton."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from tests.support.grpc_gateway import (
    INFER,
    GrpcGateway,
    call_bytes,
    failure,
    grpc_gateway,
    metric,
)
from tests.support.http2 import Http2Connection, encode_message
from tests.support.servers import free_ports
from tests.support.wait import TIMEOUT_S, wait_until

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED = 4, 8
MAX_WATCHES = 1024
CALLS_PER_CLIENT = 50
UNKNOWN_FIELD = b"\x78\1"  # number 15, a varint
IN_PROGRESS = 'gateway_requests_in_flight{route="grpc"}'


@pytest.fixture(scope="module")
def served() -> Iterator[GrpcGateway]:
    (port,) = free_ports(1)
    # Memory for four messages, one of which may belong to a method without a key.
    limits = {"max_body_bytes": str(8 << 20), "max_bytes_in_flight": str(32 << 20)}
    with grpc_gateway(
        f"http://127.0.0.1:{port}", **limits, max_connections_per_client="0"
    ) as gateway:
        yield gateway


@pytest.mark.parametrize("size", [3 << 10, 4 << 20])
def test_methods_without_a_key_read_short_messages_only(served: GrpcGateway, size: int) -> None:
    """Millions of small fields would be searched on the event loop."""
    message = UNKNOWN_FIELD * (size // len(UNKNOWN_FIELD))
    code, text = failure(call_bytes, served.address, CHECK, message)
    assert (code, text.rpartition("; ")[2]) == (
        "INVALID_ARGUMENT",
        "this method accepts at most 1024",
    )
    with grpc.insecure_channel(served.address) as channel:
        for method, limit in ((WATCH, 1024), (REFLECTION, 4096)):
            responses = channel.stream_stream(method)(iter([message * 2]), timeout=TIMEOUT_S)
            code, text = failure(list, responses)
            assert (code, text.rpartition("; ")[2]) == (
                "INVALID_ARGUMENT",
                f"this method accepts at most {limit}",
            )


def test_silent_calls_without_a_key_leave_the_memory_to_others(served: GrpcGateway) -> None:
    with Http2Connection(served.address) as strangers, Http2Connection(served.address) as slow:
        for _ in range(10):
            strangers.start_call(CHECK, x_request_timeout="300")
        statuses = [strangers.wait_for_status() for _ in range(9)]
        assert statuses == [RESOURCE_EXHAUSTED] * 9
        stream = slow.start_call(INFER)
        slow.send_data(stream, encode_message(bytes(1000), length=2000))
        # The last one has used the slot of such methods for five seconds.
        assert strangers.wait_for_status() == DEADLINE_EXCEEDED
        slow.send_data(stream, bytes(1000), is_last=True)
        assert slow.wait_for_status() != RESOURCE_EXHAUSTED


def test_a_silent_stream_of_reflection_ends(served: GrpcGateway) -> None:
    with Http2Connection(served.address) as client:
        client.start_call(REFLECTION)
        assert client.wait_for_status() == DEADLINE_EXCEEDED


def test_calls_that_watch_the_health_are_limited(served: GrpcGateway) -> None:
    with Http2Connection(served.address) as first, Http2Connection(served.address) as second:
        for client in (first, second):
            client.send(*(client.call(WATCH) for _ in range(MAX_WATCHES // 2)))
        wait_until(lambda: metric(served, IN_PROGRESS) == MAX_WATCHES)
        second.send(second.call(WATCH))
        assert second.wait_for_status() == RESOURCE_EXHAUSTED
        assert call_bytes(served.address, CHECK, b"")
    wait_until(lambda: metric(served, IN_PROGRESS) == 0)


def test_one_client_cannot_hold_calls_without_limit() -> None:
    (port,) = free_ports(1)
    limits = {"max_connections_per_client": str(CALLS_PER_CLIENT)}
    with grpc_gateway(f"http://127.0.0.1:{port}", **limits) as served:
        with Http2Connection(served.address) as first, Http2Connection(served.address) as second:
            first.send(*(first.call(WATCH) for _ in range(CALLS_PER_CLIENT)))
            wait_until(lambda: metric(served, IN_PROGRESS) == CALLS_PER_CLIENT)
            second.send(*(second.call(WATCH) for _ in range(CALLS_PER_CLIENT)))
            statuses = {second.wait_for_status() for _ in range(CALLS_PER_CLIENT)}
            assert statuses == {RESOURCE_EXHAUSTED}
            assert metric(served, IN_PROGRESS) == CALLS_PER_CLIENT
            with Http2Connection(served.address, source="127.0.0.2") as other:
                other.send(other.call(CHECK))
                assert other.wait_for_status() == 0
        wait_until(lambda: metric(served, IN_PROGRESS) == 0)
        assert call_bytes(served.address, CHECK, b"")
