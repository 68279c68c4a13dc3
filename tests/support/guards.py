"""Programs under a guard, the gateway's own reaper, which ends them even if the tests are killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from gateway.embedded import reaper
from tests.support.wait import TIMEOUT_S, wait_until

if TYPE_CHECKING:
    from typing_extensions import Self

NO_SHARED_MEMORY = f"none{os.getpid()}"


def start_guarded(
    command: Sequence[str],
    *,
    grace_s: int = 1,
    prefix: str = NO_SHARED_MEMORY,
    output: int | IO[bytes] = subprocess.DEVNULL,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a guard with this program as its only child, which ends once the guard's input is closed."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, str(grace_s), prefix, *command],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )


def child_of(guard_pid: int) -> int:
    """The process id of the guard's only child."""
    children = Path(f"/proc/{guard_pid}/task/{guard_pid}/children")
    return int(children.read_text().split()[0])


class GuardedServer:
    """A program that listens on one port, and that a test stops and starts again."""

    def __init__(
        self, port: int, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.port = port
        self._command = command
        self._environment = environment
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._guard = start_guarded(self._command, environment=self._environment)
        wait_until(self._listens)

    def _listens(self) -> bool:
        assert self._guard is not None
        assert self._guard.poll() is None, f"{self._command[0]} ended"
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), TIMEOUT_S):
            return True
        return False

    def signal(self, number: int) -> None:
        assert self._guard is not None
        os.kill(child_of(self._guard.pid), number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait(TIMEOUT_S)
        self._guard = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
