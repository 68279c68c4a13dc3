"""The rules of kube-score and Polaris, for manifests; docs/operate/kubernetes.md names the exceptions.

A rule has the name that the tool gives it, with that of kube-score first where both have it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from tests.support.kubernetes_schemas import CUSTOM
from tests.support.manifests import Manifests, Resource, containers
from tests.support.servers import ROOT

DOCUMENT: Final = ROOT / "docs" / "operate" / "kubernetes.md"
SECRET_NAME: Final = re.compile(r"PASSWORD|SECRET|TOKEN|API_?KEY|CREDENTIAL", re.IGNORECASE)
LABEL_VALUE: Final = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
HOSTNAME: Final = "kubernetes.io/hostname"
WORKLOADS: Final = ("Deployment", "StatefulSet")
SMALLEST_ID: Final = 10_000


@dataclass(frozen=True, order=True)
class Finding:
    """A rule that an object, or a container of it, breaks; a workload has the name of its label."""

    rule: str
    place: str


@dataclass(frozen=True)
class Exemption:
    """A row of the table of deliberate exceptions; the place is a pattern."""

    rule: str
    place: str

    def covers(self, finding: Finding) -> bool:
        return finding.rule == self.rule and fnmatchcase(finding.place, self.place)


def read_exemptions() -> list[Exemption]:
    _, _, section = DOCUMENT.read_text().partition("### Rules of platform teams\n")
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \| [^|]+ \|$", section.partition("\n## ")[0], re.M)
    return [
        Exemption(rule, place)
        for rules, places in rows
        for rule in re.findall(r"`([^`]+)`", rules)
        for place in re.findall(r"`([^`]+)`", places)
    ]


def find_violations(made: Manifests) -> list[Finding]:
    found = {*judge_objects(made), *judge_containers(made)}
    return sorted(found)


def judge_objects(made: Manifests) -> Iterator[Finding]:
    rules = OBJECT_RULES | dict.fromkeys(WORKLOADS, WORKLOAD_RULES)
    for resource in made.resources:
        for rule, is_met in (COMMON_RULES | rules.get(resource["kind"], {})).items():
            if not is_met(made, resource):
                yield Finding(rule, component_of(resource))


def judge_containers(made: Manifests) -> Iterator[Finding]:
    for workload in made.workloads:
        pod = pod_spec(workload)
        for container in containers(pod):
            rules = CONTAINER_RULES | (PROBE_RULES if container in pod["containers"] else {})
            for rule, is_met in rules.items():
                if not is_met(pod, container):
                    yield Finding(rule, f"{component_of(workload)}/{container['name']}")


def component_of(resource: Resource) -> str:
    labels = resource["metadata"].get("labels", {})
    name: str = labels.get("app.kubernetes.io/name") or resource["metadata"]["name"]
    return name


# Containers


def read_resource(container: Resource, kind: str, name: str) -> Any:
    return container.get("resources", {}).get(kind, {}).get(name)


def has_tag(container: Resource) -> bool:
    image = container["image"].rpartition("/")[2]
    return "@sha256:" in image or (":" in image and not image.endswith(":latest"))


def security(pod: Resource, container: Resource) -> Resource:
    return {**pod.get("securityContext", {}), **container.get("securityContext", {})}


def has_distinct_variables(container: Resource) -> bool:
    names = [variable["name"] for variable in container.get("env") or []]
    return len(names) == len(set(names))


ContainerRule = Callable[[Resource, Resource], bool]
CONTAINER_RULES: Final[dict[str, ContainerRule]] = {
    "container-resources: cpu request": lambda _, c: bool(read_resource(c, "requests", "cpu")),
    "container-resources: memory request": lambda _, c: bool(
        read_resource(c, "requests", "memory")
    ),
    "container-resources: cpu limit": lambda _, c: bool(read_resource(c, "limits", "cpu")),
    "container-resources: memory limit": lambda _, c: bool(read_resource(c, "limits", "memory")),
    "container-ephemeral-storage-request-and-limit": lambda _, c: all(
        read_resource(c, kind, "ephemeral-storage") for kind in ("requests", "limits")
    ),
    "container-image-tag": lambda _, c: has_tag(c),
    "container-image-pull-policy": lambda _, c: c.get("imagePullPolicy") == "Always",
    "container-security-context-readonlyrootfilesystem": lambda p, c: (
        security(p, c).get("readOnlyRootFilesystem") is True
    ),
    "container-security-context-privileged": lambda p, c: not security(p, c).get("privileged"),
    "container-security-context-user-group-id": lambda p, c: all(
        security(p, c).get(name, 0) >= SMALLEST_ID for name in ("runAsUser", "runAsGroup")
    ),
    "container-seccomp-profile": lambda p, c: (
        security(p, c).get("seccompProfile", {}).get("type") == "RuntimeDefault"
    ),
    "privilegeEscalationAllowed": lambda p, c: (
        security(p, c).get("allowPrivilegeEscalation") is False
    ),
    "runAsRootAllowed": lambda p, c: security(p, c).get("runAsNonRoot") is True,
    "insecureCapabilities": lambda p, c: (
        security(p, c).get("capabilities", {}) == {"drop": ["ALL"]}
    ),
    "hostPortSet": lambda _, c: not any("hostPort" in port for port in c.get("ports", [])),
    "container-ports-check": lambda _, c: all(
        len(port["name"]) <= 15 and port["containerPort"] for port in c.get("ports", [])
    ),
    "environment-variable-key-duplication": lambda _, c: has_distinct_variables(c),
    "sensitiveContainerEnvVar": lambda _, c: (
        not any(
            SECRET_NAME.search(variable["name"]) and "value" in variable
            for variable in c.get("env") or []
        )
    ),
}
PROBE_RULES: Final[dict[str, ContainerRule]] = {
    "pod-probes: readiness": lambda _, c: "readinessProbe" in c,
    "pod-probes: liveness": lambda _, c: "livenessProbe" in c,
    "pod-probes: identical": lambda _, c: c.get("readinessProbe") != c.get("livenessProbe"),
}


# Workloads


def pod_spec(workload: Resource) -> Resource:
    spec: Resource = workload["spec"]["template"]["spec"]
    return spec


def select(made: Manifests, kind: str, workload: Resource, field: str) -> list[Resource]:
    """Return the objects of a kind whose selector selects the pods of the workload."""
    return [
        resource
        for resource in made.kind(kind)
        if workload in made.selected(labels_of(resource["spec"].get(field) or {}))
    ]


def labels_of(selector: Resource) -> dict[str, str]:
    labels: dict[str, str] = selector.get("matchLabels", selector)
    return labels


def is_scaled(made: Manifests, workload: Resource) -> bool:
    return any(
        scaler["spec"]["scaleTargetRef"]["name"] == workload["metadata"]["name"]
        for scaler in made.kind("HorizontalPodAutoscaler", "ScaledObject")
    )


def has_several_pods(made: Manifests, workload: Resource) -> bool:
    return is_scaled(made, workload) or workload["spec"].get("replicas", 1) > 1


def has_policy(made: Manifests, workload: Resource, direction: str) -> bool:
    return any(
        direction in policy["spec"]["policyTypes"]
        for policy in select(made, "NetworkPolicy", workload, "podSelector")
    )


def spreads_over_nodes(workload: Resource) -> bool:
    constraints = pod_spec(workload).get("topologySpreadConstraints") or []
    return any(constraint["topologyKey"] == HOSTNAME for constraint in constraints)


def avoids_own_node(workload: Resource) -> bool:
    terms = pod_spec(workload).get("affinity", {}).get("podAntiAffinity", {})
    return any(
        term.get("podAffinityTerm", term)["topologyKey"] == HOSTNAME
        for name in terms
        for term in terms[name]
    )


def has_headless_service(made: Manifests, workload: Resource) -> bool:
    return any(
        service["metadata"]["name"] == workload["spec"].get("serviceName")
        and service["spec"].get("clusterIP") == "None"
        for service in select(made, "Service", workload, "selector")
    )


ObjectRule = Callable[[Manifests, Resource], bool]
WORKLOAD_RULES: Final[dict[str, ObjectRule]] = {
    "pod-networkpolicy: ingress": lambda m, w: has_policy(m, w, "Ingress"),
    "pod-networkpolicy: egress": lambda m, w: has_policy(m, w, "Egress"),
    "deployment-has-poddisruptionbudget": lambda m, w: bool(
        select(m, "PodDisruptionBudget", w, "selector")
    ),
    "pod-topology-spread-constraints": lambda _, w: spreads_over_nodes(w),
    "deployment-has-host-podantiaffinity": lambda m, w: (
        not has_several_pods(m, w) or avoids_own_node(w)
    ),
    "deployment-replicas": has_several_pods,
    "deployment-targeted-by-hpa-does-not-have-replicas-configured": lambda m, w: (
        not (is_scaled(m, w) and "replicas" in w["spec"])
    ),
    "statefulset-has-servicename": lambda m, w: (
        w["kind"] != "StatefulSet" or has_headless_service(m, w)
    ),
    "deployment-pod-selector-labels-match-template-metadata-labels": lambda m, w: (
        w in m.selected(labels_of(w["spec"]["selector"]))
    ),
    "priorityClassNotSet": lambda _, w: bool(pod_spec(w).get("priorityClassName")),
    "automountServiceAccountToken": lambda _, w: (
        pod_spec(w).get("automountServiceAccountToken") is False
    ),
    "hostNetworkSet": lambda _, w: (
        not any(pod_spec(w).get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))
    ),
    "hostPathSet": lambda _, w: not any("hostPath" in v for v in pod_spec(w).get("volumes", [])),
    "metadataAndInstanceMismatched": lambda _, w: (
        w["metadata"]["labels"].get("app.kubernetes.io/instance") == w["metadata"]["name"]
    ),
}


# Other objects


def list_services(ingress: Resource) -> Iterator[str]:
    for rule in ingress["spec"]["rules"]:
        for path in rule["http"]["paths"]:
            yield path["backend"]["service"]["name"]


COMMON_RULES: Final[dict[str, ObjectRule]] = {
    "stable-version": lambda _, r: (
        r["kind"] in CUSTOM or re.fullmatch(r"v\d+", r["apiVersion"].rpartition("/")[2]) is not None
    ),
    "label-values": lambda _, r: all(
        LABEL_VALUE.fullmatch(value) for value in r["metadata"].get("labels", {}).values()
    ),
}
OBJECT_RULES: Final[dict[str, dict[str, ObjectRule]]] = {
    "Service": {
        "service-targets-pod": lambda m, s: bool(m.selected(s["spec"]["selector"])),
        "service-type": lambda _, s: s["spec"].get("type", "ClusterIP") == "ClusterIP",
    },
    "Ingress": {
        "ingress-targets-service": lambda m, i: all(
            m.has("Service", name) for name in list_services(i)
        ),
        "tlsSettingsMissing": lambda _, i: bool(i["spec"].get("tls")),
    },
    "HorizontalPodAutoscaler": {
        "horizontalpodautoscaler-has-target": lambda m, h: m.has(
            h["spec"]["scaleTargetRef"]["kind"], h["spec"]["scaleTargetRef"]["name"]
        ),
        "horizontalpodautoscaler-replicas": lambda _, h: h["spec"].get("minReplicas", 1) > 1,
        "hpaMaxAvailability": lambda _, h: h["spec"]["maxReplicas"] > h["spec"]["minReplicas"],
    },
    "NetworkPolicy": {
        "networkpolicy-targets-pod": lambda m, n: bool(
            m.selected(labels_of(n["spec"]["podSelector"]))
        ),
    },
    "PodDisruptionBudget": {
        "poddisruptionbudget-has-policy": lambda _, p: "unhealthyPodEvictionPolicy" in p["spec"],
        "pdbDisruptionsIsZero": lambda _, p: p["spec"].get("maxUnavailable") not in (0, "0%"),
    },
    "ConfigMap": {
        "sensitiveConfigmapContent": lambda _, c: (
            not any(SECRET_NAME.search(name) for name in c.get("data") or {})
        ),
    },
}
