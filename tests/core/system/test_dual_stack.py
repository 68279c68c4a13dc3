"""`--host ::` listens on both families where the kernel has them, and on IPv4 where it has not."""

from __future__ import annotations

import errno
import json
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gateway.listeners import join_host_port
from tests.support.servers import GATEWAY, Command, free_ports
from tests.support.up import write_model
from tests.support.wait import TIMEOUT_S, wait_until

IPV4, IPV6 = "127.0.0.1", "::1"
WITHOUT_IPV6 = (sys.executable, "-m", "tests.support.without_ipv6", *GATEWAY)
KERNELS = {"both families": GATEWAY, "IPv4 only": WITHOUT_IPV6}
FAMILIES = {"both families": (IPV4, IPV6), "IPv4 only": (IPV4,)}


def has_ipv6() -> bool:
    try:
        with socket.create_server((IPV6, 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    write_model(folder)
    return folder


@contextmanager
def running(
    command: str, host: str, program: Sequence[str], *flags: str, **environment: str
) -> Iterator[SimpleNamespace]:
    gateway, api, http, grpc_port, metrics = free_ports(5)
    ports = {"http": http, "grpc": grpc_port, "metrics": metrics}
    arguments = [command, "--host", host, *flags]
    if command != "serve":
        for name, port in ports.items():
            arguments += [f"--triton-{name}-port", str(port)]
    if command != "triton":
        arguments += ["--port", str(gateway)]
        environment["GATEWAY_GRPC_PORT"] = str(api)
    with Command(*arguments, environment=environment, program=program) as process:
        yield SimpleNamespace(process=process, gateway=gateway, api=api, **ports)


def is_refused(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as client:
        return client.connect_ex((host, port)) == errno.ECONNREFUSED


def ask_grpc(host: str, port: int) -> bool:
    """Return whether the model is ready."""
    with grpc.insecure_channel(join_host_port(host, port)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = service_pb2.ModelReadyRequest(name="echo")
        answer = stub.ModelReady(request, timeout=TIMEOUT_S, wait_for_ready=True)
    return bool(answer.ready)


def accepts(host: str, port: int) -> bool:
    return not is_refused(host, port)


def can_infer(host: str, port: int) -> bool:
    url = f"http://{join_host_port(host, port)}/v1/models/echo/infer"
    body = {"inputs": [1.5, 2.5]}
    return httpx.post(url, json=body, timeout=TIMEOUT_S, trust_env=False).status_code == 200


@pytest.fixture(scope="module")
def triton_url(repository: Path) -> Iterator[str]:
    with running("triton", "::", GATEWAY, str(repository), "--load", "echo") as triton:
        triton.process.wait_for("Triton is ready")
        yield f"http://127.0.0.1:{triton.http}?grpc={triton.grpc}&metrics={triton.metrics}"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("command", ["serve", "serve --workers 2", "up"])
def test_gateway_listens_on_the_families_of_the_kernel(
    repository: Path, triton_url: str, command: str, kernel: str
) -> None:
    name, *flags = command.split()
    if name == "up":
        flags = [str(repository), "--load", "echo"]
    environment = {"GATEWAY_TRITON_URLS": triton_url} if name == "serve" else {}
    with running(name, "::", KERNELS[kernel], *flags, **environment) as server:
        line = server.process.wait_for("ready after" if name == "up" else "serving")
        assert f"on http://[::]:{server.gateway} " in line
        for host in FAMILIES[kernel]:
            wait_until(partial(can_infer, host, server.gateway))
            assert ask_grpc(host, server.api)
        if kernel == "IPv4 only":
            assert is_refused(IPV6, server.gateway)
            assert is_refused(IPV6, server.api)
        if name == "up":  # its own Triton is for the gateway alone
            assert not is_refused(IPV4, server.http)
            assert is_refused(IPV6, server.http)


@pytest.mark.parametrize("kernel", KERNELS)
def test_triton_listens_on_the_families_of_the_kernel(repository: Path, kernel: str) -> None:
    body = {"inputs": [{"name": "IN", "shape": [2], "datatype": "FP32", "data": [1.5, 2.5]}]}
    with running("triton", "::", KERNELS[kernel], str(repository), "--load", "echo") as triton:
        ready = triton.process.wait_for("Triton is ready")
        assert f"http://[::]:{triton.http}?grpc={triton.grpc}&metrics={triton.metrics}" in ready
        for host in FAMILIES[kernel]:
            wait_until(partial(accepts, host, triton.http))
            url = f"http://{join_host_port(host, triton.http)}/v2/models/echo/infer"
            assert httpx.post(url, json=body, trust_env=False).status_code == 200
            page = httpx.get(f"http://{join_host_port(host, triton.metrics)}/metrics")
            assert "nv_inference_request_success" in page.text
            assert ask_grpc(host, triton.grpc)
        if kernel == "IPv4 only":
            ports = (triton.http, triton.grpc, triton.metrics)
            assert [is_refused(IPV6, port) for port in ports] == [True] * 3


def test_host_of_one_family_is_only_that(repository: Path) -> None:
    """A specific IPv6 address, as before, for Triton and the gateway."""
    with running("triton", IPV6, GATEWAY, str(repository), "--load", "echo") as triton:
        triton.process.wait_for(f"Triton is ready: http://[::1]:{triton.http}?")
        url = f"http://[::1]:{triton.http}?grpc={triton.grpc}&metrics={triton.metrics}"
        with running("serve", IPV6, GATEWAY, GATEWAY_TRITON_URLS=url) as server:
            server.process.wait_for(f"on http://[::1]:{server.gateway} ")
            wait_until(partial(can_infer, IPV6, server.gateway))
            ports = (triton.http, triton.grpc, triton.metrics, server.gateway, server.api)
            assert [is_refused(IPV4, port) for port in ports] == [True] * 5


def test_client_has_the_address_of_its_family(repository: Path) -> None:
    """An IPv4 client of a host with both is not `::ffff:127.0.0.1`, so that limits and logs know it."""
    with running("serve", "::", GATEWAY, GATEWAY_LOG_FORMAT="json") as server:
        server.process.wait_for("serving")
        for host in (IPV4, IPV6):
            url = f"http://{join_host_port(host, server.gateway)}/v1/models/{host.count(':')}/infer"
            httpx.post(url, trust_env=False)
            line = json.loads(server.process.wait_for(f"/v1/models/{host.count(':')}/infer "))
            assert line["client"] == host


def test_port_of_either_family_that_is_in_use_is_named() -> None:
    for host, family in ((IPV4, socket.AF_INET), (IPV6, socket.AF_INET6)):
        with socket.create_server((host, 0), family=family) as taken:
            port = taken.getsockname()[1]
            with Command("serve", "--host", "::", "--port", str(port)) as process:
                process.wait_for(f"port {port} cannot be used (address already in use)")
                assert process.end() == 1
