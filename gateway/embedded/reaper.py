"""Keeps one tritonserver, and sees to it that nothing of it outlives its owner.

Run as a script of its own, on the standard library alone, between the owner and the server. The owner
holds the other end of standard input: when that closes, however the owner ended, the server is stopped.
The guard adopts every orphan of the server (a Python backend's stubs), ends them, and removes the
server's shared-memory regions, so that a crash of any one side leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SHARED_MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lives on Linux
# Further arguments of the server, one a line: everybody may read this script's own, and only its user
# may read its environment (proc(5)).
ARGUMENTS_VARIABLE = "TRITON_GATEWAY_SERVER_ARGUMENTS"


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_for_stop(server: subprocess.Popen[bytes], signal_pipe: int) -> None:
    """Return when the server has ended, the owner has gone, or a signal asks to stop."""
    while server.poll() is None:
        readable, _, _ = select.select([0, signal_pipe], [], [])
        if 0 in readable and not os.read(0, 4096):
            return
        if signal_pipe in readable:
            received = os.read(signal_pipe, 64)
            if signal.SIGTERM in received or signal.SIGINT in received:
                return
            reap_orphans(server.pid)


def reap_orphans(server_pid: int) -> None:
    """Bury adopted processes that ended by themselves, but leave the server to its own `poll`."""
    with suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == server_pid:
                return
            os.waitpid(ended.si_pid, 0)


def stop_server(server: subprocess.Popen[bytes], grace_s: float) -> None:
    """Ask the server to end, and after `grace_s` seconds insist."""
    server.terminate()
    try:
        server.wait(grace_s)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def kill_orphans() -> None:
    """Kill and reap what the server left: as their subreaper we are now their parent."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        with suppress(OSError):  # without this file there is no list of them
            for pid in children.read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if ended == 0:
            time.sleep(0.01)


def kill_processes_by_prefix(prefix: str) -> None:
    """Kill the stubs of a guard that was killed itself: its prefix is among their arguments."""
    for arguments in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"\0{prefix}".encode() in arguments.read_bytes():
                os.kill(int(arguments.parent.name), signal.SIGKILL)
        except OSError:
            continue  # it has just ended, or is somebody else's


def remove_shared_memory(prefix: str) -> None:
    for region in SHARED_MEMORY_FOLDER.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)


def main(grace_s: str, shared_memory_prefix: str, *command: str) -> int:
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    server = subprocess.Popen(
        [command[0], *os.environ.pop(ARGUMENTS_VARIABLE, "").splitlines(), *command[1:]],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - there are no threads here
    )
    try:
        wait_for_stop(server, signals)
        stop_server(server, float(grace_s))
    finally:
        kill_orphans()
        remove_shared_memory(shared_memory_prefix)
    return server.returncode


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.exit(code if code >= 0 else 128 - code)
