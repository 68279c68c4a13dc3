"""A real Prometheus."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import yaml

from tests.support.missing import find_program
from tests.support.servers import free_ports
from tests.support.wait import TIMEOUT_S

if TYPE_CHECKING:
    from typing_extensions import Self


class Prometheus:
    """A Prometheus with these scrape jobs and rules, which all have its interval.

    It scrapes for the first time after 5 s or so.
    """

    def __init__(
        self,
        folder: Path,
        jobs: Sequence[dict[str, Any]],
        rules: Sequence[Path] = (),
        interval: str = "1s",
    ) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        config = folder / "prometheus.yaml"
        document = {
            "global": {"scrape_interval": interval, "evaluation_interval": interval},
            "rule_files": [str(copy_rules(path, folder)) for path in rules],
            "scrape_configs": list(jobs),
        }
        config.write_text(yaml.safe_dump(document))
        self._log = folder / "prometheus.log"
        command = [find_program("prometheus"), f"--config.file={config}", "--log.format=json"]
        command += [
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        self._output = self._log.open("wb")
        self._process = subprocess.Popen(command, stdout=self._output, stderr=self._output)

    def ask(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=TIMEOUT_S).is_success
        except httpx.TransportError:
            return False

    def healthy(self) -> set[str]:
        """The jobs whose targets it has all scraped, and could read."""
        targets = self.ask("targets")["activeTargets"]
        failed = {t["labels"]["job"] for t in targets if t["health"] != "up"}
        return {t["labels"]["job"] for t in targets} - failed

    def query(self, expression: str) -> list[dict[str, Any]]:
        return list(self.ask("query", query=expression)["result"])

    def complaints(self) -> list[str]:
        return re.findall(r'.*"level":"(?:warn|error)".*', self._log.read_text())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._output.close()


def copy_rules(path: Path, folder: Path) -> Path:
    """Copy a file of rules without the intervals of its groups."""
    document = yaml.safe_load(path.read_text())
    for group in document["groups"]:
        group.pop("interval", None)
    copy = folder / path.name
    copy.write_text(yaml.safe_dump(document))
    return copy
