"""A server that answers by a script: each request with the next step, or with that of its path."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

JSON = "application/json"


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
