"""Invalid responses of a replica: the gateway answers 502, and its memory stays bounded."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import grpc
import httpx
import psutil
import pytest
from tritonclient.grpc import service_pb2

from gateway.fleet.index import MAX_INDEX_ENTRIES
from tests.support.errors import assert_error
from tests.support.grpc_gateway import STREAM, grpc_gateway
from tests.support.servers import gateway
from tests.support.wait import TIMEOUT_S, wait_until

MIB = 1 << 20
TEXT = {"name": "Y", "datatype": "BYTES", "shape": [1]}
NUMBER = {"name": "Y", "datatype": "FP32", "shape": [1]}
METADATA = {
    "name": "m",
    "versions": ["1"],
    "platform": "",
    "inputs": [{"name": "X", "datatype": "BYTES", "shape": [1]}],
    "outputs": [TEXT],
}
UNREADABLE: dict[str, Any] = {
    "a number as BYTES": {"outputs": [{**TEXT, "data": [1]}]},
    "null as BYTES": {"outputs": [{**TEXT, "data": [None]}]},
    "half a surrogate": {"outputs": [{**TEXT, "data": ["\ud800"]}]},
    "a name that is none": {"outputs": [{**TEXT, "name": 1, "data": ["a"]}]},
    "a name of half a surrogate": {"outputs": [{**TEXT, "name": "\udfff", "data": ["a"]}]},
    "no datatype": {"outputs": [{"name": "Y", "shape": [1], "data": ["a"]}]},
    "an unknown datatype": {"outputs": [{**TEXT, "datatype": "TEXT", "data": ["a"]}]},
    "a datatype that is none": {"outputs": [{**TEXT, "datatype": ["BYTES"], "data": ["a"]}]},
    "a wrong shape": {"outputs": [{**TEXT, "shape": [2], "data": ["a"]}]},
    "a shape that is none": {"outputs": [{**TEXT, "shape": "a", "data": ["a"]}]},
    "an enormous shape": {"outputs": [{**TEXT, "shape": [1 << 62], "data": ["a"]}]},
    "a shape of large numbers": {"outputs": [{**TEXT, "shape": [1 << 70], "data": ["a"]}]},
    "a number out of range": {
        "outputs": [{"name": "Y", "datatype": "INT8", "shape": [1], "data": [1 << 70]}]
    },
    "ragged data": {"outputs": [{**NUMBER, "shape": [2], "data": [[1], [1, 2]]}]},
    "an object as data": {"outputs": [{**TEXT, "data": {"a": 1}}]},
    "no data": {"outputs": [TEXT]},
    "a size of what is not there": {"outputs": [{**TEXT, "parameters": {"binary_data_size": 99}}]},
    "outputs that are none": {"outputs": 1},
    "no object": [1],
    "a version of half a surrogate": {"model_version": "\ud800", "outputs": []},
    "no JSON": b"{",
    "deep JSON": b"[" * 100_000,
    "numbers in place of texts": {"outputs": [{**NUMBER, "data": [1.5]}]},
}
METADATAS: dict[str, Any] = {
    "inputs that are none": {**METADATA, "inputs": 1},
    "no name": {"inputs": [], "outputs": []},
    "a shape of texts": {**METADATA, "inputs": [{**TEXT, "shape": ["a"]}]},
    "an unknown datatype": {**METADATA, "inputs": [{**TEXT, "datatype": "X"}]},
    "a list": [1],
    "a text": "a",
    "null": None,
    "deep": b"[" * 100_000,
}


class Replica(BaseHTTPRequestHandler):
    """Answers as its table says: a model's metadata or its inference, by the model's name."""

    protocol_version = "HTTP/1.1"
    answers: ClassVar[dict[str, Any]] = {}

    def do_GET(self) -> None:
        name = self.path.split("/")[3] if self.path.startswith("/v2/models/") else ""
        if self.path.endswith("/config"):
            self.answer(self.answers.get(f"config {name}", {"name": name}))
        else:
            self.answer(self.answers.get(f"metadata {name}", {**METADATA, "name": name}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/v2/repository/index":
            self.answer(self.answers.get("index", []))
        else:
            self.answer(self.answers[self.path.split("/")[3]])

    def answer(self, document: Any) -> None:
        if document is Ellipsis:
            self.answer_without_end()
            return
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer_without_end(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        piece = b"%x\r\n%b\r\n" % (MIB, b" " * MIB)
        with suppress(OSError):
            while True:
                self.wfile.write(piece)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def replica() -> Iterator[str]:
    """The address of a replica whose responses a test sets."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Replica)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def served(replica: str) -> Iterator[tuple[httpx.Client, psutil.Process]]:
    with gateway(replica, max_answer_bytes=str(64 * MIB)) as (client, command):
        yield client, psutil.Process(command.pid)


def infer(client: httpx.Client, model: str, accept: str = "application/json") -> httpx.Response:
    headers = {"Content-Type": "text/plain", "Accept": accept}
    return client.post(f"/v1/models/{model}/infer", content="a", headers=headers)


@pytest.mark.long
@pytest.mark.fault(
    "a response is valid HTTP but not a Triton response: JSON of other types, shapes and"
)
@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_inference_response_is_502(
    served: tuple[httpx.Client, psutil.Process], name: str
) -> None:
    client, _ = served
    Replica.answers = {"m": UNREADABLE[name]}
    for accept in ("application/json", "application/octet-stream", "application/x-npz"):
        response = infer(client, "m", accept)
        if name == "numbers in place of texts" and accept != "application/octet-stream":
            assert response.status_code == 200
        else:
            assert_error(response, 502, "BAD_UPSTREAM", "replica")


@pytest.mark.fault(
    "a response is valid HTTP but not a Triton response: JSON of other types, shapes and"
)
def test_texts_in_a_json_response_are_read(served: tuple[httpx.Client, psutil.Process]) -> None:
    client, _ = served
    Replica.answers = {"m": {"model_version": "1", "outputs": [{**TEXT, "data": ["caf\u00e9"]}]}}
    assert infer(client, "m").json()["outputs"] == {"Y": ["caf\u00e9"]}
    assert infer(client, "m", "application/octet-stream").content == "caf\u00e9".encode()


@pytest.mark.fault(
    "a response is valid HTTP but not a Triton response: JSON of other types, shapes and"
)
@pytest.mark.parametrize("name", METADATAS)
@pytest.mark.parametrize("what", ["metadata", "config"])
def test_unreadable_metadata_or_config_is_502(
    served: tuple[httpx.Client, psutil.Process], what: str, name: str
) -> None:
    client, _ = served
    model = f"{what}-{name}".replace(" ", "-")
    document = METADATAS[name]
    if what == "config" and isinstance(document, dict):
        document = {"input": 1} if "none" in name else {"max_batch_size": name}
    Replica.answers = {f"{what} {model}": document}
    assert_error(client.get(f"/v1/models/{model}"), 502, "BAD_UPSTREAM", "replica")


@pytest.mark.fault("a response does not end, or is larger than the limit")
@pytest.mark.parametrize("what", ["metadata", "config", "inference"])
def test_endless_response_is_502_and_not_kept_in_memory(
    served: tuple[httpx.Client, psutil.Process], what: str
) -> None:
    client, process = served
    model = f"endless-{what}"
    Replica.answers = {model if what == "inference" else f"{what} {model}": ...}
    before = process.memory_info().rss
    response = infer(client, model)
    assert_error(response, 502, "BAD_UPSTREAM", "exceeds the limit of")
    assert process.memory_info().rss - before < 400 * MIB
    Replica.answers = {"m": {"outputs": [{**TEXT, "data": ["a"]}]}}
    assert infer(client, "m").status_code == 200


def list_ready(count: int) -> list[dict[str, str]]:
    return [{"name": f"model{at}", "version": "1", "state": "READY"} for at in range(count)]


@pytest.mark.fault("a replica lists more than 50,000 models")
def test_index_with_too_many_models_is_ignored(
    served: tuple[httpx.Client, psutil.Process],
) -> None:
    """An index of 350,000 entries took seconds of the event loop."""
    client, _ = served

    def read_replica() -> Any:
        (replica,) = client.get("/v1/replicas").json()["replicas"]
        return replica

    Replica.answers = {"index": list_ready(MAX_INDEX_ENTRIES + 1)}
    wait_until(lambda: "more than 50000 entries" in str(read_replica()))
    Replica.answers = {"index": list_ready(2000)}  # in a thread
    wait_until(lambda: read_replica()["models"].get("model1999") == "READY")
    assert read_replica()["state"] == "UP"
    Replica.answers = {"index": []}
    wait_until(lambda: not read_replica()["models"])


class InvalidMessages(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Responds to each message with an error whose text is not UTF-8."""

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler:
        if handler_call_details.method != STREAM:
            return grpc.unary_unary_rpc_method_handler(lambda _message, _context: b"")
        return grpc.stream_stream_rpc_method_handler(
            lambda messages, _context: (b"\x0a\x02\xff\xfe" for _ in messages)
        )


@pytest.mark.fault(
    "a response is valid HTTP but not a Triton response: JSON of other types, shapes and"
)
def test_unreadable_message_of_a_stream_is_502(replica: str) -> None:
    Replica.answers = {"config m": {"model_transaction_policy": {"decoupled": True}}}
    server = grpc.server(ThreadPoolExecutor(1), handlers=[InvalidMessages()])
    url = f"{replica}?grpc={server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    request = service_pb2.ModelInferRequest(model_name="m").SerializeToString()
    try:
        with grpc_gateway(url) as served, grpc.insecure_channel(served.address) as channel:
            answer = infer(served.http, "m", "text/event-stream")
            assert_error(answer, 502, "BAD_UPSTREAM", "the replica's inference response is invalid")
            responses = channel.stream_stream(STREAM)(iter([request, request]), timeout=TIMEOUT_S)
            read = service_pb2.ModelStreamInferResponse.FromString
            texts = [read(response).error_message for response in responses]
            assert texts == ["the replica's inference response is invalid"] * 2
    finally:
        server.stop(None).wait()
