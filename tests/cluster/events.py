"""What an operator does, and what goes wrong, as tables: each row says which requests may fail."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from tests.cluster.desired import count_restarts, find_spread_differences
from tests.cluster.kubectl import ANY, ClusterError, run_command
from tests.cluster.resources import (
    CHANGING,
    GATEWAY,
    REDIS,
    RUN_LABEL,
    TRITON,
    build_keys_secret,
    format_keys,
)
from tests.cluster.scene import Obstacle, Scene
from tests.cluster.verdict import Losses
from tests.support.helm import CHART
from tests.support.keys import BOTH, bearer
from tests.support.manifests import Resource, quantity

AWAY_S: Final = 60.0  # Redis and CoreDNS
NODE_DOWN_S: Final = 30.0
CHANGE_PAUSE_S: Final = 2.0
# What a gateway and a Triton are until a probe notices that they are stopped.
GATEWAY_UNNOTICED_S: Final = 10.0
TRITON_UNNOTICED_S: Final = 5.0
CONTAINERS: Final = {GATEWAY: "gateway", TRITON: "triton"}
NEW_KEY: Final = BOTH
# Programs that run in a container: Python is in every image.
TAKE_MEMORY = "parts = [bytes([1]) * 2**26 for _ in range({count})]"
FILL_DISK = """
with open("/tmp/full", "wb") as file:
    for _ in range({count}): file.write(bytes(2**20))
"""


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


SCALE_INS: Final = 10


def scale_in_and_out(scene: Scene) -> None:
    """The pod that ends is used by nobody when it gets its signal, each time."""
    for _ in range(SCALE_INS):
        for count in (1, 2):
            scale(scene, f"deployment/{TRITON}", count)
            scene.wait_for_pods()


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


def load_during_rollout(scene: Scene) -> None:
    """Load a model through the API while one of the Tritons is new."""
    before = {pod["metadata"]["name"] for pod in scene.list_pods(TRITON)}
    restart(TRITON)(scene)

    def is_replaced() -> bool:
        return not before >= {pod["metadata"]["name"] for pod in scene.list_pods(TRITON)}

    scene.wait(is_replaced, "the rollout has started no Triton")
    answer = scene.call("POST", f"/v2/repository/models/{CHANGING}/load")
    # A replica may leave while it loads: the gateways then finish the load.
    if answer.status != 200 and "PARTLY_DONE" not in answer.body:
        raise ClusterError(f"the load was answered with {answer.status} {answer.body}")
    scene.wishes[CHANGING] = True


def add_key(scene: Scene) -> None:
    """Wait until every gateway accepts a key that was added."""
    write_keys(scene, format_keys(NEW_KEY))

    def is_accepted() -> bool:
        answers = scene.ask_gateways("/v1/models", bearer(NEW_KEY))
        return all(answer.status == 200 for answer in answers)

    scene.wait(is_accepted, "a gateway does not accept the new key")


def replace_keys(text: str) -> Callable[[Scene], None]:
    """Wait until every gateway has rejected a file."""

    def act(scene: Scene) -> None:
        write_keys(scene, text)
        is_rejected = partial(has_valid_keys, scene, is_valid=False)
        scene.wait(is_rejected, "a gateway does not report that the keys file is not valid")

    return act


def restore_keys(scene: Scene) -> None:
    write_keys(scene, format_keys())
    scene.wait(partial(has_valid_keys, scene), "a gateway does not read the valid keys file")


def write_keys(scene: Scene, text: str) -> None:
    scene.cluster.apply([build_keys_secret(text)], scene.namespace)


def has_valid_keys(scene: Scene, *, is_valid: bool = True) -> bool:
    line = f'gateway_file_valid{{file="keys"}} {int(is_valid)}'
    return all(line in answer.body for answer in scene.ask_gateways("/metrics"))


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


def drain_redis_node(scene: Scene) -> None:
    """Drain the node with Redis, which cannot start elsewhere if its volume is local."""
    if not scene.list_pods(REDIS):
        raise Obstacle("the installation has no Redis")
    list_usable_nodes(scene)
    drain(scene, choose_pod(scene, REDIS)["spec"]["nodeName"])


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


def change_models_without_redis(scene: Scene) -> None:
    """A change that is refused while Redis is away is never made later."""
    scale(scene, f"statefulset/{REDIS}", 0)
    scene.wait(lambda: not scene.list_pods(REDIS), "Redis does not end")
    ends = time.monotonic() + AWAY_S
    verbs = ("load", "unload")
    number = 0
    while time.monotonic() < ends:
        verb = verbs[number % len(verbs)]
        answer = scene.call("POST", f"/v2/repository/models/{CHANGING}/{verb}")
        if answer.status == 200:
            scene.wishes[CHANGING] = verb == "load"
        elif "STATE_UNAVAILABLE" not in answer.body:
            raise ClusterError(f"the {verb} was answered with {answer.status} {answer.body}")
        number += 1
        time.sleep(CHANGE_PAUSE_S)


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


def kill(name: str) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        pod = choose_pod(scene, name)
        scene.send_signal(pod, name, signal.SIGKILL)
        wait_until_noticed(scene, pod)

    return act


def stop(name: str) -> Callable[[Scene], None]:
    """Stop a process, until the liveness probe has it replaced."""

    def act(scene: Scene) -> None:
        pod = choose_pod(scene, name)
        scene.send_signal(pod, name, signal.SIGSTOP)
        wait_until_noticed(scene, pod)

    return act


def wait_until_noticed(scene: Scene, pod: Resource) -> None:
    """Wait until the container was started again, or Kubernetes or a gateway misses what died."""
    name = pod["metadata"]["name"]
    before = count_restarts(pod)

    def is_noticed() -> bool:
        now = count_restarts(scene.cluster.get_object("pod", name, scene.namespace))
        return now > before or bool(scene.find_pod_differences() or scene.find_fleet_differences())

    scene.wait(is_noticed, f"nothing has noticed the fault of {name}")


def exceed_memory(name: str) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        pod = choose_pod(scene, name)
        limit_bytes = quantity(find_container(pod, name)["resources"]["limits"]["memory"])
        program = TAKE_MEMORY.format(count=int(limit_bytes) // 2**26 + 1)
        with scene.fault():
            run_inside(scene, pod, name, program)
        if find_group_version(scene, pod, name) == 1:
            raise Obstacle("control groups v1 kill only the process that asks for memory")
        wait_until_noticed(scene, pod)

    return act


def find_group_version(scene: Scene, pod: Resource, name: str) -> int:
    program = "import os; print(os.path.exists('/sys/fs/cgroup/cgroup.controllers'))"
    return 1 if "False" in run_inside(scene, pod, name, program) else 2


def exceed_storage(name: str) -> Callable[[Scene], None]:
    """Fill /tmp beyond its limit: the pod is evicted, and another one starts."""

    def act(scene: Scene) -> None:
        pod = choose_pod(scene, name)
        (volume,) = (each for each in pod["spec"]["volumes"] if each["name"] == "tmp")
        limit_bytes = quantity(volume["emptyDir"]["sizeLimit"])
        name_of_pod = pod["metadata"]["name"]

        def is_evicted() -> bool:
            found = scene.cluster.list_objects("pods", scene.namespace)
            phases = {each["metadata"]["name"]: each["status"]["phase"] for each in found}
            return phases.get(name_of_pod) in (None, "Failed")

        with scene.fault():
            run_inside(scene, pod, name, FILL_DISK.format(count=int(limit_bytes) // 2**20 + 64))
            scene.wait(is_evicted, f"{name_of_pod} was not evicted")

    return act


def find_container(pod: Resource, name: str) -> Resource:
    containers: list[Resource] = pod["spec"]["containers"]
    return next(each for each in containers if each["name"] == CONTAINERS[name])


def run_inside(scene: Scene, pod: Resource, name: str, program: str) -> str:
    """Return what a Python program prints in a container, which may kill it."""
    command = ("python3", "-c", program)
    return scene.cluster.execute(
        scene.namespace, pod["metadata"]["name"], CONTAINERS[name], *command, accepted=ANY
    )


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
IN_GATEWAY: Final = Losses.connections_inside
IN_TRITON: Final = Losses.requests_inside

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
    Event("Tritons are scaled 2 → 1 → 2, ten times", scale_in_and_out),
    Event(
        "all pods are replaced twice after a node is drained",
        drain_and_roll_out_twice,
        undo=uncordon_node,
    ),
    Event("a model is loaded while the Tritons are replaced", load_during_rollout),
    Event("a key is added", add_key, undo=restore_keys),
    Event("the keys become broken YAML", replace_keys("keys: [\n"), undo=restore_keys),
    Event("the keys become empty", replace_keys(""), undo=restore_keys),
    # Before Redis is stopped: it may then start on another node than that of the load.
    Event("a node dies", lose_node, IN_GATEWAY, TRITON_UNNOTICED_S, undo=start_node),
    Event("Redis is away while models change", change_models_without_redis, undo=start_redis),
    Event("the node with Redis is drained", drain_redis_node, undo=uncordon_node),
    Event("CoreDNS is away", stop_dns, undo=start_dns),
    Event("a gateway is deleted without grace", delete_pod(GATEWAY, *FORCE), IN_GATEWAY, 5.0),
    Event("a Triton is deleted without grace", delete_pod(TRITON, *FORCE), IN_TRITON, 5.0),
    Event("kill -9 of a gateway", kill(GATEWAY), IN_GATEWAY),
    Event("kill -9 of a Triton", kill(TRITON), IN_TRITON),
    Event("a gateway stops running", stop(GATEWAY), IN_GATEWAY, GATEWAY_UNNOTICED_S),
    Event("a Triton stops running", stop(TRITON), IN_TRITON, TRITON_UNNOTICED_S),
    Event("a gateway exceeds its memory", exceed_memory(GATEWAY), IN_GATEWAY),
    Event("a Triton exceeds its memory", exceed_memory(TRITON), IN_TRITON),
    Event("a gateway exceeds its storage", exceed_storage(GATEWAY), IN_GATEWAY),
    Event("a Triton exceeds its storage", exceed_storage(TRITON), IN_TRITON),
)
CHART_EVENTS: Final = (
    Event("upgrade of the chart", upgrade_chart),
    Event("rollback of the chart", roll_back_chart),
)
