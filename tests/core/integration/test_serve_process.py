"""`triton-gateway serve` as a process: its start, HTTPS and file descriptors."""

from __future__ import annotations

import resource
import select
import socket
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import psutil
import pytest
import trustme

from tests.support.certificates import trusting, write_pair
from tests.support.fake_triton import port_of
from tests.support.servers import Command, free_ports, gateway_before
from tests.support.wait import TIMEOUT_S, wait_until

NO_TRITON = {"GATEWAY_TRITON_URLS": "http://127.0.0.1:9"}


def test_invalid_settings_are_reported_once_at_the_start(tmp_path: Path) -> None:
    """The gateway reports them, and not each worker."""
    environment = {
        **NO_TRITON,
        "GATEWAY_MAX_BODY_BYTE": "5",
        "GATEWAY_KEYS_FILE": str(tmp_path / "none.yaml"),
    }
    arguments = ("serve", "--port", str(free_ports(1)[0]), "--workers", "2")
    with Command(*arguments, environment=environment) as serve:
        assert serve.end() == 1
    assert serve.output.count("did you mean GATEWAY_MAX_BODY_BYTES?") == 1
    assert serve.output.count("none.yaml") == 1
    assert "Traceback" not in serve.output


def test_replica_that_was_never_reached_is_named_at_the_start() -> None:
    (port,) = free_ports(1)
    with Command("serve", "--port", str(port), environment=NO_TRITON) as serve:
        serve.wait_for("replica 127.0.0.1:9 is DOWN: ")
        serve.wait_for("served as soon as it answers; to start a Triton here: triton-gateway up")


@pytest.mark.long
def test_workers_serve_https(tmp_path: Path) -> None:
    authority = trustme.CA()
    write_pair(authority, tmp_path)
    (port,) = free_ports(1)
    environment = {
        **NO_TRITON,
        "GATEWAY_TLS_CERT_FILE": str(tmp_path / "cert.pem"),
        "GATEWAY_TLS_KEY_FILE": str(tmp_path / "key.pem"),
    }
    arguments = ("serve", "--port", str(port), "--workers", "2")
    with Command(*arguments, environment=environment) as serve:
        serve.wait_for("serving")
        with httpx.Client(verify=trusting(authority), timeout=TIMEOUT_S) as client:
            assert client.get(f"https://127.0.0.1:{port}/livez").status_code == 200


def test_too_few_open_files_are_refused_at_the_start() -> None:
    program = ("sh", "-c", 'ulimit -n 255 && exec "$0" -m gateway "$@"', sys.executable)
    arguments = ("serve", "--port", str(free_ports(1)[0]))
    with Command(*arguments, program=program, environment=NO_TRITON) as serve:
        assert serve.end() == 1
    (line,) = serve.lines
    assert line.startswith(
        "triton-gateway: the gateway may open 255 files, and needs 256 or more: "
    )


@pytest.mark.long
@pytest.mark.fault("no file descriptors are left")
def test_connections_are_refused_while_there_are_no_file_descriptors() -> None:
    """A real gateway that may open 256 files, and 400 connections."""
    (port,) = free_ports(1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        command = Command("serve", "--port", str(port), environment=NO_TRITON, guarded=False)
        resource.prlimit(command.pid, resource.RLIMIT_NOFILE, (256, 256))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with command:
        try:
            command.wait_for("serving")
            command.wait_for("open files allows")
            flood(command, port)
        finally:
            command.process.terminate()


def flood(command: Command, port: int) -> None:
    with ExitStack() as stack:
        for _ in range(400):
            connection = stack.enter_context(socket.socket())
            connection.settimeout(TIMEOUT_S)
            connection.connect(("127.0.0.1", port))
        process = psutil.Process(command.pid)
        before, start = sum(process.cpu_times()[:2]), time.monotonic()
        time.sleep(1)
        spent = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - start)
        assert spent < 0.5  # it does not spin
        assert process.num_fds() < 256
        wait_until(lambda: is_answered(port, "/livez"))
    wait_until(lambda: is_answered(port, "/docs"))


def is_answered(port: int, path: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=TIMEOUT_S).status_code == 200
    return False


def test_first_openapi_document_delays_no_other_request() -> None:
    """It takes half a second to build, and needs no key."""
    (nobody,) = free_ports(1)
    with gateway_before(f"http://127.0.0.1:{nobody}") as client, ExitStack() as stack:
        document, liveness = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port_of(client))))
            for _ in range(2)
        ]
        document.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        liveness.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answered, _, _ = select.select([document, liveness], [], [], TIMEOUT_S)
        assert answered == [liveness]
        assert document.recv(1000).startswith(b"HTTP/1.1 200 OK")
        assert client.get("/openapi.json").json() == client.get("/openapi.json").json()
