"""The documented commands for Kubernetes in the order of their page, without a cluster.

Programs in place of kubectl and helm render what a cluster would get. For the other commands they call the
real ones with an address where nothing listens: these check the arguments first.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest
import yaml

from tests.support.documents import DOCUMENTS
from tests.support.kubernetes_tools import kubernetes_program
from tests.support.manifests import Manifests, containers
from tests.support.servers import ROOT

DEPLOY = next(path for path in DOCUMENTS if "# Uninstall\n" in path.read_text())
# They build and move images, and install the command: all of that is there.
PREPARATION = ("docker ", "kind ", "pip ")
KEY = re.compile(r"tgw_[\w-]+")
PLACEHOLDER = "tgw_…"
# What a command prints, by a part of it.
EXPECTED = {
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
    (install,) = (text for text in sections.values() if "kubectl apply -k k8s/overlays/dev" in text)
    dev, prod, ask, wait = read_blocks(install)
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
        """Assert that the command succeeds, and prints what the page says."""
        written = self._insert_key(command)
        for pattern, word in self._words.items():
            written = re.sub(pattern, word, written)
        words = ["bash", "-o", "pipefail", "-c", written]
        if written.endswith("&"):
            words[-1] = f"exec {written.rstrip('& ')}"
            process = subprocess.Popen(words, cwd=self._folder, env=self._environment)
            self._background.append(process)
            return
        ended = subprocess.run(
            words, cwd=self._folder, env=self._environment, capture_output=True, text=True
        )
        assert ended.returncode == 0, f"{command}: {ended.stderr or ended.stdout}"
        for part, expected in EXPECTED.items():
            assert part not in command or expected in ended.stdout, command
        self._keys += KEY.findall(ended.stdout) if "key create" in command else ()

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


# What is refused ends with a line for the command that lists what is left.
KUBECTL = """
case "$*" in
  "apply -k "*) REAL kustomize "$3" >> objects ;;
  *"--dry-run=client "*) exec REAL "$@" ;;
  *"apply -f -") cat >> objects ;;
  *"create "*) REAL "$@" --dry-run=client -o yaml >> objects ;;
  *) REAL --server http://127.0.0.1:1 "$@" 2>&1 | grep refused && echo triton-gateway-keys; exit ;;
esac && echo --- >> objects
"""
HELM = """
case "$1" in
  install) shift; REAL template "$@" >> objects ;;
  *) REAL --kube-apiserver http://127.0.0.1:1 "$@" 2>&1 | grep refused ;;
esac
"""
VALUES = {"redis": {"enabled": True}}


@pytest.fixture
def walk(tmp_path: Path, demo: httpx.Client) -> Iterator[Walk]:
    """A shell in a folder like a checkout, with the values of the chart."""
    for name in ("docs", "deploy", "k8s"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "values.yaml").write_text(json.dumps(VALUES))
    (tmp_path / "bin").mkdir()
    for name, script in (("kubectl", KUBECTL), ("helm", HELM)):
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\n{script.replace('REAL', kubernetes_program(name))}\n")
        program.chmod(0o755)
    opened = Walk(tmp_path, {"localhost:8080": demo.base_url.netloc.decode()})
    yield opened
    opened.close()


def test_commands_in_sentences_are_accepted() -> None:
    """kubectl checks their arguments before it notices that nothing listens at the address."""
    commands = re.findall(r"`(kubectl [^`]+)`", DEPLOY.read_text())
    words = [shlex.split(command) for command in commands]
    namespaced = [each for each in words if each[1] in ("-n", "--namespace")]
    for each in words:
        is_whole = each in namespaced or {"-k", "nodes", "namespace"} & set(each) or len(each) < 4
        assert is_whole or each[1:3] == ["scale", "deployment/triton"], each
    assert len(namespaced) > 8
    program = kubernetes_program("kubectl")
    for each in namespaced:
        command = [program, "--server", "http://127.0.0.1:1", *each[1:]]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert "refused" in ended.stderr, each


def test_shell_beside_a_gateway_is_one_that_its_namespace_admits() -> None:
    (command,) = re.findall(r"`(kubectl [^`]*debug[^`]+)`", DEPLOY.read_text())
    assert command.endswith(" --profile=restricted")
    for variant in ("dev", "prod"):
        (namespace,) = Manifests.of(variant).kind("Namespace")
        labels = namespace["metadata"]["labels"]
        assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize("journey", ["dev", "prod", pytest.param("chart", marks=pytest.mark.long)])
def test_commands_of_the_page_run_and_create_what_the_pods_need(
    walk: Walk, tmp_path: Path, journey: str
) -> None:
    commands = read_journeys()[journey]
    for command in commands:
        if not command.startswith(PREPARATION):
            walk.run(command)
    objects = yaml.safe_load_all((tmp_path / "objects").read_text())
    made = Manifests(journey, tuple(each for each in objects if each))
    text = "\n".join(commands)
    (namespace,) = set(re.findall(r" -n (\S+)", text))
    assert {each["metadata"].get("namespace", namespace) for each in made.resources} == {namespace}
    for kind, name in re.findall(r" (deployment|service)/(\S+)", text):
        assert made.has(kind.capitalize(), name), name
    rendered = json.dumps(made.resources, sort_keys=True)
    secrets = {each["metadata"]["name"]: each["data"] for each in made.kind("Secret")}
    assert set(re.findall(r'"secretName": "([^"]+)"', rendered)) <= secrets.keys()
    for key, name in re.findall(r'"key": "([^"]+)", "name": "([^"]+)"', rendered):
        assert key in secrets[name], name
    if journey == "dev":
        built = set(re.findall(r" -t (\S+)", text))
        assert built == {
            container["image"]
            for workload in made.workloads
            for container in containers(workload["spec"]["template"]["spec"])
        }
