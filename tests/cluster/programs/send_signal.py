"""`send_signal.py POD_UID PROGRAM NUMBER` sends a signal to a program of a pod, from a pod with `hostPID`.

The first process of a container ignores SIGKILL and SIGSTOP of its own container. Needs Python alone.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


def find_processes(pod_uid: str, program: str) -> list[int]:
    """Return the processes of a pod that run this program, or a script of this name."""
    names = (pod_uid, pod_uid.replace("-", "_"))  # by the drivers cgroupfs and systemd
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if not folder.name.isdigit():
                continue
            group = (folder / "cgroup").read_text()
            words = (folder / "cmdline").read_text(errors="replace").split("\0")[:2]
            is_program = program in [Path(word).name for word in words]
            if is_program and any(name in group for name in names):
                found.append(int(folder.name))
    return found


def main(pod_uid: str, program: str, number: str) -> None:
    processes = find_processes(pod_uid, program)
    if not processes:
        sys.exit(f"no process {program} of pod {pod_uid} is on this node")
    for process in processes:
        os.kill(process, int(number))
    print(*processes)


if __name__ == "__main__":
    main(*sys.argv[1:])
