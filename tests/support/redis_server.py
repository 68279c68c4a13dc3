"""A real Redis that a test starts and stops."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote
from uuid import uuid4

import pytest
import redis

from gateway.embedded import reaper
from tests.support.servers import free_ports
from tests.support.wait import TIMEOUT_S, wait_until


class RedisServer:
    """A redis-server as a process, under a guard, so that it never outlives the tests."""

    def __init__(self, folder: Path, *options: str) -> None:
        if shutil.which("redis-server") is None:
            pytest.fail("redis-server is missing: apt-get install redis-server", pytrace=False)
        (self.port,) = free_ports(1)
        listens = () if "--tls-port" in options else ("--port", str(self.port))
        self._command = [
            *(sys.executable, "-I", "-S", reaper.__file__, "1", f"none{os.getpid()}"),
            *("redis-server", "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
            *("--dir", str(folder), *listens),
            *(option.replace("PORT", str(self.port)) for option in options),
        ]
        self._guard: subprocess.Popen[bytes] | None = None
        self.start()

    def url(self, **options: str) -> str:
        """With keys of its own, so that the tests do not meet."""
        query = "&".join(f"{name}={quote(value)}" for name, value in options.items())
        return f"redis://127.0.0.1:{self.port}/0?prefix={uuid4()}:&{query}".rstrip("&")

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port)

    def start(self) -> None:
        self._guard = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
        wait_until(self._listens)

    def _listens(self) -> bool:
        assert self._guard is not None
        assert self._guard.poll() is None, "redis-server ended"
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), TIMEOUT_S):
            return True
        return False

    def signal(self, number: int) -> None:
        assert self._guard is not None
        children = Path(f"/proc/{self._guard.pid}/task/{self._guard.pid}/children")
        os.kill(int(children.read_text()), number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait(TIMEOUT_S)
        self._guard = None


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options)
    try:
        yield server
    finally:
        server.stop()
