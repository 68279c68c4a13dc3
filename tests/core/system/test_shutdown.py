"""SIGTERM: the gateway becomes unready, drains and exits; no request in progress is lost."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from tests.support.fleet import QUICK, Load, repository
from tests.support.nginx import run_nginx
from tests.support.servers import ROOT, Command, Triton, free_ports
from tests.support.wait import TIMEOUT_S, wait_until

FOREVER_S = 600.0
CONNECTING_CLIENTS = 32


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    with Triton(repository(tmp_path_factory.mktemp("models")), "echo", "other") as running:
        running.wait()
        yield running


@contextmanager
def serve(triton: Triton, *arguments: str, drain_s: float) -> Iterator[tuple[Command, str]]:
    (port,) = free_ports(1)
    environment = {f"GATEWAY_{name.upper()}": str(value) for name, value in QUICK.items()}
    environment |= {"GATEWAY_TRITON_URLS": triton.options.url, "GATEWAY_DRAIN_S": f"{drain_s:g}"}
    with Command("serve", "--port", str(port), *arguments, environment=environment) as command:
        command.wait_for("serving")
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_ready(url))
        yield command, url


def is_ready(url: str) -> bool:
    return httpx.get(f"{url}/readyz", timeout=TIMEOUT_S).status_code == 200


def refuses(url: str) -> bool:
    """Return whether no server listens there any more."""
    address = httpx.URL(url)
    try:
        socket.create_connection((address.host, address.port or 80), TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    return False


def infer_slowly(url: str) -> httpx.Response:
    """Send an inference that takes as long as `held` lasts."""
    tensor = {"name": "X", "datatype": "FP32", "shape": [2], "data": [-1000, 0]}
    path = f"{url}/v2/models/echo/infer"
    return httpx.post(path, json={"inputs": [tensor]}, timeout=TIMEOUT_S)


@contextmanager
def held(triton: Triton) -> Iterator[Path]:
    """Within, `echo` holds slow inferences; yield the file that it writes when it has one."""
    hold, started = (triton.repository / "echo" / name for name in ("hold", "held"))
    hold.touch()
    started.unlink(missing_ok=True)
    try:
        yield started
    finally:
        hold.unlink(missing_ok=True)


@pytest.mark.fault("SIGTERM under load, rolling restarts")
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="one process"),
        pytest.param(("--workers", "2"), id="two workers", marks=pytest.mark.long),
    ],
)
def test_sigterm_makes_a_gateway_unready_until_its_requests_are_finished(
    triton: Triton, arguments: tuple[str, ...]
) -> None:
    """The drain is longer if the machine is so slow that the clients did not notice it in time."""
    assert any(ends_in_order(triton, arguments, drain_s) for drain_s in (1, 5, 30))


def ends_in_order(triton: Triton, arguments: tuple[str, ...], drain_s: float) -> bool:
    """Return whether the clients had stopped before the drain was over; then all had their responses."""
    with (
        ThreadPoolExecutor(1) as pool,
        serve(triton, *arguments, drain_s=drain_s) as (command, url),
        held(triton) as started,
    ):
        signalled_at = math.inf
        try:
            with Load(url, clients=4, model="other") as load:
                load.wait_for_more(100)
                signalled_at = time.monotonic()
                os.kill(command.pid, signal.SIGTERM)
                wait_until(lambda: not is_ready(url))
                # It still serves clients that have not noticed yet.
                load.wait_for_more(8)
                slow = pool.submit(infer_slowly, url)
                wait_until(lambda: started.exists() or slow.done())
        except httpx.HTTPError:
            if time.monotonic() - signalled_at < drain_s:
                raise
        if time.monotonic() - signalled_at > drain_s:
            return False
        assert set(load.statuses) == {200}
        wait_until(lambda: refuses(url))
        assert time.monotonic() - signalled_at > drain_s - 0.1
        assert command.process.poll() is None
        assert not slow.done(), slow.result().text
        (triton.repository / "echo" / "hold").unlink()
        assert slow.result().status_code == 200
        assert command.end() == 0
    return True


@pytest.mark.long
@pytest.mark.fault("SIGTERM under load, rolling restarts")
def test_replacement_of_gateways_behind_nginx_loses_no_request(triton: Triton) -> None:
    """nginx has the directives of the Ingress, and does not know which gateway is ready."""
    port, *gateway_ports = free_ports(3)
    environment = {f"GATEWAY_{name.upper()}": str(value) for name, value in QUICK.items()}
    # A new gateway holds requests until it has seen its Triton.
    environment |= {"GATEWAY_HOLD_S": "30", "GATEWAY_DRAIN_S": "1"}
    environment |= {"GATEWAY_TRITON_URLS": triton.options.url}

    def start(gateway_port: int) -> Command:
        arguments = ("serve", "--port", str(gateway_port))
        command = stack.enter_context(Command(*arguments, environment=environment))
        command.wait_for("serving")
        return command

    with ExitStack() as stack:
        commands = {each: start(each) for each in gateway_ports}
        stack.enter_context(run_nginx(port, configure_nginx(port, gateway_ports)))
        with Load(f"http://127.0.0.1:{port}", clients=8, model="other") as load:
            for gateway_port, command in commands.items():
                load.wait_for_more(50)
                os.kill(command.pid, signal.SIGTERM)
                assert command.end() == 0
                load.wait_for_more(50)
                start(gateway_port)
            load.wait_for_more(50)
        assert set(load.statuses) == {200}


def configure_nginx(port: int, gateway_ports: Sequence[int]) -> str:
    """Return directives as ingress-nginx writes them for the annotations of the Ingress."""
    ingress = yaml.safe_load((ROOT / "k8s/components/ingress/ingress.yaml").read_text())
    notes = {
        name.rpartition("/")[2]: value for name, value in ingress["metadata"]["annotations"].items()
    }
    size = notes.pop("proxy-body-size")
    # For the controller: it is about the paths.
    del notes["use-regex"]
    directives = [f"{name.replace('-', '_')} {value};" for name, value in notes.items()]
    servers = [f"server 127.0.0.1:{each} max_fails=0;" for each in gateway_ports]
    return f"""
    access_log off; client_max_body_size {size};
    upstream gateways {{ {" ".join(servers)} keepalive 8; }}
    server {{
        listen 127.0.0.1:{port};
        {" ".join(directives)}
        proxy_http_version 1.1; proxy_set_header Connection "";
        location / {{ proxy_pass http://gateways; }}
    }}
    """


@pytest.mark.fault("SIGTERM under load, rolling restarts")
def test_rollout_loses_no_request_of_clients_that_follow_the_readiness(
    triton: Triton,
) -> None:
    """As a Service does: each request has a connection of its own, to a gateway that was just ready."""
    environment = {"GATEWAY_TRITON_URLS": triton.options.url, "GATEWAY_DRAIN_S": "1"}
    ports = free_ports(2)
    endpoints = Endpoints(ports)

    def start(port: int) -> Command:
        command = stack.enter_context(
            Command("serve", "--port", str(port), environment=environment)
        )
        command.wait_for("serving")
        return command

    with ExitStack() as stack, ThreadPoolExecutor(CONNECTING_CLIENTS + 1) as pool:
        commands = [start(port) for port in ports]
        stack.callback(endpoints.stopped.set)
        pool.submit(endpoints.follow)
        wait_until(lambda: endpoints.ready == ports)
        running = [pool.submit(endpoints.send_requests) for _ in range(CONNECTING_CLIENTS)]
        for port, command in zip(ports, commands, strict=True):
            os.kill(command.pid, signal.SIGTERM)
            wait_until(lambda port=port: port not in endpoints.ready)  # type: ignore[misc]
            assert command.end() == 0
            start(port)
            wait_until(lambda: endpoints.ready == ports)
        endpoints.stopped.set()
        answered = [each.result() for each in running]
    assert min(answered) > 0


class Endpoints:
    """The gateways that are ready."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = ports
        self.ready: list[int] = []
        self.stopped = threading.Event()

    def follow(self) -> None:
        while not self.stopped.wait(0.05):
            self.ready = [port for port in self._ports if self._status(port, "/readyz") == b"200"]

    def send_requests(self) -> int:
        """Return how many were answered, until it is stopped. Raises the error of one that is lost."""
        answered = 0
        while not self.stopped.is_set():
            for port in self.ready:
                assert self._status(port, "/livez") == b"200"
                answered += 1
        return answered

    def _status(self, port: int, path: str) -> bytes:
        try:
            with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
                request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
                connection.sendall(request.encode())
                return connection.recv(100)[9:12]
        except ConnectionRefusedError:
            if path == "/readyz":
                return b""
            raise


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigint_after_another_signal_ends_the_gateway_at_once(
    triton: Triton, number: signal.Signals
) -> None:
    """It waits neither for the end of the drain nor for the running request, which would take forever."""
    with (
        ThreadPoolExecutor(1) as pool,
        serve(triton, drain_s=FOREVER_S) as (command, url),
        held(triton) as started,
    ):
        slow = pool.submit(infer_slowly, url)
        wait_until(started.exists)
        os.kill(command.pid, number)
        wait_until(lambda: refuses(url) if number == signal.SIGINT else not is_ready(url))
        os.kill(command.pid, signal.SIGTERM)  # ignored
        os.kill(command.pid, signal.SIGINT)
        command.end()
        with pytest.raises(httpx.HTTPError):
            slow.result()
        assert "Traceback" not in command.output


def test_draining_gateway_is_unready_and_closes_connections_after_responses(
    triton: Triton,
) -> None:
    with (
        serve(triton, drain_s=FOREVER_S) as (command, url),
        httpx.Client(base_url=url, timeout=TIMEOUT_S) as client,
    ):
        assert "connection" not in client.get("/livez").headers
        os.kill(command.pid, signal.SIGTERM)
        wait_until(lambda: client.get("/readyz").status_code == 503)
        assert client.get("/readyz").json()["draining"] is True
        assert client.get("/livez").headers["connection"] == "close"
        assert client.get("/livez").status_code == 200
        os.kill(command.pid, signal.SIGINT)
        command.end()
