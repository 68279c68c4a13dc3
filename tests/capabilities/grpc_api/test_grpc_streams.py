"""Streams of Triton's gRPC API through the gateway."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from gateway.embedded.supervisor import EmbeddedTriton
from tests.capabilities.grpc_api.support.grpc_gateway import (
    STREAM,
    GrpcGateway,
    failure,
    fp32,
    grpc_gateway,
    make_input,
)
from tests.support.metrics import metric
from tests.support.model_zoo.zoo import AS_WRITTEN, COUNTING, SHARED, TICKING, T, write_repository
from tests.support.servers import triton_with
from tests.support.wait import TIMEOUT_S, wait_until

# Its second output has no fixed shape, and so no classes.
TICKING_SEQUENCE = replace(
    TICKING,
    name="ticking_sequence",
    outputs=(T("NUMBER", "INT32", (1,)), T("MADE", "FP64", (-1,))),
    extra=COUNTING.extra,
)

Outcome = tuple[triton_grpc.InferResult | None, InferenceServerException | None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    write_repository(folder, AS_WRITTEN, (*SHARED, COUNTING, TICKING_SEQUENCE))
    return folder


@pytest.fixture(scope="module")
def triton(folder: Path) -> Iterator[EmbeddedTriton]:
    with triton_with(
        (folder,),
        (
            "plain_FP32", "ticking", "counting", "failing", "refusing", "sleeping", "cancellable",
            TICKING_SEQUENCE.name,
        ),
    ) as triton:  # fmt: skip
        yield triton


@pytest.fixture(scope="module")
def served(triton: EmbeddedTriton) -> Iterator[GrpcGateway]:
    with grpc_gateway(triton.options.url, connect_timeout_s="10") as gateway:
        yield gateway


class Stream:
    """A stream of Triton's own client."""

    def __init__(self, address: str, **options: Any) -> None:
        self.client = triton_grpc.InferenceServerClient(address)
        self.outcomes: Queue[Outcome] = Queue()
        self.client.start_stream(
            lambda result, error: self.outcomes.put((result, error)), **options
        )

    def send(self, model: str, *inputs: triton_grpc.InferInput, **options: Any) -> None:
        self.client.async_stream_infer(model, list(inputs), **options)

    def receive(self) -> Any:
        """The next result. Raises the error of the stream or of a request."""
        result, error = self.outcomes.get(timeout=TIMEOUT_S)
        if error is not None:
            raise error
        return result


@contextmanager
def open_stream(address: str, **options: Any) -> Iterator[Stream]:
    stream = Stream(address, **options)
    try:
        yield stream
    finally:
        stream.client.stop_stream(cancel_requests=True)
        stream.client.close()


def int32(value: int, name: str = "X", shape: tuple[int, ...] = (1, 1)) -> triton_grpc.InferInput:
    return make_input(name, np.full(shape, value, np.int32), "INT32")


def ticks(count: int, seconds: float) -> list[triton_grpc.InferInput]:
    return [int32(count, "COUNT", (1,)), fp32(seconds, name="SECONDS")]


@pytest.mark.long
def test_models_with_one_response_answer_in_order(served: GrpcGateway) -> None:
    with open_stream(served.address) as stream:
        for number in range(40):
            seconds = 0.3 if number == 0 else 0.0
            stream.send(
                "sleeping", fp32(seconds, shape=(1, 1), name="SECONDS"), request_id=f"s{number}"
            )
            stream.send("plain_FP32", fp32(number, shape=(1, 1)), request_id=f"p{number}")
        got = [stream.receive().get_response().id for _ in range(80)]
    assert got == [f"{letter}{number}" for number in range(40) for letter in "sp"]


def test_decoupled_model_answers_as_triton_does(
    served: GrpcGateway, triton: EmbeddedTriton
) -> None:
    answers = []
    for address in (served.address, f"127.0.0.1:{triton.options.grpc_port}"):
        with open_stream(address) as stream:
            stream.send(
                "ticking", *ticks(3, 0.01), request_id="t", enable_empty_final_response=True
            )
            responses = [stream.receive().get_response() for _ in range(4)]
            answers.append(
                [
                    (
                        each.id,
                        len(each.outputs),
                        each.parameters["triton_final_response"].bool_param,
                    )
                    for each in responses
                ]
            )
    assert answers[0] == answers[1] == [*[("t", 2, False)] * 3, ("t", 0, True)]


def request_ticks(count: int, seconds: float, version: str = "") -> bytes:
    request = service_pb2.ModelInferRequest(model_name="ticking", model_version=version, id="t")
    request.inputs.add(name="COUNT", datatype="INT32", shape=[1])
    request.inputs.add(name="SECONDS", datatype="FP32", shape=[1])
    contents = np.array([count], np.int32), np.array([seconds], np.float32)
    request.raw_input_contents.extend(each.tobytes() for each in contents)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return bytes(request.SerializeToString())


def receive_all(address: str, *requests: bytes) -> list[Any]:
    """The messages of a stream of these requests."""
    with grpc.insecure_channel(address) as channel:
        messages = list(channel.stream_stream(STREAM)(iter(requests), timeout=TIMEOUT_S))
    return [service_pb2.ModelStreamInferResponse.FromString(each) for each in messages]


@pytest.mark.parametrize(
    ("request_message", "numbers"),
    [
        (request_ticks(2, -0.001), ["error", 0, 1, "final"]),
        (request_ticks(0, -0.001, "1"), ["error", "final"]),
        (request_ticks(-2, 0.001), [0, 1, "final error"]),
        (request_ticks(-2, -0.001), ["error", 0, 1, "final error"]),
    ],
    ids=["first", "alone", "last", "both"],
)
def test_errors_of_a_decoupled_model_are_those_of_triton(
    served: GrpcGateway, triton: EmbeddedTriton, request_message: bytes, numbers: list[object]
) -> None:
    received = []
    for address in (served.address, f"127.0.0.1:{triton.options.grpc_port}"):
        answers = receive_all(address, request_message)
        kinds: list[object] = []
        for answer in answers:
            response = answer.infer_response
            is_final = response.parameters["triton_final_response"].bool_param
            assert ("boom" in answer.error_message) == bool(answer.error_message)
            kind = "final " * is_final + "error" * bool(answer.error_message)
            contents = response.raw_output_contents
            kinds.append(np.frombuffer(contents[0], np.int32).item() if contents else kind.strip())
            del response.raw_output_contents[:]  # among them the time
        assert kinds == numbers
        received.append([each.infer_response for each in answers])
    assert received[0] == received[1]


def test_error_that_a_model_makes_says_nothing_about_its_replica(served: GrpcGateway) -> None:
    requests = []
    for text in (b"NOT_FOUND:Request for unknown model: 'refusing' is not found", b"UNKNOWN:again"):
        request = service_pb2.ModelInferRequest(model_name="refusing")
        request.inputs.add(name="X", datatype="BYTES", shape=[1, 1])
        request.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
        requests.append(request.SerializeToString())
    # One after the other: the second is sent when the first has failed.
    messages = [receive_all(served.address, request)[0].error_message for request in requests]
    assert "unknown model" in messages[0]
    assert messages[1] == "again"


def failed_attempts(served: GrpcGateway, triton: EmbeddedTriton) -> float:
    labels = f'replica="127.0.0.1:{triton.options.http_port}",outcome="failed"'
    return metric(served.http, f"gateway_upstream_attempts_total{{{labels}}}")


def test_stream_that_begins_with_a_fault_is_a_failed_attempt(
    served: GrpcGateway, triton: EmbeddedTriton
) -> None:
    before = failed_attempts(served, triton)
    (answer,) = receive_all(served.address, request_bytes("failing"))
    assert answer.infer_response.model_name == "failing"
    wait_until(lambda: failed_attempts(served, triton) == before + 1)


def test_responses_of_a_decoupled_model_arrive_as_they_are_made(served: GrpcGateway) -> None:
    with open_stream(served.address) as stream:
        stream.send("ticking", *ticks(3, 0.3))
        stream.send("plain_FP32", fp32(1, shape=(1, 1)), request_id="quick")
        received = [(stream.receive().get_response().id, time.monotonic()) for _ in range(4)]
    assert "quick" in [each for each, _ in received[:2]]
    assert received[3][1] - received[1][1] > 0.25


def test_response_that_waits_for_another_holds_no_slot(
    triton: EmbeddedTriton,
) -> None:
    limits = {"max_model_inflight": "1", "max_queue": "0", "connect_timeout_s": "10"}

    def is_served() -> bool:
        try:
            client.infer("plain_FP32", [fp32(1, shape=(1, 1))])
        except InferenceServerException:
            return False
        return True

    with (
        grpc_gateway(triton.options.url, **limits) as gateway,
        triton_grpc.InferenceServerClient(gateway.address) as client,
        open_stream(gateway.address) as stream,
    ):
        wait_until(is_served)
        stream.send("cancellable", fp32(20, shape=(1, 1), name="SECONDS"))
        stream.send("plain_FP32", fp32(1, shape=(1, 1)))
        wait_until(lambda: metric(gateway.http, 'gateway_requests_in_flight{route="grpc"}') == 3)
        wait_until(is_served)
        assert stream.outcomes.empty()


def request_bytes(model: str) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model, id=f"for {model}")
    request.inputs.add(name="X", datatype="FP32", shape=[1, 1])
    request.raw_input_contents.append(np.float32(4).tobytes())
    return bytes(request.SerializeToString())


def test_stream_continues_after_a_failed_request(
    served: GrpcGateway,
) -> None:
    failures = {
        "no_such_model": "unknown model: 'no_such_model'",
        "failing": "boom",
        "": "unknown model: ''",
    }
    requests = [*map(request_bytes, failures), b"\xff\xff", request_bytes("plain_FP32")]
    *failed, malformed, last = receive_all(served.address, *requests)
    for (model, words), response in zip(failures.items(), failed, strict=True):
        assert response.infer_response.id == f"for {model}"
        assert response.infer_response.model_name == model
        assert response.infer_response.parameters["triton_final_response"].bool_param
        assert words in response.error_message
        assert "/" not in response.error_message.replace("/v1/models", "")
    assert "not a valid protobuf message" in malformed.error_message
    assert malformed.infer_response.parameters["triton_final_response"].bool_param
    assert not last.error_message
    assert last.infer_response.id == "for plain_FP32"
    assert np.frombuffer(last.infer_response.raw_output_contents[0], np.float32) == 4


def test_sequences_of_one_stream_stay_on_their_replicas(
    triton: EmbeddedTriton, tmp_path: Path
) -> None:
    write_repository(tmp_path, AS_WRITTEN, (COUNTING,))
    with (
        triton_with((tmp_path,), ("counting",)) as other,
        grpc_gateway(triton.options.url, other.options.url, connect_timeout_s="10") as gateway,
        open_stream(gateway.address) as stream,
    ):
        wait_until(lambda: ready_replicas(gateway) == 2)
        used: set[int] = set()
        for first in range(
            5001, 6000, 100
        ):  # on a busy machine, one replica may serve a turn alone
            sequences = (*range(first, first + 11), f"named-{first}")
            counts, processes = run_sequences(stream, sequences)
            assert counts == {str(sequence): [1, 2, 3, 4, 5, 6] for sequence in sequences}
            assert {len(each) for each in processes.values()} == {1}
            used = used.union(*processes.values())
            if len(used) == 2:
                return
    raise AssertionError("all sequences were sent to one replica")


def run_sequences(
    stream: Stream, sequences: Sequence[int | str]
) -> tuple[dict[str, list[int]], dict[str, set[int]]]:
    """Run sequences of six steps at once; return the counts of each, and the processes of its steps."""
    for step in range(6):
        for sequence in sequences:
            stream.send(
                "counting",
                int32(1),
                request_id=str(sequence),
                sequence_id=sequence,
                sequence_start=step == 0,
                sequence_end=step == 5,
            )
    counts: dict[str, list[int]] = {}
    processes: dict[str, set[int]] = {}
    for _ in range(6 * len(sequences)):
        result = stream.receive()
        name = result.get_response().id
        counts.setdefault(name, []).append(result.as_numpy("COUNT").item())
        processes.setdefault(name, set()).add(result.as_numpy("PROCESS").item())
    return counts, processes


def ready_replicas(gateway: GrpcGateway) -> int:
    replicas = gateway.http.get("/v1/replicas").json()["replicas"]
    return sum(each["models"].get("counting") == "READY" for each in replicas)


def test_step_of_an_unknown_sequence_is_refused(served: GrpcGateway) -> None:
    with open_stream(served.address) as stream:
        stream.send("counting", int32(1), sequence_id=4711)
        with pytest.raises(InferenceServerException, match=r"sequence 4711 .* is not running"):
            stream.receive()


def test_step_after_a_refused_one_waits_for_the_step_before_that(served: GrpcGateway) -> None:
    """The model is decoupled: otherwise the responses keep the order as well."""

    def send(count: int, **options: Any) -> None:
        stream.send(TICKING_SEQUENCE.name, *ticks(count, 0.01), sequence_id=1, **options)

    classified = triton_grpc.InferRequestedOutput("MADE", class_count=1)
    with open_stream(served.address) as stream:
        send(5000, sequence_start=True)
        assert stream.receive().as_numpy("NUMBER") == 0
        send(1, outputs=[classified])
        send(1)
        # The stream itself is one of them.
        wait_until(lambda: metric(served.http, 'gateway_requests_in_flight{route="grpc"}') == 4)
        (replica,) = served.http.get("/v1/replicas").json()["replicas"]
        assert replica["outstanding"] == 1


ENDLESS = fp32(600, name="SECONDS", shape=(1, 1))


def cancel_call(gateway: GrpcGateway, wait_for_start: Callable[[], object]) -> None:
    outcomes: Queue[Outcome] = Queue()
    with triton_grpc.InferenceServerClient(gateway.address) as client:
        call = client.async_infer(
            "cancellable", [ENDLESS], lambda result, error: outcomes.put((result, error))
        )
        wait_for_start()
        call.cancel()
        assert "CANCELLED" in str(outcomes.get(timeout=TIMEOUT_S)[1])


def cancel_stream(gateway: GrpcGateway, wait_for_start: Callable[[], object]) -> None:
    with open_stream(gateway.address) as stream:
        stream.send("cancellable", ENDLESS)
        wait_for_start()


def exceed_deadline_of_the_call(gateway: GrpcGateway, _: Callable[[], object]) -> None:
    with triton_grpc.InferenceServerClient(gateway.address) as client:
        code, _message = failure(client.infer, "cancellable", [ENDLESS], client_timeout=1.0)
        assert code == "DEADLINE_EXCEEDED"


def exceed_timeout_of_the_metadata(gateway: GrpcGateway, _: Callable[[], object]) -> None:
    with triton_grpc.InferenceServerClient(gateway.address) as client:
        headers = {"x-request-timeout": "0.5"}
        code, message = failure(client.infer, "cancellable", [ENDLESS], headers=headers)
        assert (code, "no response within 0.5 s" in message) == ("DEADLINE_EXCEEDED", True)


@pytest.mark.parametrize(
    "leave",
    [cancel_call, cancel_stream, exceed_deadline_of_the_call, exceed_timeout_of_the_metadata],
)
def test_inference_stops_in_triton_when_its_caller_leaves(
    served: GrpcGateway, folder: Path, leave: Callable[[GrpcGateway, Callable[[], object]], None]
) -> None:
    """The model writes to files that an inference started, and how it ended after how many seconds."""
    started, ends = (folder / "cancellable" / name for name in ("started", "ends"))
    for file in (started, ends):
        file.unlink(missing_ok=True)
    leave(served, lambda: wait_until(started.exists))
    wait_until(lambda: ends.exists() and ends.read_text().endswith("\n"))
    ((outcome, seconds, _),) = (line.split() for line in ends.read_text().splitlines())
    assert outcome == "cancelled"
    assert float(seconds) < 60
