"""A unit test starts no process: what needs one belongs to tests/integration or tests/system."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

PROCESS_EVENTS = frozenset(
    {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec", "os.system"}
)
# The events that have not happened since the test began. The hook takes one out, as `pop(event, arguments)`.
# It is no function of Python's: while one runs, another thread cannot set its trace function for coverage.
_absent: dict[str, object] = {}
sys.addaudithook(_absent.pop)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Forget what other lanes started; the fixtures of this test have not been set up yet."""
    _absent.update(dict.fromkeys(PROCESS_EVENTS))


@pytest.fixture(autouse=True)
def no_process() -> Iterator[None]:
    """Fail a test that started a process, or whose fixtures did."""
    yield
    started = PROCESS_EVENTS - _absent.keys()
    assert not started, f"a unit test must not start a process: {', '.join(started)}"
