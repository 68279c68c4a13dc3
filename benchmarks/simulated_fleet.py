"""A fleet of simulated replicas in one process: cheap servers with the answers of an idle Triton.

Every replica has its own port, which also serves its metrics. `POST /add/NAME` adds a model to the index of
the replica, as if a Triton had loaded it.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import cast

import orjson
import uvloop

from tests.support.servers import free_ports
from tests.support.tools import of_models

INDEX_PATH = "/v2/repository/index"
ADD_PATH = "/add/"
NOT_FOUND = (
    b"HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
)
TENSOR = {"name": "X", "datatype": "FP32", "shape": [-1, 256]}
OUTPUT = {"name": "Y", "datatype": "FP32", "shape": [1, 256], "data": [0.5] * 256}
CONFIG_DATA_TYPE = "TYPE_FP32"
COUNT = {"count": 0, "ns": 0}


def name_models(count: int) -> list[str]:
    return [f"model_{number}" for number in range(count)]


def encode_response(body: bytes, content_type: str = "application/json") -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def describe_model(name: str) -> dict[str, object]:
    """Return Triton's metadata, config and statistics of a model, by the end of the path."""
    outputs = [{**TENSOR, "name": "Y"}]
    config_tensor = {"name": "X", "data_type": CONFIG_DATA_TYPE, "dims": [256]}
    statistics = {
        "name": name,
        "version": "1",
        "last_inference": 0,
        "inference_count": 0,
        "execution_count": 0,
        "inference_stats": {"success": COUNT, "fail": COUNT, "queue": COUNT},
    }
    return {
        "": {"name": name, "versions": ["1"], "inputs": [TENSOR], "outputs": outputs},
        "/config": {
            "name": name,
            "max_batch_size": 64,
            "input": [config_tensor],
            "output": [{**config_tensor, "name": "Y"}],
        },
        "/stats": {"model_stats": [statistics]},
        "/ready": {},
    }


def build_model_responses(models: Sequence[str]) -> dict[str, bytes]:
    return {
        f"/v2/models/{name}{version}{end}": encode_response(orjson.dumps(document))
        for name in models
        for version in ("", "/versions/1")
        for end, document in describe_model(name).items()
    }


def build_responses(models: Sequence[str]) -> dict[str, bytes]:
    """Return the responses that all replicas have in common, by path."""
    responses = build_model_responses(models)
    server = {"name": "triton", "version": "2.60.0", "extensions": ["model_repository"]}
    result = {"model_name": models[0], "model_version": "1", "outputs": [OUTPUT]}
    responses["/infer"] = encode_response(orjson.dumps(result))
    responses["/v2"] = encode_response(orjson.dumps(server))
    responses["/v2/health/live"] = encode_response(b"")
    responses["/v2/health/ready"] = encode_response(b"")
    responses["/metrics"] = encode_response(of_models(len(models)), "text/plain; charset=utf-8")
    return responses


class SimulatedReplica:
    """A replica: its index, and the responses that it shares with the others."""

    def __init__(self, models: Sequence[str], responses: Mapping[str, bytes]) -> None:
        self._models = list(models)
        self._responses = responses
        self._added_responses: dict[str, bytes] = {}
        self._index = self._encode_index()

    def _encode_index(self) -> bytes:
        entries = [{"name": name, "version": "1", "state": "READY"} for name in self._models]
        return encode_response(orjson.dumps(entries))

    def respond(self, path: str) -> bytes:
        if path == INDEX_PATH:
            return self._index
        if path.startswith(ADD_PATH):
            name = path.removeprefix(ADD_PATH)
            self._models.append(name)
            self._added_responses |= build_model_responses([name])
            self._index = self._encode_index()
            return encode_response(b"")
        if path.endswith("/infer"):
            return self._responses["/infer"]
        return self._responses.get(path) or self._added_responses.get(path, NOT_FOUND)


class ReplicaConnection(asyncio.Protocol):
    """The part of HTTP/1.1 that the gateway and wrk need: requests with a length, one after the other."""

    def __init__(self, replica: SimulatedReplica) -> None:
        self._replica = replica
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if not end or len(body) < int(length or 0):
            return
        self._received = b""
        _, path, _ = head.decode("latin-1").split(" ", 2)
        self._transport.write(self._replica.respond(path))


def serve(ports: Sequence[int], models: Sequence[str], pipe: Connection) -> None:
    """Run the replicas until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark closes the pipe

    async def run_replicas() -> None:
        loop = asyncio.get_running_loop()
        closed = asyncio.Event()
        loop.add_reader(pipe.fileno(), closed.set)
        responses = build_responses(models)
        for port in ports:
            replica = SimulatedReplica(models, responses)
            await loop.create_server(
                partial(ReplicaConnection, replica),
                "127.0.0.1",
                port,
                backlog=1024,
            )
        gc.freeze()
        pipe.send("serving")
        await closed.wait()
        loop.remove_reader(pipe.fileno())

    uvloop.run(run_replicas())


@contextmanager
def simulated_fleet(count: int, models: Sequence[str]) -> Iterator[list[int]]:
    """Run replicas that have these models ready; provide their ports."""
    ports = free_ports(count)
    context = multiprocessing.get_context("spawn")
    local, remote = context.Pipe()
    process = context.Process(target=serve, args=(ports, models, remote), daemon=True)
    process.start()
    remote.close()
    with local:
        local.recv()
        yield ports
    process.join()
