"""`triton-gateway up`, whose standard error is a pipe that is not read: Triton's log fills it quickly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.servers import ROOT, free_ports
from tests.support.up import wait_for_end, write_model
from tests.support.wait import wait_until

pytestmark = pytest.mark.long

INFERENCES = 400  # each makes Triton log 2 KB


@contextmanager
def unread(repository: Path, command: str) -> Iterator[tuple[subprocess.Popen[bytes], str, str]]:
    """Yield the process, and the addresses of the gateway and its Triton."""
    gateway, http, grpc, metrics = free_ports(4)
    flags = [
        "--triton-http-port",
        http,
        "--triton-grpc-port",
        grpc,
        "--triton-metrics-port",
        metrics,
    ]
    flags += ["--model-repository", repository, "--log-verbose", 1]
    if command == "up":
        flags += ["--port", gateway]
    with subprocess.Popen(
        [sys.executable, "-m", "gateway", command, *map(str, flags)],
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "GATEWAY_STATE": "memory:"},
        start_new_session=True,
    ) as process:
        try:
            yield process, f"http://127.0.0.1:{gateway}", f"http://127.0.0.1:{http}"
        finally:
            process.kill()  # the guard then ends its children


def serves(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/v2/models/echo/ready", timeout=5).status_code == 200
    return False


@pytest.mark.fault("standard error is a pipe that nobody reads")
@pytest.mark.parametrize("command", ["up", "triton"])
def test_triton_serves_and_all_processes_end_if_the_log_is_not_read(
    tmp_path: Path, command: str
) -> None:
    """Takes long: a server is started, and each inference writes until the pipe is full."""
    write_model(tmp_path, "pass")
    with unread(tmp_path, command) as (process, gateway, triton):
        url = gateway if command == "up" else triton
        wait_until(lambda: serves(url))
        body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}
        with httpx.Client(base_url=url, timeout=30) as client:
            for _ in range(INFERENCES):
                assert client.post("/v2/models/echo/infer", json=body).status_code == 200
            family = psutil.Process(process.pid).children(recursive=True)
            if command == "up":
                page = client.get("/metrics").text
                assert "gateway_log_lines_dropped_total" in page
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        wait_for_end(family)
