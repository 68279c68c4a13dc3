"""Pages of metrics, and Prometheus' checks of them."""

from __future__ import annotations

import subprocess

from tests.support.missing import find_program
from tests.support.servers import ROOT
from tests.support.wait import TIMEOUT_S

TRITON = (ROOT / "tests/data/triton_metrics.txt").read_text()


def check_with_promtool(page: str) -> list[str]:
    """Its complaints about names. Its exit status is 1 for a page that cannot be read, 3 for such lint."""
    command = [find_program("promtool", "prometheus"), "check", "metrics"]
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
