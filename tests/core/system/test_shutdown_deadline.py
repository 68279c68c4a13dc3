"""SIGTERM while something hangs for good: a disk, the event loop, a thread that keeps the interpreter."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.servers import ROOT, Command, free_ports, workers
from tests.support.wait import wait_until

pytestmark = pytest.mark.long

# Far longer than any test waits for the process's end.
FOREVER_S = 1000
NOBODY = "http://127.0.0.1:1"


@contextmanager
def locked(state: Path, command: Command, processes: int) -> Iterator[None]:
    """Lock the state in the block, for which its processes wait as for a disk that hangs."""
    with closing(sqlite3.connect(state, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        wait_until(lambda: command.output.count("written: database is locked") >= processes)
        yield


@contextmanager
def serving(tmp_path: Path, *arguments: str) -> Iterator[tuple[Command, str]]:
    (port,) = free_ports(1)
    environment = {
        "GATEWAY_TRITON_URLS": NOBODY,
        "GATEWAY_STATE": f"file://{tmp_path}/state.db",
        "GATEWAY_SHUTDOWN_S": "1",
    }
    command = Command(
        "serve", "--port", str(port), *arguments, environment=environment, guarded=False
    )
    try:
        command.wait_for("serving")
        url = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{url}/livez", timeout=30).status_code == 200
        yield command, url
    finally:
        with suppress(psutil.NoSuchProcess):
            for each in workers(command):
                each.kill()
        command.process.kill()
        command.end()
        assert command.process.stdin is not None
        command.process.stdin.close()


@pytest.mark.fault("a disk, a thread or the event loop hangs during shutdown")
@pytest.mark.parametrize("processes", [1, 2])
def test_state_that_hangs_does_not_prevent_the_exit(tmp_path: Path, processes: int) -> None:
    with (
        serving(tmp_path, "--workers", f"{processes}") as (command, _),
        locked(tmp_path / "state.db", command, processes),
    ):
        os.kill(command.pid, signal.SIGTERM)
        assert command.end(60) == 0


# A real gateway, but for one path at which the test has it hang.
HANGING = """
import ctypes, sys, time
from gateway.app import create_app
from gateway.process_exit import prompt_exit
from gateway.server.http import create_server
from gateway.server.launch import configure_process

settings, say = configure_process()
application = create_app(settings)
HANGS = {"/loop": lambda: time.sleep(1000), "/interpreter": lambda: ctypes.PyDLL(None).sleep(1000)}

async def hanging(scope, receive, send):
    HANGS.get(scope.get("path"), bool)()
    await application(scope, receive, send)

with prompt_exit():
    create_server(hanging, settings, "127.0.0.1", int(sys.argv[1]), lambda: say("serving")).run()
"""


@contextmanager
def hanging(**settings: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    (port,) = free_ports(1)
    environment = {"GATEWAY_TRITON_URLS": NOBODY, "GATEWAY_STATE": "memory:", **settings}
    with subprocess.Popen(
        [sys.executable, "-c", HANGING, str(port)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "GATEWAY_DRAIN_S": "0", "GATEWAY_SHUTDOWN_S": "1", **environment},
    ) as process:
        try:
            assert process.stderr is not None
            assert any("serving" in line for line in process.stderr)
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: answers(url))
            yield process, url
        finally:
            process.kill()


def answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/livez", timeout=1).status_code == 200
    return False


def hang(url: str) -> None:
    """Send the request after which nothing is answered."""

    def ask() -> None:
        with suppress(httpx.HTTPError):
            httpx.get(url, timeout=FOREVER_S)

    threading.Thread(target=ask, daemon=True).start()
    wait_until(lambda: not answers(url.rpartition("/")[0]))


@pytest.mark.fault("a disk, a thread or the event loop hangs during shutdown")
@pytest.mark.parametrize("settings", [{}, {"GATEWAY_DRAIN_S": "1"}], ids=["at once", "draining"])
def test_hung_event_loop_is_ended_at_the_shutdown_deadline(settings: dict[str, str]) -> None:
    """Takes long: the times for draining and for shutting down go by."""
    with hanging(**settings) as (process, url):
        hang(f"{url}/loop")
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the shutdown deadline (GATEWAY_DRAIN_S, GATEWAY_SHUTDOWN_S) has passed" in stderr


def test_thread_that_holds_the_interpreter_lock_is_ended_by_the_kernel() -> None:
    """No line of the gateway can run then, and none can be logged.

    Takes long: the time for shutting down, and what the kernel waits after it, go by.
    """
    with hanging(GATEWAY_DRAIN_S="5") as (process, url):
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{url}/readyz").json().get("draining"))
        hang(f"{url}/interpreter")
        assert process.wait(120) == -signal.SIGALRM


LEFT = """
import sys, threading, time
from gateway.process_exit import prompt_exit
from gateway.messages import CommandError

threading.Thread(target=time.sleep, args=(1000,), name="decode_0").start()
with prompt_exit():
    {ending}
"""


@pytest.mark.parametrize(
    ("ending", "status", "message"),
    [
        ("pass", 0, ""),
        ("raise CommandError('Triton is gone')", 1, "triton-gateway: Triton is gone"),
        ("raise SystemExit(143)", 143, ""),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise ValueError('a fault')", 1, "ValueError: a fault"),
    ],
)
def test_exit_status_and_message_are_kept_if_a_thread_is_left(
    ending: str, status: int, message: str
) -> None:
    code = LEFT.format(ending=ending)
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == status
    assert message in run.stderr
    assert "exiting without waiting for thread decode_0" in run.stderr
