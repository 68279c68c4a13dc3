"""The documents tell the truth: their commands are run, and their tables compared with the code."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import pytest

from gateway import app, errors
from gateway.settings import Settings
from tests.servers import ROOT

DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
PROGRAMS = {"curl": ["curl"], "triton-gateway": [sys.executable, "-m", "gateway"]}
READMES = sorted(ROOT.glob("triton_repo_examples/*/README.md"))
# Its examples are about models that it makes; tests/test_bring_your_model.py runs them.
OWN_SERVER = "bring-your-model.md"
OF_THE_DEMO = [path for path in DOCUMENTS if path.name != OWN_SERVER]


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


@pytest.mark.parametrize(("document", "command", "answer"), list(examples(OF_THE_DEMO)))
def test_an_example_prints_what_the_document_says(
    demo: httpx.Client, document: str, command: str, answer: str
) -> None:
    assert_prints(demo, command, answer)


def test_there_are_examples() -> None:
    assert len(list(examples([ROOT / "README.md"]))) >= 5


def family(base: type[errors.GatewayError]) -> Iterator[type[errors.GatewayError]]:
    for error in base.__subclasses__():
        yield error
        yield from family(error)


def test_every_error_is_documented_and_no_other() -> None:
    rows = re.findall(
        r"^\| (\d{3}) \| `(\w+)` \|", (ROOT / "docs/errors.md").read_text(), re.MULTILINE
    )
    documented = {(int(status), code) for status, code in rows}
    assert app.create_app  # whose imports define the errors of every layer
    known = {
        (error.status, error.code) for error in (errors.GatewayError, *family(errors.GatewayError))
    }
    known |= {(status, code) for status, (code, _) in errors.FRAMEWORK.items()}
    assert documented == known


def test_every_setting_is_documented_and_no_other() -> None:
    rows = re.findall(
        r"^\| `GATEWAY_(\w+)` \| `?([^|]*?)`? \| (.*) \|$",
        (ROOT / "docs/settings.md").read_text(),
        re.MULTILINE,
    )
    documented = {name.lower(): text for name, _, text in rows}
    assert documented == {name: field.description for name, field in Settings.model_fields.items()}


def test_links_between_documents_lead_somewhere() -> None:
    for path in [*DOCUMENTS, *READMES]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path}: {target}"


def test_every_own_metric_is_documented_and_no_other(demo: httpx.Client) -> None:
    rows = re.findall(
        r"^\| `(gateway_\w+)` \| (\w+) \| [^|]* \| (.*) \|$",
        (ROOT / "docs/metrics.md").read_text(),
        re.MULTILINE,
    )
    documented = {name: (kind, text) for name, kind, text in rows}
    page = demo.get("/metrics").text
    kinds = dict(re.findall(r"^# TYPE (gateway_\w+) (\w+)$", page, re.MULTILINE))
    texts = dict(re.findall(r"^# HELP (gateway_\w+) (.*)$", page, re.MULTILINE))
    assert documented == {name: (kind, texts[name]) for name, kind in kinds.items()}
