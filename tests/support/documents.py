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

from deploy.site.prepare import read_tabs
from tests.support.gateway_forks import run_gateway
from tests.support.servers import ROOT

DOCS = ROOT / "docs"
DOCUMENTS = sorted([ROOT / "README.md", *DOCS.glob("**/*.md")])


INTERPRETERS = {
    "Python": [sys.executable, "-c"],
    "JavaScript": ["node", "--input-type=module", "-e"],
}


READMES = sorted(ROOT.glob("triton_repo_examples/*/README.md"))


# Their examples are about models that they make: test_bring_your_model.py and test_on_demand_walkthrough.py
# run them.
OWN_SERVER = DOCS / "serve/bring-your-model.md"
ON_DEMAND = DOCS / "serve/on-demand.md"
# Its examples are about a model of `triton_repo_examples`, and about completions: test_examples.py and
# test_completions.py run them.
LANGUAGE_MODELS = DOCS / "serve/llm.md"
# Its recipes upload models: test_cookbook.py runs them.
COOKBOOK = DOCS / "use/cookbook.md"
# Its recipes need an issuer of tokens and certificates: tests/capabilities/identity runs them.
TOKENS = DOCS / "operate/tokens.md"
COMPLETIONS = "/v1/chat/completions"


def examples(documents: Iterable[Path]) -> Iterator[tuple[str, str, str]]:
    """Every `$ command` of a console block, and what the document says that it prints."""
    for path in documents:
        for block in re.findall(r"```console\n(.*?)```", path.read_text(), re.DOTALL):
            for example in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, answer = example.partition("\n")
                yield path.name, command, answer.strip()


def programs(documents: Iterable[Path]) -> Iterator[tuple[str, str, str]]:
    """Every program of a document's tabs, with its language."""
    for path in documents:
        for tabs in read_tabs(path.read_text()):
            for language in INTERPRETERS:
                yield path.name, language, strip_fence(tabs[language])


def python_programs(document: Path) -> list[str]:
    """The programs of a document outside of tabs, in their order."""
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


def read_all() -> str:
    """The text of all documents, for what stands in one of them, wherever that is."""
    return "\n".join(path.read_text() for path in DOCUMENTS)


def find_block(language: str, words: str) -> str:
    """The only block of a language that has these words."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", read_all(), re.MULTILINE | re.DOTALL)
    (found,) = (block for block in blocks if words in block)
    return str(found)


def strip_fence(block: str) -> str:
    return block.split("\n", 1)[1].removesuffix("```\n")


def matches(answer: str, printed: str) -> bool:
    """`…` in a document stands for anything."""
    return (
        re.fullmatch(".*".join(map(re.escape, answer.split("…"))), printed, re.DOTALL) is not None
    )


def assert_prints(gateway: httpx.Client, command: str, answer: str) -> None:
    words = shlex.split(command.replace("localhost:8080", str(gateway.base_url).rstrip("/")))
    environment = {**os.environ, "TRITON_GATEWAY_URL": str(gateway.base_url)}
    if words[0] == "triton-gateway":
        run = run_gateway(*words[1:], environment=environment)
    else:
        assert words[0] == "curl", command
        run = subprocess.run(
            words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60
        )
    assert run.returncode == 0, run.stderr
    assert matches(answer, run.stdout.strip()), run.stdout


def assert_prints_its_comment(
    gateway: httpx.Client, language: str, program: str, folder: Path = ROOT
) -> None:
    """Run the program in a folder: it prints the comments of the lines that print, or the last comment."""
    prints = r"(?:print\(|console\.log\().*(?:#|//) (.*)$"
    comments = re.findall(r"(?:#|//) (.*)$", program, re.MULTILINE)
    expected = "\n".join(re.findall(prints, program, re.MULTILINE) or comments[-1:])
    url = str(gateway.base_url).rstrip("/")
    program = program.replace("http://localhost:8080", url)
    program = program.replace("localhost:8080", url.removeprefix("http://"))
    run = subprocess.run(
        [*INTERPRETERS[language], program],
        cwd=folder,
        env={**os.environ, "TRITON_GATEWAY_URL": url, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert expected
    assert run.returncode == 0, run.stderr
    assert matches(expected, run.stdout.strip()), run.stdout
