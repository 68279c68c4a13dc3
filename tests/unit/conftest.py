"""A unit test starts no process: what needs one belongs to tests/integration or tests/system."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

PROCESS_EVENTS = frozenset(
    {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec", "os.system"}
)
_started: list[str] = []


def record_process(event: str, arguments: tuple[object, ...]) -> None:
    if event in PROCESS_EVENTS:
        _started.append(f"{event}{arguments[:2]!r}"[:200])


sys.addaudithook(record_process)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Forget what other lanes started; the fixtures of this test have not been set up yet."""
    _started.clear()


@pytest.fixture(autouse=True)
def no_process() -> Iterator[None]:
    """Fail a test that started a process, or whose fixtures did."""
    yield
    assert not _started, f"a unit test must not start a process: {_started[0]}"
