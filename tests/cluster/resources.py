"""The objects that are applied: overlays that fit into a small cluster, Secrets, and the pods of the load."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Final

import yaml

from tests.support.keys import ADMIN, INFER, entry
from tests.support.manifests import K8S, Resource, build, containers
from tests.support.servers import ROOT

GATEWAY, TRITON, REDIS = "triton-gateway", "triton", "redis"
RUN_LABEL: Final = "triton-gateway-test"  # of namespaces and pods
# The images by the last part of their names, which is also the name in IMAGES=…
IMAGES: Final[Mapping[str, str]] = {
    "gateway": "triton-gateway",
    "embedded": "triton-gateway-embedded",
    "redis": "redis",
}
SCALED_OBJECT: Final = "ScaledObject"
COOLDOWN_S: Final = 15
# Of the pods of the tools; without a request of its own, storage would have its limit.
REQUESTS: Final = {"cpu": "50m", "memory": "128Mi", "ephemeral-storage": "16Mi"}
PROGRAMS: Final = Path(__file__).parent / "programs"
EXAMPLES: Final = ROOT / "triton_repo_examples"
# A stream of a second, which every Triton loads at its start; and a model that is loaded and unloaded.
STREAMING, CHANGING = "countdown", "upper"
MODELS_FOLDER: Final = "/test-models"
DEMONSTRATION: Final = "/opt/triton-gateway/triton_repo"
KEYS_SECRET: Final = "triton-gateway-keys"
METRICS_SECRET: Final = "triton-gateway-metrics-key"
STATE_SECRET: Final = "triton-gateway-redis"
STATE_PASSWORD: Final = "0123456789abcdef"
SECRETS: Final = (KEYS_SECRET, STATE_SECRET)


def read_small_patches() -> dict[str, Any]:
    """Return the patches of kubernetes.md for small nodes."""
    page = (ROOT / "docs" / "operate" / "kubernetes.md").read_text()
    blocks = re.findall(r"^```yaml\n(patches:\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    (patches,) = (block for block in blocks if "/requests/" in block)
    document: dict[str, Any] = yaml.safe_load(patches)
    return document


def read_number_of_tritons() -> dict[str, Any]:
    """Return the `replicas` that the overlay prod suggests where nothing scales the Tritons."""
    overlay = (K8S / "overlays" / "prod" / "kustomization.yaml").read_text()
    (suggested,) = re.findall(r"^# (replicas:\n(?:#   .*\n)+)", overlay, re.MULTILINE)
    document: dict[str, Any] = yaml.safe_load(re.sub("^# ", "", suggested, flags=re.MULTILINE))
    return document


def render_overlay(
    overlay: str,
    namespace: str,
    components: Sequence[str],
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> list[Resource]:
    """Return the objects of an overlay with further components and changes, in a namespace."""
    with TemporaryDirectory() as name:
        folder = Path(name).resolve()
        k8s = os.path.relpath(K8S, folder)
        document = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": namespace,
            "resources": [f"{k8s}/overlays/{overlay}"],
            "components": [f"{k8s}/components/{component}" for component in components],
            # Of components whose objects contain the namespace.
            "transformers": [
                f"{k8s}/components/{component}/namespace"
                for component in components
                if (K8S / "components" / component / "namespace").is_dir()
            ],
            **changes,
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(document))
        return list(yaml.load_all(build(folder), yaml.CSafeLoader))


def fit_overlay(
    resources: Sequence[Resource], kinds: Collection[str], images: Mapping[str, str], run: str
) -> list[Resource]:
    """Return the objects that the cluster knows, with these images, and a label on the pods.

    The namespace exists already. Without Prometheus, KEDA would not know how many Tritons there should be.
    """
    left_out = {"Namespace", SCALED_OBJECT}
    fitted = [each for each in resources if each["kind"] in kinds and each["kind"] not in left_out]
    for template in list_templates(fitted):
        template["metadata"]["labels"][RUN_LABEL] = run
        for container in containers(template["spec"]):
            container["image"] = replace_image(container["image"], images)
    return fitted


def list_scalers(namespace: str) -> list[Resource]:
    """Return the objects with which KEDA asks a single gateway, by the documents, and scales soon."""
    page = (ROOT / "docs" / "serve" / "on-demand.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (text,) = (block for block in blocks if "metrics-api" in block)
    text = text.replace(f".{GATEWAY}.svc", f".{namespace}.svc")
    found: list[Resource] = list(yaml.safe_load_all(text))
    (scaled,) = (each for each in found if each["kind"] == SCALED_OBJECT)
    scaled["spec"]["cooldownPeriod"] = COOLDOWN_S
    behavior = {"scaleDown": {"stabilizationWindowSeconds": COOLDOWN_S}}
    scaled["spec"]["advanced"] = {"horizontalPodAutoscalerConfig": {"behavior": behavior}}
    return found


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


def add_test_models(resources: Sequence[Resource]) -> list[Resource]:
    """Return the objects with the models of the load: mounted from ConfigMaps, one of them declared."""
    (deployment,) = (
        each
        for each in resources
        if each["kind"] == "Deployment" and each["metadata"]["name"] == TRITON
    )
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    container["args"] += [DEMONSTRATION, MODELS_FOLDER, "--load", STREAMING]
    for model in (STREAMING, CHANGING):
        container["volumeMounts"].append(
            {"name": model, "mountPath": f"{MODELS_FOLDER}/{model}", "readOnly": True}
        )
        items = [
            {"key": path.name, "path": str(path.relative_to(EXAMPLES / model))}
            for path in list_model_files(model)
        ]
        pod["volumes"].append(
            {"name": model, "configMap": {"name": f"model-{model}", "items": items}}
        )
    (declared,) = (
        each
        for each in resources
        if each["kind"] == "ConfigMap" and "models.yaml" in each.get("data", {})
    )
    document = yaml.safe_load(declared["data"]["models.yaml"])
    document["models"].append(STREAMING)
    declared["data"]["models.yaml"] = yaml.safe_dump(document)
    return [
        *(
            build_config_map(f"model-{model}", list_model_files(model))
            for model in (STREAMING, CHANGING)
        ),
        *resources,
    ]


def list_model_files(model: str) -> list[Path]:
    folder = EXAMPLES / model
    return [folder / "config.pbtxt", folder / "1" / "model.py"]


def build_config_map(name: str, files: Sequence[Path], **texts: str) -> Resource:
    data = {path.name: path.read_text() for path in files} | texts
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def build_keys_secret(text: str) -> Resource:
    return build_secret(KEYS_SECRET, {"keys.yaml": text})


def format_keys(*further_keys: str) -> str:
    entries = [entry(ADMIN, "admin"), entry(INFER, "infer")]
    entries += [entry(key, "infer") for key in further_keys]
    return yaml.safe_dump({"keys": entries})


def build_secret(name: str, texts: Mapping[str, str]) -> Resource:
    metadata = {"name": name}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": dict(texts)}


def list_secrets() -> list[Resource]:
    """Return the Secrets that kubernetes.md creates before the objects."""
    state = build_secret(STATE_SECRET, {"password": STATE_PASSWORD})
    return [build_keys_secret(format_keys()), build_secret(METRICS_SECRET, {"key": ADMIN}), state]


def build_namespace(name: str, run: str, *, is_restricted: bool = True) -> Resource:
    level = "restricted" if is_restricted else "privileged"
    labels = {"pod-security.kubernetes.io/enforce": level, RUN_LABEL: run}
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
SLEEP: Final = ("python3", "-c", "import time; time.sleep(10**6)")


def build_pod(
    name: str,
    image: str,
    command: Sequence[str],
    program_map: str,
    security: Resource = RESTRICTED,
    **spec: Any,
) -> Resource:
    """Return a pod whose only container has the programs of a ConfigMap in /programs."""
    container = {
        "name": "main",
        "image": image,
        "command": list(command),
        "resources": {"requests": dict(REQUESTS), "limits": {"memory": "512Mi"}},
        "securityContext": security,
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


def build_agent(node: str, image: str) -> Resource:
    """Return a pod that can send signals to all processes of a node."""
    security = {"runAsUser": 0, "readOnlyRootFilesystem": True}
    return build_pod(
        f"agent-{node}"[:63].rstrip("-."),
        image,
        SLEEP,
        "programs",
        security,
        nodeName=node,
        hostPID=True,
        tolerations=[{"operator": "Exists"}],
    )
