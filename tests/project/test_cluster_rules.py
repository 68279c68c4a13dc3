"""What a cluster would do with the manifests of k8s/: compare, place, and judge them, without a cluster."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway import __version__
from tests.support.kubernetes_apply import find_changes
from tests.support.manifests import K8S, VARIANTS, Manifests, Resource, build, quantity
from tests.support.missing import find_program
from tests.support.platform_rules import find_violations, read_exemptions
from tests.support.scheduler import HOSTNAME, ZONE, Node, Pod, make_small_nodes, roll_out, schedule
from tests.support.servers import ROOT

GATEWAY, TRITON, REDIS = "triton-gateway", "triton", "redis"
DEPLOY = (ROOT / "docs" / "operate" / "kubernetes.md").read_text()


# kubectl diff


@pytest.mark.parametrize("variant", VARIANTS)
def test_second_apply_of_the_same_manifests_changes_nothing(variant: str) -> None:
    changes = [find_changes(resource) for resource in Manifests.of(variant).resources]
    assert [change for found in changes for change in found] == []


def test_comparison_finds_missing_defaults_that_every_apply_sends() -> None:
    def changes(kind: str, name: str, change: Any) -> list[str]:
        resource = yaml.safe_load(yaml.safe_dump(Manifests.of("prod").get(kind, name)))
        change(resource["spec"])
        return find_changes(resource)

    def open_a_port(spec: Resource) -> None:
        spec["ingress"][0]["ports"] = [{"port": "http"}]

    path = "NetworkPolicy/triton.spec"
    assert changes("NetworkPolicy", TRITON, open_a_port) == [f"{path}.ingress"]
    assert changes("NetworkPolicy", TRITON, lambda s: s.update(egress=[])) == [f"{path}.egress"]
    found = changes("StatefulSet", REDIS, lambda s: s["volumeClaimTemplates"][0].pop("status"))
    assert found == ["StatefulSet/redis.spec.volumeClaimTemplates"]
    found = changes("HTTPRoute", GATEWAY, lambda s: s.update(parentRefs=[{"name": "public"}]))
    assert found == ["HTTPRoute/triton-gateway.spec.parentRefs"]
    # The ports of a Service have a key, so that a missing default is no difference.
    assert changes("Service", TRITON, lambda s: s["ports"][0].pop("protocol")) == []
    found = changes("Deployment", TRITON, lambda s: s["strategy"].pop("type"))
    assert found == ["Deployment/triton.spec.strategy"]
    pod = ["Deployment/triton.spec.template.spec.containers[triton].resources.limits.memory"]
    found = changes("Deployment", TRITON, write_another_quantity)
    assert found == pod


def write_another_quantity(spec: Resource) -> None:
    (container,) = spec["template"]["spec"]["containers"]
    container["resources"]["limits"]["memory"] = "16384Mi"


# The scheduler


def make_nodes(zones: Sequence[str], *, loaded: int = 0) -> list[Node]:
    """Nodes with room for everything; that of the number `loaded` already has other pods."""
    nodes = []
    for number, zone in enumerate(zones):
        labels = {HOSTNAME: f"n{number}"} | ({ZONE: zone} if zone else {})
        node = Node(labels, {"cpu": 32, "memory": 128 << 30, "ephemeral-storage": 1 << 40})
        node.capacity["nvidia.com/gpu"] = 4
        if number == loaded:
            node.used |= {"cpu": 8, "memory": 64 << 30}
        nodes.append(node)
    return nodes


def place(made: Manifests, nodes: list[Node], counts: dict[str, int]) -> None:
    pods = {workload["metadata"]["name"]: Pod.of(workload) for workload in made.workloads}
    schedule([pods[name] for name, count in counts.items() for _ in range(count)], nodes)


ZONES = {
    "no zones": ["", ""],
    "one zone": ["a", "a"],
    "two zones": ["a", "b"],
    "a label is missing": ["a", ""],
    "three nodes without zones": ["", "", ""],
    "three nodes in two zones": ["a", "a", "b"],
}


@pytest.mark.parametrize("zones", ZONES.values(), ids=ZONES)
@pytest.mark.parametrize("variant", ["prod", "everything on a CPU"])
def test_pods_are_spread_over_nodes_with_and_without_zones(variant: str, zones: list[str]) -> None:
    made = Manifests.of(variant)
    for loaded in range(len(zones)):
        nodes = make_nodes(zones, loaded=loaded)
        place(made, nodes, {REDIS: 1, GATEWAY: 2, TRITON: 2})
        for name in (GATEWAY, TRITON):
            assert max(node.count(name) for node in nodes) == 1, name
        nodes = make_nodes(zones, loaded=loaded)
        place(made, nodes, {GATEWAY: 6})
        counts = sorted(node.count(GATEWAY) for node in nodes)
        assert counts == [6 // len(zones)] * len(zones)


def test_pods_prefer_different_zones() -> None:
    made = Manifests.of("prod")
    for loaded in range(4):
        nodes = make_nodes(["a", "a", "b", "b"], loaded=loaded)
        place(made, nodes, {GATEWAY: 2, TRITON: 2})
        for name in (GATEWAY, TRITON):
            assert {node.labels[ZONE] for node in nodes if node.count(name)} == {"a", "b"}


def drain_and_roll_out(made: Manifests, zones: Sequence[str], loaded: int) -> list[Node]:
    """Replace the pods while the second node is cordoned, and once more when it is back."""
    nodes = make_nodes(zones, loaded=loaded)
    place(made, nodes, {GATEWAY: 2, TRITON: 2})
    for is_cordoned in (True, False):
        nodes[1].is_cordoned = is_cordoned
        for name in (GATEWAY, TRITON):
            roll_out(name, nodes)
    return nodes


@pytest.mark.parametrize("zones", [["", ""], ["a", "b"]], ids=["no zones", "two zones"])
@pytest.mark.parametrize("variant", ["prod", "everything on a CPU"])
def test_rollout_after_a_drain_spreads_the_pods_again(variant: str, zones: list[str]) -> None:
    for loaded in range(len(zones)):
        nodes = drain_and_roll_out(Manifests.of(variant), zones, loaded)
        for name in (GATEWAY, TRITON):
            assert [node.count(name) for node in nodes] == [1, 1], name


def test_pods_that_end_would_push_new_ones_together_without_the_revision() -> None:
    """The simulation shows the fault because of which the terms of the manifests select one revision."""
    made = Manifests("old terms", tuple(copy.deepcopy(Manifests.of("prod").resources)))
    for name in (GATEWAY, TRITON):
        terms = made.pod(name)["affinity"]["podAntiAffinity"]
        for term in terms["preferredDuringSchedulingIgnoredDuringExecution"]:
            del term["podAffinityTerm"]["matchLabelKeys"]
    nodes = drain_and_roll_out(made, ["", ""], loaded=0)
    for name in (GATEWAY, TRITON):
        assert [node.count(name) for node in nodes] == [0, 2], name


# Small nodes


def test_dev_fits_on_two_small_nodes_with_a_second_gateway_and_rollouts() -> None:
    nodes = make_small_nodes()
    place(Manifests.of("dev"), nodes, {TRITON: 1, GATEWAY: 2})
    for name in (GATEWAY, TRITON):
        roll_out(name, nodes)


def test_prod_fits_on_two_small_nodes_with_the_documented_patches(tmp_path: Path) -> None:
    found = re.findall(r"^```yaml\n(patches:\n.*?)^```", DEPLOY, re.MULTILINE | re.DOTALL)
    (patches,) = (each for each in found if "/requests/" in each)
    base = os.path.relpath(K8S, tmp_path.resolve())
    document = {
        "resources": [f"{base}/base"],
        "components": [f"{base}/components/{name}" for name in ("redis-state", "cpu-only")],
        **yaml.safe_load(patches),
    }
    write_overlay(
        tmp_path / "overlay", json.loads(json.dumps(document).replace(base, f"../{base}"))
    )
    made = Manifests("small", tuple(yaml.safe_load_all(build((tmp_path / "overlay").resolve()))))
    nodes = make_small_nodes()
    place(made, nodes, {REDIS: 1, TRITON: 2, GATEWAY: 2})
    for name in (GATEWAY, TRITON):
        roll_out(name, nodes)
        assert [node.count(name) for node in nodes] == [1, 1], name
    # The autoscaler compares with what is requested: it must not count the smaller request as load.
    before = Manifests.of("base")
    targets = [find_scaling_cpu(each) for each in (made, before)]
    assert targets[0] == pytest.approx(targets[1])
    # Without the patches, a second gateway has no room.
    nodes = make_small_nodes()
    with pytest.raises(ValueError, match="empty"):
        place(Manifests.of("everything on a CPU"), nodes, {REDIS: 1, TRITON: 2, GATEWAY: 2})


def find_scaling_cpu(made: Manifests) -> float:
    """Return the cores that a gateway uses when the autoscaler starts another one."""
    (scaler,) = made.kind("HorizontalPodAutoscaler")
    (metric,) = scaler["spec"]["metrics"]
    (container,) = made.pod(GATEWAY)["containers"]
    percent: float = metric["resource"]["target"]["averageUtilization"]
    return quantity(container["resources"]["requests"]["cpu"]) * percent / 100


def test_without_room_elsewhere_pods_share_a_node() -> None:
    nodes = make_nodes(["", ""])
    nodes[1].capacity["cpu"] = 1
    place(Manifests.of("prod"), nodes, {TRITON: 2, GATEWAY: 2})
    assert [node.count(TRITON) for node in nodes] == [2, 0]
    assert [node.count(GATEWAY) for node in nodes] == [1, 1]


def test_second_constraint_for_zones_would_spread_nothing_without_zones() -> None:
    """The simulation shows the fault because of which the manifests have one constraint only."""
    made = Manifests.of("prod")
    gateway = yaml.safe_load(yaml.safe_dump(made.get("Deployment", GATEWAY)))
    pod = gateway["spec"]["template"]["spec"]
    pod["topologySpreadConstraints"].append(
        {**pod["topologySpreadConstraints"][0], "topologyKey": ZONE}
    )
    del pod["affinity"]
    nodes = make_nodes(["", ""])
    schedule([Pod.of(gateway)] * 6, nodes)
    assert [node.count(GATEWAY) for node in nodes] == [0, 6]


# The number of pods


def test_no_apply_resets_the_number_of_tritons() -> None:
    """Neither after `kubectl scale`, nor after an autoscaler; the overlay prod shows where to set it."""
    for variant in VARIANTS:
        if variant != "dev":
            assert "replicas" not in Manifests.of(variant).get("Deployment", TRITON)["spec"], (
                variant
            )


def test_number_that_the_overlay_suggests_is_that_of_the_autoscaler(tmp_path: Path) -> None:
    overlay = (K8S / "overlays" / "prod" / "kustomization.yaml").read_text()
    (suggested,) = re.findall(r"^# (replicas:\n(?:#   .*\n)+)", overlay, re.MULTILINE)
    base = os.path.relpath(K8S, tmp_path.resolve())
    document = yaml.safe_load(re.sub(r"^# ", "", suggested, flags=re.MULTILINE))
    write_overlay(tmp_path / "overlay", {"resources": [f"../{base}/base"], **document})
    made = Manifests("scaled", tuple(yaml.safe_load_all(build((tmp_path / "overlay").resolve()))))
    (scaling,) = Manifests.of("prod").kind("ScaledObject")
    replicas = made.get("Deployment", TRITON)["spec"]["replicas"]
    assert replicas == scaling["spec"]["minReplicaCount"] == 2


# kube-score and Polaris


def test_rules_of_platform_teams_find_only_the_documented_exceptions() -> None:
    exemptions = read_exemptions()
    assert len(exemptions) >= 5
    found = {finding for variant in VARIANTS for finding in find_violations(Manifests.of(variant))}
    assert [each for each in sorted(found) if not any(e.covers(each) for e in exemptions)] == []
    # An exception that nothing needs any more is no exception.
    assert [e for e in exemptions if not any(e.covers(each) for each in found)] == []


def test_rules_of_platform_teams_notice_what_they_name() -> None:
    made = Manifests.of("prod")
    found = {each.rule for each in find_violations(break_everything(made))}
    assert {
        "automountServiceAccountToken",
        "container-ephemeral-storage-request-and-limit",
        "container-image-tag",
        "container-resources: memory limit",
        "container-security-context-readonlyrootfilesystem",
        "deployment-has-poddisruptionbudget",
        "environment-variable-key-duplication",
        "hostNetworkSet",
        "hostPathSet",
        "insecureCapabilities",
        "pod-networkpolicy: egress",
        "pod-probes: readiness",
        "pod-topology-spread-constraints",
        "runAsRootAllowed",
        "sensitiveContainerEnvVar",
        "service-type",
        "statefulset-has-servicename",
    } <= found


def break_everything(made: Manifests) -> Manifests:
    kept = ("Deployment", "StatefulSet", "Service")
    resources = [
        yaml.safe_load(yaml.safe_dump(each)) for each in made.resources if each["kind"] in kept
    ]
    for resource in resources:
        if resource["kind"] == "Service":
            resource["spec"] |= {"type": "NodePort", "clusterIP": "10.0.0.1"}
            continue
        pod = resource["spec"]["template"]["spec"]
        pod |= {"hostNetwork": True, "volumes": [{"name": "x", "hostPath": {"path": "/"}}]}
        for field in ("securityContext", "topologySpreadConstraints"):
            del pod[field]
        del pod["automountServiceAccountToken"]
        variable = {"name": "PASSWORD", "value": "x"}
        container = {"name": "x", "image": "x:latest", "env": [variable, variable]}
        pod |= {"containers": [container], "initContainers": []}
    return Manifests("broken", tuple(resources))


# Overlays of users


def test_namespace_of_an_overlay_is_in_the_queries_of_keda(tmp_path: Path) -> None:
    parts = ("redis-state", "monitoring", "keda", "keda-zero")
    shutil.copytree(K8S, tmp_path / "k8s")
    write_overlay(
        tmp_path / "overlay",
        {
            "namespace": "vision",
            "resources": ["../k8s/base"],
            "components": [f"../k8s/components/{part}" for part in parts],
            "transformers": [f"../k8s/components/{part}/namespace" for part in parts[2:]],
        },
    )
    text = build((tmp_path / "overlay").resolve())
    made = Manifests("vision", tuple(yaml.safe_load_all(text)))
    (scaling,) = made.kind("ScaledObject")
    queries = [each["metadata"]["query"] for each in scaling["spec"]["triggers"]]
    assert len(queries) == 3
    for query in queries:
        assert re.findall(r'namespace="([^"]*)"', query) == ["vision"]
        assert 'job="triton-gateway"' in query
    assert {each["metadata"].get("namespace") for each in made.resources} == {"vision"}


def test_size_of_the_ingress_follows_the_setting_of_an_overlay(tmp_path: Path) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    setting = {"name": "triton-gateway-settings", "behavior": "merge"}
    write_overlay(
        tmp_path / "overlay",
        {
            "resources": ["../k8s/base"],
            "components": ["../k8s/components/ingress"],
            "configMapGenerator": [setting | {"literals": ["GATEWAY_MAX_BODY_BYTES=104857600"]}],
            "transformers": ["../k8s/components/ingress/size"],
        },
    )
    made = Manifests("size", tuple(yaml.safe_load_all(build((tmp_path / "overlay").resolve()))))
    (ingress,) = made.kind("Ingress")
    notes = ingress["metadata"]["annotations"]
    assert notes["nginx.ingress.kubernetes.io/proxy-body-size"] == "104857600"
    assert made.settings()["GATEWAY_MAX_BODY_BYTES"] == "104857600"


def write_overlay(folder: Path, document: dict[str, Any]) -> None:
    folder.mkdir()
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(head | document))


@pytest.mark.long  # seven clones
def test_overlay_of_the_documents_refers_to_a_version_of_k8s_and_equals_prod(
    tmp_path: Path,
) -> None:
    """kustomize fetches a real repository, which has nothing but this folder."""
    (block,) = re.findall(r"```yaml\n(# kustomization\.yaml\n.*?)```", DEPLOY, re.DOTALL)
    repository = tmp_path.resolve() / "repository"
    shutil.copytree(K8S, repository / "k8s")
    author = ("-c", "user.name=x", "-c", "user.email=x@example.com")
    for words in (
        ("init",),
        ("add", "."),
        (*author, "commit", "-m", "x"),
        ("tag", f"v{__version__}"),
    ):
        git = [find_program("git"), "-C", str(repository), *words]
        subprocess.run(git, check=True, capture_output=True)
    address = "https://github.com/triton-gateway/triton-gateway//"
    assert block.count(address) >= 5
    write_overlay(
        tmp_path / "overlay", yaml.safe_load(block.replace(address, f"file://{repository}//"))
    )
    made = [*yaml.safe_load_all(build((tmp_path / "overlay").resolve()))]
    expected = [each for each in Manifests.of("prod").resources if each["kind"] != "Namespace"]
    assert [summarize(each) for each in made] == [summarize(each) for each in expected]
    assert {each["metadata"]["namespace"] for each in made} == {"models"}
    assert 'namespace="models"' in str(made)


def summarize(resource: Resource) -> tuple[str, str]:
    return resource["kind"], resource["metadata"]["name"]


def test_files_of_k8s_refer_to_nothing_outside_of_it() -> None:
    for path in K8S.rglob("kustomization.yaml"):
        document = yaml.safe_load(path.read_text())
        for field in ("resources", "components", "transformers"):
            for reference in document.get(field) or []:
                assert K8S in (path.parent / reference).resolve().parents, (path, reference)
