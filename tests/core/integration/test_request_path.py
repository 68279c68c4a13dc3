"""The number of functions and modules between a handler and the write to the replica."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.servers import ROOT

pytestmark = pytest.mark.long

MAX_FUNCTIONS = 22
MAX_MODULES = 11


def test_request_passes_few_functions_and_modules() -> None:
    command = [sys.executable, "-m", "tests.support.request_walk"]
    walk = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    functions = [line.split() for line in walk.splitlines()]
    modules = {module for module, _ in functions}
    assert ["fleet/dispatch.py", "_send_to_replicas"] in functions
    assert len(functions) <= MAX_FUNCTIONS, walk
    assert len(modules) <= MAX_MODULES, sorted(modules)
