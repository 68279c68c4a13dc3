"""What `make test-cluster` can show without a cluster: its load, what it applies, and that it cleans up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from gateway.embedded.supervisor import EmbeddedTriton
from tests.cluster.installations import LOAD, TEXT_STREAMS, build_values
from tests.cluster.kubectl import ClusterError, connect
from tests.cluster.resources import (
    IMAGES,
    PROGRAMS,
    build_namespace,
    build_pod,
    fit_overlay,
    list_secrets,
    list_templates,
    render_prod,
)
from tests.cluster.verdict import Failure, Losses, Outcome, Record, find_violations, parse_record
from tests.support.helm import render_chart
from tests.support.kubernetes_schemas import KUBERNETES, complaints
from tests.support.manifests import Manifests, containers
from tests.support.servers import ROOT, GatewayProcess, free_ports
from tests.support.wait import TIMEOUT_S, wait_until

LOAD_PROGRAM = PROGRAMS / "load.py"
OWN_IMAGES = {role: f"mirror.example/{name}:test" for role, name in IMAGES.items()}


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


BEFORE = 95.0
FAULT_ENDED = 100.0
AFTER = 105.0


@pytest.mark.parametrize(
    ("losses", "connected", "began", "is_allowed"),
    [
        (Losses.none, BEFORE, BEFORE, False),
        (Losses.requests_inside, BEFORE, BEFORE, True),
        (Losses.requests_inside, BEFORE, AFTER, False),
        (Losses.connections_inside, BEFORE, AFTER, True),
        (Losses.connections_inside, AFTER, AFTER, False),
    ],
)
def test_request_may_fail_only_inside_what_died(
    losses: Losses, connected: float, began: float, is_allowed: bool
) -> None:
    failure = Failure("unary", connected, began, began + 1, "502")
    record = Record(Counter(unary=1), (failure,))
    outcome = Outcome("an event", losses, record, fault_ended=FAULT_ENDED)
    assert bool(find_violations(outcome)) != is_allowed


def test_objects_of_the_test_fit_a_small_cluster() -> None:
    kinds = {"ConfigMap", "Deployment", "HorizontalPodAutoscaler", "NetworkPolicy", "Service"}
    kinds |= {"PodDisruptionBudget", "ServiceAccount", "StatefulSet"}
    fitted = fit_overlay(render_prod("another-name"), kinds, OWN_IMAGES, "run")
    assert {each["kind"] for each in fitted} == kinds
    own = [build_pod("load", "image", ("python3",), "programs"), build_namespace("tools", "run")]
    objects = [*fitted, *list_secrets(), *own]
    assert [found for each in objects for found in complaints(each, KUBERNETES[-1])] == []
    text = json.dumps(fitted)
    assert "nvidia.com/gpu" not in text
    images = [each["image"] for one in list_templates(fitted) for each in containers(one["spec"])]
    assert set(images) == set(OWN_IMAGES.values())
    assert Manifests("prod", tuple(fitted)).get("Deployment", "triton")["spec"]["replicas"] == 2


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
        "prod",
        "chart",
        "tools",
    }
    assert printed.splitlines()[-1] == "interrupted"
