"""Clients that make the gateway hold as much memory as they can, of every kind, and how much that is."""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from io import BytesIO
from multiprocessing.connection import Connection as Pipe
from multiprocessing.synchronize import Event
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.capabilities.grpc_api.support.grpc_gateway import (
    INFER,
    STREAM,
    GrpcGateway,
    grpc_gateway,
)
from tests.support.fake_triton import port_of
from tests.support.fleet import url_of, write_echo
from tests.support.load import LOG_WARNINGS, SPAWN, post
from tests.support.measurements import assert_number, forget_peaks, memory_bytes, peak_bytes
from tests.support.metrics import held_memory, metric
from tests.support.servers import Triton
from tests.support.wait import TIMEOUT_S, wait_until

MIB = 1 << 20
NICENESS = 10
CLIENTS = 60  # of each kind
BODY_BYTES = 4 * MIB
BUDGET_BYTES = 256 * MIB
ROUNDS = 40
# More than before, when all clients have left.
MAX_KEPT_BYTES = 64 * MIB
SHED = 'gateway_requests_shed_total{reason="memory"}'
SETTINGS = {
    **LOG_WARNINGS,
    "max_bytes_in_flight": str(BUDGET_BYTES),
    # There is room for so many streams.
    "max_body_bytes": str(BUDGET_BYTES // CLIENTS),
    "max_connections_per_client": "0",
    "on_demand_models": "late*",
    "connect_timeout_s": "10",
}
ANSWERS = {"reset", "200", "429", "OK", "RESOURCE_EXHAUSTED"}
Work = Callable[[Event, int, str], Counter[str]]


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    folder = tmp_path_factory.mktemp("models")
    for name in ("echo", "late", "later"):
        write_echo(folder, name, dims=-1)
    with Triton(folder, "echo") as triton:
        triton.wait()
        yield triton


@contextmanager
def gateway_at_rest(triton: Triton) -> Iterator[tuple[GrpcGateway, int]]:
    """A gateway that has served some requests, and its memory."""
    with grpc_gateway(url_of(triton), **SETTINGS) as served:
        wait_until(lambda: served.http.get("/v2/models/echo/ready").is_success)
        infer_over_grpc(served.address, encode_request("echo", 8))
        assert infer(served.http).is_success
        memory = memory_bytes(served.command.pid)
        forget_peaks(served.command.pid)
        yield served, memory


def infer(client: httpx.Client) -> httpx.Response:
    return client.post("/v1/models/echo/infer", json={"inputs": [1, 2]})


def encode_request(model: str, size_bytes: int, first: float = 0.0) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="X", datatype="FP32", shape=[size_bytes // 4])
    request.raw_input_contents.append(struct.pack("<f", first) + bytes(size_bytes - 4))
    return bytes(request.SerializeToString())


def infer_over_grpc(address: str, message: bytes) -> None:
    with grpc.insecure_channel(address) as channel:
        channel.unary_unary(INFER)(message, timeout=TIMEOUT_S)


@contextmanager
def clients_in_a_process(work: Work, served: GrpcGateway) -> Iterator[Callable[[], Counter[str]]]:
    """Run clients of low priority; yield a function that lets them end, and returns their outcomes."""
    stop = SPAWN.Event()
    (results, pipe) = SPAWN.Pipe(duplex=False)
    arguments = (pipe, work, stop, port_of(served.http), served.address)
    process = SPAWN.Process(target=run_work, args=arguments)
    process.start()
    pipe.close()  # so that the end of the process is one of its results

    def end() -> Counter[str]:
        stop.set()
        assert results.poll(3 * TIMEOUT_S)
        outcomes: Counter[str] = results.recv()
        process.join()
        return outcomes

    try:
        yield end
    finally:
        process.kill()
        process.join()


def run_work(pipe: Pipe, work: Work, stop: Event, port: int, address: str) -> None:
    os.nice(NICENESS)
    pipe.send(work(stop, port, address))


def open_channel(address: str) -> grpc.Channel:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    return grpc.insecure_channel(address, options)


def start_unread_streams(stop: Event, channel: grpc.Channel, message: bytes) -> list[Any]:
    """A client whose core has sent a message takes the next one, until the stream is not read."""

    def send() -> Iterator[bytes]:
        for _ in range(30):
            if not stop.is_set():
                yield message
        stop.wait()

    return [channel.stream_stream(STREAM)(send()) for _ in range(CLIENTS)]


def leave_streams_unread(stop: Event, _: int, address: str) -> Counter[str]:
    """Streams of one caller send large requests, and read nothing. The process ends without a farewell."""
    channel = open_channel(address)
    calls = start_unread_streams(stop, channel, encode_request("echo", BODY_BYTES))
    stop.wait()
    return Counter({"unread": len(calls)})


@pytest.mark.long
@pytest.mark.fault("clients of every kind hold memory at once")
def test_message_that_waits_for_its_model_is_held(triton: Triton) -> None:
    trouble = triton.repository / "later" / "trouble"
    trouble.write_text("hold")
    message = encode_request("later", MIB)
    with gateway_at_rest(triton) as (served, _), ThreadPoolExecutor(1) as pool:
        call = pool.submit(infer_over_grpc, served.address, message)
        wait_until(lambda: held_memory(served.http)["held"] == 2 * len(message))
        trouble.unlink()
        call.result()
        wait_until(lambda: set(held_memory(served.http).values()) == {0})


@pytest.mark.fault("gRPC streams that send large requests and do not read the responses")
def test_stream_is_not_read_until_there_is_memory(triton: Triton) -> None:
    """The next message would be received in full as well, only to be refused."""
    hold = triton.repository / "echo" / "hold"
    hold.touch()
    large = encode_request("echo", MIB)
    settings = {
        **SETTINGS,
        "max_bytes_in_flight": str(3 * MIB),
        "max_body_bytes": str(2 * MIB),
    }
    with grpc_gateway(url_of(triton), **settings) as served, ThreadPoolExecutor(1) as pool:
        held = pool.submit(infer_over_grpc, served.address, encode_request("echo", MIB, -1000))
        wait_until(lambda: held_memory(served.http)["message"] > 0)
        with grpc.insecure_channel(served.address) as channel:
            answers = channel.stream_stream(STREAM)(iter([large] * 3), timeout=TIMEOUT_S)
            errors = [read_stream_error(next(answers))]
            time.sleep(1.5)  # a check of the memory
            hold.unlink()
            held.result()
            errors += map(read_stream_error, answers)
    assert "memory" in errors[0]
    assert errors[1:] == ["", ""]


def read_stream_error(message: bytes) -> str:
    error: str = service_pb2.ModelStreamInferResponse.FromString(message).error_message
    return error


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.fault("gRPC streams that send large requests and do not read the responses")
def test_sixty_unread_streams_of_one_caller_hold_bounded_memory(triton: Triton) -> None:
    small = encode_request("echo", 8)
    with gateway_at_rest(triton) as (served, idle), grpc.insecure_channel(served.address) as other:
        call = other.unary_unary(INFER)
        latencies = []
        with clients_in_a_process(leave_streams_unread, served) as end:
            wait_until(lambda: metric(served.http, SHED) > CLIENTS / 2)
            for _ in range(ROUNDS):
                started_at = time.perf_counter()
                assert call(small, timeout=TIMEOUT_S)
                latencies.append(time.perf_counter() - started_at)
            peak = peak_bytes(served.command.pid)
            end()
        assert peak - idle <= 3 * BUDGET_BYTES
        print(f"{(peak - idle) / MIB:.0f} MiB")
        wait_until(lambda: set(held_memory(served.http).values()) == {0})
        wait_until(lambda: memory_bytes(served.command.pid) - idle <= MAX_KEPT_BYTES)
        assert_number("slowest inference of another", max(latencies) * 1000, "ms", at_most=100)


async def ask(stop: Event, port: int, wire: bytes, held_back_bytes: int) -> str:
    """Send a request, its last bytes only at the end, and leave the response unread; return the status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(wire[: len(wire) - held_back_bytes])
    status = asyncio.ensure_future(reader.readline())
    await asyncio.to_thread(stop.wait)
    if not status.done():
        writer.write(wire[len(wire) - held_back_bytes :])
    try:
        return (await status).split()[1].decode()
    except ConnectionError:  # refused, and its end came before the response was read
        return "reset"
    finally:
        with suppress(ConnectionError):
            await reader.read()
        writer.transport.abort()


def finish_call(call: Any) -> str:
    """Read all responses of a call; return its code, or that of an error in a response."""
    with suppress(grpc.RpcError):
        deque(call, maxlen=0)
    return str(call.code().name)


def hold_every_kind(stop: Event, port: int, address: str) -> Counter[str]:
    """Slow and unread bodies over HTTP, unread calls over gRPC, and both while a model is loaded."""
    file = BytesIO()
    np.save(file, np.zeros(BODY_BYTES // 4, np.float32))
    wires = {
        model: post(
            f"/v1/models/{model}/infer", file.getvalue(), "application/x-npy", "Connection: close"
        )
        for model in ("echo", "late")
    }
    channels = [open_channel(address) for _ in range(3)]
    calls = start_unread_streams(stop, channels[0], encode_request("echo", BODY_BYTES))
    for model, channel in zip(("echo", "late"), channels[1:], strict=True):
        message = encode_request(model, BODY_BYTES)
        calls += [
            channel.unary_stream(INFER)(message, timeout=TIMEOUT_S * 2) for _ in range(CLIENTS)
        ]

    async def run() -> list[str]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(6 * CLIENTS))
        requests: list[Awaitable[str]] = []
        for wire, held_back_bytes in ((wires["echo"], 1), (wires["echo"], 0), (wires["late"], 0)):
            requests += [ask(stop, port, wire, held_back_bytes) for _ in range(CLIENTS)]
        return list(
            await asyncio.gather(
                *requests,
                *(loop.run_in_executor(None, partial(end_call, stop, call)) for call in calls),
            )
        )

    return Counter(asyncio.run(run()))


def end_call(stop: Event, call: Any) -> str:
    stop.wait()
    return finish_call(call)


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.fault("clients of every kind hold memory at once")
def test_clients_of_every_kind_together_hold_bounded_memory(triton: Triton) -> None:
    trouble = triton.repository / "late" / "trouble"
    trouble.write_text("hold")
    with gateway_at_rest(triton) as (served, idle):
        with clients_in_a_process(hold_every_kind, served) as end:
            wait_until(lambda: metric(served.http, "gateway_requests_held") >= CLIENTS)
            wait_until(lambda: metric(served.http, SHED) > CLIENTS)
            for _ in range(ROUNDS):
                assert served.http.get("/livez").status_code == 200
                assert infer(served.http).status_code == 200
            trouble.unlink()
            outcomes = end()
        assert set(outcomes) <= ANSWERS, outcomes
        assert outcomes.total() == 6 * CLIENTS
        peak = peak_bytes(served.command.pid)
        print(f"{(peak - idle) / MIB:.0f} MiB")
        assert peak - idle <= 3 * BUDGET_BYTES
        wait_until(lambda: set(held_memory(served.http).values()) == {0})
        wait_until(lambda: memory_bytes(served.command.pid) - idle <= MAX_KEPT_BYTES)


def test_refused_calls_leave_their_messages_to_nothing(triton: Triton) -> None:
    """An error that is in a cycle with its call would keep the message until a garbage collection."""
    with (
        gateway_at_rest(triton) as (served, memory),
        grpc.insecure_channel(served.address) as channel,
    ):
        call = channel.unary_unary(INFER)
        for number in range(300):
            name = f"{number}{'x' * 200_000}"
            with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
                call(encode_request(name, 8), timeout=TIMEOUT_S)
        assert_number("growth", (memory_bytes(served.command.pid) - memory) / MIB, "MiB")
        assert memory_bytes(served.command.pid) - memory <= 16 * MIB
