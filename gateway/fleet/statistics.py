"""Triton's statistics of models, summed over the fleet.

Clients take the difference of two responses. It is right while replicas restart, join and leave, because what
a replica has counted is kept when it counts from 0 again, does not answer, or has left the fleet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Mapping
from contextlib import nullcontext
from functools import reduce
from time import perf_counter
from typing import Any, Final

import orjson

from gateway.errors import (
    BadUpstream,
    GatewayError,
    ModelNotReady,
    UnknownModel,
    UpstreamResponseTooLarge,
)
from gateway.fleet.pool import NoReplica, ReplicaPool
from gateway.fleet.replica import Replica
from gateway.fleet.transports import decode_json, triton_model_path
from gateway.tasks import run_together
from gateway.triton.error_mapping import map_triton_error
from gateway.triton.request_target import RequestTarget

# Of one version of a model, as in Triton's statistics extension.
Statistics = Mapping[str, Any]
REPLICA_TIMEOUT_S: Final = 5.0
MAX_RESPONSE_BYTES: Final = 8 << 20  # limit for the response of one replica
# Size of all kept statistics as JSON; in memory, they take about seven times as much.
MAX_KEPT_BYTES: Final = 16 << 20
MAX_REPLICAS: Final = 256  # replicas of one version, removed ones included
LATEST: Final = "last_inference"  # a time, of which the latest counts
MEMORY: Final = "memory_usage"  # a current value, which is not kept
ITEM_KEYS: Final = ("batch_size", "type", "id")  # tell the items of a list apart


class VersionCounts:
    """The statistics of one version of a model by replica, and what they counted before their restarts."""

    def __init__(self) -> None:
        self._past: Statistics = {}
        self._last: dict[str, Statistics] = {}  # replica, removed ones included → last statistics
        self._received_at: dict[str, float] = {}
        self.kept_bytes = 0  # approximate size as JSON

    def record(self, replica: str, statistics: Statistics, sent_at: float) -> None:
        """Record a replica's answer; `sent_at` is when it was asked, by `time.perf_counter`."""
        last = self._last.get(replica)
        if last is not None and has_fallen(last, statistics):
            if sent_at < self._received_at[replica]:
                return  # a later response to another request has replaced this one
            self._forget(replica)  # it counts from 0 again
        elif last is None and len(self._last) >= MAX_REPLICAS:
            self._forget(next(iter(self._last)))
        self._last[replica] = statistics
        self._received_at[replica] = perf_counter()

    def _forget(self, replica: str) -> None:
        """Keep only the counts of a replica."""
        del self._received_at[replica]
        self._past = add_statistics(self._past, drop_memory(self._last.pop(replica)))

    def serialize_sum(self, answering: Container[str]) -> bytes:
        document = orjson.dumps(self.sum(answering))
        self.kept_bytes = len(document) * (len(self._last) + 1)
        return document

    def sum(self, answering: Container[str]) -> Statistics:
        """Return the sum; the memory is only summed for the replicas that answered."""
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
        # Of reads of all models, whose documents are large.
        self._reading = asyncio.Lock()
        # Of sums, which use a thread.
        self._adding = asyncio.Lock()

    async def read(self, target: RequestTarget) -> bytes:
        """Return the sums of a model's versions or, without a model, of all, as Triton does over HTTP.

        Replicas that do not answer have what they last said. Raises Triton's error if no replica knows the
        model, or the failure of a replica if none answers.
        """
        replicas = [each for each in self._pool.replicas.values() if self._pool.is_reachable(each)]
        if not replicas:
            raise NoReplica
        # A replica that hangs delays no read of another model.
        async with nullcontext() if target.model else self._reading:
            sent_at = perf_counter()
            outcomes = await run_together(self._try_to_read(each, target) for each in replicas)
            failures = [outcome for outcome in outcomes if isinstance(outcome, GatewayError)]
            if len(failures) == len(replicas):
                raise self._choose_failure(failures, target)
            answers = {
                replica.name: outcome
                for replica, outcome in zip(replicas, outcomes, strict=True)
                if not isinstance(outcome, GatewayError)
            }
            async with self._adding:
                return await asyncio.to_thread(self._add_up, answers, sent_at)

    async def read_replica(self, name: str, target: RequestTarget) -> bytes:
        """Return the answer of one replica. Raises `UnknownReplica`, or as `read`."""
        return await self._read(self._pool.get_replica(name), target)

    async def _try_to_read(self, replica: Replica, target: RequestTarget) -> bytes | GatewayError:
        try:
            return await self._read(replica, target)
        except UpstreamResponseTooLarge:  # its last counts would be too old
            raise
        except GatewayError as exc:
            return exc

    async def _read(self, replica: Replica, target: RequestTarget) -> bytes:
        path = triton_model_path(target.model, target.version) if target.model else "/v2/models"
        response = await replica.http.request(
            b"GET",
            f"{path}/stats".encode(),
            headers=replica.management_headers,
            timeout_s=min(target.timeout_s, REPLICA_TIMEOUT_S),
            max_bytes=MAX_RESPONSE_BYTES,
        )
        if response.status != 200:
            raise map_triton_error(response.status, response.body, target)
        return response.body

    def _choose_failure(self, failures: list[GatewayError], target: RequestTarget) -> GatewayError:
        unknown = [failure for failure in failures if isinstance(failure, UnknownModel)]
        if len(unknown) == len(failures) and self._pool.is_listed(target.model, target.version):
            return ModelNotReady(target.model, target.version)
        return next((failure for failure in failures if failure not in unknown), failures[0])

    def _add_up(self, answers: Mapping[str, bytes], sent_at: float) -> bytes:
        """Record the answers of replicas, and return the sums of the versions in them, in a thread."""
        reported: dict[VersionCounts, None] = {}  # a set that keeps the order of the answers
        for replica, body in answers.items():
            for statistics in parse_statistics(body):
                counts = self._find_counts(statistics["name"], statistics["version"])
                counts.record(replica, statistics, sent_at)
                reported[counts] = None
        documents = [counts.serialize_sum(answers) for counts in reported]
        self._drop_oldest()
        return b'{"model_stats":[%b]}' % b",".join(documents)

    def _find_counts(self, model: str, version: str) -> VersionCounts:
        """Return the counts of a version, and make it the one that is dropped last."""
        counts = self._versions.pop((model, version), None) or VersionCounts()
        self._versions[model, version] = counts
        return counts

    def _drop_oldest(self) -> None:
        excess = sum(counts.kept_bytes for counts in self._versions.values()) - MAX_KEPT_BYTES
        for key, counts in list(self._versions.items()):
            if excess <= 0:
                break
            del self._versions[key]
            excess -= counts.kept_bytes


def parse_statistics(body: bytes) -> list[Statistics]:
    match decode_json(body):
        case {"model_stats": [*versions]} if all(map(is_statistics, versions)):
            return versions
    raise BadUpstream("the replica's statistics are not those of Triton's statistics extension")


def is_statistics(value: Any) -> bool:
    match value:
        case {"name": str(), "version": str(), "inference_count": int(), "inference_stats": {}}:
            return True
    return False


def has_fallen(before: Any, now: Any) -> bool:
    """Return whether a count is lower than before, because the replica counts from 0 again."""
    match before, now:
        case dict(), dict():
            shared = before.keys() & now.keys() - {LATEST}
            return any(has_fallen(before[name], now[name]) for name in shared)
        case int(), int():
            return now < before
    return False


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
