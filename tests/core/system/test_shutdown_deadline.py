"""SIGTERM while something hangs for good: a disk, the event loop, a thread that keeps the interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.servers import ROOT, Command, free_ports, workers
from tests.support.wait import wait_until

# Far longer than any test waits for the process's end.
FOR_EVER_S = 1000
NOBODY = "http://127.0.0.1:1"


def hang_disk(state: Path) -> None:
    """Put a pipe in the place of the state file: who reads it waits until somebody writes there."""
    pipe = state.with_suffix(".pipe")
    os.mkfifo(pipe)
    pipe.rename(state)


def is_hanging(pid: int) -> bool:
    """Whether a thread of the process waits in the opening of a pipe."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            found.append((task / "wchan").read_text())
    return "wait_for_partner" in found or "fifo_open" in found


@contextmanager
def serving(tmp_path: Path, *arguments: str) -> Iterator[tuple[Command, str]]:
    state = tmp_path / "state.json"
    state.write_text('{"format": 1, "revision": 0, "models": {}}')
    (port,) = free_ports(1)
    environment = {
        "GATEWAY_TRITON_URLS": NOBODY,
        "GATEWAY_STATE": f"file://{state}",
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


@pytest.mark.long
@pytest.mark.fault("a disk, a thread or the event loop hangs during shutdown")
def test_a_disk_that_hangs_is_left_behind(tmp_path: Path) -> None:
    with serving(tmp_path) as (command, _):
        hang_disk(tmp_path / "state.json")
        wait_until(lambda: is_hanging(command.pid))
        os.kill(command.pid, signal.SIGTERM)
        began = time.monotonic()
        assert command.end(60) == 0
        print(f"ended {time.monotonic() - began:.1f} s after SIGTERM")
    assert "exiting without waiting for thread state_0" in command.lines[-1]


@pytest.mark.long
@pytest.mark.fault("a disk, a thread or the event loop hangs during shutdown")
def test_so_do_workers(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers", "2") as (command, _):
        wait_until(lambda: len(workers(command)) == 2)
        hang_disk(tmp_path / "state.json")
        wait_until(lambda: all(is_hanging(worker.pid) for worker in workers(command)))
        os.kill(command.pid, signal.SIGTERM)
        assert command.end(60) == 0


# A real gateway, but for one path at which the test has it hang.
HANGING = """
import ctypes, sys, time
from gateway.app import create_app
from gateway.process_exit import prompt_exit
from gateway.server import create_server
from gateway.launch import configure_process

settings, say = configure_process()
application = create_app(settings)
WAYS = {"/loop": lambda: time.sleep(1000), "/interpreter": lambda: ctypes.PyDLL(None).sleep(1000)}

async def hanging(scope, receive, send):
    WAYS.get(scope.get("path"), bool)()
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
            assert "serving" in process.stderr.readline()
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
    """From this request on nothing is answered."""

    def ask() -> None:
        with suppress(httpx.HTTPError):
            httpx.get(url, timeout=FOR_EVER_S)

    threading.Thread(target=ask, daemon=True).start()
    wait_until(lambda: not answers(url.rpartition("/")[0]))


@pytest.mark.long
@pytest.mark.fault("a disk, a thread or the event loop hangs during shutdown")
@pytest.mark.parametrize("settings", [{}, {"GATEWAY_DRAIN_S": "1"}], ids=["at once", "draining"])
def test_a_loop_that_hangs_ends_with_the_time_for_shutting_down(settings: dict[str, str]) -> None:
    """Takes long: the times for draining and for shutting down go by."""
    with hanging(**settings) as (process, url):
        hang(f"{url}/loop")
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the shutdown deadline (GATEWAY_DRAIN_S, GATEWAY_SHUTDOWN_S) has passed" in said


@pytest.mark.long
def test_a_thread_that_keeps_the_interpreter_is_ended_by_the_kernel() -> None:
    """No line of ours can run then, and none can be said.

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


@pytest.mark.long
@pytest.mark.parametrize(
    ("ending", "status", "told"),
    [
        ("pass", 0, ""),
        ("raise CommandError('Triton is gone')", 1, "triton-gateway: Triton is gone"),
        ("raise SystemExit(143)", 143, ""),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise ValueError('a fault')", 1, "ValueError: a fault"),
    ],
)
def test_the_status_and_the_sentence_of_an_end_stay_as_they_are(
    ending: str, status: int, told: str
) -> None:
    code = LEFT.format(ending=ending)
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == status
    assert told in run.stderr
    assert "exiting without waiting for thread decode_0" in run.stderr
