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
from dataclasses import replace
from pathlib import Path

import httpx
import psutil

from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.model_zoo.zoo import TICKING, Model, Names, T, write_repository
from tests.support.servers import ROOT, Command, free_ports

SLOW_STREAMS = 8
# Each instance runs one stream at a time.
SLOW_TICKING = replace(
    TICKING,
    name="slow_ticking",
    extra=f"instance_group [{{ count: {SLOW_STREAMS} kind: KIND_CPU }}]",
)
MODELS = (
    Model("small", "identity", (T("X", "FP32", (256,)),), (T("Y", "FP32", (256,)),), 64),
    Model("large", "identity", (T("X", "FP32", (-1,)),), (T("Y", "FP32", (-1,)),)),
    Model("blob", "length", (T("X", "BYTES", (1,)),), (T("Y", "INT32", (1,)),), 64),
    Model("array", "mean", (T("X", "FP32", (3, 224, 224)),), (T("Y", "FP32", (1,)),), 64),
    TICKING,
    SLOW_TICKING,
)


class ServerNotStarted(RuntimeError):
    """A server that exited at once, or did not respond in time."""


READY_TIMEOUT_S = 30.0
LIVE = "/v2/health/live"
RunningServer = tuple[str, psutil.Process]  # its URL and process

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
    """Run a server, and provide its process once `url` responds. Raises `ServerNotStarted`."""
    try:
        # Ctrl-C ends the benchmark, which ends the server.
        started = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as exc:
        raise ServerNotStarted(f"{command[0]} cannot be run: {exc}") from exc
    try:
        wait_until_ready(url, started)
        yield psutil.Process(started.pid)
    finally:
        started.terminate()
        started.wait(20)


def wait_until_ready(url: str, started: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            httpx.get(url, timeout=1)
        except httpx.HTTPError as exc:
            if started.poll() is not None:
                raise ServerNotStarted(f"it exited with status {started.returncode}") from exc
            if time.monotonic() > deadline:
                raise ServerNotStarted(f"no response in {READY_TIMEOUT_S:.0f} s") from exc
            time.sleep(0.05)
        else:
            return


@contextmanager
def gateway(
    triton: str,
    workers: int = 1,
    settings: Mapping[str, str] | None = None,
    module: str = "gateway",
) -> Iterator[RunningServer]:
    (port,) = free_ports(1)
    environment = {
        "GATEWAY_TRITON_URLS": triton,
        "GATEWAY_LOG_LEVEL": "warning",
        **(settings or {}),
    }
    arguments = ["serve", "--port", str(port)]
    if workers > 1:
        arguments += ["--workers", str(workers)]
    # A process of its own: one that tests fork shares the memory of its parent.
    program = (sys.executable, "-m", module)
    with Command(*arguments, environment=environment, program=program) as command:
        command.wait_for("serving")
        yield f"http://127.0.0.1:{port}", psutil.Process(command.pid)


def nginx_program() -> str:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    return program or sys.exit("make bench requires nginx: apt-get install nginx-light wrk")


@contextmanager
def nginx(triton: str, workers: int = 1) -> Iterator[RunningServer]:
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "nginx.conf"
        config.write_text(NGINX.format(folder=folder, port=port, triton=triton, workers=workers))
        url = f"http://127.0.0.1:{port}"
        with process([nginx_program(), "-c", str(config)], f"{url}{LIVE}") as running:
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


INSTANT = """
keepalive_requests 1000000000;
server {{
    listen 127.0.0.1:{port};
    location / {{ default_type application/json; return 200 "{{}}"; }}
    {locations}
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


def uvicorn_command(app: str, port: int) -> list[str]:
    command = [sys.executable, "-m", "uvicorn", app, "--port", str(port), "--loop", "uvloop"]
    return [*command, "--http", "httptools", "--log-level", "warning", "--no-access-log"]


@contextmanager
def plain_fastapi(triton: EmbeddedTriton) -> Iterator[RunningServer]:
    (port,) = free_ports(1)
    command = uvicorn_command("benchmarks.baselines.fastapi_app:app", port)
    url = f"http://127.0.0.1:{port}"
    with process(command, f"{url}/docs", **triton_variables(triton)) as running:
        yield url, running


def triton_variables(triton: EmbeddedTriton) -> dict[str, str]:
    """Return the environment that tells a plain FastAPI application where Triton is."""
    http, grpc = triton.options.http_port, triton.options.grpc_port
    return {"TRITON": f"127.0.0.1:{http}", "TRITON_GRPC": f"127.0.0.1:{grpc}"}


@contextmanager
def bare_proxy(upstream: str) -> Iterator[RunningServer]:
    (port,) = free_ports(1)
    command = uvicorn_command("benchmarks.baselines.bare_proxy:app", port)
    url = f"http://127.0.0.1:{port}"
    with process([*command, "--lifespan", "off"], f"{url}{LIVE}", TRITON=upstream) as running:
        yield url, running


@contextmanager
def instant_upstream(replies: Mapping[str, str]) -> Iterator[str]:
    """Run a server that returns these JSON texts at once, by path; provide its address."""
    (port,) = free_ports(1)
    locations = "".join(
        f"location = {path} {{ default_type application/json; return 200 '{text}'; }}\n"
        for path, text in replies.items()
    )
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "nginx.conf"
        server = INSTANT.format(port=port, locations=locations)
        config.write_text(PAGES.format(folder=folder, servers=server))
        command = [nginx_program(), "-e", f"{folder}/error.log", "-c", str(config)]
        with process(command, f"http://127.0.0.1:{port}/"):
            yield f"127.0.0.1:{port}"
