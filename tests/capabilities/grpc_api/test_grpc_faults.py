"""Hostile gRPC clients, and replicas and gateways that end during calls."""

from __future__ import annotations

import gzip
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton_grpc
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from gateway.capabilities.grpc_api.call import MetadataTooLarge
from gateway.capabilities.grpc_api.streams import MAX_STREAM_REQUESTS
from gateway.services import METRICS_INTERVAL_S
from tests.capabilities.grpc_api.support.grpc_gateway import (
    INFER,
    STREAM,
    GrpcGateway,
    call_bytes,
    failure,
    fp32,
    grpc_gateway,
    make_input,
    memory_mib,
)
from tests.capabilities.grpc_api.support.http2 import (
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    UNFINISHED_MESSAGES,
    UNFINISHED_MIB,
    WINDOW_UPDATE,
    Http2Connection,
    encode_frame,
    encode_message,
    unfinished_messages,
)
from tests.support.fleet import url_of
from tests.support.measurements import forget_peaks, peak_bytes
from tests.support.metrics import held_memory, metric
from tests.support.model_zoo.zoo import AS_WRITTEN, SHARED, write_repository
from tests.support.scripted_server import replica_with_invalid_messages
from tests.support.servers import Triton
from tests.support.wait import TIMEOUT_S, wait_until

MODELS = (
    "plain_FP32",
    "plain_BYTES",
    "plain_INT64",
    "ticking",
    "sleeping",
    "cancellable",
    "large_FP32",
)
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
RESOURCE_EXHAUSTED = 8
SHED = 'gateway_requests_shed_total{reason="memory"}'
IN_PROGRESS = 'gateway_requests_in_flight{route="grpc"}'
LIMITS = {
    "write_timeout_s": "1",
    "max_body_bytes": str(8 << 20),
    "max_bytes_in_flight": str(32 << 20),
    "request_timeout_s": "5",
    "connect_timeout_s": "10",
    "max_connections_per_client": "2048",  # more than the calls of a connection
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpc-faults")
    write_repository(folder, AS_WRITTEN, SHARED)
    return folder


@pytest.fixture(scope="module")
def triton(folder: Path) -> Iterator[Triton]:
    with Triton(folder, *MODELS) as triton:
        triton.wait()
        yield triton


@pytest.fixture(scope="module")
def served(triton: Triton) -> Iterator[GrpcGateway]:
    with grpc_gateway(url_of(triton), **LIMITS) as gateway:
        wait_until(lambda: gateway.http.get("/v2/models/plain_FP32/ready").is_success)
        yield gateway


def infer_request(model: str, values: np.ndarray, **fields: Any) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model, **fields)
    request.inputs.add(name="X", datatype="FP32", shape=values.shape)
    request.raw_input_contents.append(values.tobytes())
    return bytes(request.SerializeToString())


SMALL = infer_request("plain_FP32", np.zeros((1, 4), np.float32))


def numbers_request() -> bytes:
    """A number of one byte here has eight in the response."""
    request = service_pb2.ModelInferRequest(model_name="plain_INT64")
    tensor = request.inputs.add(name="X", datatype="INT64", shape=[1, 60_000])
    tensor.contents.int64_contents.extend([1] * 60_000)
    return bytes(request.SerializeToString())


def serves(gateway: GrpcGateway) -> bool:
    return len(call_bytes(gateway.address, INFER, SMALL)) > 0


def ticking_request(count: int, **fields: Any) -> bytes:
    request = service_pb2.ModelInferRequest(model_name="ticking", **fields)
    for name, datatype, value in (
        ("COUNT", "INT32", np.array([count], np.int32)),
        ("SECONDS", "FP32", np.array([0], np.float32)),
    ):
        request.inputs.add(name=name, datatype=datatype, shape=[1])
        request.raw_input_contents.append(value.tobytes())
    return bytes(request.SerializeToString())


@pytest.mark.fault("a gRPC client does not read its stream")
def test_client_that_does_not_read_its_stream_is_disconnected(served: GrpcGateway) -> None:
    name = 'gateway_requests_refused_total{reason="answer_not_taken"}'
    before = metric(served.http, name)
    memory = memory_mib(served)
    long_responses = ticking_request(3000, id="a" * 50_000)  # each repeats the id
    with grpc.insecure_channel(served.address) as channel:
        responses = channel.stream_stream(STREAM)(iter([long_responses]))
        wait_until(lambda: metric(served.http, name) == before + 1)
        assert memory_mib(served) < memory + 64
        code, message = failure(list, responses)
    assert (code, message) == ("DEADLINE_EXCEEDED", "the responses were not read in time")
    assert serves(served)


@pytest.mark.fault("gRPC streams that send large requests and do not read the responses")
def test_unread_responses_count_against_the_memory_budget(triton: Triton) -> None:
    message = encode_message(numbers_request())
    limits = {"max_body_bytes": str(64 << 10), "max_bytes_in_flight": str(8 << 20)}
    with grpc_gateway(url_of(triton), **limits) as gateway, ExitStack() as stack:
        wait_until(lambda: serves(gateway))
        methods = [INFER] * 6 + [STREAM] * 6
        clients = [stack.enter_context(Http2Connection(gateway.address)) for _ in methods]
        for client, method in zip(clients, methods, strict=True):
            stream = client.start_call(method)
            client.send_data(stream, message, is_last=True)
        wait_until(lambda: metric(gateway.http, SHED) > 0)
        window = (1 << 24).to_bytes(4, "big")
        for client in clients:
            client.send(*(encode_frame(WINDOW_UPDATE, 0, number, window) for number in (0, stream)))
        statuses = [client.wait_for_status() for client in clients]
        assert set(statuses[:6]) <= {0, RESOURCE_EXHAUSTED}
        assert set(statuses[6:]) == {0}  # a refusal is a message of the stream
        wait_until(lambda: set(held_memory(gateway.http).values()) == {0})


@pytest.mark.long
@pytest.mark.fault("gRPC streams that send large requests and do not read the responses")
def test_unread_response_is_charged_until_the_client_leaves(served: GrpcGateway) -> None:
    """grpcio has it after the stream has ended."""
    name = 'gateway_requests_refused_total{reason="answer_not_taken"}'
    before = metric(served.http, name)
    with Http2Connection(served.address) as client:
        client.send_data(client.start_call(STREAM), encode_message(numbers_request()))
        wait_until(lambda: metric(served.http, name) > before)
        wait_until(lambda: metric(served.http, IN_PROGRESS) == 0)
        ended_at = time.monotonic()
        wait_until(lambda: time.monotonic() > ended_at + 2 * METRICS_INTERVAL_S)
        assert held_memory(served.http)["response"] > 480_000
    wait_until(lambda: held_memory(served.http)["response"] == 0)


@pytest.mark.fault("gRPC streams that send large requests and do not read the responses")
def test_stream_is_read_slowly_while_much_memory_is_used(served: GrpcGateway) -> None:
    """Together, the requests of both streams need more than the budget."""
    before = metric(served.http, SHED)
    message = infer_request("plain_FP32", np.zeros((1, 1 << 19), np.float32))
    with grpc.insecure_channel(served.address) as channel, ThreadPoolExecutor(2) as pool:
        streams = [channel.stream_stream(STREAM)(iter([message] * 10)) for _ in range(2)]
        # At once: a client that does not read is left.
        for responses in pool.map(list[bytes], streams):
            assert [len(response) > len(message) for response in responses] == [True] * 10
    assert metric(served.http, SHED) == before


@pytest.mark.fault("thousands of gRPC streams on one connection")
def test_thousands_of_streams_leave_other_clients_served(served: GrpcGateway) -> None:
    memory = memory_mib(served)
    with Http2Connection(served.address) as flood:
        flood.send(*(flood.call(WATCH) for _ in range(2000)))
        wait_until(lambda: metric(served.http, IN_PROGRESS) >= 1024)
        assert serves(served)
        assert metric(served.http, IN_PROGRESS) <= 1024
        assert memory_mib(served) < memory + 64
    wait_until(lambda: metric(served.http, IN_PROGRESS) == 0)


@pytest.mark.fault("gRPC messages over the limit, compressed ones that decompress beyond it, large")
def test_large_message_or_metadata_is_refused(served: GrpcGateway) -> None:
    large = infer_request("plain_FP32", np.zeros((1, 3 << 20), np.float32))
    code, words = failure(call_bytes, served.address, INFER, large)
    assert (code, "larger than max" in words) == ("RESOURCE_EXHAUSTED", True)
    metadata = [("x-large", "a" * 200_000)]
    code, _ = failure(call_bytes, served.address, INFER, SMALL, metadata=metadata)
    assert code == "RESOURCE_EXHAUSTED"
    assert serves(served)


@pytest.mark.fault("gRPC messages over the limit, compressed ones that decompress beyond it, large")
def test_metadata_beyond_the_limit_of_triton_are_refused(served: GrpcGateway) -> None:
    for size in (8 << 10, 60 << 10):
        metadata = [("x-large", "a" * size)]
        with grpc.insecure_channel(served.address) as channel:
            responses = channel.stream_stream(STREAM)(iter([SMALL]), metadata=metadata)
            outcomes = (
                failure(call_bytes, served.address, INFER, SMALL, metadata=metadata),
                failure(next, responses),
            )
        assert outcomes == (("RESOURCE_EXHAUSTED", MetadataTooLarge.message),) * 2
    for name, value in (("x-large", "a" * 7000), ("x-large-bin", b"a" * 7000)):
        pairs: list[tuple[str, str | bytes]] = [(name, value), ("authorization", "b" * 20_000)]
        assert call_bytes(served.address, INFER, SMALL, metadata=pairs)


@pytest.mark.long
@pytest.mark.fault("gRPC messages over the limit, compressed ones that decompress beyond it, large")
def test_message_that_inflates_over_the_limit_is_refused(served: GrpcGateway) -> None:
    memory = memory_mib(served)
    bomb = gzip.compress(bytes(512 << 20), 9)
    with Http2Connection(served.address) as client:
        stream = client.start_call(INFER, grpc_encoding="gzip")
        client.send_data(stream, encode_message(bomb, is_compressed=True), is_last=True)
        assert client.wait_for(HEADERS).stream == stream
    assert memory_mib(served) < memory + 64
    with triton_grpc.InferenceServerClient(served.address) as triton_client:
        for algorithm in ("gzip", "deflate"):
            result = triton_client.infer(
                "plain_FP32", [fp32(1, 2, shape=(1, 2))], compression_algorithm=algorithm
            )
            assert result.as_numpy("Y").tolist() == [[1, 2]]


@pytest.mark.fault("gRPC messages that never end, calls without a message, half-closed streams")
def test_unfinished_messages_hold_bounded_memory(served: GrpcGateway) -> None:
    """There is room for four: 32 MiB of messages of at most 8 MiB."""
    forget_peaks(served.command.pid)
    memory = memory_mib(served)
    with unfinished_messages(served.address, INFER, x_request_timeout="60") as statuses:
        wait_until(lambda: len(statuses) >= UNFINISHED_MESSAGES * 3 / 4)
        assert serves(served)
    assert set(statuses) == {RESOURCE_EXHAUSTED}
    assert peak_bytes(served.command.pid) / 1024**2 - memory < UNFINISHED_MIB / 2


class OpenStream:
    """A stream that stays open after its first request."""

    def __init__(self, gateway: GrpcGateway) -> None:
        self._requests: Queue[bytes | None] = Queue()
        self._channel = grpc.insecure_channel(gateway.address)
        self.responses = self._channel.stream_stream(STREAM)(iter(self._requests.get, None))

    def __enter__(self) -> OpenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.put(None)
        self._channel.close()

    def is_answered(self) -> bool:
        """Send a request; return whether it was answered."""
        self._requests.put(SMALL)
        return next(self.responses) is not None


@pytest.mark.fault("gRPC messages that never end, calls without a message, half-closed streams")
def test_streams_with_unfinished_messages_hold_bounded_memory(served: GrpcGateway) -> None:
    """Those that are open stay so, and there is room for four."""
    forget_peaks(served.command.pid)
    memory = memory_mib(served)
    with ExitStack() as stack:
        idle = [stack.enter_context(OpenStream(served)) for _ in range(2)]
        assert all(stream.is_answered() for stream in idle)
        with unfinished_messages(served.address, STREAM) as statuses:
            wait_until(lambda: len(statuses) == UNFINISHED_MESSAGES - 2)
            assert serves(served)
            assert all(stream.is_answered() for stream in idle)
        assert set(statuses) == {RESOURCE_EXHAUSTED}
    assert peak_bytes(served.command.pid) / 1024**2 - memory < UNFINISHED_MIB / 2
    wait_until(lambda: metric(served.http, IN_PROGRESS) == 0)
    with OpenStream(served) as stream:
        assert stream.is_answered()


@pytest.mark.fault("gRPC streams with thousands of requests in progress, or idle after large ones")
def test_stream_has_a_bounded_number_of_requests(triton: Triton) -> None:
    refused = service_pb2.ModelInferRequest(model_name="absent").SerializeToString()
    readings = [0.0]
    with grpc_gateway(url_of(triton), **{**LIMITS, "request_timeout_s": "60"}) as gateway:
        wait_until(lambda: serves(gateway))
        with Http2Connection(gateway.address) as client:
            stream = client.start_call(STREAM)
            # The other responses wait for that of the first request.
            messages = encode_message(wait_request(20)) + encode_message(refused) * 1000
            client.send_data(stream, messages)

            def is_steady() -> bool:
                readings.append(metric(gateway.http, IN_PROGRESS))
                return readings[-1] > 1 and readings[-1] == readings[-2]

            wait_until(is_steady)
            assert readings[-1] == 1 + MAX_STREAM_REQUESTS


def wait_request(seconds: float) -> bytes:
    request = service_pb2.ModelInferRequest(model_name="cancellable")
    request.inputs.add(name="SECONDS", datatype="FP32", shape=[1, 1])
    request.raw_input_contents.append(np.array([seconds], np.float32).tobytes())
    return bytes(request.SerializeToString())


@pytest.mark.long
@pytest.mark.fault("gRPC messages that never end, calls without a message, half-closed streams")
def test_call_without_a_request_ends(served: GrpcGateway) -> None:
    with Http2Connection(served.address) as client:
        client.start_call(INFER)  # neither a message nor an end
        assert client.wait_for(HEADERS, 30).stream == 1
        stream = client.start_call(INFER)
        client.send(encode_frame(DATA, 1, stream, b""))  # an end without a message
        assert client.wait_for(HEADERS).stream == stream
    with grpc.insecure_channel(served.address) as channel:
        assert list(channel.stream_stream(STREAM)(iter([]), timeout=TIMEOUT_S)) == []


@pytest.mark.fault("bytes that are not the protobuf message of the method, unknown methods")
@given(st.binary(max_size=200) | st.binary(max_size=40).map(lambda end: SMALL + end))
def test_arbitrary_bytes_are_answered(served: GrpcGateway, message: bytes) -> None:
    with grpc.insecure_channel(served.address) as channel:
        for method in (INFER, f"{INFER[:-5]}Metadata"):
            call = channel.unary_unary(method).future(message, timeout=TIMEOUT_S)
            assert call.code().name in ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED")


def crashing_requests() -> dict[str, service_pb2.ModelInferRequest]:
    """Requests that crash tritonserver 2.51 or a model's process, or that come close to it."""
    requests = {}
    for name, shape in (
        ("overflow", [1 << 62, 4]),
        ("too many elements", [1 << 31, 1 << 31]),
        ("negative", [-1, -4]),
        ("many dimensions", [1] * 100_000),
        ("empty, but huge", [0, 1 << 62, 1 << 62]),
    ):
        request = service_pb2.ModelInferRequest(model_name="plain_FP32")
        request.inputs.add(name="X", datatype="FP32", shape=shape)
        request.raw_input_contents.append(b"")
        requests[name] = request
    request = service_pb2.ModelInferRequest(model_name="plain_BYTES")
    tensor = request.inputs.add(name="X", datatype="BYTES", shape=[1, 1])
    tensor.contents.bytes_contents.append(b"a")
    request.outputs.add(name="Y").parameters["classification"].int64_param = 2
    requests["classes of texts"] = request
    request = service_pb2.ModelInferRequest.FromString(SMALL)
    for number in range(20_000):
        request.parameters[f"p{number}"].int64_param = number
    requests["many parameters"] = request
    request = service_pb2.ModelInferRequest.FromString(SMALL)
    request.parameters["p" * 100_000].int64_param = 1
    requests["a long parameter"] = request
    request = service_pb2.ModelInferRequest.FromString(SMALL)
    for number in range(20_000):
        request.inputs.add(name=f"X{number}")
    requests["many inputs"] = request
    return requests


@pytest.mark.fault("gRPC requests that crash a Triton: shapes that overflow, classes of texts")
def test_request_that_would_crash_triton_is_refused(
    served: GrpcGateway, subtests: pytest.Subtests
) -> None:
    for name, request in crashing_requests().items():
        with subtests.test(name):
            message = request.SerializeToString()
            code, _ = failure(call_bytes, served.address, INFER, message)
            assert code == "INVALID_ARGUMENT"
            with grpc.insecure_channel(served.address) as channel:
                (response,) = channel.stream_stream(STREAM)(iter([message]), timeout=TIMEOUT_S)
            assert service_pb2.ModelStreamInferResponse.FromString(response).error_message
            assert serves(served)


@pytest.mark.fault("two thousand gRPC calls at the same moment")
def test_calls_of_a_burst_are_answered(served: GrpcGateway) -> None:
    calls = 200
    with ExitStack() as stack:
        connections = [stack.enter_context(Http2Connection(served.address)) for _ in range(10)]
        bursts = [[client.call(CHECK) for _ in range(calls)] for client in connections]
        for client, frames in zip(connections, bursts, strict=True):
            client.send(*frames)
        statuses = {client.wait_for_status() for client in connections for _ in range(calls)}
    assert statuses == {0}


@pytest.mark.fault("thousands of gRPC calls that are reset at once, pings without end")
def test_client_that_pings_too_often_is_disconnected(served: GrpcGateway) -> None:
    with Http2Connection(served.address) as client:
        client.send(*(encode_frame(PING, 0, 0, bytes(8)) for _ in range(20)))
        assert b"too_many_pings" in client.wait_for(GOAWAY).payload
    assert serves(served)


@pytest.mark.fault("a Triton is killed while it serves a gRPC stream")
def test_killed_replica_fails_only_its_requests_of_a_stream(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("killed", "kept")]
    for each in folders:
        write_repository(each, AS_WRITTEN, SHARED)
    killed, kept = (Triton(each, "plain_FP32", "cancellable") for each in folders)
    patient = {**LIMITS, "request_timeout_s": "60"}
    with killed, kept, grpc_gateway(url_of(killed), url_of(kept), **patient) as gateway:
        for triton in (killed, kept):
            triton.wait()
        wait_until(lambda: count_ready(gateway, "cancellable") == 2)
        outcomes: Queue[tuple[Any, Any]] = Queue()
        with triton_grpc.InferenceServerClient(gateway.address) as client:
            client.start_stream(lambda result, error: outcomes.put((result, error)))
            seconds = make_input("SECONDS", np.full((1, 1), 2, np.float32), "FP32")
            for _ in range(4):
                client.async_stream_infer("cancellable", [seconds])
            # A request that has not reached the model could be sent to the other replica.
            for each in folders:
                wait_until((each / "cancellable" / "started").exists)
            killed.kill()
            first = [outcomes.get(timeout=TIMEOUT_S) for _ in range(4)]
            failed = [str(error) for _, error in first if error is not None]
            assert 0 < len(failed) < 4
            assert all(
                re.search("closed its gRPC connection|ended the gRPC", text) for text in failed
            )
            for _ in range(10):
                client.async_stream_infer("plain_FP32", [fp32(1, shape=(1, 1))])
            assert [outcomes.get(timeout=TIMEOUT_S)[1] for _ in range(10)] == [None] * 10
            client.stop_stream()


def count_ready(gateway: GrpcGateway, model: str) -> int:
    """The number of replicas that the gateway would send a request to."""
    replicas = gateway.http.get("/v1/replicas").json()["replicas"]
    return sum(each["models"].get(model) == "READY" for each in replicas)


def outstanding(gateway: GrpcGateway) -> dict[str, int]:
    replicas = gateway.http.get("/v1/replicas").json()["replicas"]
    return {each["address"]: each["outstanding"] for each in replicas}


@pytest.mark.long
@pytest.mark.fault("the gateway is stopped while it serves gRPC calls and streams")
def test_stopped_gateway_answers_the_requests_that_it_received(triton: Triton) -> None:
    environment = {**LIMITS, "request_timeout_s": "30", "shutdown_s": "20", "drain_s": "1"}
    with grpc_gateway(url_of(triton), **environment) as gateway:
        wait_until(lambda: serves(gateway))
        outcomes: Queue[tuple[Any, Any]] = Queue()
        with triton_grpc.InferenceServerClient(gateway.address) as client:
            client.start_stream(lambda result, error: outcomes.put((result, error)))
            seconds = make_input("SECONDS", np.full((1, 1), 4, np.float32), "FP32")
            for _ in range(2):
                client.async_stream_infer("sleeping", [seconds])
            call = client.async_infer(
                "cancellable", [seconds], lambda result, error: outcomes.put((result, error))
            )
            wait_until(lambda: sum(outstanding(gateway).values()) >= 3)
            psutil.Process(gateway.command.pid).send_signal(signal.SIGTERM)
            ends = [outcomes.get(timeout=TIMEOUT_S) for _ in range(4)]
            assert call is not None
        errors = [str(error) for _, error in ends if error is not None]
        assert len(errors) == 1, errors
        assert "the gateway is shutting down; open the stream again" in errors[0]
        assert gateway.command.end() == 0


@pytest.mark.fault(
    "a response is valid HTTP but not a Triton response: JSON of other types, shapes and"
)
def test_unreadable_message_is_an_error_of_the_stream() -> None:
    request = service_pb2.ModelInferRequest(model_name="m").SerializeToString()
    with (
        replica_with_invalid_messages() as url,
        grpc_gateway(url) as served,
        grpc.insecure_channel(served.address) as channel,
    ):
        responses = channel.stream_stream(STREAM)(iter([request, request]), timeout=TIMEOUT_S)
        read = service_pb2.ModelStreamInferResponse.FromString
        texts = [read(response).error_message for response in responses]
    assert texts == ["the replica's inference response is invalid"] * 2
