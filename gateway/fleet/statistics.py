"""Triton's statistics of models, summed over the fleet.

Clients take the difference of two responses. It is right while replicas restart, join and leave, because what
a replica has counted is kept when it counts from 0 again, does not answer, or has left the fleet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from time import perf_counter
from typing import Any, Final

from gateway.errors import BadUpstream, GatewayError, UnknownModel
from gateway.fleet.pool import NoReplica, ReplicaPool
from gateway.fleet.replica import Replica
from gateway.fleet.transports import request_json, triton_model_path
from gateway.tasks import run_together
from gateway.triton.request_target import RequestTarget

# Of one version of a model, as in Triton's statistics extension.
Statistics = Mapping[str, Any]
REPLICA_TIMEOUT_S: Final = 5.0
MAX_VERSIONS: Final = 10_000  # whose counts are kept
LATEST: Final = "last_inference"  # a time, of which the latest counts
MEMORY: Final = "memory_usage"  # of a replica now: it is not kept
ITEM_KEYS: Final = ("batch_size", "type", "id")  # tell the items of a list apart


class VersionCounts:
    """The statistics of one version of a model by replica, and those of replicas that are gone."""

    def __init__(self) -> None:
        self._past: Statistics = {}  # of replicas that were restarted or have left
        self._last: dict[str, Statistics] = {}  # of each replica
        self._received_at: dict[str, float] = {}

    def record(self, replica: str, statistics: Statistics, sent_at: float) -> None:
        """Record what a replica says; `sent_at` is when it was asked, by `time.perf_counter`."""
        if count_events(statistics) < count_events(self._last.get(replica, {})):
            if sent_at < self._received_at[replica]:
                return  # of two requests at the same time, this one was answered first
            self.forget(replica)  # it counts from 0 again
        self._last[replica] = statistics
        self._received_at[replica] = perf_counter()

    def forget(self, replica: str) -> None:
        """Keep only the counts of a replica."""
        del self._received_at[replica]
        self._past = add_statistics(self._past, drop_memory(self._last.pop(replica)))

    def forget_others(self, replicas: Iterable[str]) -> None:
        for replica in self._last.keys() - replicas:
            self.forget(replica)

    def sum(self, answering: Iterable[str]) -> Statistics:
        """Return the sum; the memory is that of the replicas that answered."""
        current = [
            statistics if replica in answering else drop_memory(statistics)
            for replica, statistics in self._last.items()
        ]
        total: Statistics = reduce(add_statistics, current, self._past)
        return total


class FleetStatistics:
    """The statistics of all models, as this process has seen them."""

    def __init__(self, pool: ReplicaPool) -> None:
        self._pool = pool
        self._versions: dict[tuple[str, str], VersionCounts] = {}

    async def read(self, target: RequestTarget) -> dict[str, list[Statistics]]:
        """Return the sums of a model's versions or, without a model, of all, as Triton does over HTTP.

        Replicas that do not answer have what they last said. Raises Triton's error if no replica knows the
        model, or the failure of a replica if none answers.
        """
        replicas = [each for each in self._pool.replicas.values() if self._pool.is_reachable(each)]
        if not replicas:
            raise NoReplica
        sent_at = perf_counter()
        outcomes = await run_together(try_to_read(replica, target) for replica in replicas)
        failures = [outcome for outcome in outcomes if isinstance(outcome, GatewayError)]
        if len(failures) == len(replicas):
            known = [failure for failure in failures if not isinstance(failure, UnknownModel)]
            raise (known or failures)[0]
        answers = {
            replica.name: outcome
            for replica, outcome in zip(replicas, outcomes, strict=True)
            if not isinstance(outcome, GatewayError)
        }
        for replica, versions in answers.items():
            for statistics in versions:
                self._find_counts(statistics).record(replica, statistics, sent_at)
        return {"model_stats": self._sum_versions(answers)}

    async def read_replica(self, name: str, target: RequestTarget) -> dict[str, list[Statistics]]:
        """Return what one replica says. Raises `UnknownReplica`, or as `read`."""
        return {"model_stats": await read_statistics(self._pool.get_replica(name), target)}

    def _sum_versions(self, answers: Mapping[str, list[Statistics]]) -> list[Statistics]:
        names = [replica.name for replica in self._pool.replicas.values()]
        counts = dict.fromkeys(
            self._find_counts(statistics)
            for versions in answers.values()
            for statistics in versions
        )
        for each in counts:
            each.forget_others(names)
        return [each.sum(answers) for each in counts]

    def _find_counts(self, statistics: Statistics) -> VersionCounts:
        key = (statistics["name"], statistics["version"])
        counts = self._versions.get(key)
        if counts is None:
            counts = self._versions[key] = VersionCounts()
            if len(self._versions) > MAX_VERSIONS:
                del self._versions[next(iter(self._versions))]
        return counts


async def try_to_read(replica: Replica, target: RequestTarget) -> list[Statistics] | GatewayError:
    try:
        return await read_statistics(replica, target)
    except GatewayError as exc:
        return exc


async def read_statistics(replica: Replica, target: RequestTarget) -> list[Statistics]:
    """Return a replica's own statistics. Raises Triton's error, or that of the transport."""
    target = target._replace(timeout_s=min(target.timeout_s, REPLICA_TIMEOUT_S))
    path = triton_model_path(target.model, target.version) if target.model else "/v2/models"
    match await request_json(replica, target, b"GET", f"{path}/stats"):
        case {"model_stats": [*versions]} if all(map(is_statistics, versions)):
            return versions
    raise BadUpstream("the replica's statistics are not those of Triton's statistics extension")


def is_statistics(value: Any) -> bool:
    match value:
        case {"name": str(), "version": str()}:
            return True
    return False


def count_events(statistics: Statistics) -> int:
    """Return a number that only grows while a replica runs."""
    match statistics:
        case {
            "inference_count": int(inferences),
            "inference_stats": {"fail": {"count": int(failures)}},
        }:
            return inferences + failures
    return 0


def drop_memory(statistics: Statistics) -> Statistics:
    return {name: value for name, value in statistics.items() if name != MEMORY}


def add_statistics(first: Any, second: Any) -> Any:
    """Return the sum of two values of the same form; of texts, the second."""
    match first, second:
        case dict(), dict():
            sums = {
                name: add_field(name, first[name], second[name])
                for name in first.keys() & second.keys()
            }
            return {**first, **second, **sums}
        case list(), list():
            items = {identify(item): item for item in first}
            for item in second:
                key = identify(item)
                items[key] = add_statistics(items[key], item) if key in items else item
            return list(items.values())
        case int(), int():
            return first + second
    return second


def add_field(name: str, first: Any, second: Any) -> Any:
    if name in ITEM_KEYS:
        return second
    return max(first, second) if name == LATEST else add_statistics(first, second)


def identify(item: Any) -> str:
    match item:
        case dict():
            return " ".join(str(item.get(key)) for key in ITEM_KEYS)
    return ""
