"""Real servers for the tests, each ended with its test, even if the tests themselves are killed."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import pty
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import httpx
import psutil

from gateway.embedded.options import LOAD_ALL, TritonOptions
from gateway.embedded.supervisor import EmbeddedTriton, prepare_installation
from gateway.messages import print_message
from tests.support.gateway_forks import ForkedProcess, fork_gateway
from tests.support.guards import child_of, start_guarded
from tests.support.wait import TIMEOUT_S, wait_until

if TYPE_CHECKING:
    from typing_extensions import Self

LOGGER = logging.getLogger(__name__)  # pytest shows its lines if a test fails
ROOT = Path(__file__).parents[2]
MOST_RESERVED = 100  # ports, by each process of the tests


FAULTS = (
    "unhandled exception",
    "was never retrieved",
    "never awaited",
)


def _numbers() -> Iterator[int]:
    """Yield ports below those that the system gives to clients, different in each process of the tests."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    numbers = range(12_000 + 2_000 * worker, 14_000 + 2_000 * worker)
    start = random.randrange(len(numbers))
    return itertools.cycle([*numbers[start:], *numbers[:start]])


_next_number = _numbers()
_reserved: deque[socket.socket] = deque()


@atexit.register
def close_reserved() -> None:
    while _reserved:
        _reserved.pop().close()


def reserve(port: int) -> None:
    """Raise OSError where this port was given away lately, here or by another run on this machine.

    A name in the abstract namespace of sockets is gone with the process that has it.
    """
    reserved = socket.socket(socket.AF_UNIX)
    try:
        reserved.bind(f"\0triton-gateway-tests-{port}")
    except OSError:
        reserved.close()
        raise
    _reserved.append(reserved)
    if len(_reserved) > MOST_RESERVED:
        _reserved.popleft().close()


def free_ports(count: int, *further: int) -> list[int]:
    """Return unused ports, which are also unused `further` up, and were not returned recently."""
    with ExitStack() as stack:

        def hold(port: int) -> int:
            held = stack.enter_context(socket.socket())
            held.bind(("127.0.0.1", port))
            reserve(port)
            return int(held.getsockname()[1])

        ports: list[int] = []
        while len(ports) < count:
            with suppress(OSError):
                port = hold(next(_next_number))
                for more in further:
                    hold(port + more)
                ports.append(port)
        return ports


@contextmanager
def blackhole() -> Iterator[int]:
    """A port that answers no SYN: it listens, and its backlog is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = [socket.socket() for _ in range(8)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        try:
            yield listener.getsockname()[1]
        finally:
            for filler in fillers:
                filler.close()


# To complete the configs of models, Triton starts each Python model twice: 1.3 s instead of 0.06 s.
COMPLETE_CONFIGS = ("--disable-auto-complete-config",)


def triton_on_free_ports(
    repository: Path,
    *load: str,
    auto_complete: bool = False,
    say: Callable[[str], None] = print_message,
) -> EmbeddedTriton:
    """Return a Triton with these models, or all; their configs are complete, or `auto_complete` is set."""
    return triton_with(
        (repository,), load or (LOAD_ALL,), () if auto_complete else COMPLETE_CONFIGS, say=say
    )


def triton_with(
    repositories: Sequence[Path],
    load: Sequence[str] = (),
    arguments: Sequence[str] = COMPLETE_CONFIGS,
    *,
    log_verbose: int = 0,
    say: Callable[[str], None] = print_message,
) -> EmbeddedTriton:
    """Return a Triton that starts with these models and no other."""
    http, grpc, metrics = free_ports(3)
    options = TritonOptions(
        tuple(repositories),
        tuple(load),
        extra_arguments=tuple(arguments),
        log_verbose=log_verbose,
        http_port=http,
        grpc_port=grpc,
        metrics_port=metrics,
    )
    return BriefTriton(options, on_message=say)


class BriefTriton(EmbeddedTriton):
    """A Triton that is killed at the end, because its regular exit takes three or four seconds."""

    def request_stop(self) -> None:
        super().request_stop()
        kill_server_of(self.reaper_pid)


def kill_server_of(guard_pid: int) -> None:
    with suppress(OSError, IndexError):  # it has ended already
        os.kill(child_of(guard_pid), signal.SIGKILL)


GATEWAY = (sys.executable, "-m", "gateway")


class Command:
    """A `triton-gateway` command as a process, under a guard, so that it never outlives the tests.

    It is forked from a process that has imported the gateway, unless it has another `program` or no guard, or
    is `on_terminal`: it then writes to a terminal instead of a pipe. Nobody reads the pipe of an `unread` one
    until the test calls `read`.
    """

    def __init__(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        guarded: bool = True,
        program: Sequence[str] = GATEWAY,
        folder: Path = ROOT,
        on_terminal: bool = False,
        unread: bool = False,
    ) -> None:
        command = [*program, *arguments]
        self._guarded = guarded
        reading, writing = pty.openpty() if on_terminal else os.pipe()
        self._output = os.fdopen(reading, "rb")  # the thread that reads it closes it
        # No state is kept for the next test by default.
        environment = {
            **os.environ,
            "GATEWAY_STATE": "memory:",
            "GATEWAY_JOBS": "",
            "GATEWAY_DRAIN_S": "0",
            "GATEWAY_GRPC_PORT": "0",
            # Requests that are written byte by byte name any host.
            "GATEWAY_ALLOWED_HOSTS": "*",
            **(environment or {}),
        }
        self.process: subprocess.Popen[bytes] | ForkedProcess
        if guarded and not on_terminal and program is GATEWAY:
            with Path(os.devnull).open("rb") as empty:
                files = (empty.fileno(), writing, writing)
                self.process = fork_gateway(arguments, environment, folder, files)
        elif guarded:
            self.process = start_guarded(
                command, grace_s=10, output=writing, environment=environment, folder=folder
            )
        else:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=writing,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        os.close(writing)
        self.lines: list[str] = []
        self._lines_changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        if not unread:
            self.read()

    def read(self) -> None:
        """Read its output, from now on."""
        self._reader.start()

    def _read(self) -> None:
        # A terminal ends with an error of its reader.
        with self._output as output, suppress(OSError):
            for raw in output:
                with self._lines_changed:
                    self.lines.append(raw.decode(errors="replace").rstrip())
                    self._lines_changed.notify_all()
        with self._lines_changed:
            self._lines_changed.notify_all()

    @property
    def pid(self) -> int:
        """The command's own process id; the guard above it is `process`."""
        if not self._guarded:
            return self.process.pid
        while True:
            with suppress(IndexError):  # the guard has not started it yet
                return child_of(self.process.pid)
            time.sleep(0.01)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, words: str, timeout_s: float = TIMEOUT_S) -> str:
        """Return the first line with these words."""
        deadline = time.monotonic() + timeout_s
        seen = 0
        with self._lines_changed:
            while True:
                for line in self.lines[seen:]:
                    if words in line:
                        return line
                seen = len(self.lines)
                ended = not self._reader.is_alive()
                if ended or not self._lines_changed.wait(deadline - time.monotonic()):
                    raise AssertionError(f"it did not print {words!r}:\n{self.output}")

    def end(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for the command's own end; return its exit status."""
        status = self.process.wait(timeout_s)
        if self._reader.ident is None:
            self.read()
        self._reader.join(TIMEOUT_S)
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.end()
        if kind is not None:
            LOGGER.warning("output of the command:\n%s", self.output)
        # Whatever a test does to it: nothing is the gateway's own fault.
        faults = [line for line in self.lines if any(words in line for words in FAULTS)]
        assert not faults, f"it failed:\n{self.output}"


class GatewayProcess:
    """A gateway that a test ends and starts again as it likes, always on the same port."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment = environment
        self._command: Command | None = None
        self._earlier_lines: list[str] = []

    @property
    def lines(self) -> list[str]:
        """Everything that it has written, also before it was started again."""
        return [*self._earlier_lines, *(self._command.lines if self._command else ())]

    @property
    def pid(self) -> int:
        assert self._command is not None
        return self._command.pid

    def start(self) -> None:
        self._command = Command("serve", "--port", str(self.port), environment=self._environment)
        self._command.wait_for("serving")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        if self._command is not None:
            kill_server_of(self._command.process.pid)
        self.stop()

    def stop(self) -> None:
        if self._command is not None:
            command = self._command
            self._command = None
            try:
                command.__exit__(None)
            finally:
                self._earlier_lines += command.lines


@contextmanager
def gateway(*urls: str, **settings: str) -> Iterator[tuple[httpx.Client, Command]]:
    """`triton-gateway serve` before these Tritons: a client of it, and the process."""
    (port,) = free_ports(1)
    environment = {f"GATEWAY_{name.upper()}": value for name, value in settings.items()}
    environment["GATEWAY_TRITON_URLS"] = ",".join(urls)
    with (
        Command("serve", "--port", str(port), environment=environment) as command,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        command.wait_for("serving")
        yield client, command


@contextmanager
def gateway_before(*urls: str, **settings: str) -> Iterator[httpx.Client]:
    """The same, for who only asks it."""
    with gateway(*urls, **settings) as (client, _):
        yield client


class Triton:
    """A tritonserver that a test ends and starts again as it likes, always on the same ports.

    The configs of its models leave nothing out.
    """

    _entered: ClassVar[list[Triton]] = []

    def __init__(
        self,
        repository: Path,
        *load: str,
        host: str = "127.0.0.1",
        ports: Sequence[int] = (),
    ) -> None:
        self.repository = repository
        http, grpc, metrics = ports or free_ports(3)
        self.options = TritonOptions(
            (repository,),
            load,
            extra_arguments=COMPLETE_CONFIGS,
            host=host,
            http_port=http,
            grpc_port=grpc,
            metrics_port=metrics,
        )
        self._files = prepare_installation([self.options], print)
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return self.options.address

    @property
    def pid(self) -> int:
        """The process id of the server itself."""
        assert self._guard is not None
        return child_of(self._guard.pid)

    def start(self) -> None:
        """Returns at once; `wait` for it."""
        prefix = f"triton_gateway_test_{os.getpid()}_{time.monotonic_ns():x}_"
        command = self.options.build_command(self._files, prefix)
        # Whoever keeps a connection open to it makes its end take this long: longer than `ended` waits.
        patient = [
            "--exit-timeout-secs=600" if "--exit-timeout" in word else word for word in command
        ]
        self._guard = start_guarded(
            patient, grace_s=10, prefix=prefix, environment=self._files.environment()
        )

    def wait(self) -> None:
        """Wait until it serves."""
        wait_until(self._serves)

    def _serves(self) -> bool:
        assert self._guard is not None
        assert self._guard.poll() is None, f"the Triton at {self.address} ended"
        with suppress(httpx.HTTPError):
            return httpx.get(f"http://{self.address}/v2/health/live", timeout=10).is_success
        return False

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.signal(signal.SIGKILL)
        self.end()

    def end(self) -> None:
        """Wait until no process of it is left."""
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait(TIMEOUT_S)
            self._guard = None

    @property
    def is_running(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    def ended(self, timeout_s: float = TIMEOUT_S) -> float:
        """Seconds until it has ended by itself."""
        assert self._guard is not None
        began = time.monotonic()
        self._guard.wait(timeout_s)
        return time.monotonic() - began

    def __enter__(self) -> Self:
        self.start()
        self._entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.remove(self)
        if self._guard is not None:
            kill_server_of(self._guard.pid)
        self.end()

    @classmethod
    def restart_crashed(cls) -> None:
        """Start those again that ended by themselves, as Triton 2.51 sometimes does.

        The test that used one then fails; those that share it with that test do not.
        """
        for triton in cls._entered:
            if triton._guard is not None and triton._guard.poll() is not None:
                LOGGER.warning("starting the Triton at %s again: it crashed", triton.address)
                triton.end()
                triton.start()
                triton.wait()


def workers(command: Command) -> list[psutil.Process]:
    """The running workers; another child tracks shared resources."""
    children = psutil.Process(command.pid).children()
    return [child for child in children if "spawn_main" in command_of(child)]


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # or a zombie
        return ""
