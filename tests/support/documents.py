"""Console examples of the documents, and how to run them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx

from tests.support.servers import ROOT

DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


PROGRAMS = {"curl": ["curl"], "triton-gateway": [sys.executable, "-m", "gateway"]}


READMES = sorted(ROOT.glob("triton_repo_examples/*/README.md"))


# Their examples are about models that they make; tests/system runs them: test_bring_your_model.py and
# test_on_demand_walkthrough.py.
OWN_SERVER = "bring-your-model.md"
ON_DEMAND = "on-demand.md"


def examples(documents: Iterable[Path]) -> Iterator[tuple[str, str, str]]:
    """Every `$ command` of a console block, and what the document says that it prints."""
    for path in documents:
        for block in re.findall(r"```console\n(.*?)```", path.read_text(), re.DOTALL):
            for example in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, answer = example.partition("\n")
                yield path.name, command, answer.strip()


def matches(answer: str, printed: str) -> bool:
    """`…` in a document stands for anything."""
    return (
        re.fullmatch(".*".join(map(re.escape, answer.split("…"))), printed, re.DOTALL) is not None
    )


def assert_prints(gateway: httpx.Client, command: str, answer: str) -> None:
    words = shlex.split(command.replace("localhost:8080", str(gateway.base_url).rstrip("/")))
    environment = {**os.environ, "TRITON_GATEWAY_URL": str(gateway.base_url)}
    run = subprocess.run(
        [*PROGRAMS[words[0]], *words[1:]],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert matches(answer, run.stdout.strip()), run.stdout
