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
from tests.support.manifests import Manifests, Resource

ENABLED: Values = {"enabled": True}
REMOTE = {
    "s3": "s3://models.example.com/triton_repo",
    "gcs": "gs://bucket/models",
    "azure": "as://account/container/models",
}


def triton(made: Manifests) -> Resource:
    (container,) = made.pod("triton")["containers"]
    return dict(container)


def render_triton(**values: Any) -> Manifests:
    return render_chart({"triton": values})


@pytest.mark.parametrize("kind", REMOTE)
def test_triton_reads_a_bucket_with_a_secret_or_a_cloud_identity(kind: str) -> None:
    repository = {"type": kind, "url": REMOTE[kind], "secretName": "store"}
    made = render_triton(repository=repository)
    container = triton(made)
    assert f"--model-repository={REMOTE[kind]}" in container["args"]
    assert container["envFrom"] == [{"secretRef": {"name": "store"}}]
    assert made.pod("triton").get("initContainers") is None
    # Triton copies the models to /tmp.
    (tmp,) = (each for each in made.pod("triton")["volumes"] if each["name"] == "tmp")
    assert tmp["emptyDir"] == {"sizeLimit": "10Gi"}
    policy = made.get("NetworkPolicy", f"triton-to-{kind}")["spec"]
    assert made.selected(policy["podSelector"]["matchLabels"])[0]["metadata"]["name"] == "triton"
    opened = {port["port"] for rule in policy["egress"] for port in rule["ports"]}
    assert opened == {443, 53}
    # The identity of a cloud replaces the secret.
    annotations = {"iam.gke.io/gcp-service-account": "models@project.iam.gserviceaccount.com"}
    repository = {"type": kind, "url": REMOTE[kind]}
    made = render_triton(repository=repository, serviceAccountAnnotations=annotations)
    assert "envFrom" not in triton(made)
    assert made.get("ServiceAccount", "triton")["metadata"]["annotations"] == annotations


def test_model_with_a_mark_is_declared_and_loaded_by_its_name() -> None:
    models = ["text_ensemble", {"name": "ensemble", "required": "always"}]
    made = render_chart({"models": models})
    text = made.get("ConfigMap", "triton-gateway-models")["data"]["models.yaml"]
    declared = parse_models_file(text)
    assert declared.keys() == {"ensemble", "text_ensemble"}
    assert declared["ensemble"].is_always_required
    names = ["text_ensemble", "ensemble"]
    container = triton(made)
    loaded = [word for word in container["args"] if word.startswith("--load-model=")]
    assert loaded == [f"--load-model={name}" for name in names]
    assert container["readinessProbe"]["exec"]["command"][-2:] == names


def test_triton_reads_a_folder_of_a_claim() -> None:
    repository = {"type": "pvc", "claimName": "models", "subPath": "prod"}
    made = render_triton(repository=repository)
    container = triton(made)
    pod = made.pod("triton")
    assert "--model-repository=/models" in container["args"]
    (mount,) = (each for each in container["volumeMounts"] if each["mountPath"] == "/models")
    assert (mount["subPath"], mount["readOnly"]) == ("prod", True)
    (volume,) = (each for each in pod["volumes"] if each["name"] == mount["name"])
    assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert pod.get("initContainers") is None


@pytest.mark.parametrize(
    "resource", ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-3g.20gb", ""]
)
def test_requested_gpus_are_those_of_the_values(resource: str) -> None:
    gpu = {"resource": resource, "count": 2} if resource else {"count": 0}
    resources = triton(render_triton(gpu=gpu))["resources"]
    # Kubernetes requires that requests and limits of extended resources are equal.
    for kind in ("requests", "limits"):
        extended = {name: count for name, count in resources[kind].items() if "/" in name}
        assert extended == ({resource: "2"} if resource else {})


def test_tritons_are_placed_on_the_nodes_of_the_values() -> None:
    placement: Values = {
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "priorityClassName": "inference",
    }
    pod = render_triton(**placement).pod("triton")
    assert {name: pod[name] for name in placement} == placement


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


def test_size_of_the_ingress_follows_the_setting() -> None:
    def size(values: Values, annotations: Values | None = None) -> str:
        ingress = {"enabled": True, "annotations": annotations or {}}
        (made,) = render_chart({"gateway": {"settings": values}, "ingress": ingress}).kind(
            "Ingress"
        )
        return str(made["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-body-size"])

    assert size({}) == "16m"
    assert size({"GATEWAY_MAX_BODY_BYTES": "104857600"}) == "100m"
    assert size({"GATEWAY_MAX_BODY_BYTES": "1"}) == "1m"
    assert size({}, {"nginx.ingress.kubernetes.io/proxy-body-size": "1g"}) == "1g"


def test_uploads_give_the_gateways_the_claim_of_triton() -> None:
    repository = {"type": "pvc", "claimName": "models", "subPath": "prod", "uploads": "code"}
    made = render_chart({"triton": {"repository": repository}, "redis": ENABLED})
    gateway = made.pod("triton-gateway")
    triton_pod = made.pod("triton")
    assert gateway["securityContext"]["fsGroup"] == triton_pod["securityContext"]["fsGroup"]
    (container,) = gateway["containers"]
    settings = {each["name"]: each.get("value") for each in container["env"]}
    assert settings["GATEWAY_REPOSITORY"] == "file:///models"
    assert settings["GATEWAY_MODEL_UPLOADS"] == "code"
    (mount,) = (each for each in container["volumeMounts"] if each["mountPath"] == "/models")
    assert (mount["subPath"], mount.get("readOnly")) == ("prod", None)
    (volume,) = (each for each in gateway["volumes"] if each["name"] == mount["name"])
    assert volume["persistentVolumeClaim"] == {"claimName": "models"}


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


def test_sidecars_volumes_and_labels_are_added_to_the_pods() -> None:
    sidecar = {"name": "proxy", "image": "proxy:1.0"}
    ca = {"name": "ca", "secret": {"secretName": "redis-ca"}}
    mount = {"name": "ca", "mountPath": "/etc/ca", "readOnly": True}
    additions = {
        "extraContainers": [sidecar],
        "extraInitContainers": [{**sidecar, "name": "before"}],
        "extraVolumes": [ca],
        "extraVolumeMounts": [mount],
        "podLabels": {"cost-center": "42"},
        "runtimeClassName": "gvisor",
        "serviceAccountAnnotations": {"role": "x"},
        "image": {"repository": "r.example.com/x", "pullPolicy": "Always"},
    }
    made = render_chart({"gateway": additions, "triton": additions})
    for name in ("triton-gateway", "triton"):
        pod = made.pod(name)
        assert pod["containers"][1] == sidecar
        assert pod["initContainers"][0]["name"] == "before"
        assert ca in pod["volumes"]
        assert mount in pod["containers"][0]["volumeMounts"]
        assert pod["containers"][0]["imagePullPolicy"] == "Always"
        assert pod["runtimeClassName"] == "gvisor"
        template = made.get("Deployment", name)["spec"]["template"]
        assert template["metadata"]["labels"]["cost-center"] == "42"
        account = made.get("ServiceAccount", name)
        assert account["metadata"]["annotations"] == {"role": "x"}
