"""The output of kustomize for k8s/, as Python objects."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from tests.support.kubernetes_tools import kubernetes_program
from tests.support.servers import ROOT

K8S = ROOT / "k8s"
Resource = dict[str, Any]

# An overlay, or the base with components: together every file of k8s/ is in one of them.
VARIANTS = {
    "dev": (),
    "prod": (),
    "base": (),
    "s3 and ingress": ("s3-repository", "ingress", "egress"),
    "redis and keda": ("redis-state", "keda"),
    "Tritons scraped": ("redis-state", "monitoring", "monitoring-tritons", "keda"),
    "from zero": ("redis-state", "monitoring", "keda", "keda-zero"),
    "uploads on a volume": ("redis-state", "volume-repository"),
    "jobs": ("redis-state", "jobs"),
    "everything on a CPU": ("cpu-only", "redis-state", "monitoring", "keda", "gateway-api"),
}


def build(folder: Path) -> str:
    command = [kubernetes_program("kubectl"), "kustomize", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert not run.stderr, run.stderr  # what is deprecated is said there
    return run.stdout


@cache
def text(variant: str, *components: str) -> str:
    parts = components or VARIANTS[variant]
    for folder in (K8S / "overlays" / variant, K8S / variant):
        if folder.is_dir() and not parts:
            return build(folder)
    with TemporaryDirectory() as name:
        folder = Path(name).resolve()
        base = os.path.relpath(K8S, folder)
        document = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [f"{base}/base"],
            "components": [f"{base}/components/{part}" for part in parts],
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(document))
        return build(folder)


@dataclass(frozen=True)
class Manifests:
    """All resources of a variant."""

    variant: str
    resources: tuple[Resource, ...]

    @classmethod
    def of(cls, variant: str, *components: str) -> Manifests:
        """Build an overlay or the base; given components replace those of the variant."""
        return cls(variant, tuple(yaml.load_all(text(variant, *components), yaml.CSafeLoader)))

    def kind(self, *kinds: str) -> list[Resource]:
        return [resource for resource in self.resources if resource["kind"] in kinds]

    def get(self, kind: str, name: str) -> Resource:
        """The only one; a ConfigMap may have a hash behind its name."""
        (found,) = (
            resource
            for resource in self.kind(kind)
            if resource["metadata"]["name"] == name
            or (kind == "ConfigMap" and resource["metadata"]["name"].rpartition("-")[0] == name)
        )
        return found

    def has(self, kind: str, name: str) -> bool:
        return any(resource["metadata"]["name"] == name for resource in self.kind(kind))

    @property
    def workloads(self) -> list[Resource]:
        return self.kind("Deployment", "StatefulSet")

    def selected(self, labels: dict[str, str]) -> list[Resource]:
        """The workloads whose pods have these labels."""
        return [
            workload
            for workload in self.workloads
            if labels.items() <= workload["spec"]["template"]["metadata"]["labels"].items()
        ]

    def pod(self, name: str) -> Resource:
        (workload,) = (each for each in self.workloads if each["metadata"]["name"] == name)
        spec: Resource = workload["spec"]["template"]["spec"]
        return spec

    def settings(self) -> dict[str, str]:
        data: dict[str, str] = self.get("ConfigMap", "triton-gateway-settings")["data"]
        return data


def containers(pod: Resource) -> Iterator[Resource]:
    yield from pod.get("initContainers") or []
    yield from pod["containers"]


def ports(workload: Resource) -> dict[str, int]:
    """The named ports of a workload's pods."""
    return {
        port["name"]: port["containerPort"]
        for container in workload["spec"]["template"]["spec"]["containers"]
        for port in container.get("ports", [])
    }


def quantity(written: str) -> float:
    """2Gi, 100m, 4 as a number."""
    units = {"m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
    for unit, factor in units.items():
        if str(written).endswith(unit):
            return float(written.removesuffix(unit)) * factor
    return float(written)
