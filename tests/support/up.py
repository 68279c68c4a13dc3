"""The up command as a process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil

from gateway.triton.guard import SHARED_MEMORY
from gateway.triton.options import REPLICA_STEP
from tests.support.servers import Command, free_ports

CONFIG = """
backend: "python"
max_batch_size: 0
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
"""


MODEL = """
import os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        {initialize}

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN") for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", t.as_numpy())]) for t in inputs]
"""


def write_model(repository: Path, initialize: str) -> None:
    folder = repository / "echo" / "1"
    folder.mkdir(parents=True, exist_ok=True)
    (repository / "echo" / "config.pbtxt").write_text(CONFIG)
    (folder / "model.py").write_text(MODEL.format(initialize=initialize))


class Up(Command):
    """`up` with a repository, on ports of its own."""

    def __init__(
        self,
        repository: Path | str,
        *arguments: str,
        command: str = "up",
        guarded: bool = True,
        replicas: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        further = [REPLICA_STEP * number for number in range(1, replicas)]
        gateway, http, grpc, metrics = free_ports(4, *further)
        flags = ["--triton-http-port", http, "--triton-grpc-port", grpc]
        flags += ["--triton-metrics-port", metrics, "--model-repository", repository]
        if command == "up":
            flags += ["--port", gateway]
        if replicas > 1:
            flags += ["--replicas", replicas]
        super().__init__(
            command, *map(str, flags), *arguments, environment=environment, guarded=guarded
        )
        self.url = f"http://127.0.0.1:{gateway}"
        self.tritons = [f"127.0.0.1:{http + more}" for more in (0, *further)]
        self.triton = self.tritons[0]

    def infer(self) -> httpx.Response:
        return httpx.post(
            f"{self.url}/v1/models/echo/infer", json={"inputs": [1.5, 2.5]}, timeout=30
        )

    def family(self) -> list[psutil.Process]:
        """The command and everything below it: guard, tritonserver, stubs."""
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]

    def servers(self) -> list[psutil.Process]:
        """The tritonservers, in the order of their ports."""
        found = [process for process in self.family() if process.name() == "tritonserver"]
        return sorted(found, key=http_port)

    def server(self) -> psutil.Process:
        return self.servers()[0]

    def __exit__(self, *_: object) -> None:
        """Without the seconds in which a Triton says good-bye, where the test has not waited for them."""
        assert self.process.stdin is not None
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.process.pid).children(recursive=True)
            servers = {each: ports(each) for each in family if each.name() == "tritonserver"}
            self.process.stdin.close()
            for server, before in servers.items():
                deadline = time.monotonic() + 5
                # Killed before it is asked to end, it would be started again.
                while ports(server) == before and time.monotonic() < deadline:
                    time.sleep(0.02)
                server.kill()
        super().__exit__()


def ports(server: psutil.Process) -> set[int]:
    """Those that it listens on."""
    connections = server.net_connections("tcp")
    return {found.laddr.port for found in connections if found.status == psutil.CONN_LISTEN}


def http_port(server: psutil.Process) -> list[int]:
    flag = "--http-port="
    return [int(part.removeprefix(flag)) for part in server.cmdline() if part.startswith(flag)]


def assert_end(processes: list[psutil.Process]) -> None:
    """They end within 5 s. A zombie has ended; its parent, here often the tests, has yet to look."""

    def alive() -> list[psutil.Process]:
        return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    deadline = time.monotonic() + 5
    while alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive()


@contextmanager
def nothing_left(up: Up) -> Iterator[None]:
    """Within 5 s of the end of the block no process and no shared memory of `up` is left."""
    family = up.family()
    assert {"tritonserver"} <= {process.name() for process in family}
    prefix = f"triton_gateway_{up.pid}_"
    assert any(SHARED_MEMORY.glob(f"{prefix}*"))
    yield
    assert_end(family)
    deadline = time.monotonic() + 1
    while any(SHARED_MEMORY.glob(f"{prefix}*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(SHARED_MEMORY.glob(f"{prefix}*"))
