"""An installation under load: what an event disturbs, and what says when everything is well again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from tests.cluster import desired
from tests.cluster.desired import Answer, GatewayView
from tests.cluster.kubectl import TIMEOUT_S, Cluster, ClusterError
from tests.cluster.resources import GATEWAY, PROGRAMS, REDIS, TRITON, build_config_map, build_pod
from tests.cluster.verdict import (
    SETTLE_S,
    SLOW_S,
    Record,
    find_log_faults,
    find_oldest_request,
    parse_record,
)
from tests.support.keys import ADMIN, bearer
from tests.support.manifests import Resource

PATIENCE_S: Final = 600.0
LOOK_PAUSE_S: Final = 1.0
CALL_TIMEOUT_S: Final = 300.0  # a request that wakes the first Triton waits for it
GATEWAY_PORT: Final = 8080
NAME_LABEL: Final = "app.kubernetes.io/name"
PROGRAM: Final = "/programs/load.py"


class Obstacle(Exception):
    """The cluster cannot be disturbed so; the message says why."""


@dataclass(frozen=True)
class Run:
    """What all installations of a run have in common."""

    cluster: Cluster
    name: str  # random: part of the names of the namespaces
    images: Mapping[str, str]
    node_down: str = ""  # commands that end and start a node: `docker kill {node}`
    node_up: str = ""
    settle_s: float = SETTLE_S
    slow_s: float = SLOW_S

    @property
    def tools_namespace(self) -> str:
        return self.find_namespace("tools")

    def find_namespace(self, purpose: str) -> str:
        return f"triton-gateway-test-{self.name}-{purpose}"


@dataclass(frozen=True)
class Wellness:
    """When everything was well, in seconds since the wait began; or what was not, when the patience ended."""

    pods_ready_s: float
    well_s: float
    differences: tuple[str, ...] = ()


class Scene:
    """One installation, its load, and the pods from which the test asks and signals."""

    def __init__(
        self,
        run: Run,
        namespace: str,
        wishes: Mapping[str, bool],
    ) -> None:
        self.cluster = run.cluster
        self.run = run
        self.namespace = namespace
        self.wishes = dict(wishes)
        self.fault_ended = 0.0
        # What `undo` of an event restores.
        self.disturbed_node = ""
        self.dns_replicas = 0
        self._tools_namespace = run.tools_namespace
        self._image = run.images["gateway"]
        self._headers = bearer(ADMIN)
        self._load_pod = f"load-{namespace}"

    # The load.

    def start_load(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """Start the pod that sends requests to the Service, at its address: it needs no DNS."""
        settings = {
            "url": self.url,
            "grpc": self.grpc_address,
            "headers": self._headers,
            "requests": list(requests),
            "slow_s": self.run.slow_s,
        }
        programs = build_config_map(
            self._load_pod, sorted(PROGRAMS.glob("*.py")), **{"load.json": json.dumps(settings)}
        )
        command = ("python3", PROGRAM, "send", "/programs/load.json")
        # On the node of Redis: another one can then be drained.
        redis = self.list_pods(REDIS)
        place = {"nodeName": redis[0]["spec"]["nodeName"]} if redis else {}
        pod = build_pod(self._load_pod, self._image, command, self._load_pod, **place)
        self.cluster.apply([programs, pod], self._tools_namespace)
        self._wait_for_tool(self._load_pod)

    def stop_load(self) -> None:
        words = ("delete", "pod", self._load_pod, "--namespace", self._tools_namespace)
        self.cluster.run(*words, "--ignore-not-found", "--grace-period=1")

    def read_load(self, after: float, until: float) -> Record:
        words = ("logs", "--namespace", self._tools_namespace, self._load_pod)
        return parse_record(self.cluster.run(*words).splitlines(), after, until)

    def wait_for_old_requests(self, before: float) -> None:
        """Wait until no request is in progress that began before this time of the load's clock."""
        words = ("logs", "--namespace", self._tools_namespace, self._load_pod, "--tail=20")

        def is_over() -> bool:
            oldest = [find_oldest_request(line) for line in self.cluster.run(*words).splitlines()]
            known = [each for each in oldest if each is not None]
            return bool(known) and known[-1] > before

        self.wait(is_over, "the load answers no request")

    def read_clock(self) -> float:
        """Return the time of the load's clock."""
        now: float = self._run_ask([])["now"]
        return now

    @contextmanager
    def fault(self) -> Iterator[None]:
        """The block in which something dies. What began later was not inside it."""
        yield
        self.fault_ended = self.read_clock()

    # Questions.

    def find_load_node(self) -> str:
        pod = self.cluster.get_object("pod", self._load_pod, self._tools_namespace)
        node: str = pod["spec"]["nodeName"]
        return node

    @property
    def url(self) -> str:
        return f"http://{self._find_address('http')}"

    @property
    def grpc_address(self) -> str:
        return self._find_address("grpc")

    def _find_address(self, port_name: str) -> str:
        service = self.cluster.get_object("service", GATEWAY, self.namespace)["spec"]
        (port,) = (each["port"] for each in service["ports"] if each["name"] == port_name)
        return f"{service['clusterIP']}:{port}"

    def ask(
        self, requests: Sequence[Mapping[str, Any]], timeout_s: float = TIMEOUT_S
    ) -> list[Answer]:
        return [Answer(**each) for each in self._run_ask(requests, timeout_s)["responses"]]

    def _run_ask(
        self, requests: Sequence[Mapping[str, Any]], timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        text = self.cluster.execute(
            self._tools_namespace,
            self._load_pod,
            "main",
            *("python3", PROGRAM, "ask"),
            stdin=json.dumps(requests),
            timeout_s=timeout_s,
        )
        answer: dict[str, Any] = json.loads(text)
        return answer

    def call(self, method: str, path: str, json: object = None) -> Answer:
        """Call any gateway through the Service."""
        request = {"method": method, "url": self.url + path, "headers": self._headers, "json": json}
        return self.ask([{**request, "timeout": CALL_TIMEOUT_S}], timeout_s=CALL_TIMEOUT_S + 30)[0]

    # Pods.

    def list_pods(self, name: str) -> list[Resource]:
        """Return the pods with this name that run and are not about to end."""
        pods = self.cluster.list_objects("pods", self.namespace, f"{NAME_LABEL}={name}")
        return [
            pod
            for pod in pods
            if "deletionTimestamp" not in pod["metadata"]
            and pod["status"].get("phase") == "Running"
            and pod["status"].get("podIP")
        ]

    def _wait_for_tool(self, pod: str) -> None:
        words = ("wait", "--for=condition=Ready", f"pod/{pod}", "--timeout=120s")
        self.cluster.run(*words, "--namespace", self._tools_namespace, timeout_s=150)

    # Wellness.

    def wait(self, condition: Callable[[], object], complaint: str) -> None:
        """Raises `ClusterError` if the condition does not hold in time."""
        began = time.monotonic()
        while not self._holds(condition):
            if time.monotonic() - began > PATIENCE_S:
                raise ClusterError(f"after {PATIENCE_S:.0f} s, {complaint}")
            time.sleep(LOOK_PAUSE_S)

    def _holds(self, condition: Callable[[], object]) -> bool:
        """Return whether the condition holds; false while the cluster cannot be asked, as in some faults."""
        try:
            return bool(condition())
        except ClusterError:
            return False

    def find_log_faults(self) -> list[str]:
        """Return the faults in the logs of the gateways that run."""
        words = ("logs", "--namespace", self.namespace, "--selector", f"{NAME_LABEL}={GATEWAY}")
        return find_log_faults(self.cluster.run(*words, "--prefix", "--tail=-1"))

    def find_pod_differences(self) -> list[str]:
        workloads = self.cluster.list_objects("deployments,statefulsets", self.namespace)
        pods = self.cluster.list_objects("pods", self.namespace)
        return list(desired.find_pod_differences(workloads, pods))

    def read_generations(self) -> dict[str, int]:
        """Return how often the specification of each workload has changed, its number of pods included."""
        workloads = self.cluster.list_objects("deployments,statefulsets", self.namespace)
        return {each["metadata"]["name"]: int(each["metadata"]["generation"]) for each in workloads}

    def wait_for_pods(self) -> None:
        self.wait(lambda: not self.find_pod_differences(), "the pods are not ready")

    def find_fleet_differences(self) -> list[str]:
        pods = self.list_pods(GATEWAY)
        requests = [
            {"method": "GET", "url": build_pod_url(pod) + path, "headers": self._headers}
            for pod in pods
            for path in ("/readyz", "/v1/replicas")
        ]
        answers = self.ask(requests)
        names = [pod["metadata"]["name"] for pod in pods]
        views = [
            GatewayView(name, readiness, replicas)
            for name, readiness, replicas in zip(names, answers[::2], answers[1::2], strict=True)
        ]
        tritons = [pod["status"]["podIP"] for pod in self.list_pods(TRITON)]
        return list(desired.find_fleet_differences(views, tritons, self.wishes))

    def wait_until_well(self) -> Wellness:
        """Wait until all pods are ready, and then until each gateway sees the fleet as it should be."""
        began = time.monotonic()
        pods_ready_s: float | None = None
        while True:
            now_s = time.monotonic() - began
            try:
                differences = self.find_pod_differences()
                if differences:
                    pods_ready_s = None
                else:
                    pods_ready_s = now_s if pods_ready_s is None else pods_ready_s
                    differences = self.find_fleet_differences()
                    if not differences:
                        return Wellness(pods_ready_s, time.monotonic() - began)
            except ClusterError as exc:
                differences = [str(exc)]
            if now_s > PATIENCE_S:
                return Wellness(pods_ready_s or now_s, now_s, tuple(differences))
            time.sleep(LOOK_PAUSE_S)


def build_pod_url(pod: Resource) -> str:
    return f"http://{pod['status']['podIP']}:{GATEWAY_PORT}"
