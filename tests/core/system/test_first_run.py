"""The first minutes of a newcomer: what `make run` refuses, prints and logs in a terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support.keys import entry, written
from tests.support.servers import ROOT
from tests.support.up import Up, write_model
from tests.support.wait import TIMEOUT_S, wait_until

UNSUPPORTED = sorted(Path.home().glob(".pyenv/versions/3.[6-9].*/bin/python"))
KEY = "tgw_a-key-of-the-first-run"


def paste(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line.partition("paste:")[2]],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.mark.long
def test_terminal_output_names_the_page_and_has_short_lines(tmp_path: Path) -> None:
    write_model(tmp_path)
    with Up(tmp_path, on_terminal=True) as up:
        up.wait_for("press Ctrl-C to stop")
        port = httpx.URL(up.url).port
        assert up.wait_for("open:").endswith(f" http://localhost:{port}/")
        assert up.wait_for("guide:").endswith(f" http://localhost:{port}/guide/")
        answer = paste(up.wait_for("paste:"))
        assert json.loads(answer.stdout)["model"] == "echo"
        assert re.fullmatch(r"[\d:]{8} POST echo 200 \d+ ms", up.wait_for(" POST "))
        start = len(up.lines)
        for path in ("/", "/v1/models", "/v1/replicas", "/metrics", "/v2/models/echo"):
            assert up.get(path).is_success  # as an open page does
        assert up.get("/nothing").status_code == 404
        failed = up.wait_for("404")
        assert re.fullmatch(r"[\d:]{8} GET /nothing 404 \d+ ms request_id=\S+", failed)
        assert up.lines[start:] == [failed]
        os.kill(up.pid, signal.SIGINT)
        up.wait_for("stopping; press Ctrl-C again")
        assert up.end() == 130


def test_printed_request_reads_the_key_from_the_shell(tmp_path: Path) -> None:
    write_model(tmp_path / "models")
    keys = written(tmp_path / "keys.yaml", [entry(KEY, "infer")])
    with Up(tmp_path / "models", environment={"GATEWAY_KEYS_FILE": str(keys)}) as up:
        answer = paste(up.wait_for("paste:"), KEY=KEY)
        assert json.loads(answer.stdout)["model"] == "echo"


def test_output_to_a_pipe_has_all_fields_of_a_request_and_open_shows_the_page(
    tmp_path: Path,
) -> None:
    write_model(tmp_path)
    browser = tmp_path / "browser"
    browser.write_text(
        f'#!/bin/sh\necho "$1" > {tmp_path}/opened.part\nmv {tmp_path}/opened.part {tmp_path}/opened'
    )
    browser.chmod(0o755)
    with Up(tmp_path, "--open", environment={"BROWSER": f"{browser} %s"}) as up:
        page = up.wait_for("open:").split()[-1]
        up.wait_for("paste:")
        wait_until((tmp_path / "opened").exists)
        assert (tmp_path / "opened").read_text().strip() == page
        up.get("/v1/models/echo")
        line = up.wait_for("GET /v1/models/echo 200")
        assert "client=127.0.0.1" in line
        assert "request_id=" in line


def test_output_without_the_page_names_no_page_but_an_image_of_the_checkout() -> None:
    model = ROOT / "triton_repo" / "preprocessing"
    with Up(None, str(model), environment={"GATEWAY_PAGE": "false"}) as up:
        answer = paste(up.wait_for("paste:"))
        assert json.loads(answer.stdout)["model"] == "preprocessing"
        assert not re.search("open:|guide:", up.output)


@pytest.mark.skipif(not UNSUPPORTED, reason="no Python older than 3.10 on this machine")
def test_make_refuses_an_unsupported_python_before_it_installs(tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    (folder / "requirements").mkdir(parents=True)
    for name in (
        "Makefile",
        "pyproject.toml",
        "requirements/build.txt",
        "requirements/gateway.txt",
    ):
        shutil.copy(ROOT / name, folder / name)
    ended = subprocess.run(
        ["make", "run", f"PYTHON={UNSUPPORTED[-1]}"], cwd=folder, capture_output=True, text=True
    )
    assert ended.returncode != 0
    assert f"needs CPython 3.10 to 3.14; {UNSUPPORTED[-1]} is Python 3." in ended.stderr
    assert re.search(r"use: make run PYTHON=python3\.1[0-4]$", ended.stderr, re.MULTILINE)
    assert not (folder / ".venv").exists()
