"""The Helm chart: it renders the objects of k8s/, and refuses invalid values."""

from __future__ import annotations

import copy
from typing import Any

import httpx
import pytest
import yaml

from deploy.helm import chart
from gateway import __version__
from tests.support.gateway_forks import run_gateway
from tests.support.helm import CHART, EXAMPLES, Values, comparable, render_chart, run_helm
from tests.support.kubernetes_schemas import CUSTOM, KUBERNETES, complaints
from tests.support.manifests import Manifests, Resource
from tests.support.servers import free_ports

CPU_ONLY: Values = {"triton": {"cpuOnly": {"enabled": True}}}
EGRESS: Values = {
    "networkPolicy": {
        "gatewayEgress": [
            {
                "to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}],
                "ports": [{"port": 6379, "protocol": "TCP"}],
            },
            {
                "to": [
                    {
                        "namespaceSelector": {
                            "matchLabels": {"kubernetes.io/metadata.name": "observability"}
                        }
                    }
                ],
                "ports": [{"port": 4318, "protocol": "TCP"}],
            },
        ]
    }
}
S3: Values = {
    "triton": {
        "repository": {
            "type": "s3",
            "url": "s3://models.example.com/triton_repo",
            "secretName": "triton-s3",
        }
    }
}
CLAIM: Values = {"type": "pvc", "claimName": "triton-repository"}
UPLOADS: Values = {"triton": {"repository": {**CLAIM, "uploads": "artifacts"}}}
ENABLED: Values = {"enabled": True}
# The values with which the chart is each component of k8s/.
COMPONENTS: dict[str, Values] = {
    "cpu-only": CPU_ONLY,
    "egress": EGRESS,
    "gateway-api": {"gatewayApi": ENABLED},
    "ingress": {"ingress": ENABLED},
    "jobs": {"jobs": ENABLED, "redis": ENABLED},
    "keda": {"keda": ENABLED},
    "keda-zero": {"keda": {"enabled": True, "scaleToZero": True}},
    "monitoring": {"monitoring": ENABLED},
    "monitoring-tritons": {"monitoring": {"enabled": True, "scrapeTritons": True}},
    "redis-state": {"redis": ENABLED},
    "s3-repository": S3,
    "volume-repository": {**UPLOADS, "redis": ENABLED},
}
# Components that change others.
REQUIRED = {
    "jobs": ("redis-state",),
    "keda-zero": ("keda",),
    "monitoring-tritons": ("monitoring",),
    "volume-repository": ("redis-state",),
}
DEV: Values = {
    **CPU_ONLY,
    "keys": {"enabled": False},
    "gateway": {
        "autoscaling": {"enabled": False},
        "env": [{"name": "GATEWAY_STATE", "value": "memory:"}],
        "resources": {"requests": {"cpu": "100m", "memory": "192Mi"}},
    },
}
PROD: Values = {
    "gateway": {"image": {"repository": "registry.example.com/triton-gateway"}},
    "triton": {"image": {"repository": "registry.example.com/triton-gateway-triton"}},
    **dict.fromkeys(("redis", "monitoring", "keda", "gatewayApi"), ENABLED),
}
DIGEST = "sha256:" + "0" * 64
SIDECAR: Values = {
    "name": "sidecar",
    "image": "registry.example.com/sidecar:1.0",
    "resources": {
        "requests": {"cpu": "10m", "memory": "16Mi", "ephemeral-storage": "16Mi"},
        "limits": {"memory": "64Mi", "ephemeral-storage": "64Mi"},
    },
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    },
    "livenessProbe": {"tcpSocket": {"port": 9000}},
    "readinessProbe": {"httpGet": {"path": "/", "port": 9000}},
}
OTHERS: dict[str, Values] = {
    "existing Triton": {"triton": {"enabled": False, "urls": "dns+http://t.models:8000"}},
    "claim": {"triton": {"repository": {"type": "pvc", "claimName": "models", "subPath": "prod"}}},
    "Google": {"triton": {"repository": {"type": "gcs", "url": "gs://bucket/models"}}},
    "Azure": {
        "triton": {
            "repository": {"type": "azure", "url": "as://account/box/models", "secretName": "az"}
        }
    },
    "managed Redis": {
        **EGRESS,
        "redis": {
            "externalUrl": "rediss://redis.example.com:6379/0",
            "secretName": "redis",
        },
    },
    "MIG, placement, OpenShift": {
        "triton": {
            "image": {"repository": "r.example.com:5000/triton", "digest": DIGEST},
            "gpu": {"resource": "nvidia.com/mig-1g.10gb", "count": 2},
            "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "priorityClassName": "inference",
            "args": ["--log-verbose=1"],
        },
        "gateway": {"nodeSelector": {"pool": "cpu"}, "podAnnotations": {"a": "b"}},
        "networkPolicy": {"dnsPorts": [53, 5353]},
        "imagePullSecrets": [{"name": "registry"}],
        "commonLabels": {"team": "vision"},
    },
    "several releases in a namespace": {**PROD, "fullnameOverride": "vision", "ingress": ENABLED},
    "additions": {
        part: {
            "podLabels": {"cost-center": "42"},
            "serviceAccountAnnotations": {"a": "b"},
            "runtimeClassName": "nvidia",
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "DoNotSchedule",
                    "labelSelector": {"matchLabels": {"app.kubernetes.io/name": name}},
                }
            ],
            "extraContainers": [SIDECAR],
            "extraInitContainers": [{**SIDECAR, "name": "before"}],
            "extraVolumes": [{"name": "ca", "secret": {"secretName": "ca"}}],
            "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca", "readOnly": True}],
            "image": {"repository": name, "digest": DIGEST, "pullPolicy": "Always"},
        }
        for part, name in (("gateway", "triton-gateway"), ("triton", "triton"))
    },
    "no policies, a shared GPU": {
        "networkPolicy": {"enabled": False},
        "triton": {"gpu": {"resource": "nvidia.com/gpu.shared"}},
        "models": [],
    },
}
VALUE_SETS = {**COMPONENTS, "base": {}, "dev": DEV, "prod": PROD, **OTHERS}
UNKNOWN = "additional properties"


@pytest.mark.long
def test_chart_renders_the_objects_of_kustomize(subtests: pytest.Subtests) -> None:
    components = {path.name for path in (CHART.parents[2] / "k8s" / "components").iterdir()}
    assert components == COMPONENTS.keys()
    for component, values in COMPONENTS.items():
        with subtests.test(component):
            expected = Manifests.of("base", *REQUIRED.get(component, ()), component)
            assert comparable_but_number(render_chart(values)) == comparable_but_number(expected)
    for variant, values in {"base": {}, "dev": DEV, "prod": PROD}.items():
        with subtests.test(variant):
            namespace = "triton-gateway-dev" if variant == "dev" else "triton-gateway"
            rendered = render_chart(values, namespace=namespace)
            expected = Manifests.of(variant)
            assert comparable_but_number(rendered) == comparable_but_number(expected)


def comparable_but_number(made: Manifests) -> dict[str, Resource]:
    """The number of Tritons is a value of the chart, and not in the base, where an apply would reset it."""
    found = copy.deepcopy(comparable(made))
    found["Deployment/triton"]["spec"].pop("replicas", None)
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", [*VALUE_SETS, *(path.stem for path in EXAMPLES)])
def test_values_render_valid_objects(name: str) -> None:
    example = next((path for path in EXAMPLES if path.stem == name), None)
    arguments = () if example is None else ("-f", example)
    made = render_chart(VALUE_SETS.get(name), *arguments)
    known = [each for each in made.resources if each["kind"] not in CUSTOM]
    assert len(known) >= 8
    for version in KUBERNETES:
        assert [found for each in known for found in complaints(each, version)] == []
    for resource in made.resources:
        labels = resource["metadata"]["labels"]
        assert labels["app.kubernetes.io/managed-by"] == "Helm"


@pytest.mark.long
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gatway": {}}, UNKNOWN),
        ({"triton": {"gpus": 1}}, UNKNOWN),
        ({"models": [{"name": "a", "required": "yes"}]}, "value must be 'always'"),
        ({"triton": {"gpu": {"count": "one"}}}, "got string, want integer"),
        ({"gateway": {"image": {"tag": "latest"}}}, "'not' failed"),
        ({"gateway": {"settings": {"GATEWAY_LOG_LEVEL": 3}}}, "want string"),
        ({"gateway": {"settings": {"GATEWAY_LOG_LEVL": "info"}}}, "'GATEWAY_LOG_LEVEL'"),
        ({"gateway": {"settings": {"GATEWAY_TRITON_URLS": "http://a"}}}, "is set by the chart"),
        ({"gateway": {"settings": {"GATEWAY_STATE": "memory:"}}}, "undo each other's loads"),
        ({"gateway": {"settings": {"GATEWAY_SHUTDOWN_S": "300"}}}, "DRAIN_S + GATEWAY_SHUTDOWN_S"),
        ({"triton": {"enabled": False}}, "requires triton.urls"),
        ({"triton": {"repository": {"type": "s3"}}}, "must begin with s3://"),
        ({"triton": {"repository": {"type": "pvc"}}}, "requires triton.repository.claimName"),
        (
            {"triton": {"repository": {**CLAIM, "accessMode": "ReadWriteOnce"}}},
            "a claim with ReadWriteOnce belongs to one node",
        ),
        (
            {"triton": {"repository": {**CLAIM, "accessMode": "ReadOnlyMany", "uploads": "code"}}},
            "uploads requires a claim with ReadWriteMany",
        ),
        (UPLOADS, "uploads requires Redis"),
        ({"triton": {"repository": {"uploads": "code"}}}, "is for triton.repository.type=pvc"),
        ({"triton": {"exitTimeoutSeconds": 90}}, "must exceed triton.preStopSeconds"),
        ({"triton": {"replicas": 2, "maxUnavailable": 2}}, "eviction of every Triton"),
        ({"gateway": {"maxUnavailable": 2}}, "eviction of every gateway"),
        ({"gateway": {"autoscaling": {"minReplicas": 11}}}, "exceeds gateway.autoscaling.max"),
        ({"keda": {"enabled": True, "minReplicas": 9}}, "exceeds keda.maxReplicas"),
        (
            {"keda": ENABLED, "gateway": {"settings": {"GATEWAY_METRICS_REPLICAS": "False"}}},
            "requires the metrics of the Tritons",
        ),
        ({"monitoring": {"scrapeTritons": True}}, "requires monitoring.enabled"),
        ({"keda": {"scaleToZero": True}}, "requires keda.enabled"),
        ({"redis": {"enabled": True, "externalUrl": "redis://a:1/0"}}, "not both"),
        ({"jobs": ENABLED}, "jobs.enabled requires redis.enabled"),
    ],
)
def test_invalid_values_are_refused(values: Values, message: str) -> None:
    ended = run_helm("template", "x", CHART, values=values)
    assert ended.returncode != 0
    assert message in ended.stderr


def test_chart_passes_the_strict_lint_and_its_files_are_current() -> None:
    ended = run_helm("lint", "--strict", CHART)
    assert ended.returncode == 0, ended.stdout
    for path, content in chart.files().items():
        assert path.read_text() == content, f"{path.name}: make manifests"
    document = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (document["version"], document["appVersion"]) == (__version__, __version__)


def test_upgrade_changes_only_the_objects_of_changed_values() -> None:
    """A rollout is caused by changed settings, not by changed models, which the gateways reload."""
    before = comparable(render_chart(PROD))
    models = comparable(render_chart({**PROD, "models": ["ensemble"]}))
    changed = {name for name in before if before[name] != models[name]}
    assert changed == {"ConfigMap/triton-gateway-models", "Deployment/triton"}

    level = {"settings": {"GATEWAY_LOG_LEVEL": "debug"}}
    first, second = (
        render_chart({"gateway": values}).get("Deployment", "triton-gateway")["spec"]["template"]
        for values in ({}, level)
    )
    assert first["metadata"]["annotations"] != second["metadata"]["annotations"]
    assert first["spec"] == second["spec"]
    after = comparable(render_chart({**PROD, "gateway": {**PROD["gateway"], **level}}))
    assert {name for name in before if before[name] != after[name]} == {
        "ConfigMap/triton-gateway-settings"
    }
    # Kubernetes forbids changes of selectors.
    labelled = render_chart({**PROD, "commonLabels": {"team": "vision"}, "models": []})
    assert selectors(labelled) == selectors(render_chart(PROD))


def selectors(made: Manifests) -> dict[str, Any]:
    return {each["metadata"]["name"]: each["spec"]["selector"] for each in made.workloads}


@pytest.mark.long
def test_chart_test_checks_that_the_models_are_ready(demo: httpx.Client) -> None:
    pod = render_chart().get("Pod", "triton-gateway-test")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = pod["spec"]["containers"]
    assert container["args"] == ["ready", "--url", "http://triton-gateway:80"]
    # It must not receive the Service's traffic.
    assert pod["metadata"]["labels"]["app.kubernetes.io/name"] != "triton-gateway"

    def exit_status(url: str) -> int:
        return run_gateway(
            *(word.replace("http://triton-gateway:80", url) for word in container["args"])
        ).returncode

    assert exit_status(str(demo.base_url).rstrip("/")) == 0
    (closed,) = free_ports(1)
    assert exit_status(f"http://127.0.0.1:{closed}") != 0


def notes(values: Values) -> str:
    ended = run_helm("install", "x", CHART, "-n", "vision", "--dry-run=client", values=values)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.partition("NOTES:")[2]


ROUTE_FROM_ZERO: Values = {
    "keda": {"enabled": True, "scaleToZero": True},
    "gatewayApi": ENABLED,
}
OUTSIDE: Values = {
    "gateway": {
        "settings": {
            "GATEWAY_OTLP_ENDPOINT": "http://collector:4318",
            "GATEWAY_OPENAI_URLS": "http://vllm:8000",
            "GATEWAY_REPOSITORY": "s3://models/prod",
        }
    },
    "redis": {"externalUrl": "rediss://redis.example.com:6379/0", "secretName": ""},
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("values", "warnings"),
    [
        ({"networkPolicy": {"enabled": False}}, ["WARNING: without NetworkPolicies"]),
        (ROUTE_FROM_ZERO, ["WARNING: with keda.scaleToZero"]),
        ({**ROUTE_FROM_ZERO, "gatewayApi": {"enabled": True, "timeout": "315s"}}, []),
        (
            OUTSIDE,
            [
                f"the gateways cannot reach {name}: allow it in networkPolicy.gatewayEgress"
                for name in (*OUTSIDE["gateway"]["settings"], "redis.externalUrl")
            ],
        ),
        ({**OUTSIDE, **EGRESS}, []),
        ({"gateway": {"settings": {"GATEWAY_REPOSITORY": "/models"}}}, []),
        (PROD, []),
    ],
    ids=[
        "no policies",
        "a route that ends requests before a Triton is up",
        "a route that waits",
        "addresses that the policies close",
        "addresses that they open",
        "a folder",
        "the overlay prod",
    ],
)
def test_notes_name_missing_secrets_and_warn(values: Values, warnings: list[str]) -> None:
    written = notes(values)
    assert "kubectl -n vision create secret generic triton-gateway-keys " in written
    assert ("WARNING" in written) == bool(warnings)
    assert [each for each in warnings if each not in written] == []
