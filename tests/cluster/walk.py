"""A new user's path through docs/operate/kubernetes.md: its commands in their order, as the page has them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.cluster.kubectl import ClusterError, run_command
from tests.support.servers import ROOT

DEPLOY: Final = ROOT / "docs" / "operate" / "kubernetes.md"
TIMEOUT_S: Final = 660.0  # the page waits for ten minutes
# They build and move images, and install the command: all of that is there.
PREPARATION: Final = ("docker ", "kind ", "pip ")
KEY: Final = re.compile(r"tgw_[\w-]+")
PLACEHOLDER: Final = "tgw_…"
# What a command prints, by a part of it.
EXPECTED: Final = {
    "/infer": '"label":"7"',
    "key create": "tgw_",
    "doctor": "ok",
    " get secrets": "triton-gateway-keys",
}


def read_journeys() -> dict[str, list[str]]:
    """Return the commands by what they install, from the preparation to the end.

    Raises `ValueError` if the page has more or fewer blocks of commands than are known here.
    """
    sections = read_sections(DEPLOY.read_text())
    dev, prod, ask, wait = read_blocks(sections["Install"])
    (chart,) = read_blocks(sections["Helm"])
    (end,) = read_blocks(sections["Uninstall"])
    end_of_dev, *end_of_chart = re.findall(r"`((?:kubectl|helm) [^`]+)`", sections["Uninstall"])
    # "As above", the chart needs them before it is installed.
    secrets = [each for each in prod if "key create" in each or "create secret" in each]
    return {
        "dev": [*dev, end_of_dev],
        "prod": [*prod, *ask, *wait, *end],
        "chart": [chart[0], *secrets, *chart[1:], *end_of_chart],
    }


def read_sections(markdown: str) -> dict[str, str]:
    """Return the text below each heading, up to the next heading of any level."""
    _, *parts = re.split(r"^##+ (.*)$", markdown, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def read_blocks(markdown: str) -> list[list[str]]:
    """Return the commands of each block of shell commands."""
    blocks = re.findall(r"^```sh\n(.*?)^```", markdown, re.DOTALL | re.MULTILINE)
    return [re.sub(r" *\\\n *", " ", block).splitlines() for block in blocks]


class Walk:
    """A shell in a folder, whose `bin` comes first in PATH, with other words in place of some patterns."""

    def __init__(self, folder: Path, words: Mapping[str, str]) -> None:
        path = (str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"])
        own = {"PATH": os.pathsep.join(path), "PYTHONPATH": str(ROOT)}
        self._environment = {**os.environ, **own}
        self._folder = folder
        self._words = words
        self._keys: list[str] = []
        self._background: list[subprocess.Popen[bytes]] = []

    def run(self, command: str) -> None:
        """Raises `ClusterError` if the command fails, or does not print what the page says."""
        written = self._insert_key(command)
        for pattern, word in self._words.items():
            written = re.sub(pattern, word, written)
        words = ["bash", "-o", "pipefail", "-c", written]
        if written.endswith("&"):
            words[-1] = f"exec {written.rstrip('& ')}"
            process = subprocess.Popen(words, cwd=self._folder, env=self._environment)
            self._background.append(process)
            return
        printed = run_command(
            words, timeout_s=TIMEOUT_S, folder=self._folder, environment=self._environment
        )
        for part, expected in EXPECTED.items():
            if part in command and expected not in printed:
                raise ClusterError(f"{command}: '{expected}' is not in what it printed: {printed}")
        self._keys += KEY.findall(printed) if "key create" in command else ()

    def close(self) -> None:
        for process in self._background:
            process.terminate()
            process.wait()

    def _insert_key(self, command: str) -> str:
        """Replace the placeholder: the first key that was printed is the administrator's."""
        if PLACEHOLDER not in command:
            return command
        key = self._keys[0] if "--key " in command else self._keys[-1]
        return command.replace(PLACEHOLDER, key)
