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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import IO, cast

from gateway.triton import guard
from gateway.triton.chatter import Chatter
from gateway.triton.installation import Installation, install

EXIT_GRACE_S = 4.0  # Triton's own limit for running requests is a second less
RESTARTS, RESTART_WINDOW_S = 3, 60.0


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

    @property
    def ports(self) -> dict[str, int]:
        """The ports by the flag that names them."""
        return {
            "--triton-http-port": self.http_port,
            "--triton-grpc-port": self.grpc_port,
            "--triton-metrics-port": self.metrics_port,
        }

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

    def wait_until_ready(self) -> None:
        """Raises `CannotStart` when the server ends or the time is over."""
        deadline = time.monotonic() + self._options.start_timeout_s
        while not is_ready(self._options.host, self._options.http_port):
            try:
                self.process.wait(0.05)
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    raise CannotStart(self._why_it_waits()) from None
            else:
                raise CannotStart(self.why_it_ended())
        self._chatter.forget()

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

    def stop(self) -> None:
        """Close the guard's lifeline and wait; what a killed guard left is removed here."""
        cast(IO[bytes], self.process.stdin).close()
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
    three times in a minute; then `on_gone` is called, from a thread, with the reason.
    """

    def __init__(
        self,
        options: Options,
        *,
        say: Callable[[str], None] = say,
        on_gone: Callable[[str], None] = say,
    ) -> None:
        self.options = options
        self._say = say
        self._on_gone = on_gone
        self._closing = threading.Event()

    def __enter__(self) -> EmbeddedTriton:
        check_repositories(self.options.model_repositories)
        check_distinct(self.options.ports)
        for flag, port in self.options.ports.items():
            check_port(self.options.host, port, flag)
        self._files = install(self._say)
        self._begin()
        self._keeper = threading.Thread(target=self._keep, name="triton-keeper", daemon=True)
        self._keeper.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing.set()
        while self._keeper.is_alive():
            self._life.stop()  # again, if the keeper was just beginning another life
            self._keeper.join(0.1)

    @property
    def guard_pid(self) -> int:
        """The guard's process id; the server is its only child."""
        return self._life.process.pid

    def _begin(self) -> None:
        self._life = Life(self.options, self._files, self._hear)
        try:
            self._life.wait_until_ready()
        except BaseException:
            self._life.stop()
            raise

    def _hear(self, essence: str) -> None:
        if not self._closing.is_set():
            self._say(essence)

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
                self._say(f"{why}; starting it again")
                self._begin()
            except (CannotStart, OSError) as exc:
                if not self._closing.is_set():
                    self._on_gone(f"{why}; {exc}")
                return
            self._say("Triton is ready again")


def check_repositories(folders: tuple[Path, ...]) -> None:
    for folder in folders:
        if not folder.is_dir():
            raise CannotStart(
                f"there is no model repository at {folder}; name one with --model-repository"
            )


def check_distinct(ports: Mapping[str, int]) -> None:
    """Raise `CannotStart` when two flags name one port."""
    flags: dict[int, str] = {}
    for flag, port in ports.items():
        if port in flags:
            raise CannotStart(f"{flags[port]} and {flag} both name port {port}; give each its own")
        flags[port] = flag


def check_port(host: str, port: int, flag: str) -> None:
    """Raise `CannotStart` if the port is taken; Triton's own words hide which flag names it."""
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
