"""A raw HTTP connection, and a scriptable fake Triton that records its requests."""

from __future__ import annotations

import json
import queue
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from typing import Any

import httpx

from tests.support.wait import TIMEOUT_S

Headers = list[tuple[str, str]]


# What belongs to a connection and not to the answer; and what the gateway adds.
OF_THE_WIRE = {"connection", "keep-alive", "transfer-encoding", "content-length", "date"}


ADDED = {"x-request-id", "x-content-type-options"}


@dataclass(frozen=True)
class RawResponse:
    """An answer; names of headers in lower case."""

    status: int
    headers: Headers
    body: bytes

    def header(self, name: str) -> str:
        return dict(self.headers).get(name, "")

    @property
    def content(self) -> tuple[int, Headers, bytes]:
        """All of it but the framing and what the gateway adds."""
        kept = [entry for entry in self.headers if entry[0] not in OF_THE_WIRE | ADDED]
        return self.status, sorted(kept), self.body


class Wire:
    """A connection of ours: one request after the other, the answers read by their framing alone.

    A byte too much after an answer would be read as the next one's head, and fail there.
    """

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.socket.close()

    def ask(
        self,
        method: str,
        target: str,
        headers: Iterable[tuple[str, str]] = (),
        body: bytes | Iterable[bytes] = b"",
    ) -> RawResponse:
        """A body in pieces goes out chunked."""
        self.send(method, target, headers, body)
        return self.read(method)

    def send(
        self,
        method: str,
        target: str,
        headers: Iterable[tuple[str, str]] = (),
        body: bytes | Iterable[bytes] = b"",
    ) -> None:
        framing = ("Transfer-Encoding", "chunked")
        if isinstance(body, bytes):
            framing = ("Content-Length", str(len(body)))
        fields = [("Host", "localhost"), *headers]
        if body or method == "POST":
            fields.append(framing)
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields)]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        if isinstance(body, bytes):
            self.socket.sendall(body)
            return
        for piece in body:
            self.socket.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        self.socket.sendall(b"0\r\n\r\n")

    def read(self, method: str = "GET") -> RawResponse:
        while (head := self._head())[0] < 200:
            pass
        status, headers = head
        fields = dict(headers)
        if method == "HEAD":
            return RawResponse(status, headers, b"")
        if fields.get("transfer-encoding") == "chunked":
            return RawResponse(status, headers, b"".join(self._chunks()))
        return RawResponse(status, headers, self._file.read(int(fields["content-length"])))

    def _head(self) -> tuple[int, Headers]:
        first = self._file.readline().decode("latin-1")
        assert first.startswith("HTTP/1.1 "), first
        headers = []
        while line := self._file.readline().decode("latin-1").rstrip("\r\n"):
            name, _, value = line.partition(":")
            headers.append((name.lower(), value.strip()))
        return int(first.split()[1]), headers

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self._file.readline(), 16):
            yield self._file.read(size)
            assert self._file.read(2) == b"\r\n"
        assert self._file.readline() == b"\r\n"


def ask(port: int, *request: Any) -> RawResponse:
    with Wire(port) as wire:
        return wire.ask(*request)


# The fake's answers by what stands in the target; any other is answered whole.
FAKE_BODY = b'{"from":"a fake"}'


WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(FAKE_BODY),
    FAKE_BODY,
)


ODD = (
    b"HTTP/1.1 200 OK\r\nX-Two: first\r\nKeep-Alive: timeout=5\r\nX-Odd: caf\xe9 \xff\r\nX-Two: second\r\n"
    b"Content-Length: 2\r\nServer: a fake\r\n\r\nok"
)


# An answer that would change more in a browser than what it shows.
BROWSERS = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nSet-Cookie: session=mine\r\nLocation: https://else.where/\r\n"
    b'Access-Control-Allow-Origin: *\r\nAccess-Control-Allow-Credentials: true\r\nClear-Site-Data: "*"\r\n'
    b"Refresh: 0; url=https://else.where/\r\nX-Content-Type-Options: sniff\r\nX-Kept: yes\r\n"
    b"Strict-Transport-Security: max-age=1\r\nContent-Length: 2\r\n\r\nok"
)
# A stream whose first event is an error of 1 MB.
LONG_ERROR_EVENTS = b'data: {"error":"/srv/%b"}\n\ndata: {"Y":1}\n\n' % (b"a" * 1_000_000)
LONG_ERROR = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%b"
    % (len(LONG_ERROR_EVENTS), LONG_ERROR_EVENTS)
)
WHOLE_ANSWERS = {b"odd": ODD, b"browsers": BROWSERS, b"long_error": LONG_ERROR}


UNFINISHED = {
    b"silent": b"",
    b"half": b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\nthe beginning",
    b"events": b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"d\r\ndata: one\n\n\n\n\r\n",
}


@dataclass
class Fake:
    """Records the requests that reach it; answers some of them never to the end."""

    port: int
    opened: int = 0  # connections, but those that only look whether it lives
    heads: queue.Queue[bytes] = field(
        default_factory=queue.Queue
    )  # recorded before the bodies arrive
    requests: queue.Queue[tuple[bytes, bytes]] = field(default_factory=queue.Queue)
    chunks: queue.Queue[int] = field(default_factory=queue.Queue)  # the number of each body
    # When a connection ended that had half a request, or half an answer.
    aborted: queue.Queue[float] = field(default_factory=queue.Queue)

    def clear(self) -> None:
        """Forget what it recorded."""
        for record in (self.heads, self.requests, self.aborted):
            with record.mutex:
                record.queue.clear()

    def serve(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file:
            try:
                first = True
                while self._exchange(connection, file, first=first):
                    first = False
            except (EOFError, OSError):
                self.aborted.put(time.monotonic())

    def _exchange(self, connection: socket.socket, file: BufferedReader, *, first: bool) -> bool:
        """A request and its answer; false at the orderly end of the connection."""
        lines = []
        while (line := file.readline()) != b"\r\n":
            if not line:
                return False
            lines.append(line)
        head = b"".join(lines)
        if is_probe(head):
            connection.sendall(INDEX_ANSWER)
            return False
        self.opened += first
        self.heads.put(head)
        length = re.search(rb"\ncontent-length: (\d+)", head)  # and not the inference header's
        body = file.read(int(length[1])) if length else b""
        if length and len(body) < int(length[1]):
            raise EOFError
        if b"chunked" in head:
            pieces = []
            while (line := file.readline()) != b"0\r\n":
                if not line:
                    raise EOFError
                pieces.append(file.read(int(line, 16) + 2)[:-2])
            file.readline()
            body = b"".join(pieces)
            self.chunks.put(len(pieces))
        self.requests.put((head, body))
        for word, beginning in UNFINISHED.items():
            if word in lines[0]:
                connection.sendall(beginning)
                file.read()
                raise EOFError
        found = (answer for word, answer in WHOLE_ANSWERS.items() if word in lines[0])
        connection.sendall(next(found, WHOLE))
        return True


# The one model that it lists, whose name a client has to quote.
LISTED_MODEL = "a%20b"
INDEX = json.dumps([{"name": LISTED_MODEL, "version": "1", "state": "READY"}]).encode()
INDEX_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(INDEX), INDEX)


def is_probe(head: bytes) -> bool:
    """Return whether the gateway itself asks, and not a client through it."""
    is_liveness = head.startswith(b"GET /v2/health/live ") and b"\ncontent-length: 0\r" in head
    return is_liveness or head.startswith(b"POST /v2/repository/index")


@contextmanager
def fake_triton() -> Iterator[Fake]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        fake = Fake(listening.getsockname()[1])
        accepting = threading.Thread(target=fake.serve, args=(listening,), daemon=True)
        accepting.start()
        try:
            yield fake
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            accepting.join()


def port_of(client: httpx.Client) -> int:
    assert client.base_url.port is not None
    return client.base_url.port
