"""The objects that are applied: overlays that fit into a small cluster, Secrets, and the pods of the load."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import yaml

from tests.support.documents import find_block
from tests.support.keys import ADMIN, INFER, entry
from tests.support.manifests import K8S, Resource, build, containers

GATEWAY = "triton-gateway"
TRITON = "triton"
REDIS = "redis"
RUN_LABEL: Final = "triton-gateway-test"  # of namespaces and pods
# The images by the last part of their names, which is also the name in IMAGES=…
IMAGES: Final[Mapping[str, str]] = {
    "gateway": "triton-gateway",
    "embedded": "triton-gateway-embedded",
    "redis": "redis",
}
# Of the pods of the tools; without a request of its own, storage would have its limit.
REQUESTS: Final = {"cpu": "50m", "memory": "128Mi", "ephemeral-storage": "16Mi"}
PROGRAMS: Final = Path(__file__).parent / "programs"
KEYS_SECRET: Final = "triton-gateway-keys"
METRICS_SECRET: Final = "triton-gateway-metrics-key"
STATE_SECRET: Final = "triton-gateway-redis"
STATE_PASSWORD: Final = "0123456789abcdef"
SECRETS: Final = (KEYS_SECRET, STATE_SECRET)


def read_changes() -> dict[str, Any]:
    """Return the documented patches for small nodes, and the `replicas` that the overlay suggests."""
    patches = find_block("yaml", "/requests/")
    overlay = (K8S / "overlays" / "prod" / "kustomization.yaml").read_text()
    (replicas,) = re.findall(r"^# (replicas:\n(?:#   .*\n)+)", overlay, re.MULTILINE)
    return {
        **yaml.safe_load(patches),
        **yaml.safe_load(re.sub("^# ", "", replicas, flags=re.MULTILINE)),
    }


def render_prod(namespace: str) -> list[Resource]:
    """Return the objects of the overlay without GPUs, for small nodes, in a namespace."""
    with TemporaryDirectory() as name:
        folder = Path(name).resolve()
        k8s = os.path.relpath(K8S, folder)
        document = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": namespace,
            "resources": [f"{k8s}/overlays/prod"],
            "components": [f"{k8s}/components/cpu-only"],
            **read_changes(),
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(document))
        return list(yaml.load_all(build(folder), yaml.CSafeLoader))


def fit_overlay(
    resources: Sequence[Resource], kinds: Collection[str], images: Mapping[str, str], run: str
) -> list[Resource]:
    """Return the objects that the cluster knows, with these images, and a label on the pods.

    The namespace exists already. Without Prometheus, KEDA would not know how many Tritons there should be.
    """
    left_out = {"Namespace", "ScaledObject"}
    fitted = [each for each in resources if each["kind"] in kinds and each["kind"] not in left_out]
    for template in list_templates(fitted):
        template["metadata"]["labels"][RUN_LABEL] = run
        for container in containers(template["spec"]):
            container["image"] = replace_image(container["image"], images)
    return fitted


def replace_image(image: str, images: Mapping[str, str]) -> str:
    """Return the given image with the same name, or this one."""
    name = image.rpartition("/")[2].partition(":")[0].partition("@")[0]
    for role, known in IMAGES.items():
        if name == known:
            return images.get(role, image)
    return image


def list_templates(resources: Sequence[Resource]) -> Iterator[Resource]:
    """Yield the templates of the pods."""
    for resource in resources:
        if resource["kind"] in ("Deployment", "StatefulSet"):
            yield resource["spec"]["template"]


def build_config_map(name: str, files: Sequence[Path], **texts: str) -> Resource:
    data = {path.name: path.read_text() for path in files} | texts
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def build_keys_secret(text: str) -> Resource:
    return build_secret(KEYS_SECRET, {"keys.yaml": text})


def format_keys() -> str:
    return yaml.safe_dump({"keys": [entry(ADMIN, "admin"), entry(INFER, "infer")]})


def build_secret(name: str, texts: Mapping[str, str]) -> Resource:
    metadata = {"name": name}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": dict(texts)}


def list_secrets() -> list[Resource]:
    """Return the Secrets that exist before the objects."""
    state = build_secret(STATE_SECRET, {"password": STATE_PASSWORD})
    return [build_keys_secret(format_keys()), build_secret(METRICS_SECRET, {"key": ADMIN}), state]


def build_namespace(name: str, run: str) -> Resource:
    labels = {"pod-security.kubernetes.io/enforce": "restricted", RUN_LABEL: run}
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}


RESTRICTED: Final[Resource] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def build_pod(
    name: str,
    image: str,
    command: Sequence[str],
    program_map: str,
    **spec: Any,
) -> Resource:
    """Return a pod whose only container has the programs of a ConfigMap in /programs."""
    container = {
        "name": "main",
        "image": image,
        "command": list(command),
        "resources": {"requests": dict(REQUESTS), "limits": {"memory": "512Mi"}},
        "securityContext": RESTRICTED,
        "volumeMounts": [{"name": "programs", "mountPath": "/programs", "readOnly": True}],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [{"name": "programs", "configMap": {"name": program_map}}],
        **spec,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod}
