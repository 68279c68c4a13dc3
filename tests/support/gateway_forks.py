"""Gateways forked from a process that has imported their code: imports are most of the CPU time of a start.

Each worker of the tests has one such process, the server. It runs no thread, forks a guard for each command,
and the guard forks the command. The guard does for the command what `reaper.py` does for a tritonserver: the
command ends when the tests close the standard input of its guard, or end themselves.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple, NoReturn, cast

import psutil

from gateway import cli
from gateway.embedded import reaper
from tests.support import gateway_main

ROOT = Path(__file__).parents[2]
MODULES = (
    *("gateway.app", "gateway.server.launch", "gateway.server.workers"),
    # These are imported at the first use.
    *("anyio._backends._asyncio", "typer.rich_utils"),
)
GRACE_S = 10.0
MESSAGE_BYTES = 200_000


class Order(NamedTuple):
    """A command, and where it runs."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str


class ForkedProcess:
    """A guard, with the methods of a `Popen` that tests use."""

    def __init__(self, pid: int, stdin: IO[bytes], exited: int) -> None:
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None
        self._exited = exited

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            readable, _, _ = select.select([self._exited], [], [], timeout)
            if not readable:
                raise subprocess.TimeoutExpired("gateway", timeout or 0)
            status = os.read(self._exited, 16)
            os.close(self._exited)
            self.returncode = int(status) if status else -signal.SIGKILL
            with suppress(psutil.NoSuchProcess):  # until the kernel has removed it
                psutil.Process(self.pid).wait(GRACE_S)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def connect_to_server() -> socket.socket:
    """The server of this process of the tests; it ends when the connection does."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, its):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(its.fileno())],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=ROOT,
            start_new_session=True,
        )

    def stop() -> None:
        ours.close()
        process.wait(GRACE_S)

    _stop_server.callback(stop)
    return ours


# Closed at the end of the tests, or of the process.
_stop_server = ExitStack()
atexit.register(_stop_server.close)


def stop_server() -> None:
    """End the server of this process, if there is one. Gateways can no longer be started then."""
    _stop_server.close()


def fork_gateway(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    standard_files: tuple[int, int, int],
) -> ForkedProcess:
    """Start `triton-gateway` with these arguments and standard files."""
    connection = connect_to_server()
    held, holding = os.pipe()
    our_exited, exited = os.pipe()
    try:
        order = pickle.dumps(Order(list(arguments), dict(environment), str(folder)))
        socket.send_fds(connection, [order], [held, exited, *standard_files])
        pid = int(connection.recv(16))
    finally:
        os.close(held)
        os.close(exited)
    return ForkedProcess(pid, os.fdopen(holding, "wb"), our_exited)


def run_gateway(
    *arguments: str | Path | int,
    environment: Mapping[str, str] = os.environ,
    given: str = "",
    timeout_s: float = 60,
) -> subprocess.CompletedProcess[str]:
    """Run `triton-gateway` with these arguments until it has exited."""
    words = list(map(str, arguments))
    with TemporaryFile("w+") as stdin, TemporaryFile("w+") as stdout, TemporaryFile("w+") as stderr:
        stdin.write(given)
        stdin.seek(0)
        files = (stdin.fileno(), stdout.fileno(), stderr.fileno())
        process = fork_gateway(words, environment, ROOT, files)
        with process.stdin:
            status = process.wait(timeout_s)
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess(words, status, stdout.read(), stderr.read())


def serve_orders(connection: socket.socket) -> list[str]:
    """Fork a guard for each order. Return in each forked command, with its arguments."""
    signal.signal(signal.SIGCHLD, reap_guards)
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 5)
        if not message:
            os._exit(0)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        pid = os.fork()
        if pid == 0:
            connection.close()
            return guard(pickle.loads(message), *descriptors)
        connection.send(b"%d" % pid)
        for descriptor in descriptors:
            os.close(descriptor)


def reap_guards(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def guard(order: Order, held: int, exited: int, *standard_files: int) -> list[str]:
    """Guard the command until it has exited. Return in the command itself, with its arguments."""
    os.setsid()
    reaper.prctl(reaper.PR_SET_CHILD_SUBREAPER, 1)
    signals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    pid = os.fork()
    if pid:
        os.dup2(held, 0)
        for descriptor in (1, 2, held, *standard_files):
            os.close(descriptor)
        watch_command(cast("subprocess.Popen[bytes]", Child(pid)), signals, exited)
    become_command(order, standard_files)
    for descriptor in (held, exited, *standard_files, signals, wakeup):
        os.close(descriptor)
    return order.arguments


def watch_command(command: subprocess.Popen[bytes], signals: int, exited: int) -> NoReturn:
    reaper.wait_for_stop(command, signals)
    reaper.stop_server(command, GRACE_S)
    reaper.kill_orphans()
    code = command.returncode
    os.write(exited, b"%d" % (code if code >= 0 else 128 - code))
    os.kill(os.getpid(), signal.SIGKILL)  # Nothing that the command does at its end is done twice.
    raise SystemExit


def become_command(order: Order, standard_files: Sequence[int]) -> None:
    """Give this process what a new one has: a session, signals, standard files, environment and folder."""
    reaper.die_with_parent()
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    for file, standard in zip(standard_files, (0, 1, 2), strict=True):
        os.dup2(file, standard)
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.folder)


class Child:
    """A child, with the methods of a `Popen` that `reaper.py` uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        if timeout is not None and self.poll() is None:
            with open_pidfd(self.pid) as exited:
                if not select.select([exited], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("gateway", timeout)
        return self._wait(0)

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def open_pidfd(pid: int) -> IO[bytes]:
    """A file that is readable once the process has exited."""
    return os.fdopen(os.pidfd_open(pid), "rb", 0)


if __name__ == "__main__":
    gc.disable()
    for name in MODULES:
        import_module(name)
    cli.build_command()
    gc.enable()
    gc.freeze()
    sys.argv[1:] = serve_orders(socket.socket(fileno=int(sys.argv[1])))
    gateway_main.run()
