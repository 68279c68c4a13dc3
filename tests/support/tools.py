"""External programs that tests need."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.support.servers import ROOT
from tests.support.wait import TIMEOUT_S

TRITON = (ROOT / "tests/data/triton_metrics.txt").read_text()


def program(name: str, package: str = "prometheus") -> str:
    """Return the path of an installed program."""
    path = shutil.which(name)
    if path is None:
        pytest.fail(f"this test needs {name}: apt-get install {package}", pytrace=False)
    return path


def check_with_promtool(page: str) -> list[str]:
    """Its complaints about names. Its exit status is 1 for a page that cannot be read, 3 for such lint."""
    command = [program("promtool"), "check", "metrics"]
    ended = subprocess.run(command, input=page.encode(), capture_output=True, timeout=TIMEOUT_S)
    assert ended.returncode in (0, 3), ended.stderr.decode()
    return ended.stderr.decode().splitlines()


def of_models(count: int) -> bytes:
    """A Triton's page as it would be with so many models."""
    lines = []
    for sample in TRITON.splitlines():
        if 'model="echo"' in sample:
            lines += [sample.replace('"echo"', f'"model_{number}"') for number in range(count)]
        elif "model=" not in sample:
            lines.append(sample)
    return ("\n".join(lines) + "\n").encode()
