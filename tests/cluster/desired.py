"""What pods and gateways say when everything is well: each check yields the differences. No I/O."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.support.manifests import Resource

TRITON_PORT: Final = 8000
ENDED: Final = ("Failed", "Succeeded")
READY = "READY"
UP = "UP"


@dataclass(frozen=True)
class Answer:
    """The response of a gateway; status 0 if there was none."""

    status: int
    body: str

    def read(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class GatewayView:
    """What one gateway says of itself and of the fleet."""

    pod: str
    readiness: Answer
    replicas: Answer


def find_pod_differences(workloads: Sequence[Resource], pods: Sequence[Resource]) -> Iterator[str]:
    """Compare Deployments and StatefulSets with their status, and with the number of their pods."""
    wanted = 0
    for workload in workloads:
        name = workload["metadata"]["name"]
        count = workload["spec"].get("replicas", 1)
        wanted += count
        status = workload["status"]
        if status.get("observedGeneration", 0) < workload["metadata"]["generation"]:
            yield f"{name} has not been seen by its controller"
        for field in ("replicas", "updatedReplicas", "readyReplicas"):
            if status.get(field, 0) != count:
                yield f"{name} has {field} {status.get(field, 0)} instead of {count}"
    left = [pod["metadata"]["name"] for pod in pods if pod["status"].get("phase") not in ENDED]
    if len(left) != wanted:
        yield f"{len(left)} pods instead of {wanted} exist: {', '.join(left)}"


def find_fleet_differences(
    views: Sequence[GatewayView], tritons: Collection[str], wishes: Mapping[str, bool]
) -> Iterator[str]:
    """Compare what each gateway says with the addresses of the Tritons and the models that are wished.

    `wishes` says of each model whether it should be loaded.
    """
    expected = {f"{address}:{TRITON_PORT}" for address in tritons}
    for view in views:
        if view.readiness.status != 200:
            yield f"{view.pod} is not ready: {view.readiness.status} {view.readiness.body}"
        if view.replicas.status != 200:
            yield f"{view.pod} does not list replicas: {view.replicas.status} {view.replicas.body}"
            continue
        replicas = {each["address"]: each for each in view.replicas.read()["replicas"]}
        if replicas.keys() != expected:
            yield f"{view.pod} knows the replicas {sorted(replicas)} instead of {sorted(expected)}"
        for address, replica in replicas.items():
            if replica["state"] != UP:
                yield f"{view.pod} has the replica {address} in state {replica['state']}"
            for model, is_wished in wishes.items():
                if (replica["models"].get(model) == READY) != is_wished:
                    state = replica["models"].get(model, "unknown")
                    yield f"{view.pod} has the model {model} of {address} in state {state}"


def find_spread_differences(name: str, pods: Sequence[Resource]) -> Iterator[str]:
    """Compare the nodes of pods, of which there are enough for each pod."""
    nodes = sorted(pod["spec"]["nodeName"] for pod in pods)
    if len(set(nodes)) < len(nodes):
        yield f"the pods of {name} are not spread: {', '.join(nodes)}"
