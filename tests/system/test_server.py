"""What the server does below the application, on real connections."""

from __future__ import annotations

import socket
import time

from gateway.triton.embedded import EmbeddedTriton
from tests.support.servers import gateway_before

REQUEST = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"


def answered(connection: socket.socket) -> bool:
    connection.sendall(REQUEST)
    return connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_an_idle_connection_is_closed_in_time_and_a_busy_one_is_not(
    demo_triton: EmbeddedTriton,
) -> None:
    with gateway_before(demo_triton.options.url, keep_alive_s="1") as client:
        url = client.base_url
        with socket.create_connection((url.host, url.port or 80), 10) as connection:
            began = time.monotonic()
            while time.monotonic() - began < 2:  # twice the limit, never idle for as long
                assert answered(connection)
                time.sleep(0.3)
            idle = time.monotonic()
            assert connection.recv(1) == b""
            assert 0.5 < time.monotonic() - idle < 2


def test_pipelined_requests_are_answered_in_order(demo_triton: EmbeddedTriton) -> None:
    with gateway_before(demo_triton.options.url) as client:
        url = client.base_url
        with socket.create_connection((url.host, url.port or 80), 10) as connection:
            ids = [f"request-{number}" for number in range(20)]
            heads = (
                f"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nX-Request-ID: {i}\r\n\r\n" for i in ids
            )
            connection.sendall("".join(heads).encode())
            received = b""
            while received.count(b"HTTP/1.1 200") < 20 or not received.endswith(b"\r\n\r\n"):
                received += connection.recv(65536)
            found = [
                line.split(b": ")[1].decode()
                for line in received.split(b"\r\n")
                if b"x-request-id" in line
            ]
            assert found == ids
