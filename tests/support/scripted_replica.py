"""A replica whose responses a test sets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import grpc

from gateway.triton.grpc.byte_channel import STREAM_METHOD

MIB = 1 << 20
TEXT = {"name": "Y", "datatype": "BYTES", "shape": [1]}
METADATA = {
    "name": "m",
    "versions": ["1"],
    "platform": "",
    "inputs": [{"name": "X", "datatype": "BYTES", "shape": [1]}],
    "outputs": [TEXT],
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


@contextmanager
def scripted_replica() -> Iterator[str]:
    """Serve `Replica`, and yield its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Replica)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


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
