"""What `make test-cluster` can show without a cluster: its load, what it applies, and that it cleans up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from gateway.embedded.supervisor import EmbeddedTriton
from tests.cluster.events import CHART_EVENTS, CONTAINERS, OVERLAY_EVENTS
from tests.cluster.installations import DECLARED, LOAD, TEXT_STREAMS, build_values
from tests.cluster.kubectl import ClusterError, connect
from tests.cluster.resources import (
    IMAGES,
    PROGRAMS,
    RUN_LABEL,
    STREAMING,
    add_test_models,
    build_agent,
    build_namespace,
    build_pod,
    fit_overlay,
    list_scalers,
    list_secrets,
    list_templates,
    read_number_of_tritons,
    read_small_patches,
    render_overlay,
)
from tests.cluster.verdict import (
    Losses,
    Outcome,
    find_oldest_request,
    find_violations,
    parse_record,
)
from tests.support.helm import render_chart
from tests.support.kubernetes_schemas import KUBERNETES, complaints
from tests.support.load import LOG_WARNINGS
from tests.support.manifests import Manifests, Resource, containers
from tests.support.missing import find_program
from tests.support.scheduler import Pod, make_small_nodes, schedule
from tests.support.servers import ROOT, GatewayProcess, free_ports, gateway
from tests.support.wait import TIMEOUT_S, wait_until

LOAD_PROGRAM = PROGRAMS / "load.py"
OWN_IMAGES = {role: f"mirror.example/{name}:test" for role, name in IMAGES.items()}
BUILT_IN = {
    "ConfigMap",
    "Deployment",
    "HorizontalPodAutoscaler",
    "Namespace",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "Service",
    "ServiceAccount",
    "StatefulSet",
}


def test_load_sees_what_a_killed_gateway_costs(demo_triton: EmbeddedTriton, tmp_path: Path) -> None:
    """A request is lost only inside the gateway; the others wait for the next connection."""
    (grpc_port,) = free_ports(1)
    environment = {
        "GATEWAY_TRITON_URLS": demo_triton.options.url,
        "GATEWAY_GRPC_PORT": str(grpc_port),
        "GATEWAY_CONNECT_TIMEOUT_S": "10",
        "GATEWAY_LOG_LEVEL": "warning",
    }
    gateway = GatewayProcess(environment)
    gateway.start()
    settings = tmp_path / "load.json"
    load = {
        "url": gateway.url,
        "grpc": f"127.0.0.1:{grpc_port}",
        "headers": {},
        "requests": [*LOAD, *TEXT_STREAMS],
        "slow_s": TIMEOUT_S,
    }
    settings.write_text(json.dumps(load))
    output = tmp_path / "lines"
    began = time.time()
    with output.open("wb") as file:
        command = [sys.executable, str(LOAD_PROGRAM), "send", str(settings)]
        process = subprocess.Popen(command, stdout=file)
    try:
        wait_until(lambda: is_answered(output, after=began))
        gateway.kill()
        fault_ended = time.time()
        wait_until(lambda: "refused" in output.read_text())
        gateway.start()
        started = time.time()
        wait_until(lambda: is_answered(output, after=started))
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)
        gateway.stop()
    record = parse_record(read_lines(output), began, time.time())
    assert record.longest_s > 0
    fault = Outcome("kill -9", Losses.connections_inside, record, fault_ended=fault_ended)
    assert not find_violations(fault)
    on_purpose = Outcome("rollout", Losses.none, record, fault_ended=fault_ended)
    assert "connections were refused" in find_violations(on_purpose)[-1]


def read_lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def is_answered(path: Path, after: float) -> bool:
    """Return whether requests of each kind were answered after this time."""
    answered = parse_record(read_lines(path), after, time.time()).answered
    return len(answered) == len(LOAD) + 1 and all(answered.values())


def test_load_goes_on_and_says_which_requests_are_slow(
    demo_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    """While a request waits, the next ones are sent: a stall is as many slow requests as it has seconds."""
    with gateway(demo_triton.options.url, **LOG_WARNINGS) as (client, command):
        settings = tmp_path / "load.json"
        load = {
            "url": str(client.base_url).rstrip("/"),
            "grpc": "",
            "headers": {},
            "requests": LOAD[:1],
            "slow_s": 1.0,
        }
        settings.write_text(json.dumps(load))
        output = tmp_path / "lines"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, str(LOAD_PROGRAM), "send", str(settings)], stdout=file
            )
        try:
            wait_until(lambda: '"unary": 8' in output.read_text())
            os.kill(command.pid, signal.SIGSTOP)
            wait_until(lambda: has_stalled(output, 2.5))
            os.kill(command.pid, signal.SIGCONT)
            continued = time.time()
            wait_until(lambda: is_caught_up(output, after=continued))
        finally:
            os.kill(command.pid, signal.SIGCONT)
            process.terminate()
            process.wait(TIMEOUT_S)
    record = parse_record(read_lines(output), 0.0, time.time())
    assert not record.failures
    assert len(record.slow) > 4
    assert record.longest_s > 2
    (violation,) = find_violations(Outcome("a stall", Losses.none, record))
    assert violation.startswith(f"{len(record.slow)} requests were slow: ")


def has_stalled(path: Path, least_s: float) -> bool:
    counts = [line for line in map(json.loads, read_lines(path)) if "oldest" in line]
    return any(line["at"] - line["oldest"] > least_s for line in counts)


def is_caught_up(path: Path, after: float) -> bool:
    """Return whether no request is in progress that began before this time."""
    oldest = [find_oldest_request(line) for line in read_lines(path)]
    return any(each is not None and each > after for each in oldest)


def render_installation(overlay: str, *components: str) -> list[Resource]:
    changes = {**read_small_patches(), **read_number_of_tritons()} if overlay == "prod" else {}
    return render_overlay(overlay, "another-name", components, changes)


@pytest.mark.parametrize(("overlay", "components"), [("dev", ()), ("prod", ("cpu-only",))])
def test_overlay_fits_into_a_small_cluster(overlay: str, components: tuple[str, ...]) -> None:
    rendered = render_installation(overlay, *components)
    resources = fit_overlay(rendered, BUILT_IN, OWN_IMAGES, "run")
    if overlay == "prod":
        resources = add_test_models(resources)
        resources += list_secrets()
    for version in KUBERNETES:
        assert not [each for resource in resources for each in complaints(resource, version)]
    assert {each["kind"] for each in resources} <= BUILT_IN | {"Secret"}
    assert "Namespace" not in {each["kind"] for each in resources}
    text = json.dumps(resources)
    assert "nvidia.com/gpu" not in text
    assert "registry.example.com" not in text
    for template in list_templates(resources):
        assert template["metadata"]["labels"][RUN_LABEL] == "run"
        for container in containers(template["spec"]):
            assert container["image"] in OWN_IMAGES.values()
    made = Manifests(overlay, tuple(resources))
    # The numbers of pods and what they request are those of the manifests and of the page.
    assert "replicas" not in made.get("Deployment", "triton-gateway")["spec"] or overlay == "dev"
    assert made.get("Deployment", "triton")["spec"]["replicas"] == (1 if overlay == "dev" else 2)
    assert [each["spec"]["minReplicas"] for each in made.kind("HorizontalPodAutoscaler")] == (
        [] if overlay == "dev" else [2]
    )
    nodes = make_small_nodes()
    pods = {each["metadata"]["name"]: Pod.of(each) for each in made.workloads}
    schedule([pods["triton"], pods["triton-gateway"]] * 2, nodes)
    for name, container_name in CONTAINERS.items():
        names = [container["name"] for container in made.pod(name)["containers"]]
        assert container_name in names
        assert "tmp" in [volume["name"] for volume in made.pod(name)["volumes"]]


def test_models_of_the_load_are_declared_and_loaded_at_the_start() -> None:
    rendered = render_installation("prod", "cpu-only")
    resources = add_test_models(fit_overlay(rendered, BUILT_IN, OWN_IMAGES, "run"))
    made = Manifests("prod", tuple(resources))
    declared = yaml.safe_load(made.get("ConfigMap", "triton-gateway-models")["data"]["models.yaml"])
    assert set(declared["models"]) == {*DECLARED, STREAMING}
    (container,) = made.pod("triton")["containers"]
    assert container["args"][-2:] == ["--load", STREAMING]


def test_scaler_without_prometheus_is_the_documented_one_in_its_namespace() -> None:
    authentication, scaled = list_scalers("another-name")
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["type"] == "metrics-api"
    assert trigger["metadata"]["url"] == "http://triton-gateway.another-name.svc/metrics"
    assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
    (reference,) = authentication["spec"]["secretTargetRef"]
    names = {each["metadata"]["name"]: each.get("stringData", {}) for each in list_secrets()}
    assert reference["key"] in names[reference["name"]]
    assert scaled["spec"]["minReplicaCount"] == 0


def test_chart_takes_the_values_of_a_small_cluster() -> None:
    made = render_chart(build_values(OWN_IMAGES))
    images = {
        container["image"]
        for template in list_templates(made.resources)
        for container in containers(template["spec"])
    }
    assert images == set(OWN_IMAGES.values())
    assert made.get("Deployment", "triton")["spec"]["replicas"] == 2
    (scaler,) = made.kind("HorizontalPodAutoscaler")
    assert scaler["spec"]["minReplicas"] == 2


def test_page_names_every_event() -> None:
    page = (ROOT / "docs/contribute/verification.md").read_text()
    assert not [each.name for each in (*OVERLAY_EVENTS, *CHART_EVENTS) if each.name not in page]


def test_drained_node_gets_pods_again_before_it_can_die() -> None:
    """With two nodes for pods, the other one has Redis and the load."""
    names = [each.name for each in OVERLAY_EVENTS]
    between = names[names.index("a node is drained") : names.index("a node dies")]
    assert {"gateways are scaled 2 → 4 → 1 → 2", "Tritons are scaled 2 → 4 → 1 → 2"} <= {*between}


def test_pods_of_the_tools_fit_the_schemas() -> None:
    load = build_pod("load", "image", ("python3",), "programs")
    agent = build_agent("node-1.example", "image")
    for resource in (load, agent, build_namespace("tools", "run", is_restricted=False)):
        for version in KUBERNETES:
            assert not complaints(resource, version)


def test_signal_reaches_the_program_of_a_pod_alone(tmp_path: Path) -> None:
    """A pod is recognized by its control group: here, any part of the path."""
    names = ("of-the-pod", "of-another-program")
    for name in names:
        (tmp_path / name).symlink_to(find_program("sleep", "coreutils"))
    processes = [subprocess.Popen([tmp_path / name, "600"]) for name in names]
    try:
        first, second = processes
        group = Path(f"/proc/{first.pid}/cgroup").read_text().splitlines()[0]
        send = [sys.executable, str(PROGRAMS / "send_signal.py")]
        subprocess.run([*send, group, names[0], str(int(signal.SIGKILL))], check=True)
        assert first.wait(TIMEOUT_S) == -signal.SIGKILL
        assert second.poll() is None
        ended = subprocess.run([*send, "no-such-pod", names[1], "9"], capture_output=True)
        assert ended.returncode == 1
        assert b"no process of-another-program of pod no-such-pod" in ended.stderr
    finally:
        for process in processes:
            process.kill()
            process.wait(TIMEOUT_S)


# Answers as a cluster without objects, and does not end when it is asked for the kinds of objects.
FAKE_KUBECTL = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
  *current-context*) echo kind-test ;;
  *" get "*) echo '{"items": []}' ;;
  *api-resources*) exec sleep 600 ;;
esac
"""


@pytest.fixture
def kubectl_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let this program be found instead of the real one; return the file with its calls."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(FAKE_KUBECTL)
    kubectl.chmod(0o755)
    calls = tmp_path / "calls"
    calls.touch()
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(calls))
    return calls


def test_cluster_is_refused_unless_it_is_named(kubectl_calls: Path) -> None:
    with pytest.raises(ClusterError, match="make test-cluster CLUSTER_CONTEXT=kind-test"):
        connect("")
    with pytest.raises(ClusterError, match="the current context is 'kind-test': kubectl config"):
        connect("prod")
    assert kubectl_calls.read_text().splitlines() == ["config current-context"] * 2
    connect("kind-test")


def test_namespaces_are_removed_after_ctrl_c(kubectl_calls: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.cluster", "--context", "kind-test"]
    command += ["--output", str(tmp_path / "results")]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        wait_until(lambda: "api-resources" in kubectl_calls.read_text())
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        printed, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, printed
    *_, last = kubectl_calls.read_text().splitlines()
    assert last.startswith("--context kind-test delete namespace triton-gateway-test-")
    created = {word for word in last.split() if word.startswith("triton-gateway-test-")}
    assert {name.rpartition("-")[2] for name in created} == {
        "dev",
        "prod",
        "chart",
        "zero",
        "tools",
    }
    assert printed.splitlines()[-1] == "interrupted"
