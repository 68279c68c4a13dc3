"""The walkthrough of docs/serve/on-demand.md, with three small models."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support.documents import ON_DEMAND, assert_prints, examples
from tests.support.up import Up

pytestmark = pytest.mark.long

DOCUMENT = ON_DEMAND


def test_walkthrough_prints_what_the_document_says(tmp_path: Path) -> None:
    text = DOCUMENT.read_text()
    (script,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    (flags,) = re.findall(r'make run ARGS="(.*)"', text)
    subprocess.run(["sh", "-e", "-c", script], cwd=tmp_path, check=True, timeout=60)
    first, folder, *others = shlex.split(flags)
    assert first == "--model-repository"
    with Up(tmp_path / folder, *others) as up, httpx.Client(base_url=up.url) as client:
        up.wait_for("ready after")
        for _, command, answer in examples([DOCUMENT]):
            assert_prints(client, command, answer)
