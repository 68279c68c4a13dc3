"""The objects that the Helm chart renders from values, as Python objects."""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support.kubernetes_tools import kubernetes_program
from tests.support.manifests import Manifests, Resource
from tests.support.servers import ROOT

CHART = ROOT / "deploy" / "helm" / "triton-gateway"
EXAMPLES = sorted((CHART / "examples").iterdir())
Values = dict[str, Any]
SETTINGS_HASH = re.compile(r"\b(triton-gateway-settings)-[a-z0-9]{10}\b")


def run_helm(*args: str | Path, values: Values | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [kubernetes_program("helm"), *args, "-f", "-"],
        input=json.dumps(values or {}),
        capture_output=True,
        text=True,
        timeout=60,
    )


def render_chart(
    values: Values | None = None, *args: str | Path, namespace: str = "triton-gateway"
) -> Manifests:
    text = _render_text(json.dumps(values or {}), args, namespace)
    documents = [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]
    return Manifests("chart", tuple(documents))


@cache  # tests have most of their values in common
def _render_text(values: str, args: tuple[str | Path, ...], namespace: str) -> str:
    command = ("template", "triton-gateway", CHART, "-n", namespace, *args)
    ended = run_helm(*command, values=json.loads(values))
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def without_origin(resource: Resource) -> Resource:
    """Return a copy without the tools' own labels, hashes, empty lists and order of volumes."""
    copy: Resource = json.loads(SETTINGS_HASH.sub(r"\1", json.dumps(resource)))
    metadata = copy["metadata"]
    metadata.pop("namespace", None)
    labels = metadata["labels"] = metadata.get("labels") or {}
    for label in ("app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart"):
        labels.pop(label, None)
    labels["app.kubernetes.io/part-of"] = "triton-gateway"  # kustomize: on the base's objects only
    metadata["annotations"] = metadata.get("annotations") or {}
    if copy["kind"] == "ConfigMap":
        labels.pop("app.kubernetes.io/name", None)  # kustomize: not on generated objects
    if copy["kind"] in ("Deployment", "StatefulSet"):
        template = copy["spec"]["template"]
        notes = template["metadata"].pop("annotations", {})
        notes.pop("checksum/settings", None)
        template["metadata"]["annotations"] = notes
        pod = template["spec"]
        pod["volumes"] = sorted(pod.get("volumes", []), key=lambda volume: str(volume["name"]))
        pod["initContainers"] = pod.get("initContainers") or []
    if (copy.get("data") or {}).get("models.yaml"):
        copy["data"] = yaml.safe_load(copy["data"]["models.yaml"])
    return copy


def comparable(manifests: Manifests) -> dict[str, Resource]:
    """Return the objects that both tools create, by kind and name."""
    found = [
        without_origin(resource)
        for resource in manifests.resources
        if resource["kind"] != "Namespace"
        and "helm.sh/hook" not in resource["metadata"].get("annotations", {})
    ]
    named = {f"{each['kind']}/{each['metadata']['name']}": each for each in found}
    assert len(named) == len(found)
    return named
