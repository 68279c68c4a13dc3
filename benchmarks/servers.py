"""Context managers that run the gateway and the servers it is compared with."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from tests.support.model_zoo.zoo import TICKING, Model, Names, T, write_repository
from tests.support.servers import ROOT, Command, free_ports

MODELS = (
    Model("small", "identity", (T("X", "FP32", (256,)),), (T("Y", "FP32", (256,)),), 64),
    Model("large", "identity", (T("X", "FP32", (-1,)),), (T("Y", "FP32", (-1,)),)),
    Model("blob", "length", (T("X", "BYTES", (1,)),), (T("Y", "INT32", (1,)),), 64),
    Model("array", "mean", (T("X", "FP32", (3, 224, 224)),), (T("Y", "FP32", (1,)),), 64),
    TICKING,
)

PEERS = ROOT / ".venv-peers" / "bin" / "python"

NGINX = """
worker_processes {workers}; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
    access_log off; client_max_body_size 1g; client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy; proxy_request_buffering off; proxy_buffering off;
    keepalive_requests 1000000000;
    upstream triton {{ server {triton}; keepalive 64; keepalive_requests 1000000000; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://triton; proxy_http_version 1.1; proxy_set_header Connection ""; }}
    }}
}}
"""


@contextmanager
def repository() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        write_repository(Path(folder), Names(), MODELS)
        for config in Path(folder).glob("*/config.pbtxt"):
            if "max_batch_size: 0" not in config.read_text():
                config.write_text(config.read_text() + "\ndynamic_batching { }\n")
        yield Path(folder)


@contextmanager
def process(command: list[str], url: str, **environment: str) -> Iterator[psutil.Process]:
    """Run a server, and provide its process once `url` responds."""
    started = subprocess.Popen(
        command, env={**os.environ, **environment}, cwd=ROOT, stdout=subprocess.DEVNULL
    )
    try:
        wait_until_ready(url)
        yield psutil.Process(started.pid)
    finally:
        started.terminate()
        started.wait(20)


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            httpx.get(url, timeout=1)
        except httpx.HTTPError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


@contextmanager
def gateway(
    triton: str, workers: int = 1, settings: Mapping[str, str] | None = None
) -> Iterator[tuple[str, psutil.Process]]:
    (port,) = free_ports(1)
    environment = {
        "GATEWAY_TRITON_URLS": triton,
        "GATEWAY_LOG_LEVEL": "warning",
        **(settings or {}),
    }
    arguments = ["serve", "--port", str(port)]
    if workers > 1:
        arguments += ["--workers", str(workers)]
    with Command(*arguments, environment=environment) as command:
        command.wait_for("serving")
        yield f"http://127.0.0.1:{port}", psutil.Process(command.pid)


def nginx_program() -> str:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    return program or sys.exit("make bench requires nginx: apt-get install nginx-light wrk")


@contextmanager
def nginx(triton: str, workers: int = 1) -> Iterator[tuple[str, psutil.Process]]:
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "nginx.conf"
        config.write_text(NGINX.format(folder=folder, port=port, triton=triton, workers=workers))
        url = f"http://127.0.0.1:{port}"
        with process([nginx_program(), "-c", str(config)], f"{url}/v2/health/live") as running:
            yield url, running


PAGES = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ }}
http {{ access_log off; {servers} }}
"""
PAGE = """
server {{
    listen 127.0.0.1:{port};
    location = /metrics {{ default_type text/plain; alias {folder}/page; }}
    location / {{ default_type application/json; return 200 "[]"; }}
}}
"""


@contextmanager
def metrics_pages(page: bytes, count: int) -> Iterator[list[str]]:
    """Run replicas without models that serve this metrics page."""
    ports = free_ports(count)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "page").write_bytes(page)
        Path(folder).chmod(0o755)  # nginx's workers run as nobody
        config = Path(folder) / "nginx.conf"
        servers = "".join(PAGE.format(folder=folder, port=port) for port in ports)
        config.write_text(PAGES.format(folder=folder, servers=servers))
        command = [nginx_program(), "-e", f"{folder}/error.log", "-c", str(config)]
        with process(command, f"http://127.0.0.1:{ports[-1]}/metrics"):
            yield [f"http://127.0.0.1:{port}?metrics={port}" for port in ports]


@contextmanager
def shell(line: str) -> Iterator[None]:
    """Run a shell command in the background, if there is one."""
    if not line:
        yield
        return
    with subprocess.Popen(["/bin/sh", "-c", line], start_new_session=True) as running:
        try:
            yield
            if running.poll() is not None:
                raise RuntimeError(f"the command exited early: {line}")
        finally:
            os.killpg(running.pid, signal.SIGKILL)


@contextmanager
def plain_fastapi(triton: str) -> Iterator[tuple[str, psutil.Process]]:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "uvicorn", "benchmarks.baselines.fastapi_app:app"]
    command += [
        "--port",
        str(port),
        "--loop",
        "uvloop",
        "--http",
        "httptools",
        "--log-level",
        "warning",
    ]
    command += ["--no-access-log"]
    url = f"http://127.0.0.1:{port}"
    with process(command, f"{url}/docs", TRITON=triton) as running:
        yield url, running


def has_kserve() -> bool:
    # `make bench-peers` creates this file.
    return (PEERS.parents[1] / ".ready").exists()


@contextmanager
def kserve_transformer(triton: str) -> Iterator[tuple[str, psutil.Process]]:
    (port,) = free_ports(1)
    command = [str(PEERS), "-W", "ignore", "-m", "benchmarks.baselines.kserve_transformer"]
    command += ["--http_port", str(port), "--workers", "1", "--enable_grpc", "false"]
    command += ["--model_name", "small", "--predictor_host", triton, "--predictor_protocol", "v2"]
    command += ["--enable_latency_logging", "false"]
    url = f"http://127.0.0.1:{port}"
    with process(command, f"{url}/v1/models/small", KSERVE_LOGLEVEL="WARNING") as running:
        yield url, running
