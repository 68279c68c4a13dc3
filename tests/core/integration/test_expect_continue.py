"""A client that waits for 100 Continue gets the final status at once where the header alone decides."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.support.model_zoo.zoo import Names, identity, image, write_repository
from tests.support.servers import gateway_before, triton_on_free_ports
from tests.support.wait import TIMEOUT_S

MAX_BODY_BYTES = 1000
LENGTH = "Content-Length: 100"
LONG = "Content-Length: 1001"
JSON = "Content-Type: application/json"
PNG = "Content-Type: image/png"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
UNSUPPORTED = (415, "UNSUPPORTED_BODY")
TOO_LARGE = (413, "TOO_LARGE")
UNKNOWN_MODEL = (404, "MODEL_NOT_FOUND")
UNKNOWN_PATH = (404, "NOT_FOUND")
# The request line without the version, the header, the status and the code.
DECIDED = (
    ("POST /v1/models/picture/infer", ("Content-Type: audio/wav", LENGTH), *UNSUPPORTED),
    (
        "POST /v1/models/picture/infer?dry_run=true",
        ("Content-Type: audio/wav", LENGTH),
        *UNSUPPORTED,
    ),
    ("POST /v1/models/picture/versions/1/infer", ("Content-Type: video/mp4", LENGTH), *UNSUPPORTED),
    (
        "POST /v1/models/picture/infer",
        ("Content-Type: application/pdf", "Transfer-Encoding: chunked"),
        *UNSUPPORTED,
    ),
    ("POST /v1/models/picture/infer", (PNG, "Content-Encoding: br", LENGTH), *UNSUPPORTED),
    ("POST /v2/models/picture/infer", (JSON, "Content-Encoding: br", LENGTH), *UNSUPPORTED),
    ("POST /v1/models/picture/infer", (PNG, LONG), *TOO_LARGE),
    ("POST /v1/models/text/infer", ("Content-Type: text/plain", LONG), *TOO_LARGE),
    ("POST /v2/models/text/infer", (JSON, LONG), *TOO_LARGE),
    ("POST /v2/models/text/generate", (JSON, LONG), *TOO_LARGE),
    ("POST /v1/models/nobody/infer", (PNG, LENGTH), *UNKNOWN_MODEL),
    ("POST /v1/models/text/versions/7/infer", (PNG, LENGTH), *UNKNOWN_MODEL),
    ("POST /v2/models/nobody/infer", (JSON, LENGTH), *UNKNOWN_MODEL),
    ("POST /v2/models/text/versions/7/infer", (JSON, LENGTH), *UNKNOWN_MODEL),
    ("POST /v2/models/nobody/generate_stream", (JSON, LENGTH), *UNKNOWN_MODEL),
    ("POST /v1/nowhere", (JSON, LENGTH), *UNKNOWN_PATH),
    ("POST /v1/models/text/infer/", (JSON, LENGTH), *UNKNOWN_PATH),
    ("POST /v2/nowhere", (JSON, LENGTH), *UNKNOWN_PATH),
    ("PUT /v1/models/text/infer", (JSON, LENGTH), 405, "METHOD_NOT_ALLOWED"),
    (
        "POST /v1/models/text/infer",
        ("Content-Type: multipart/form-data", LENGTH),
        400,
        "MALFORMED_REQUEST",
    ),
    (
        "POST /v1/models/text/infer",
        (PNG, LENGTH, "X-Request-Timeout: soon"),
        400,
        "MALFORMED_REQUEST",
    ),
)
TEXT = b"a text"
V2_BODY = b'{"inputs":[{"name":"X","shape":[1],"datatype":"BYTES","data":["a text"]}]}'
CONTINUED = (
    ("POST /v1/models/text/infer", "Content-Type: text/plain", TEXT),
    ("POST /v1/models/text/infer", "Content-Type: application/octet-stream", TEXT),
    ("POST /v1/models/text/infer", "Content-Type: audio/wav", TEXT),
    ("POST /v1/models/text/infer", "X-Any: no type", TEXT),
    ("POST /v1/models/text/infer", "Content-Type: application/x-www-form-urlencoded", TEXT),
    ("POST /v2/models/text/infer", JSON, V2_BODY),
    ("POST /v2/models/text/versions/1/infer", JSON, V2_BODY),
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("repository")
    models = (identity("text", "BYTES", (1,)), image("picture", (3, 6, 4)))
    write_repository(folder, Names(), models)
    limit = str(MAX_BODY_BYTES)
    with (
        triton_on_free_ports(folder) as triton,
        gateway_before(triton.options.url, max_body_bytes=limit) as client,
    ):
        yield client


@contextmanager
def expecting(client: httpx.Client, line: str, *headers: str) -> Iterator[socket.socket]:
    """Send a header that waits for 100 Continue, and no body."""
    address = client.base_url.host, client.base_url.port or 80
    lines = (f"{line} HTTP/1.1", "Host: localhost", "Expect: 100-continue", *headers, "", "")
    with socket.create_connection(address, TIMEOUT_S) as connection:
        connection.sendall("\r\n".join(lines).encode())
        yield connection


def receive_response(connection: socket.socket) -> tuple[int, bytes]:
    """Return the status and the body of the next response."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    (length,) = (
        int(line.partition(b":")[2])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length:")
    )
    while len(body) < length:
        body += connection.recv(65536)
    return int(head.split()[1]), body


@pytest.mark.parametrize(("line", "headers", "status", "code"), DECIDED)
def test_final_status_is_sent_instead_of_100_continue(
    client: httpx.Client, line: str, headers: tuple[str, ...], status: int, code: str
) -> None:
    with expecting(client, line, *headers) as connection:
        received_status, body = receive_response(connection)
    assert (received_status, json.loads(body)["code"]) == (status, code)


@pytest.mark.parametrize(("line", "content_type", "content"), CONTINUED)
def test_client_continues_where_the_body_decides(
    client: httpx.Client, line: str, content_type: str, content: bytes
) -> None:
    length = f"Content-Length: {len(content)}"
    with expecting(client, line, content_type, length) as connection:
        received = b""
        while len(received) < len(CONTINUE):
            received += connection.recv(len(CONTINUE) - len(received))
        assert received == CONTINUE
        connection.sendall(content)
        status, body = receive_response(connection)
    assert (status, b"a text" in body) == (200, True)
