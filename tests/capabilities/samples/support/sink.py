"""A sink of CloudEvents over HTTP, which can stop answering."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


@dataclass(frozen=True)
class Received:
    """An event: the attributes and all other headers in lower case, and the data."""

    attributes: dict[str, str]
    headers: dict[str, str]
    data: bytes

    @property
    def is_request(self) -> bool:
        return self.attributes["type"].endswith("inference.request")


@dataclass
class HttpSink:
    port: int = 0
    status: int = 204
    events: list[Received] = field(default_factory=list)
    answers: threading.Event = field(default_factory=threading.Event)
    connections: set[tuple[str, int]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/events?from=test"

    def find(self, request_id: str) -> list[Received]:
        """Return the events of a request, that of the request first."""
        events = [each for each in list(self.events) if each.attributes["requestid"] == request_id]
        return sorted(events, key=lambda each: not each.is_request)


@contextmanager
def http_sink() -> Iterator[HttpSink]:
    sink = HttpSink()
    sink.answers.set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            sink.answers.wait()
            sink.connections.add(self.client_address)
            headers = {name.lower(): value for name, value in self.headers.items()}
            attributes = {
                name[3:]: unquote(value)
                for name, value in headers.items()
                if name.startswith("ce-")
            }
            if sink.status < 300 and self.path == "/events?from=test":
                sink.events.append(Received(attributes, headers, data))
            self.send_response(sink.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    sink.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield sink
    finally:
        sink.answers.set()
        server.shutdown()
        thread.join()
        server.server_close()
