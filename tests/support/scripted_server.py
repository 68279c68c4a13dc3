"""Servers that answer by a script: with the next step, with that of a path, or as a Triton would."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import grpc

from gateway.triton.grpc.byte_channel import STREAM_METHOD

JSON = "application/json"
MIB = 1 << 20
TEXT = {"name": "Y", "datatype": "BYTES", "shape": [1]}
METADATA = {
    "name": "m",
    "versions": ["1"],
    "platform": "",
    "inputs": [{"name": "X", "datatype": "BYTES", "shape": [1]}],
    "outputs": [TEXT],
}


class Script(BaseHTTPRequestHandler):
    """A request, which the server keeps, and the ways to answer it."""

    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def do_POST(self) -> None:
        received = {"path": self.path, "connection": str(self.client_address), **self.headers}
        self.server.received.append(received)
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.find_step(self.path)(self)

    do_GET = do_POST  # noqa: N815 - the names of the standard library
    do_HEAD = do_POST  # noqa: N815
    do_DELETE = do_POST  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        with suppress(ConnectionError):  # the client reads no further
            self.wfile.write(body)


Step = Callable[[Script], None]


class ScriptedServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *steps: Step, by_path: Mapping[str, Step] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Script)
        self.steps = list(steps)
        self.by_path = by_path or {}  # by what their paths begin with
        self.received: list[dict[str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def find_step(self, path: str) -> Step:
        begins = filter(path.startswith, self.by_path)
        return self.by_path[max(begins, key=len)] if self.by_path else self.steps.pop(0)


@contextmanager
def serving(*steps: Step, by_path: Mapping[str, Step] | None = None) -> Iterator[ScriptedServer]:
    with ScriptedServer(*steps, by_path=by_path) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def respond(content: bytes, content_type: str = JSON, **headers: str) -> Step:
    return lambda script: script.answer(200, content, Content_Type=content_type, **headers)


class Replica:
    """Answers as its table says: a model's metadata or its inference, by the model's name."""

    answers: ClassVar[dict[str, Any]] = {}

    @classmethod
    def respond(cls, script: Script) -> None:
        parts = script.path.split("/")
        name = parts[3] if script.path.startswith("/v2/models/") else ""
        if script.path == "/v2/repository/index":
            document = cls.answers.get("index", [])
        elif script.command == "POST":
            document = cls.answers[parts[3]]
        elif script.path.endswith("/config"):
            document = cls.answers.get(f"config {name}", {"name": name})
        else:
            document = cls.answers.get(f"metadata {name}", {**METADATA, "name": name})
        if document is Ellipsis:
            respond_without_end(script)
        else:
            body = document if isinstance(document, bytes) else json.dumps(document).encode()
            script.answer(200, body)


def respond_without_end(script: Script) -> None:
    script.send_response(200)
    script.send_header("Transfer-Encoding", "chunked")
    script.end_headers()
    piece = b"%x\r\n%b\r\n" % (MIB, b" " * MIB)
    with suppress(OSError):
        while True:
            script.wfile.write(piece)


@contextmanager
def scripted_replica() -> Iterator[str]:
    """Serve `Replica`, and yield its address."""
    with serving(by_path={"": Replica.respond}) as server:
        yield server.url


class InvalidMessages(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Responds to each message with an error whose text is not UTF-8."""

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler:
        if handler_call_details.method != STREAM_METHOD:
            return grpc.unary_unary_rpc_method_handler(lambda _message, _context: b"")
        return grpc.stream_stream_rpc_method_handler(
            lambda messages, _context: (b"\x0a\x02\xff\xfe" for _ in messages)
        )


@contextmanager
def replica_with_invalid_messages() -> Iterator[str]:
    """Serve `Replica` with the decoupled model `m`, and `InvalidMessages` over gRPC; yield its address."""
    Replica.answers = {"config m": {"model_transaction_policy": {"decoupled": True}}}
    server = grpc.server(ThreadPoolExecutor(1), handlers=[InvalidMessages()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with scripted_replica() as url:
            yield f"{url}?grpc={port}"
    finally:
        server.stop(None).wait()
