"""The HTTP server below the application, on real connections."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from tests.support.servers import Triton, gateway_before
from tests.support.wait import TIMEOUT_S

REQUEST = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
KEEP_ALIVE_S = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.URL]:
    """A gateway before a Triton without a model."""
    with Triton(tmp_path_factory.mktemp("models")) as triton:
        triton.wait()
        with gateway_before(triton.options.url, keep_alive_s=str(KEEP_ALIVE_S)) as client:
            yield client.base_url


def connection_to(server: httpx.URL) -> socket.socket:
    return socket.create_connection((server.host, server.port or 80), TIMEOUT_S)


def answers(connection: socket.socket) -> bool:
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(REQUEST)
        return connection.recv(4096).startswith(b"HTTP/1.1 200")
    return False


def test_idle_connection_is_closed_and_a_busy_one_is_not(server: httpx.URL) -> None:
    """Try again if the machine was so slow that the busy connection was idle, too."""
    assert any(busy_outlives_idle(server) for _ in range(10))


def busy_outlives_idle(server: httpx.URL) -> bool:
    """Return whether one was busy all the time; then only the idle one was closed."""
    with connection_to(server) as busy, connection_to(server) as idle:
        assert answers(busy)
        assert answers(idle)
        began = last = time.monotonic()
        closed = False
        while not closed:
            closed = bool(select.select([idle], [], [], 0.2)[0])
            answered = answers(busy)
            if time.monotonic() - last > KEEP_ALIVE_S / 2:
                return False
            assert answered
            last = time.monotonic()
        assert idle.recv(1) == b""
        assert last - began > KEEP_ALIVE_S / 2
    return True


def test_pipelined_requests_are_answered_in_order(server: httpx.URL) -> None:
    with connection_to(server) as connection:
        ids = [f"request-{number}" for number in range(16)]
        heads = (
            f"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nX-Request-ID: {i}\r\n\r\n" for i in ids
        )
        connection.sendall("".join(heads).encode())
        received = b""
        while received.count(b"HTTP/1.1 200") < 16 or not received.endswith(b"\r\n\r\n"):
            received += connection.recv(65536)
        found = [
            line.split(b": ")[1].decode()
            for line in received.split(b"\r\n")
            if b"x-request-id" in line
        ]
        assert found == ids
