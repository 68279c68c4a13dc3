"""Processes of the tests: unit tests start none, and none is left when the tests have ended."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

PROCESS_EVENTS: Final = frozenset(
    {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec", "os.system"}
)
END_S: Final = 15.0

# The events that have not happened since a test began: the hook removes one by `pop(event, arguments)`.
_absent_events: dict[str, object] = {}
sys.addaudithook(_absent_events.pop)


@contextmanager
def forbid_processes() -> Iterator[None]:
    """Raise AssertionError if a process was started in the block."""
    _absent_events.update(dict.fromkeys(PROCESS_EVENTS))
    yield
    started = PROCESS_EVENTS - _absent_events.keys()
    assert not started, f"a unit test must not start a process: {', '.join(started)}"


# A variable of the processes of a run, with the run's folder for temporary files.
RUN_VARIABLE = "TRITON_GATEWAY_TESTS"


def find_processes(temporary_folder: Path) -> list[psutil.Process]:
    """Return the other processes of the run with this folder for temporary files."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            inherited = process.environ().get(RUN_VARIABLE) == str(temporary_folder)
            if inherited and process.pid != os.getpid():
                found.append(process)
    return found


def end_processes(temporary_folder: Path) -> list[str]:
    """Wait until the processes of the tests have ended. Kill and return those that do not."""
    deadline = time.monotonic() + END_S
    while find_processes(temporary_folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = []
    for process in find_processes(temporary_folder):
        with suppress(psutil.Error):
            left.append(f"{process.pid} {' '.join(process.cmdline())}")
            process.kill()
    return left
