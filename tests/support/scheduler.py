"""The rule by which Kubernetes' scheduler chooses a node: filters and scores of the plugins that matter here.

Simplified from pkg/scheduler/framework/plugins: fit by requests, least and balanced allocation, soft topology
spread, and preferred anti-affinity, with the default weights.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from tests.support.manifests import Resource, quantity

MAX_SCORE: Final = 100
SPREAD_WEIGHT: Final = 2
AFFINITY_WEIGHT: Final = 2
HOSTNAME: Final = "kubernetes.io/hostname"
ZONE: Final = "topology.kubernetes.io/zone"
SCORED: Final = ("cpu", "memory")
REVISION: Final = "pod-template-hash"


@dataclass(frozen=True)
class Pod:
    name: str
    labels: Mapping[str, str]
    requests: Mapping[str, float]
    spread: Sequence[Resource]
    avoided: Sequence[Resource]

    @classmethod
    def of(cls, workload: Resource) -> Pod:
        template = workload["spec"]["template"]
        requests: defaultdict[str, float] = defaultdict(float)
        for container in template["spec"]["containers"]:
            for resource, amount in container["resources"]["requests"].items():
                requests[resource] += quantity(amount)
        affinity = template["spec"].get("affinity", {}).get("podAntiAffinity", {})
        return cls(
            workload["metadata"]["name"],
            labels=template["metadata"]["labels"] | {REVISION: "0"},
            requests=requests,
            spread=template["spec"].get("topologySpreadConstraints", []),
            avoided=affinity.get("preferredDuringSchedulingIgnoredDuringExecution", []),
        )

    @property
    def revision(self) -> str:
        return self.labels[REVISION]

    def renew(self) -> Pod:
        """Return the pod of the next revision."""
        return replace(self, labels={**self.labels, REVISION: str(int(self.revision) + 1)})

    def selects(self, term: Resource, other: Pod) -> bool:
        """Return whether a constraint or term of this pod selects the other one."""
        wanted = dict(term["labelSelector"]["matchLabels"])
        wanted |= {key: self.labels[key] for key in term.get("matchLabelKeys", [])}
        return bool(wanted.items() <= other.labels.items())


@dataclass
class Node:
    labels: dict[str, str]
    capacity: dict[str, float]
    used: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    pods: list[Pod] = field(default_factory=list)
    is_cordoned: bool = False

    def has_room(self, pod: Pod) -> bool:
        return all(
            self.used[name] + amount <= self.capacity.get(name, 0)
            for name, amount in pod.requests.items()
        )

    def run(self, pod: Pod) -> None:
        self.pods.append(pod)
        for name, amount in pod.requests.items():
            self.used[name] += amount

    def end(self, pod: Pod) -> None:
        self.pods.remove(pod)
        for name, amount in pod.requests.items():
            self.used[name] -= amount

    def count(self, name: str) -> int:
        return sum(pod.name == name for pod in self.pods)


def make_small_nodes() -> list[Node]:
    """Return two nodes of two cores and 4 GB, less what the kubelet reserves and the system requests."""
    free = {"cpu": 1.53, "memory": 3.0 * (1 << 30), "ephemeral-storage": 40.0 * (1 << 30)}
    return [Node({HOSTNAME: f"n{number}"}, dict(free)) for number in range(2)]


def schedule(pods: Sequence[Pod], nodes: Sequence[Node]) -> None:
    """Place each pod on the node with the highest score, the first of equals. Raises `ValueError`
    if none has room.
    """
    for pod in pods:
        fitting = [node for node in nodes if node.has_room(pod)]
        spread = score_spread(pod, fitting)
        affinity = score_affinity(pod, nodes, fitting)
        scores = [
            SPREAD_WEIGHT * spread[number]
            + AFFINITY_WEIGHT * affinity[number]
            + score_allocation(pod, node)
            for number, node in enumerate(fitting)
        ]
        next(node for node, score in zip(fitting, scores, strict=True) if score == max(scores)).run(
            pod
        )


def roll_out(name: str, nodes: Sequence[Node]) -> None:
    """Replace the pods of a name one after the other: a new one starts before an old one ends.

    An old pod is still ending when the next new one is scheduled, unless that needs its room.
    """
    usable = [node for node in nodes if not node.is_cordoned]
    replaced = [(node, pod) for node in nodes for pod in node.pods if pod.name == name]
    ending: list[tuple[Node, Pod]] = []
    for node, pod in replaced:
        new = pod.renew()
        if ending and not any(each.has_room(new) for each in usable):
            end_all(ending)
        schedule([new], usable)
        ending.append((node, pod))
    end_all(ending)


def end_all(ending: list[tuple[Node, Pod]]) -> None:
    while ending:
        node, pod = ending.pop()
        node.end(pod)


def score_allocation(pod: Pod, node: Node) -> float:
    shares = [
        (node.used[name] + pod.requests.get(name, 0)) / node.capacity[name] for name in SCORED
    ]
    least = MAX_SCORE * (1 - sum(shares) / len(shares))
    balanced = MAX_SCORE * (1 - abs(shares[0] - shares[1]) / 2)
    return least + balanced


def score_spread(pod: Pod, fitting: Sequence[Node]) -> list[float]:
    """A node without the label of one of the constraints gets no score for any of them."""
    keys = [constraint["topologyKey"] for constraint in pod.spread]
    counted = [node for node in fitting if keys and all(key in node.labels for key in keys)]
    totals: dict[int, float] = {id(node): 0.0 for node in counted}
    for constraint in pod.spread:
        key = constraint["topologyKey"]
        found = Counter({node.labels[key]: 0 for node in counted})
        for node in counted:
            found[node.labels[key]] += sum(pod.selects(constraint, each) for each in node.pods)
        for node in counted:
            totals[id(node)] += found[node.labels[key]] * math.log(len(found) + 2)
    most = max(totals.values(), default=0)
    fewest = min(totals.values(), default=0)

    def normalize(node: Node) -> float:
        if id(node) not in totals:
            return 0
        return MAX_SCORE * (most + fewest - totals[id(node)]) / most if most else MAX_SCORE

    return [normalize(node) for node in fitting]


def score_affinity(pod: Pod, nodes: Sequence[Node], fitting: Sequence[Node]) -> list[float]:
    """The terms of the pod count, and those of the pods that run; a node without the label has neither."""
    scores: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        for running in node.pods:
            for one, other in ((pod, running), (running, pod)):
                for term in one.avoided:
                    key = term["podAffinityTerm"]["topologyKey"]
                    if key in node.labels and one.selects(term["podAffinityTerm"], other):
                        scores[key, node.labels[key]] -= term["weight"]
    raw = [
        sum(score for (key, value), score in scores.items() if node.labels.get(key) == value)
        for node in fitting
    ]
    lowest, highest = min(raw), max(raw)
    span = highest - lowest
    return [MAX_SCORE * (score - lowest) / span if span else 0 for score in raw]
