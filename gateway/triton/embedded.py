"""A tritonserver as a context manager: started, watched, and gone without a trace when left."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import IO, cast

from gateway.triton import guard
from gateway.triton.chatter import Chatter
from gateway.triton.installation import Installation, install

EXIT_GRACE_S = 4.0  # Triton's own limit for running requests is a second less
POLL_S = 0.05
RESTARTS, RESTART_WINDOW_S = 3, 60.0
LAST_PORT = 65535
REPLICA_STEP = 100  # from one replica's ports to the next one's


class ModelControl(str, Enum):
    """Triton's `--model-control-mode`."""

    explicit = "explicit"
    none = "none"
    poll = "poll"


class CannotStart(Exception):
    """Why Triton did not start, in a sentence that says what to do."""


@dataclass(frozen=True)
class Options:
    """What the embedded Triton is started with."""

    model_repositories: tuple[Path, ...]
    load: tuple[str, ...] = ()
    model_control: ModelControl = ModelControl.explicit
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    start_timeout_s: float = 120.0
    shift: int = 0  # how far the ports are from those that the flags name

    def replica(self, number: int) -> Options:
        """The same on other ports: replica 0 has these, each further one `REPLICA_STEP` more."""
        shift = number * REPLICA_STEP
        return replace(
            self,
            http_port=self.http_port + shift,
            grpc_port=self.grpc_port + shift,
            metrics_port=self.metrics_port + shift,
            shift=self.shift + shift,
        )

    @property
    def ports(self) -> dict[str, int]:
        """The ports by the flag that names them."""
        plus = f" (+ {self.shift})" if self.shift else ""
        return {
            f"--triton-http-port{plus}": self.http_port,
            f"--triton-grpc-port{plus}": self.grpc_port,
            f"--triton-metrics-port{plus}": self.metrics_port,
        }

    @property
    def address(self) -> str:
        return f"{self.host}:{self.http_port}"

    @property
    def url(self) -> str:
        """This Triton as a replica in `GATEWAY_TRITON_URLS`."""
        return (
            f"http://{self.host}:{self.http_port}?grpc={self.grpc_port}&metrics={self.metrics_port}"
        )

    def command(self, files: Installation, shared_memory_prefix: str) -> list[str]:
        explicit = self.model_control is ModelControl.explicit
        return [
            str(files.server),
            *(f"--model-repository={folder.absolute()}" for folder in self.model_repositories),
            f"--model-control-mode={self.model_control.value}",
            *(f"--load-model={model}" for model in self.load if explicit),
            "--model-config-name=embedded",
            f"--backend-directory={files.backends}",
            f"--backend-config=python,shm-region-prefix-name={shared_memory_prefix}",
            *(f"--{api}-address={self.host}" for api in ("http", "grpc", "metrics")),
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            f"--exit-timeout-secs={int(EXIT_GRACE_S) - 1}",
        ]


def say(line: str) -> None:
    """To a person, on standard error; that nobody reads it any more must not stop anything."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


class Life:
    """One run of the server, from its start to its end, under a guard."""

    def __init__(self, options: Options, files: Installation, hear: Callable[[str], None]) -> None:
        self._options = options
        self._chatter = Chatter()
        self._prefix = f"triton_gateway_{os.getpid()}_{time.monotonic_ns():x}_"
        self._deadline = time.monotonic() + options.start_timeout_s
        # -I -S: the guard needs the standard library alone, and starts in 15 ms without `site`.
        command = [sys.executable, "-I", "-S", guard.__file__, str(EXIT_GRACE_S), self._prefix]
        self.process = subprocess.Popen(
            [*command, *options.command(files, self._prefix)],
            env=files.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the terminal's Ctrl-C is for us; we stop the guard
        )
        self._reader = threading.Thread(target=self._read, args=(hear,), daemon=True)
        self._reader.start()

    def _read(self, hear: Callable[[str], None]) -> None:
        with cast(IO[bytes], self.process.stdout) as log:
            for raw in log:
                essence = self._chatter.hear(raw.decode(errors="replace").rstrip())
                if essence is not None:
                    hear(essence)

    def ready(self) -> bool:
        """Whether it serves by now. Raises `CannotStart` when it has ended or the time is over."""
        if is_ready(self._options.host, self._options.http_port):
            self._chatter.forget()
            return True
        if self.process.poll() is not None:
            raise CannotStart(self.why_it_ended())
        if time.monotonic() > self._deadline:
            raise CannotStart(self._why_it_waits())
        return False

    def _why_it_waits(self) -> str:
        limit_s = self._options.start_timeout_s
        return f"Triton was not ready within {limit_s:g} s; its last line: {self._chatter.last}"

    def why_it_ended(self) -> str:
        self._reader.join(1)
        if self._chatter.failures:
            failed = "; ".join(f"{model}: {why}" for model, why in self._chatter.failures.items())
            return f"Triton could not load {failed}"
        words = self._chatter.complaint or self._chatter.last
        return f"Triton ended with status {self.process.returncode}: {words}"

    def let_go(self) -> None:
        """Close the guard's lifeline: it stops the server."""
        cast(IO[bytes], self.process.stdin).close()

    def stop(self) -> None:
        """Let go and wait; what a killed guard left is removed here."""
        self.let_go()
        try:
            self.process.wait(EXIT_GRACE_S + 2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        guard.end_processes_of(self._prefix)
        self._reader.join(1)
        guard.remove_shared_memory(self._prefix)


class EmbeddedTriton:
    """`with EmbeddedTriton(options) as triton:` a Triton that is ready.

    Raises `CannotInstall` or `CannotStart`. When the server ends by itself it is started again, up to
    three times in a minute; then `on_gone` is called, from a thread, with a sentence that says why.
    """

    def __init__(
        self,
        options: Options,
        *,
        say: Callable[[str], None] = say,
        on_gone: Callable[[str], None] = say,
        label: str = "",
    ) -> None:
        self.options = options
        self._say = say
        self._on_gone = on_gone
        self._label = label  # before every sentence, to tell several apart
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="triton-keeper", daemon=True)
        self._running = ExitStack()

    def __enter__(self) -> EmbeddedTriton:
        self._running.enter_context(side_by_side([self], self._say))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._running.close()

    @property
    def guard_pid(self) -> int:
        """The guard's process id; the server is its only child."""
        return self._life.process.pid

    def begin(self, files: Installation) -> None:
        """Start the server; it is not ready yet."""
        self._files = files
        self._life = Life(self.options, files, self._hear)

    def ready(self) -> bool:
        """Whether it serves by now; from then on it is kept. Raises `CannotStart`."""
        try:
            ready = self._life.ready()
        except CannotStart as exc:
            raise CannotStart(f"{self._label}{exc}") from exc
        if ready:
            self._keeper.start()
        return ready

    def let_go(self) -> None:
        """Ask the server to end, without waiting for it."""
        self._closing.set()
        self._life.let_go()

    def end(self) -> None:
        """Stop the server for good; without a trace of it when this returns."""
        self._closing.set()
        self._life.stop()
        while self._keeper.is_alive():
            self._keeper.join(0.1)
            self._life.stop()  # again, if the keeper was just beginning another life

    def _tell(self, sentence: str) -> None:
        self._say(f"{self._label}{sentence}")

    def _hear(self, essence: str) -> None:
        if not self._closing.is_set():
            self._tell(essence)

    def _keep(self) -> None:
        """Start the server again when it ends by itself; give up when that does not help."""
        ends: deque[float] = deque(maxlen=RESTARTS)
        while True:
            self._life.process.wait()
            why = self._life.why_it_ended()
            self._life.stop()
            if self._closing.is_set():
                return
            often = len(ends) == RESTARTS and time.monotonic() - ends[0] < RESTART_WINDOW_S
            ends.append(time.monotonic())
            try:
                if often:
                    raise CannotStart(
                        f"it ended {RESTARTS + 1} times within {RESTART_WINDOW_S:g} s"
                    )
                self._tell(f"{why}; starting it again")
                self._begin_again()
            except (CannotStart, OSError) as exc:
                if not self._closing.is_set():
                    self._on_gone(
                        f"{self._label}Triton is gone and does not come back: {why}; {exc}"
                    )
                return
            self._tell("Triton is ready again")

    def _begin_again(self) -> None:
        self.begin(self._files)
        try:
            while not self._life.ready():
                time.sleep(POLL_S)
        except BaseException:
            self._life.stop()
            raise


@contextmanager
def side_by_side(
    tritons: Sequence[EmbeddedTriton], say: Callable[[str], None] = say
) -> Iterator[None]:
    """All of them ready within, started and stopped at the same time; `say` hears of the preparation.

    Raises `CannotInstall` or `CannotStart`, and then none of them is left.
    """
    files = prepared([triton.options for triton in tritons], say)
    with ExitStack() as stack:
        for triton in tritons:
            triton.begin(files)
            stack.callback(triton.end)
        for triton in tritons:  # on the way out, before the first is waited for
            stack.callback(triton.let_go)
        waiting = list(tritons)
        while waiting := [triton for triton in waiting if not triton.ready()]:
            time.sleep(POLL_S)
        yield


def prepared(fleet: Sequence[Options], say: Callable[[str], None]) -> Installation:
    """What all of them need, once. Raises `CannotInstall`, or `CannotStart` where one cannot."""
    for options in fleet:
        check_repositories(options.model_repositories)
    check_distinct(ports_of(fleet))
    for options in fleet:
        for flag, port in options.ports.items():
            check_port(options.host, port, flag)
    return install(say)


def ports_of(fleet: Sequence[Options]) -> dict[str, int]:
    """The ports of replicas by the flag that names each."""
    return {flag: port for options in fleet for flag, port in options.ports.items()}


def check_repositories(folders: tuple[Path, ...]) -> None:
    for folder in folders:
        if not folder.is_dir():
            raise CannotStart(
                f"there is no model repository at {folder}; name one with --model-repository"
            )


def check_distinct(ports: Mapping[str, int]) -> None:
    """Raise `CannotStart` when two flags name one port, or one names none."""
    flags: dict[int, str] = {}
    for flag, port in ports.items():
        check_number(port, flag)
        if port in flags:
            raise CannotStart(f"{flags[port]} and {flag} both name port {port}; give each its own")
        flags[port] = flag


def check_number(port: int, flag: str) -> None:
    if not 0 <= port <= LAST_PORT:
        raise CannotStart(f"{flag} cannot be {port}; a port is between 1 and {LAST_PORT}")


def check_port(host: str, port: int, flag: str) -> None:
    """Raise `CannotStart` if the port is taken; Triton's own words hide which flag names it."""
    check_number(port, flag)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise CannotStart(
                f"port {port} cannot be used ({os.strerror(exc.errno or 0).lower()}); "
                f"name another with {flag}"
            ) from exc


def is_ready(host: str, port: int) -> bool:
    """Ask on a fresh connection: a Triton that is stopping goes on answering old ones as if well."""
    connection = http.client.HTTPConnection(host, port, timeout=1)
    try:
        connection.request("GET", "/v2/health/ready", headers={"Connection": "close"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
