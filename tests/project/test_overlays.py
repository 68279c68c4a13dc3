"""Overlays that users write: what documents and comments suggest for them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway import __version__
from tests.support.documents import find_block
from tests.support.manifests import K8S, Manifests, Resource, build, quantity
from tests.support.missing import find_program

GATEWAY = "triton-gateway"
TRITON = "triton"
PROD = (K8S / "overlays" / "prod" / "kustomization.yaml").read_text()


def render(folder: Path, document: dict[str, Any]) -> Manifests:
    """Render a kustomization whose paths begin with k8s/."""
    overlay = (folder / "overlay").resolve()
    overlay.mkdir()
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    text = yaml.safe_dump(head | document).replace(" k8s/", f" {os.path.relpath(K8S, overlay)}/")
    (overlay / "kustomization.yaml").write_text(text)
    return Manifests("overlay", tuple(yaml.safe_load_all(build(overlay))))


def list_components(*names: str) -> list[str]:
    return [f"k8s/components/{name}" for name in names]


@pytest.mark.parametrize("components", [(), ("redis-state", "cpu-only")])
def test_documented_patches_lower_the_requests(tmp_path: Path, components: tuple[str, ...]) -> None:
    patches = find_block("yaml", "/requests/")
    document = {"resources": ["k8s/base"], "components": list_components(*components)}
    made = render(tmp_path, document | yaml.safe_load(patches))
    requests = made.pod(TRITON)["containers"][0]["resources"]["requests"]
    assert (requests["cpu"], requests["memory"]) == ("500m", "1Gi")
    assert ("nvidia.com/gpu" in requests) == (not components)
    # The autoscaler compares with what is requested: it must not count the smaller request as load.
    assert find_scaling_cpu(made) == pytest.approx(find_scaling_cpu(Manifests.of("base")))


def find_scaling_cpu(made: Manifests) -> float:
    """Return the cores that a gateway uses when the autoscaler starts another one."""
    (scaler,) = made.kind("HorizontalPodAutoscaler")
    (metric,) = scaler["spec"]["metrics"]
    (container,) = made.pod(GATEWAY)["containers"]
    percent: float = metric["resource"]["target"]["averageUtilization"]
    return quantity(container["resources"]["requests"]["cpu"]) * percent / 100


def test_number_in_the_overlay_is_that_of_the_autoscaler(tmp_path: Path) -> None:
    (suggested,) = re.findall(r"^# (replicas:\n(?:#   .*\n)+)", PROD, re.MULTILINE)
    document = yaml.safe_load(re.sub(r"^# ", "", suggested, flags=re.MULTILINE))
    made = render(tmp_path, {"resources": ["k8s/base"], **document})
    (scaling,) = Manifests.of("prod").kind("ScaledObject")
    replicas = made.get("Deployment", TRITON)["spec"]["replicas"]
    assert replicas == scaling["spec"]["minReplicaCount"] == 2


def test_patches_that_the_overlay_suggests_can_be_applied(tmp_path: Path) -> None:
    suggested = re.sub(r"^# ?", "", PROD[PROD.index("# patches:") :], flags=re.MULTILINE)
    document = yaml.safe_load(PROD.replace("../..", "k8s"))
    document["resources"] = ["k8s/base"]
    document["components"] += list_components("egress")
    made = render(tmp_path, document | yaml.safe_load(suggested))
    labels = [each["metadata"]["labels"] for each in made.kind("PodMonitor", "PrometheusRule")]
    assert [each["release"] for each in labels] == ["monitoring"] * 2
    assert made.get("Deployment", TRITON)["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0


def test_namespace_of_an_overlay_is_in_the_queries_of_keda(tmp_path: Path) -> None:
    parts = list_components("redis-state", "monitoring", "keda", "keda-zero")
    document = {
        "namespace": "vision",
        "resources": ["k8s/base"],
        "components": parts,
        "transformers": [f"{part}/namespace" for part in parts[2:]],
    }
    made = render(tmp_path, document)
    (scaling,) = made.kind("ScaledObject")
    queries = [each["metadata"]["query"] for each in scaling["spec"]["triggers"]]
    assert len(queries) == 3
    for query in queries:
        assert re.findall(r'namespace="([^"]*)"', query) == ["vision"]
        assert 'job="triton-gateway"' in query
    assert {each["metadata"].get("namespace") for each in made.resources} == {"vision"}


def test_size_of_the_ingress_follows_the_setting(tmp_path: Path) -> None:
    literals = {"literals": ["GATEWAY_MAX_BODY_BYTES=104857600"]}
    document = {
        "resources": ["k8s/base"],
        "components": list_components("ingress"),
        "configMapGenerator": [{"name": f"{GATEWAY}-settings", "behavior": "merge", **literals}],
        "transformers": ["k8s/components/ingress/size"],
    }
    (ingress,) = render(tmp_path, document).kind("Ingress")
    notes = ingress["metadata"]["annotations"]
    assert notes["nginx.ingress.kubernetes.io/proxy-body-size"] == "104857600"


@pytest.mark.long  # seven clones
def test_documented_overlay_names_a_version_and_equals_prod(tmp_path: Path) -> None:
    """kustomize fetches a real repository, which has nothing but this folder."""
    block = find_block("yaml", "# kustomization.yaml\n")
    repository = tmp_path.resolve() / "repository"
    shutil.copytree(K8S, repository / "k8s")
    author = ("-c", "user.name=x", "-c", "user.email=x@example.com")
    commands = (("init",), ("add", "."), (*author, "commit", "-m", "x"), ("tag", f"v{__version__}"))
    for words in commands:
        git = [find_program("git"), "-C", str(repository), *words]
        subprocess.run(git, check=True, capture_output=True)
    address = "https://github.com/triton-gateway/triton-gateway//"
    assert block.count(address) >= 5
    made = render(tmp_path, yaml.safe_load(block.replace(address, f"file://{repository}//")))
    expected = [each for each in Manifests.of("prod").resources if each["kind"] != "Namespace"]
    assert [*map(name_of, made.resources)] == [*map(name_of, expected)]
    assert {each["metadata"]["namespace"] for each in made.resources} == {"models"}
    assert 'namespace="models"' in str(made.resources)


def name_of(resource: Resource) -> tuple[str, str]:
    return resource["kind"], resource["metadata"]["name"]


def test_files_of_k8s_refer_to_nothing_outside_of_it() -> None:
    for path in K8S.rglob("kustomization.yaml"):
        document = yaml.safe_load(path.read_text())
        for field in ("resources", "components", "transformers"):
            for reference in document.get(field) or []:
                assert K8S in (path.parent / reference).resolve().parents, (path, reference)
