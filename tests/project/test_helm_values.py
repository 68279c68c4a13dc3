"""The effects of single values of the Helm chart: repositories, GPUs, monitoring, scaling, placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.access.keys import read_keys_file
from gateway.callers import CallerLimits
from gateway.repository.models_file import parse_models_file
from tests.support.gateway_forks import run_gateway
from tests.support.helm import CHART, EXAMPLES, Values, render_chart
from tests.support.manifests import Manifests

ENABLED: Values = {"enabled": True}
REMOTE = {
    "s3": "s3://models.example.com/triton_repo",
    "gcs": "gs://bucket/models",
    "azure": "as://account/container/models",
}


TRITON = "Deployment/triton/spec/template/spec"
CONTAINER = f"{TRITON}/containers/0"
GATEWAY = "Deployment/triton-gateway/spec/template/spec"
CLAIM = {"type": "pvc", "claimName": "models", "subPath": "prod"}
IDENTITY = {"iam.gke.io/gcp-service-account": "models@project.iam.gserviceaccount.com"}
PLACEMENT: Values = {
    "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "priorityClassName": "inference",
}
SIDECAR = {"name": "proxy", "image": "proxy:1.0"}
CA = {"name": "ca", "secret": {"secretName": "redis-ca"}}
MOUNT = {"name": "ca", "mountPath": "/etc/ca", "readOnly": True}
ADDITIONS: Values = {
    "extraContainers": [SIDECAR],
    "extraInitContainers": [{**SIDECAR, "name": "before"}],
    "extraVolumes": [CA],
    "extraVolumeMounts": [MOUNT],
    "podLabels": {"cost-center": "42"},
    "runtimeClassName": "gvisor",
    "serviceAccountAnnotations": {"role": "x"},
    "image": {"repository": "r.example.com/x", "pullPolicy": "Always"},
}
MODELS = ["text_ensemble", {"name": "ensemble", "required": "always"}]
SIZE = "Ingress/triton-gateway/metadata/annotations/nginx.ingress.kubernetes.io~proxy-body-size"
INGRESS: Values = {"ingress": ENABLED}


def limit_body(count: int) -> Values:
    return {"gateway": {"settings": {"GATEWAY_MAX_BODY_BYTES": str(count)}}, **INGRESS}


def use_gpus(resource: str) -> Values:
    return {"triton": {"gpu": {"resource": resource, "count": 2}}}


def mount(claim: Values) -> Values:
    return {"triton": {"repository": claim}, "redis": ENABLED}


# Values, and what stands at some place of the rendered objects, or is one of the items there.
EFFECTS: list[tuple[Values, str, Any]] = [
    ({"models": MODELS}, f"{CONTAINER}/args", "--load-model=text_ensemble"),
    ({"models": MODELS}, f"{CONTAINER}/args", "--load-model=ensemble"),
    ({"models": MODELS}, f"{CONTAINER}/readinessProbe/exec/command", "ensemble"),
    (mount(CLAIM), f"{CONTAINER}/args", "--model-repository=/models"),
    (
        mount(CLAIM),
        f"{CONTAINER}/volumeMounts",
        {"name": "repository", "mountPath": "/models", "subPath": "prod", "readOnly": True},
    ),
    (
        mount(CLAIM),
        f"{TRITON}/volumes",
        {"name": "repository", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
    ),
    (
        mount({**CLAIM, "uploads": "code"}),
        f"{GATEWAY}/containers/0/env",
        {"name": "GATEWAY_MODEL_UPLOADS", "value": "code"},
    ),
    (
        mount({**CLAIM, "uploads": "code"}),
        f"{GATEWAY}/volumes",
        {"name": "repository", "persistentVolumeClaim": {"claimName": "models"}},
    ),
    *(
        (use_gpus(name), f"{CONTAINER}/resources/{kind}/{name.replace('/', '~')}", "2")
        for name in ("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-3g.20gb")
        for kind in ("requests", "limits")  # which must be equal for extended resources
    ),
    *(({"triton": PLACEMENT}, f"{TRITON}/{name}", PLACEMENT[name]) for name in PLACEMENT),
    (INGRESS, SIZE, "16m"),
    (limit_body(104857600), SIZE, "100m"),
    (limit_body(1), SIZE, "1m"),
    *(
        ({part: ADDITIONS}, f"Deployment/{name}/spec/template/{place}", expected)
        for part, name in (("gateway", "triton-gateway"), ("triton", "triton"))
        for place, expected in (
            ("spec/containers", SIDECAR),
            ("spec/initContainers/0/name", "before"),
            ("spec/volumes", CA),
            ("spec/containers/0/volumeMounts", MOUNT),
            ("spec/containers/0/imagePullPolicy", "Always"),
            ("spec/runtimeClassName", "gvisor"),
            ("metadata/labels/cost-center", "42"),
        )
    ),
]


def look_up(made: Manifests, place: str) -> Any:
    """Return what stands at a place: kind/name/keys, with ~ for the / in a key."""
    kind, name, *keys = place.split("/")
    found: Any = made.get(kind, name)
    for key in keys:
        found = found[int(key) if isinstance(found, list) else key.replace("~", "/")]
    return found


@pytest.mark.parametrize(("values", "place", "expected"), EFFECTS)
def test_values_have_their_effect(values: Values, place: str, expected: Any) -> None:
    found = look_up(render_chart(values), place)
    assert found == expected or (isinstance(found, list) and expected in found)


def test_model_with_a_mark_is_declared_with_it() -> None:
    made = render_chart({"models": MODELS})
    text = made.get("ConfigMap", "triton-gateway-models")["data"]["models.yaml"]
    declared = parse_models_file(text)
    assert declared.keys() == {"ensemble", "text_ensemble"}
    assert declared["ensemble"].is_always_required


@pytest.mark.parametrize("kind", REMOTE)
def test_triton_reads_a_bucket_with_a_secret_or_an_identity(kind: str) -> None:
    repository = {"type": kind, "url": REMOTE[kind]}
    made = render_chart({"triton": {"repository": {**repository, "secretName": "store"}}})
    container = look_up(made, CONTAINER)
    assert f"--model-repository={REMOTE[kind]}" in container["args"]
    assert container["envFrom"] == [{"secretRef": {"name": "store"}}]
    policy = made.get("NetworkPolicy", f"triton-to-{kind}")["spec"]
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {443, 53}
    # The identity of a cloud replaces the secret.
    values = {"repository": repository, "serviceAccountAnnotations": IDENTITY}
    made = render_chart({"triton": values})
    assert "envFrom" not in look_up(made, CONTAINER)
    assert look_up(made, "ServiceAccount/triton/metadata/annotations") == IDENTITY


def test_existing_tritons_are_reached_through_the_policy() -> None:
    (example,) = (path for path in EXAMPLES if path.stem == "existing-triton")
    values = yaml.safe_load(example.read_text())
    made = render_chart(None, "-f", example)
    assert made.settings()["GATEWAY_TRITON_URLS"] == values["triton"]["urls"]
    assert not made.has("Deployment", "triton")
    rules = made.get("NetworkPolicy", "triton-gateway")["spec"]["egress"]
    (rule,) = (each for each in rules if "to" in each)
    assert rule["to"] == values["triton"]["peers"]
    assert {port["port"] for port in rule["ports"]} == {8000, 8001, 8002}


def test_commands_of_the_example_create_the_keys_of_the_tenants(tmp_path: Path) -> None:
    text = (CHART / "examples" / "several-tenants.yaml").read_text()
    commands = [
        line.removeprefix("#   triton-gateway ")
        for line in text.splitlines()
        if line.startswith("#   triton-gateway key create ")
    ]
    file = tmp_path / "keys.yaml"
    for command in commands:
        words = command.replace("'", "").replace("keys.yaml", str(file)).split()
        assert run_gateway(*words).returncode == 0, command
    callers = {caller.name: caller for caller in read_keys_file(file).values()}
    declared = yaml.safe_load(text)["models"]
    visible = {
        name: [model for model in declared if caller.can_see(model)]
        for name, caller in callers.items()
    }
    # Each team uses its own model of the fleet.
    assert visible == {"vision": ["resnet50"], "search": ["text_ensemble"], "ops": declared}
    assert callers["vision"].limits == CallerLimits(50)


def test_full_name_gives_a_release_names_of_its_own() -> None:
    parts = dict.fromkeys(("redis", "monitoring", "keda", "gatewayApi", "ingress"), ENABLED)
    made = render_chart({**parts, "fullnameOverride": "vision"})
    other = render_chart(parts)
    names = {(each["kind"], each["metadata"]["name"]) for each in made.resources}
    assert not names & {(each["kind"], each["metadata"]["name"]) for each in other.resources}
    assert len(names) == len(other.resources)
    assert all(name == "vision" or name.startswith("vision-") for _, name in names)
    assert made.get("ConfigMap", "vision-settings")["data"]["GATEWAY_TRITON_URLS"] == (
        "dns+http://vision-triton:8000?prefer=vision-triton-ready"
    )
    (container,) = made.pod("vision")["containers"]
    settings = {each["name"]: each.get("value") for each in container["env"]}
    assert settings["GATEWAY_STATE"] == "redis://vision-redis:6379/0"
    for workload in made.workloads:
        labels = workload["spec"]["selector"]["matchLabels"]
        assert labels["app.kubernetes.io/instance"] == "triton-gateway"
        assert made.selected(labels) == [workload]
        assert other.selected(labels) == []
    # The alerts select the job by this label.
    assert (
        made.get("Deployment", "vision")["spec"]["template"]["metadata"]["labels"][
            "app.kubernetes.io/name"
        ]
        == "triton-gateway"
    )
