"""What an operator does, and what goes wrong, as tables: each row says which requests may fail."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from tests.cluster.desired import find_spread_differences
from tests.cluster.kubectl import ClusterError, run_command
from tests.cluster.resources import GATEWAY, REDIS, RUN_LABEL, TRITON
from tests.cluster.scene import Obstacle, Scene
from tests.cluster.verdict import Losses
from tests.support.helm import CHART
from tests.support.manifests import Resource

AWAY_S: Final = 60.0  # Redis and CoreDNS
NODE_DOWN_S: Final = 30.0
UNNOTICED_S: Final = 5.0  # until a probe misses what died


@dataclass(frozen=True)
class Event:
    """`act` returns when the effect can be seen; `undo` also runs if it failed or was interrupted."""

    name: str
    act: Callable[[Scene], None]
    losses: Losses = Losses.none
    unnoticed_s: float = 0.0
    undo: Callable[[Scene], None] | None = None


# On purpose.


def restart(*names: str) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        workloads = [f"deployment/{name}" for name in names]
        scene.cluster.run("rollout", "restart", *workloads, "--namespace", scene.namespace)

    return act


def scale(scene: Scene, name: str, count: int) -> None:
    words = ("scale", name, f"--replicas={count}", "--namespace", scene.namespace)
    scene.cluster.run(*words)


def scale_up_and_down(*names: str) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        for count in (4, 1, 2):
            for name in names:
                scale(scene, f"deployment/{name}", count)
            scene.wait_for_pods()

    return act


def choose_pod(scene: Scene, name: str) -> Resource:
    pods = scene.list_pods(name)
    if not pods:
        raise ClusterError(f"no pod of {name} runs")
    return pods[0]


def delete_pod(name: str, *options: str) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        pod = choose_pod(scene, name)["metadata"]["name"]
        with scene.fault():
            scene.cluster.run("delete", "pod", pod, "--namespace", scene.namespace, *options)

    return act


def choose_node(scene: Scene) -> str:
    """Return a node with pods of the installation, but without Redis, whose volume may be local.

    Raises `Obstacle` if there is no other node for them.
    """
    list_usable_nodes(scene)
    kept = {scene.find_load_node(), *(pod["spec"]["nodeName"] for pod in scene.list_pods(REDIS))}
    used = [
        pod["spec"]["nodeName"] for pod in [*scene.list_pods(GATEWAY), *scene.list_pods(TRITON)]
    ]
    candidates = [node for node in used if node not in kept]
    if not candidates:
        raise Obstacle("Redis or the load is on every node with gateways and Tritons")
    chosen: str = max(candidates, key=used.count)
    return chosen


def list_usable_nodes(scene: Scene) -> list[str]:
    """Raises `Obstacle` if there is only one."""
    nodes = scene.cluster.list_objects("nodes")
    names = [node["metadata"]["name"] for node in nodes if is_usable(node)]
    if len(names) < 2:
        raise Obstacle("the cluster has one node for pods")
    return names


def is_usable(node: Resource) -> bool:
    taints = node["spec"].get("taints", [])
    return not any(taint["effect"] in ("NoSchedule", "NoExecute") for taint in taints)


def drain_node(scene: Scene) -> None:
    drain(scene, choose_node(scene))


def drain_and_roll_out_twice(scene: Scene) -> None:
    """Replace all pods while a node is drained, and once more when it is back: they are spread again."""
    drain_node(scene)
    for _ in range(2):
        restart(GATEWAY, TRITON)(scene)
        scene.wait_for_pods()
        uncordon_node(scene)
    for name in (GATEWAY, TRITON):
        for difference in find_spread_differences(name, scene.list_pods(name)):
            raise ClusterError(difference)


def drain(scene: Scene, node: str) -> None:
    """Evict the pods of this run only."""
    selector = f"--pod-selector={RUN_LABEL}={scene.run.name}"
    options = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=300s")
    scene.disturbed_node = node
    scene.cluster.run("drain", node, selector, *options, timeout_s=330)


def uncordon_node(scene: Scene) -> None:
    if scene.disturbed_node:
        scene.cluster.run("uncordon", scene.disturbed_node)
        scene.disturbed_node = ""


def stop_redis(scene: Scene) -> None:
    scale(scene, f"statefulset/{REDIS}", 0)
    scene.wait(lambda: not scene.list_pods(REDIS), "Redis does not end")
    time.sleep(AWAY_S)


def start_redis(scene: Scene) -> None:
    scale(scene, f"statefulset/{REDIS}", 1)


DNS: Final = ("deployment/coredns", "--namespace", "kube-system")


def stop_dns(scene: Scene) -> None:
    """Names are looked up every five seconds: without an answer, the last addresses count."""
    deployments = scene.cluster.list_objects("deployments", "kube-system")
    found = [each for each in deployments if each["metadata"]["name"] == "coredns"]
    if not found:
        raise Obstacle("kube-system has no Deployment coredns")
    scene.dns_replicas = found[0]["spec"]["replicas"]
    scene.cluster.run("scale", *DNS, "--replicas=0")
    time.sleep(AWAY_S)


def start_dns(scene: Scene) -> None:
    if scene.dns_replicas:
        scene.cluster.run("scale", *DNS, f"--replicas={scene.dns_replicas}")
        scene.cluster.run("rollout", "status", *DNS, "--timeout=120s", timeout_s=150)
        scene.dns_replicas = 0


def upgrade_chart(scene: Scene) -> None:
    """Change a setting, which creates new gateways."""
    change = ("--reuse-values", "--set", "gateway.settings.GATEWAY_LOG_LEVEL=warning")
    scene.cluster.helm("upgrade", GATEWAY, str(CHART), "--namespace", scene.namespace, *change)


def roll_back_chart(scene: Scene) -> None:
    """Return to the installation: each event is followed by another upgrade, with the same values."""
    scene.cluster.helm("rollback", GATEWAY, "1", "--namespace", scene.namespace)


# Faults.


def lose_node(scene: Scene) -> None:
    if not scene.run.node_down:
        raise Obstacle("no command ends a node: --node-down 'docker kill {node}'")
    scene.disturbed_node = choose_node(scene)
    with scene.fault():
        run_node_command(scene.run.node_down, scene.disturbed_node)
    scene.wait(
        lambda: not is_node_ready(scene), "the cluster does not notice that the node is gone"
    )
    time.sleep(NODE_DOWN_S)


def start_node(scene: Scene) -> None:
    if scene.disturbed_node:
        run_node_command(scene.run.node_up, scene.disturbed_node)
        scene.wait(partial(is_node_ready, scene), "the node does not come back")
        scene.disturbed_node = ""


def run_node_command(template: str, node: str) -> None:
    run_command(shlex.split(template.format(node=node)))


def is_node_ready(scene: Scene) -> bool:
    nodes = scene.cluster.list_objects("nodes")
    (node,) = (each for each in nodes if each["metadata"]["name"] == scene.disturbed_node)
    conditions = node["status"]["conditions"]
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


FORCE: Final = ("--grace-period=0", "--force")

OVERLAY_EVENTS: Final = (
    Event("rollout of the gateways", restart(GATEWAY)),
    Event("rollout of the Tritons", restart(TRITON)),
    Event("rollout of both", restart(GATEWAY, TRITON)),
    Event("a gateway is deleted", delete_pod(GATEWAY)),
    Event("a Triton is deleted", delete_pod(TRITON)),
    # Before pods are replaced: of two nodes, the drained one is empty until then, and could not die.
    Event("a node is drained", drain_node, undo=uncordon_node),
    Event("gateways are scaled 2 → 4 → 1 → 2", scale_up_and_down(GATEWAY)),
    Event("Tritons are scaled 2 → 4 → 1 → 2", scale_up_and_down(TRITON)),
    Event(
        "all pods are replaced twice after a node is drained",
        drain_and_roll_out_twice,
        undo=uncordon_node,
    ),
    # Before Redis is stopped: it may then start on another node than that of the load.
    Event("a node dies", lose_node, Losses.connections_inside, UNNOTICED_S, undo=start_node),
    Event("Redis is away", stop_redis, undo=start_redis),
    Event("CoreDNS is away", stop_dns, undo=start_dns),
    Event(
        "a gateway is deleted without grace",
        delete_pod(GATEWAY, *FORCE),
        Losses.connections_inside,
        UNNOTICED_S,
    ),
    Event(
        "a Triton is deleted without grace",
        delete_pod(TRITON, *FORCE),
        Losses.requests_inside,
        UNNOTICED_S,
    ),
)
CHART_EVENTS: Final = (
    Event("upgrade of the chart", upgrade_chart),
    Event("rollback of the chart", roll_back_chart),
)
