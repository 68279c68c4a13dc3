"""Other proxies and tools, which `make bench-peers` installs. What is not available is skipped."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from benchmarks.servers import LIVE, RunningServer, ServerNotStarted, process
from tests.support.servers import ROOT, free_ports

FOLDER = ROOT / ".venv-peers"
PROGRAMS = FOLDER / "bin"

ENVOY_TYPES = "type.googleapis.com/envoy.extensions.filters"
ENVOY = """
static_resources:
  listeners:
  - address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": {types}.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: ingress
          generate_request_id: false
          http_filters:
          - name: envoy.filters.http.router
            typed_config:
              "@type": {types}.http.router.v3.Router
          route_config:
            virtual_hosts:
            - name: triton
              domains: ["*"]
              routes:
              - match: {{ prefix: "/" }}
                route: {{ cluster: triton, timeout: 0s }}
  clusters:
  - name: triton
    type: STATIC
    connect_timeout: 1s
    load_assignment:
      cluster_name: triton
      endpoints:
      - lb_endpoints:
        - endpoint:
            address: {{ socket_address: {{ address: {host}, port_value: {upstream_port} }} }}
"""


def report_skipped(name: str, reason: object) -> None:
    print(f"skipped: {name}: {reason}", file=sys.stderr, flush=True)


def find_program(name: str) -> str:
    """Return the path of a program of the peers' environment, or of the system.

    Raises `ServerNotStarted` if it is not installed.
    """
    program = shutil.which(name, path=f"{PROGRAMS}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        raise ServerNotStarted(f"{name} is not installed; run: make bench-peers")
    return program


def start_peer(
    stack: ExitStack, name: str, start: Callable[[], AbstractContextManager[RunningServer]]
) -> RunningServer | None:
    """Start a peer until the stack is closed; report why if it is not available."""
    try:
        return stack.enter_context(start())
    except ServerNotStarted as exc:
        report_skipped(name, exc)
        return None


@contextmanager
def envoy(upstream: str) -> Iterator[RunningServer]:
    (port,) = free_ports(1)
    host, _, upstream_port = upstream.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "envoy.yaml"
        values = {"port": port, "host": host, "upstream_port": upstream_port}
        config.write_text(ENVOY.format(types=ENVOY_TYPES, **values))
        command = [find_program("envoy"), "-c", str(config), "--concurrency", "1"]
        command += ["--disable-hot-restart", "--log-level", "error"]
        url = f"http://127.0.0.1:{port}"
        with process(command, f"{url}{LIVE}") as running:
            yield url, running


@contextmanager
def kserve_transformer(triton: str) -> Iterator[RunningServer]:
    if not any(FOLDER.glob("lib/python*/site-packages/kserve")):
        raise ServerNotStarted("kserve is not installed; run: make bench-peers")
    (port,) = free_ports(1)
    command = [str(PROGRAMS / "python"), "-W", "ignore"]
    command += ["-m", "benchmarks.baselines.kserve_transformer"]
    command += ["--http_port", str(port), "--workers", "1", "--enable_grpc", "false"]
    command += ["--model_name", "small", "--predictor_host", triton, "--predictor_protocol", "v2"]
    command += ["--enable_latency_logging", "false"]
    url = f"http://127.0.0.1:{port}"
    with process(command, f"{url}/v1/models/small", KSERVE_LOGLEVEL="WARNING") as running:
        yield url, running


@contextmanager
def vllm_router(upstream: str) -> Iterator[RunningServer]:
    """Run vLLM's router, which is written in Rust. It routes only the paths of LLM servers."""
    port, metrics_port = free_ports(2)
    command = [find_program("vllm-router"), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", f"http://{upstream}", "--policy", "round_robin"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    command += ["--disable-retries", "--log-level", "error"]
    url = f"http://127.0.0.1:{port}"
    with process(command, f"{url}/health") as running:
        yield url, running
