"""The configuration that compose.yaml gives Prometheus, as Prometheus' own tool reads it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.support.servers import ROOT
from tests.support.tools import program


def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    for name in ("compose/prometheus.yml", "monitoring/rules.yml", "monitoring/alerts.yml"):
        shutil.copy(ROOT / "deploy" / name, tmp_path)
    command = [program("promtool"), "check", "config", str(tmp_path / "prometheus.yml")]
    subprocess.run(command, check=True)
