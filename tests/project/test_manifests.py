"""The manifests of k8s/: schemas of three Kubernetes versions, and rules that no schema has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.monitoring import prometheusrule
from gateway.access.keys import read_keys_file
from gateway.capabilities.grpc_api.methods import TRITON_METHODS
from gateway.capabilities.installed import SETTINGS
from gateway.config.settings import Settings, list_setting_names
from gateway.embedded.supervisor import EmbeddedTriton
from gateway.repository.models_file import parse_models_file
from gateway.triton.grpc.byte_channel import GRPC_SERVICE
from tests.support.documents import read_all
from tests.support.kubernetes_schemas import CUSTOM, KUBERNETES, check_custom, complaints
from tests.support.manifests import K8S, VARIANTS, Manifests, Resource, containers, ports, quantity
from tests.support.missing import find_program
from tests.support.servers import ROOT
from tests.support.wait import TIMEOUT_S

GATEWAY = "triton-gateway"
TRITON = "triton"
# Secrets that the user of the manifests creates.
SECRETS_OF_USERS = {
    "triton-gateway-jobs",
    "triton-gateway-keys",
    "triton-gateway-metrics-key",
    "triton-gateway-redis",
    "triton-s3",
}


@pytest.fixture(scope="module", params=VARIANTS)
def made(request: pytest.FixtureRequest) -> Manifests:
    return Manifests.of(request.param)


@pytest.fixture(scope="module")
def prod() -> Manifests:
    return Manifests.of("prod")


# Schemas


def test_every_object_fits_the_schemas_of_kubernetes(made: Manifests) -> None:
    known = [resource for resource in made.resources if resource["kind"] not in CUSTOM]
    assert known
    for version in KUBERNETES:
        assert [each for resource in known for each in complaints(resource, version)] == []


STREAMS_AND_READINESS = ("ModelStreamInfer", "ServerReady")
PRIVATE_METHODS = ("Repository", "TraceSetting", "LogSettings", "SystemShared", "CudaShared")


def test_custom_resources_fit_their_schemas() -> None:
    custom = [each for variant in VARIANTS for each in Manifests.of(variant).kind(*CUSTOM)]
    assert {resource["kind"] for resource in custom} == CUSTOM
    assert check_custom(custom) == ""
    found = check_custom([{**resource, "spec": "none"} for resource in custom])
    assert {line.partition(" ")[0] for line in found.splitlines()} >= CUSTOM


# References between objects


def test_every_selector_selects_pods(made: Manifests) -> None:
    for service in made.kind("Service"):
        assert made.selected(service["spec"]["selector"]), service["metadata"]
    for workload in made.workloads:
        wanted = workload["spec"]["selector"]["matchLabels"]
        assert made.selected(wanted) == [workload]
    for resource in made.kind("PodDisruptionBudget", "PodMonitor"):
        assert len(made.selected(resource["spec"]["selector"]["matchLabels"])) == 1
    for policy in made.kind("NetworkPolicy"):
        assert len(made.selected(policy["spec"]["podSelector"]["matchLabels"])) == 1
    for workload in made.workloads:
        for spread in workload["spec"]["template"]["spec"].get("topologySpreadConstraints", []):
            assert made.selected(spread["labelSelector"]["matchLabels"]) == [workload]


def scaled(made: Manifests) -> Iterator[tuple[Resource, int]]:
    """The workloads that something scales, and the least number of their pods."""
    for resource in made.kind("HorizontalPodAutoscaler", "ScaledObject"):
        spec = resource["spec"]
        target = made.get("Deployment", spec["scaleTargetRef"]["name"])
        yield target, spec.get("minReplicas") or spec["minReplicaCount"]


def test_number_of_pods_is_set_at_one_place(made: Manifests) -> None:
    least = {target["metadata"]["name"]: number for target, number in scaled(made)}
    assert len(least) == len([*scaled(made)])
    for workload in made.workloads:
        name = workload["metadata"]["name"]
        # The Tritons of the base are scaled by a component or by the user's overlay.
        is_set = name not in least and (name != TRITON or made.variant == "dev")
        assert ("replicas" in workload["spec"]) == is_set, name
    # One gateway is enough for the single node of a laptop.
    assert least.get(GATEWAY, 1) == (1 if made.variant == "dev" else 2)


def test_disruption_budget_lets_a_node_be_drained(
    made: Manifests,
) -> None:
    least = {target["metadata"]["name"]: number for target, number in scaled(made)}
    for budget in made.kind("PodDisruptionBudget"):
        (workload,) = made.selected(budget["spec"]["selector"]["matchLabels"])
        replicas = least.get(workload["metadata"]["name"], workload["spec"].get("replicas"))
        allowed = budget["spec"].get("maxUnavailable", 0)
        assert allowed or budget["spec"]["minAvailable"] < replicas
    triton = made.get("PodDisruptionBudget", TRITON)["spec"]
    assert triton["maxUnavailable"] == 1
    assert triton["unhealthyPodEvictionPolicy"] == "IfHealthyBudget"


def test_every_port_that_is_named_exists(made: Manifests) -> None:
    policies = [
        (workload, policy["spec"])
        for policy in made.kind("NetworkPolicy")
        for workload in made.selected(policy["spec"]["podSelector"]["matchLabels"])
    ]
    named = [
        (workload, port["targetPort"])
        for service in made.kind("Service")
        for workload in made.selected(service["spec"]["selector"])
        for port in service["spec"]["ports"]
    ]
    named += [
        (workload, (probe.get("httpGet") or probe["tcpSocket"])["port"])
        for workload in made.workloads
        for container in workload["spec"]["template"]["spec"]["containers"]
        for probe in probes(container).values()
        if "exec" not in probe
    ]
    named += [
        (workload, endpoint["port"])
        for monitor in made.kind("PodMonitor")
        for workload in made.selected(monitor["spec"]["selector"]["matchLabels"])
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
    ]
    named += [
        (workload, port["port"])
        for workload, policy in policies
        for rule in policy.get("ingress", [])
        for port in rule["ports"]
    ]
    assert [port for workload, port in named if port not in ports(workload)] == []
    for _, policy in policies:
        for rule in policy.get("egress", []):
            for peer in (each for each in rule.get("to", []) if "podSelector" in each):
                (target,) = made.selected(peer["podSelector"]["matchLabels"])
                assert {port["port"] for port in rule["ports"]} == {*ports(target).values()}


def test_everything_that_is_mounted_or_read_exists(made: Manifests) -> None:
    maps = {resource["metadata"]["name"] for resource in made.kind("ConfigMap")}
    accounts = {resource["metadata"]["name"] for resource in made.kind("ServiceAccount")}
    for workload in made.workloads:
        pod = workload["spec"]["template"]["spec"]
        assert pod.get("serviceAccountName", "default") in accounts | {"default"}
        claims = {
            claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])
        }
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        mounted = {
            mount["name"] for each in containers(pod) for mount in each.get("volumeMounts", [])
        }
        assert mounted == volumes.keys() | claims
        named = [
            volume["configMap"]["name"] for volume in volumes.values() if "configMap" in volume
        ]
        secrets = [
            volume["secret"]["secretName"] for volume in volumes.values() if "secret" in volume
        ]
        for container in containers(pod):
            for source in container.get("envFrom", []):
                named += [source["configMapRef"]["name"]] if "configMapRef" in source else []
                secrets += [source["secretRef"]["name"]] if "secretRef" in source else []
            sources = (
                each["valueFrom"] for each in container.get("env", []) if "valueFrom" in each
            )
            secrets += [source["secretKeyRef"]["name"] for source in sources]
        assert {*named} <= maps
        assert {*secrets} <= SECRETS_OF_USERS


# Security


def test_every_container_is_confined_limited_and_pinned(made: Manifests) -> None:
    for workload in made.workloads:
        pod = workload["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            resources = container["resources"]
            requests = resources["requests"]
            limits = resources["limits"]
            assert {"cpu", "memory"} <= requests.keys()
            for name in ("memory", "ephemeral-storage"):
                assert quantity(limits[name]) >= quantity(requests[name])
            # `kubectl describe pod` says why it ended.
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
            image = container["image"].rpartition("/")[2]
            assert "@sha256:" in image or (":" in image and not image.endswith(":latest"))
    for account in made.kind("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def test_limit_of_the_storage_holds_the_volumes_and_the_log(made: Manifests) -> None:
    log_bytes = 50 << 20  # five files of 10 MiB, as the kubelet rotates them
    for workload in made.workloads:
        pod = workload["spec"]["template"]["spec"]
        local = [volume for volume in pod.get("volumes", []) if "emptyDir" in volume]
        sizes = [
            quantity(volume["emptyDir"]["sizeLimit"])
            for volume in local
            if volume["emptyDir"].get("medium") != "Memory"
        ]
        (container,) = pod["containers"]
        limit = quantity(container["resources"]["limits"]["ephemeral-storage"])
        assert limit >= sum(sizes) + log_bytes
        # The cluster autoscaler may remove a node with these volumes.
        notes = workload["spec"]["template"]["metadata"].get("annotations", {})
        named = notes.get("cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes", "")
        assert {*filter(None, named.split(","))} == {volume["name"] for volume in local}


def test_policies_cover_every_pod_and_close_triton(
    made: Manifests,
) -> None:
    for workload in made.workloads:
        directions = {
            direction
            for policy in made.kind("NetworkPolicy")
            if workload in made.selected(policy["spec"]["podSelector"]["matchLabels"])
            for direction in policy["spec"]["policyTypes"]
        }
        assert directions == {"Ingress", "Egress"}
    (policy,) = (each for each in made.kind("NetworkPolicy") if each["metadata"]["name"] == TRITON)
    assert {*policy["spec"]["policyTypes"]} == {"Ingress", "Egress"}
    peers = {}
    for rule in policy["spec"]["ingress"]:
        (peer,) = rule["from"]
        ((_, selector),) = peer.items()
        peers[next(iter(selector["matchLabels"].values()))] = {
            port["port"] for port in rule["ports"]
        }
    assert peers == {GATEWAY: {"http", "grpc", "metrics"}, "monitoring": {"metrics"}}
    service = made.get("Service", TRITON)
    assert service["spec"]["clusterIP"] == "None"
    for outside in made.kind("Ingress", "HTTPRoute"):
        assert TRITON not in re.findall(r"'name': '([\w-]+)'", str(outside["spec"]))
    assert not [each for each in made.kind("Service") if "type" in each["spec"]]


def test_pods_that_look_up_names_reach_any_dns(made: Manifests) -> None:
    """NodeLocal DNSCache is no pod that a selector could select."""
    looking = {GATEWAY: True, TRITON: made.variant == "s3 and ingress"}
    for name, looks_up in looking.items():
        (workload,) = (each for each in made.workloads if each["metadata"]["name"] == name)
        anywhere = {
            (port["port"], port.get("protocol", "TCP"))
            for policy in made.kind("NetworkPolicy")
            if workload in made.selected(policy["spec"]["podSelector"]["matchLabels"])
            for rule in policy["spec"].get("egress", [])
            if "to" not in rule
            for port in rule["ports"]
        }
        assert ({(53, "UDP"), (53, "TCP")} <= anywhere) == looks_up


def test_grpc_route_opens_inference_alone(made: Manifests) -> None:
    for route in made.kind("GRPCRoute"):
        (rule,) = route["spec"]["rules"]
        methods = {match["method"]["method"] for match in rule["matches"]}
        assert {match["method"]["service"] for match in rule["matches"]} == {GRPC_SERVICE[1:]}
        assert {"ModelInfer", "ModelStreamInfer"} < methods
        assert methods <= {*TRITON_METHODS, *STREAMS_AND_READINESS}
        assert not any(method.startswith(PRIVATE_METHODS) for method in methods)


OPERATIONS = [
    (method.upper(), re.sub(r"\{\w+\}", "name", path))
    for path, item in json.loads((ROOT / "docs" / "openapi.json").read_text())["paths"].items()
    for method in item
]
# Paths of Triton's own API, which passes through.
OPERATIONS_OF_TRITON = [
    ("GET", "/v2"),
    ("GET", "/v2/health/live"),
    *(
        ("GET", f"/v2/models/name{end}")
        for end in ("", "/ready", "/config", "/stats", "/versions/1")
    ),
    *(("POST", f"/v2/models/name/{end}") for end in ("infer", "generate", "generate_stream")),
    ("POST", "/v2/models/name/versions/1/infer"),
]
INTERNAL = (
    *("/livez", "/readyz", "/metrics", "/v1/log-level", "/v1/operations", "/v1/replicas"),
    *("/v1/events", "/v1/state", "/v1/quotas"),
    *("/v2/repository", "/v2/logging", "/v2/trace", "/v2/systemsharedmemory"),
    *("/models", "/ping", "/predictions"),  # TorchServe's, which are off by default
)
# Their caller may delete them as well.
OWN_JOBS = "/v1/jobs"
FILES_AND_LABELS = re.compile(r"(?<!/v1)/(files|labels)\b(?!/name/|/name:)")


def is_internal(method: str, path: str) -> bool:
    if path.startswith(OWN_JOBS):
        return False
    return method in ("PUT", "DELETE") or path.startswith(INTERNAL)


def is_admitted_by_ingress(ingress: Resource, path: str) -> bool:
    """An Ingress knows no methods; ingress-nginx writes `location ~* "^PATH"`."""
    assert ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/use-regex"] == "true"
    (rule,) = ingress["spec"]["rules"]
    assert {each["pathType"] for each in rule["http"]["paths"]} == {"ImplementationSpecific"}
    return any(re.match(f"^{each['path']}", path, re.IGNORECASE) for each in rule["http"]["paths"])


def is_admitted_by_route(route: Resource, method: str, path: str) -> bool:
    matches = [match for rule in route["spec"]["rules"] for match in rule["matches"]]
    return any(
        match["method"] == method
        and (
            path == match["path"]["value"]
            or (
                match["path"]["type"] == "PathPrefix"
                and path.startswith(f"{match['path']['value']}/")
            )
        )
        for match in matches
    )


def test_http_route_opens_calls_and_no_change_of_models() -> None:
    (route,) = Manifests.of("prod").kind("HTTPRoute")
    for rule in route["spec"]["rules"]:
        assert len(rule["matches"]) <= 8  # the limit of the first versions of the Gateway API
    for method, path in [*OPERATIONS, *OPERATIONS_OF_TRITON]:
        is_open = is_admitted_by_route(route, method, path)
        assert is_open != is_internal(method, path), (method, path)
    for path in INTERNAL:
        for method in ("GET", "POST", "PUT", "DELETE"):
            assert not is_admitted_by_route(route, method, path)


def test_ingress_opens_calls_and_no_path_of_a_change() -> None:
    (ingress,) = Manifests.of("s3 and ingress").kind("Ingress")
    changed = {path for method, path in OPERATIONS if method in ("PUT", "DELETE")}
    changed = {path for path in changed if not path.startswith(OWN_JOBS)}
    assert "/v1/models/name" in changed
    assert len(OPERATIONS) > 30
    for method, path in [*OPERATIONS, *OPERATIONS_OF_TRITON]:
        is_open = is_admitted_by_ingress(ingress, path)
        needed = not is_internal(method, path) and path not in changed
        assert is_open == (needed and not FILES_AND_LABELS.search(path)), (method, path)
    for path in (*INTERNAL, "/v2/models/name/trace/setting", "/v1/models/name/infer/more"):
        assert not is_admitted_by_ingress(ingress, path), path


def test_example_of_the_keys_can_be_read(tmp_path: Path) -> None:
    secret = yaml.safe_load((K8S / "base" / "keys.example.yaml").read_text())
    (tmp_path / "keys.yaml").write_text(secret["stringData"]["keys.yaml"])
    assert {key.name for key in read_keys_file(tmp_path / "keys.yaml").values()} == {
        "ops",
        "prometheus",
        "shop",
    }
    volumes = {volume["name"]: volume for volume in Manifests.of("base").pod(GATEWAY)["volumes"]}
    assert volumes["keys"]["secret"]["secretName"] == secret["metadata"]["name"]


# Settings, deadlines and probes


def settings_of(made: Manifests) -> Settings:
    given = made.settings()
    return Settings.model_validate(
        {name.removeprefix("GATEWAY_").lower(): value for name, value in given.items()}
    )


def test_settings_are_known_and_complete(made: Manifests) -> None:
    known = {f"GATEWAY_{name.upper()}" for name in list_setting_names(*SETTINGS)}
    secret_files = ("STATE_PASSWORD", "JOBS_PASSWORD", "JOBS_SECRET")
    known |= {f"GATEWAY_{name}_FILE" for name in secret_files}
    (container,) = made.pod(GATEWAY)["containers"]
    given = {each["name"] for each in container.get("env") or []}
    assert given <= known
    assert not [
        each for each in container.get("env") or [] if "valueFrom" in each
    ]  # secrets are files
    assert ("GATEWAY_KEYS_FILE" in given) == (made.variant != "dev")
    assert made.settings().keys() <= known
    # What the manifests count on stands there, whatever the defaults will be.
    assert made.settings().keys() >= {
        "GATEWAY_TRITON_URLS",
        "GATEWAY_MODELS_FILE",
        "GATEWAY_STATE",
        "GATEWAY_REQUEST_TIMEOUT_S",
        "GATEWAY_MAX_REQUEST_TIMEOUT_S",
        "GATEWAY_DRAIN_S",
        "GATEWAY_SHUTDOWN_S",
        "GATEWAY_MAX_BODY_BYTES",
    }


def test_several_gateways_share_their_state_or_accept_no_changes(made: Manifests) -> None:
    """Each with a memory of its own, they would undo each other's loads without end."""
    (container,) = made.pod(GATEWAY)["containers"]
    given = {each["name"]: each.get("value") for each in container.get("env") or []}
    state = given.get("GATEWAY_STATE") or made.settings()["GATEWAY_STATE"]
    replicas = made.get("Deployment", GATEWAY)["spec"].get("replicas")
    assert (
        state == "none:" or state.startswith("redis://") or (state == "memory:" and replicas == 1)
    )


def test_gateway_finds_triton_by_its_service(made: Manifests) -> None:
    service = made.get("Service", TRITON)
    assert service["spec"]["publishNotReadyAddresses"] is True
    http = {port["name"]: port["port"] for port in service["spec"]["ports"]}["http"]
    # A pod that is about to end is no ready endpoint any more, unless the Service publishes all pods.
    preferred = made.get("Service", "triton-ready")
    assert "publishNotReadyAddresses" not in preferred["spec"]
    assert preferred["spec"]["clusterIP"] == "None"
    assert preferred["spec"]["selector"] == service["spec"]["selector"]
    url = f"dns+http://{TRITON}:{http}?prefer=triton-ready"
    assert settings_of(made).triton_urls == (url,)
    (workload,) = made.selected(service["spec"]["selector"])
    assert ports(workload) == {"http": 8000, "grpc": 8001, "metrics": 8002}


def test_terminating_pod_has_time_for_its_longest_request(made: Manifests) -> None:
    settings = settings_of(made)
    pod = made.pod(GATEWAY)
    (container,) = pod["containers"]
    waits_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    longest_s = settings.max_request_timeout_s
    assert settings.request_timeout_s <= longest_s <= settings.shutdown_s
    assert pod["terminationGracePeriodSeconds"] > waits_s + settings.drain_s + settings.shutdown_s
    # What sends requests has heard of it before the last connection is taken.
    ready = container["readinessProbe"]
    assert settings.drain_s > ready["periodSeconds"] * ready["failureThreshold"]

    triton = made.pod(TRITON)
    (container,) = triton["containers"]
    waits_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    words = container["args"]
    given = [
        int(word.partition("=")[2]) for word in words if word.startswith("--exit-timeout-secs=")
    ]
    for exit_s in given:
        assert longest_s < exit_s < triton["terminationGracePeriodSeconds"] - waits_s
    assert given or words[0] == "triton"  # the embedded one's is fixed


def test_terminating_triton_serves_until_replaced(made: Manifests) -> None:
    """CoreDNS keeps the addresses of a Service for 30 s, and its answers have that time to live."""
    pod = made.pod(TRITON)
    (container,) = pod["containers"]
    waits_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert waits_s >= settings_of(made).dns_interval_s + 30
    assert pod["terminationGracePeriodSeconds"] > waits_s


def test_routes_wait_for_the_gateway_and_pass_its_largest_body(
    made: Manifests,
) -> None:
    settings = settings_of(made)
    for ingress in made.kind("Ingress"):
        notes = {
            name.rpartition("/")[2]: value
            for name, value in ingress["metadata"]["annotations"].items()
        }
        assert int(notes["proxy-read-timeout"]) > settings.max_request_timeout_s
        size = int(notes["proxy-body-size"].removesuffix("m")) << 20
        assert size >= settings.max_body_bytes
    for route in made.kind("HTTPRoute"):
        for rule in route["spec"]["rules"]:
            for wait in rule["timeouts"].values():
                assert float(wait.removesuffix("s")) > settings.max_request_timeout_s


def probes(container: Resource) -> dict[str, Any]:
    return {name: probe for name, probe in container.items() if name.endswith("Probe")}


def test_probes_ask_for_liveness_and_readiness_separately(made: Manifests) -> None:
    for workload in made.workloads:
        for container in workload["spec"]["template"]["spec"]["containers"]:
            found = probes(container)
            assert found.keys() == {"startupProbe", "livenessProbe", "readinessProbe"}
            actions = {
                name: {key: probe[key] for key in ("httpGet", "exec", "tcpSocket") if key in probe}
                for name, probe in found.items()
            }
            assert actions["livenessProbe"] == actions["startupProbe"] != actions["readinessProbe"]
            for probe in found.values():
                assert probe.get("timeoutSeconds", 1) <= probe.get("periodSeconds", 10)
            if workload["metadata"]["name"] != "redis":
                # A regular start has no events of failed probes, on a busy node either.
                assert found["startupProbe"]["initialDelaySeconds"] >= 10
                assert found["startupProbe"]["timeoutSeconds"] >= 2


def test_shared_memory_fits_into_the_limit(made: Manifests) -> None:
    pod = made.pod(TRITON)
    (triton,) = pod["containers"]
    limit = quantity(triton["resources"]["limits"]["memory"])
    (shm,) = (volume for volume in pod["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"
    assert quantity(shm["emptyDir"]["sizeLimit"]) <= limit / 2
    assert {"name": "shm", "mountPath": "/dev/shm"} in triton["volumeMounts"]


# Models, monitoring and scaling


def test_declared_models_exist_and_are_loaded_at_the_start(made: Manifests) -> None:
    declared = parse_models_file(
        made.get("ConfigMap", "triton-gateway-models")["data"]["models.yaml"]
    )
    for name in declared:
        assert (ROOT / "triton_repo" / name / "config.pbtxt").is_file()
    words = " ".join(made.pod(TRITON)["containers"][0]["args"])
    assert re.findall(r"--load(?:-model)?[= ](\S+)", words) == list(declared)


@pytest.mark.long
def test_triton_is_ready_with_the_models_of_its_start(
    made: Manifests, demo_triton: EmbeddedTriton
) -> None:
    (container,) = made.pod(TRITON)["containers"]
    args = container["args"]  # those of `triton-gateway triton` are tested with it
    assert "--strict-readiness=false" in args or args[0] == "triton"
    words = container["readinessProbe"]["exec"]["command"]
    declared = parse_models_file(
        made.get("ConfigMap", "triton-gateway-models")["data"]["models.yaml"]
    )
    assert words[-len(declared) :] == list(declared)
    assert words[0] == "python3"
    port = str(demo_triton.options.http_port)
    probe = [sys.executable, *(word.replace("8000", port) for word in words[1:])]
    for probed, reason in ((probe, ""), ([*probe, "nobody"], "HTTP Error 400: Bad Request")):
        run = subprocess.run(probed, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        assert run.returncode == bool(reason)
        # Kubernetes shows it in the event of the failed probe.
        assert run.stderr == (f"model nobody is not ready: {reason}\n" if reason else "")


def test_models_and_keys_can_change_without_new_pods(made: Manifests) -> None:
    (container,) = made.pod(GATEWAY)["containers"]
    assert not [mount for mount in container["volumeMounts"] if "subPath" in mount]
    assert made.has("ConfigMap", "triton-gateway-models")  # under its own name, without a hash
    assert not made.has("ConfigMap", "triton-gateway-settings")  # which makes new pods


def test_rules_and_dashboard_are_those_of_deploy_monitoring(prod: Manifests) -> None:
    rules = K8S / "components" / "monitoring" / "rules.yaml"
    assert rules.read_text() == prometheusrule.text(), "make manifests"
    data = prod.get("ConfigMap", "triton-gateway-dashboard")["data"]
    dashboard = (ROOT / "deploy" / "monitoring" / "dashboard.json").read_text()
    assert data == {"triton-gateway.json": dashboard}


def test_tritons_are_scaled_by_the_requests_that_wait(prod: Manifests, tmp_path: Path) -> None:
    (namespace,) = prod.kind("Namespace")
    assert namespace["metadata"]["name"] == "triton-gateway"
    (scaling,) = prod.kind("ScaledObject")
    spec = scaling["spec"]
    assert len(spec["triggers"]) == 2
    queries = [trigger["metadata"]["query"] for trigger in spec["triggers"]]
    for query in queries:
        assert query.startswith("sum(max by (namespace, replica, model, version) (")
        assert 'namespace="triton-gateway"' in query
    rules = [{"record": f"q:{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "keda", "rules": rules}]}))
    subprocess.run(
        [find_program("promtool", "prometheus"), "check", "rules", str(file)], check=True
    )
    assert spec["fallback"]["behavior"] == "currentReplicasIfHigher"
    assert spec["fallback"]["replicas"] >= spec["minReplicaCount"]
    for trigger in spec["triggers"]:
        assert trigger["metadata"]["ignoreNullValues"] == "false"
        assert trigger.get("metricType", "AverageValue") == "AverageValue"  # for the fallback


def test_fleet_scaled_to_zero_is_woken_by_held_requests() -> None:
    made = Manifests.of("from zero")
    (scaling,) = made.kind("ScaledObject")
    spec = scaling["spec"]
    assert spec["minReplicaCount"] == 0
    (demand,) = [each["metadata"] for each in spec["triggers"] if each["name"] == "demand"]
    assert demand["query"].startswith("sum(gateway_demand{")
    # The gateways always report it: without samples, the monitoring has failed.
    assert demand["ignoreNullValues"] == "false"
    (container,) = made.pod("triton-gateway")["containers"]
    settings = {each["name"]: each.get("value") for each in container["env"]}
    hold_s = float(settings["GATEWAY_HOLD_S"])
    assert hold_s <= float(settings["GATEWAY_REQUEST_TIMEOUT_S"])
    (monitor,) = made.kind("PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    seen_after_s = float(endpoint["interval"].removesuffix("s")) + spec["pollingInterval"] + 1
    assert hold_s - seen_after_s >= 240  # in which a node and a Triton start


def test_prometheus_operator_finds_its_objects(
    made: Manifests,
) -> None:
    label = "kube-prometheus-stack"
    for resource in made.kind("PodMonitor", "ServiceMonitor", "PrometheusRule"):
        assert resource["metadata"]["labels"]["release"] == label
    others = [each for each in made.resources if each["kind"] not in CUSTOM]
    assert not [each for each in others if "release" in each["metadata"].get("labels", {})]
    for monitor in made.kind("PodMonitor"):
        (workload,) = made.selected(monitor["spec"]["selector"]["matchLabels"])
        labels = workload["spec"]["template"]["metadata"]["labels"]
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        replaced = [
            each["replacement"]
            for each in endpoint.get("metricRelabelings", [])
            if each["targetLabel"] == "job"
        ]
        assert [labels[monitor["spec"]["jobLabel"]], *replaced][-1] == GATEWAY
        assert f'up{{job="{GATEWAY}"}}' in str(made.kind("PrometheusRule"))


def test_documented_command_uninstalls_all_but_the_namespace() -> None:
    command = r"^kubectl delete -k k8s/overlays/prod -l '!(\S+)'$"
    (label,) = re.findall(command, read_all(), re.MULTILINE)
    prod = Manifests.of("prod")
    kept = [each for each in prod.resources if label in each["metadata"].get("labels", {})]
    assert [each["kind"] for each in kept] == ["Namespace"]
    # The Secrets are the user's, and Kubernetes keeps the claims of a StatefulSet that is deleted.
    assert not prod.kind("Secret", "PersistentVolumeClaim")
    (redis,) = prod.kind("StatefulSet")
    assert "persistentVolumeClaimRetentionPolicy" not in redis["spec"]


def test_pods_prefer_other_nodes_and_zones_by_their_revision(made: Manifests) -> None:
    """A constraint for zones would make the scheduler ignore every node without a zone.

    Without the revision, pods that end would push those of a rollout together.
    """
    host = "kubernetes.io/hostname"
    zone = "topology.kubernetes.io/zone"
    for name in (GATEWAY, TRITON):
        own = {
            "labelSelector": {"matchLabels": {"app.kubernetes.io/name": name}},
            "matchLabelKeys": ["pod-template-hash"],
        }
        pod = made.pod(name)
        preferred = [
            {"weight": weight, "podAffinityTerm": {"topologyKey": key, **own}}
            for weight, key in ((100, host), (50, zone))
        ]
        assert pod["affinity"]["podAntiAffinity"] == {
            "preferredDuringSchedulingIgnoredDuringExecution": preferred
        }
        constraint = {"maxSkew": 1, "topologyKey": host, "whenUnsatisfiable": "ScheduleAnyway"}
        assert pod["topologySpreadConstraints"] == [{**constraint, **own}]
