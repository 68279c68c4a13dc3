"""The parent process of a tritonserver, which cleans up after it.

It runs as a separate script, on the standard library only, between the owner and the server. The owner
holds the other end of standard input: when that closes, for whatever reason, the server is stopped. The
reaper adopts the server's orphans (stubs of the Python backend), kills them, and removes the server's
shared memory, so that a crash of any one process leaves nothing behind.
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
# Additional arguments of the server, one per line: every user can read this script's arguments, but only
# its own user can read its environment (proc(5)).
ARGUMENTS_VARIABLE = "TRITON_GATEWAY_SERVER_ARGUMENTS"


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_for_stop(server: subprocess.Popen[bytes], signal_pipe: int) -> None:
    """Return when the server has exited, the owner has closed its end, or a stop signal arrives."""
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
    """Reap adopted processes that have exited, but not the server, which its own `poll` reaps."""
    with suppress(ChildProcessError):
        while exited := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if exited.si_pid == server_pid:
                return
            os.waitpid(exited.si_pid, 0)


def stop_server(server: subprocess.Popen[bytes], grace_s: float) -> None:
    server.terminate()
    try:
        server.wait(grace_s)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def kill_orphans() -> None:
    # As the subreaper, this process is the parent of the server's orphans.
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        with suppress(OSError):  # the kernel may lack this file
            for pid in children.read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        try:
            exited, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if exited == 0:
            time.sleep(0.01)


def kill_processes_by_prefix(prefix: str) -> None:
    """Kill the stubs that a killed reaper left: its prefix is one of their arguments."""
    for arguments in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"\0{prefix}".encode() in arguments.read_bytes():
                os.kill(int(arguments.parent.name), signal.SIGKILL)
        except OSError:
            continue  # it has just exited, or belongs to another user


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
