"""The up command as a process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil

from gateway.embedded.options import REPLICA_PORT_STEP
from gateway.embedded.reaper import SHARED_MEMORY_FOLDER
from tests.support.model_folders import write_model_folder
from tests.support.servers import COMPLETE_CONFIGS, Command, free_ports
from tests.support.wait import TIMEOUT_S, wait_until

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


def holding(place: Path) -> str:
    """Create a file; return code for `initialize` that waits while the file exists."""
    place.touch()
    return f"while os.path.exists({str(place)!r}): time.sleep(0.01)"


def write_model(repository: Path, initialize: str = "pass") -> None:
    files = {"1/model.py": MODEL.format(initialize=initialize)}
    write_model_folder(repository / "echo", CONFIG, files)


class Up(Command):
    """`up` with a repository, or with the models among its arguments, on ports of its own; the configs of
    its models leave nothing out, or `auto_complete` is set."""

    def __init__(
        self,
        repository: Path | str | None,
        *arguments: str,
        command: str = "up",
        guarded: bool = True,
        auto_complete: bool = False,
        replicas: int = 1,
        environment: Mapping[str, str] | None = None,
        on_terminal: bool = False,
    ) -> None:
        further = [REPLICA_PORT_STEP * number for number in range(1, replicas)]
        gateway, http, grpc, metrics = free_ports(4, *further)
        flags = ["--triton-http-port", http, "--triton-grpc-port", grpc]
        flags += ["--triton-metrics-port", metrics]
        if repository is not None:
            flags += ["--model-repository", repository]
        if command == "up":
            flags += ["--port", gateway]
        if not auto_complete:
            flags += [f"--triton-arg={argument}" for argument in COMPLETE_CONFIGS]
        if replicas > 1:
            flags += ["--replicas", replicas]
        super().__init__(
            command,
            *map(str, flags),
            *arguments,
            environment=environment,
            guarded=guarded,
            on_terminal=on_terminal,
        )
        self.url = f"http://127.0.0.1:{gateway}"
        self.tritons = [f"127.0.0.1:{http + more}" for more in (0, *further)]
        self.triton = self.tritons[0]

    def infer(self) -> httpx.Response:
        return httpx.post(
            f"{self.url}/v1/models/echo/infer", json={"inputs": [1.5, 2.5]}, timeout=TIMEOUT_S
        )

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=TIMEOUT_S)

    def family(self) -> list[psutil.Process]:
        """The command and everything below it: guard, tritonserver, stubs."""
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]

    def servers(self) -> list[psutil.Process]:
        """The tritonservers, in the order of their ports."""
        return sorted(named("tritonserver", self.family()), key=http_port)

    def stubs(self) -> list[psutil.Process]:
        """The processes of Python models."""
        return named("triton_python_backend_stub", self.family())

    def server(self) -> psutil.Process:
        return self.servers()[0]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Without the seconds in which a Triton with a Python model ends, where the test has not
        waited for them."""
        assert self.process.stdin is not None
        with suppress(psutil.NoSuchProcess):
            listening = listeners(psutil.Process(self.process.pid).children(recursive=True))
            self.process.stdin.close()
            cut_short(listening)
        super().__exit__(kind)


def listeners(processes: Iterable[psutil.Process]) -> dict[psutil.Process, set[int]]:
    """The tritonservers among them, and the ports that each listens on."""
    return {process: ports(process) for process in named("tritonserver", processes)}


def named(name: str, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the running processes of this name."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.name() == name:
                found.append(process)
    return found


def cut_short(listening: Mapping[psutil.Process, set[int]]) -> None:
    """Kill those that have begun to end. Killed before, they would be started again."""
    for server, before in listening.items():

        def is_ending(server: psutil.Process = server, before: set[int] = before) -> bool:
            return has_ended(server) or ports(server) != before

        with suppress(psutil.NoSuchProcess):
            wait_until(is_ending)
            server.kill()


def has_ended(process: psutil.Process) -> bool:
    """A zombie has ended; its parent, here often the tests, has yet to look."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def ports(server: psutil.Process) -> set[int]:
    """Return the ports on which it listens."""
    connections = server.net_connections("tcp")
    return {found.laddr.port for found in connections if found.status == psutil.CONN_LISTEN}


def http_port(server: psutil.Process) -> list[int]:
    flag = "--http-port="
    with suppress(psutil.NoSuchProcess):
        return [int(part.removeprefix(flag)) for part in server.cmdline() if part.startswith(flag)]
    return []


def wait_for_end(processes: list[psutil.Process]) -> None:
    wait_until(lambda: all(map(has_ended, processes)))


@contextmanager
def nothing_left(up: Up, *, brief: bool = False) -> Iterator[None]:
    """After the block no process and no shared memory of `up` is left.

    `brief`: its Tritons are killed as soon as they have begun to end, which takes them three seconds.
    """
    family = up.family()
    assert {"tritonserver"} <= {process.name() for process in family}
    listening = listeners(family)
    prefix = f"triton_gateway_{up.pid}_"
    assert any(SHARED_MEMORY_FOLDER.glob(f"{prefix}*"))
    yield
    if brief:
        cut_short(listening)
    wait_for_end(family)
    wait_until(lambda: not any(SHARED_MEMORY_FOLDER.glob(f"{prefix}*")))
