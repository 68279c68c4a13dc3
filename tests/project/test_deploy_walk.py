"""The commands of docs/operate/kubernetes.md, without a cluster. `make test-cluster` runs the same on one.

Programs in place of kubectl and helm render what a cluster would get. For the other commands they call the
real ones with an address where nothing listens: these check the arguments first.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.cluster.kubectl import write_program
from tests.cluster.walk import DEPLOY, KEY, PREPARATION, Walk, read_journeys
from tests.support.kubernetes_tools import kubernetes_program
from tests.support.manifests import Manifests, containers
from tests.support.servers import ROOT

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
        write_program(tmp_path / "bin" / name, script.replace("REAL", kubernetes_program(name)))
    opened = Walk(tmp_path, {"localhost:8080": demo.base_url.netloc.decode()})
    yield opened
    opened.close()


def test_key_is_read_with_all_of_its_characters() -> None:
    assert KEY.findall("key: tgw_a-b_c- (ops)") == ["tgw_a-b_c-"]


def test_commands_in_sentences_name_the_namespace_and_are_accepted() -> None:
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
