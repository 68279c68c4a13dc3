"""Triton's statistics of models, summed over the replicas that answer."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import nullcontext
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
LATEST: Final = "last_inference"  # a time, of which the latest counts
ITEM_KEYS: Final = ("batch_size", "type", "id")  # tell the items of a list apart


class FleetStatistics:
    def __init__(self, pool: ReplicaPool) -> None:
        self._pool = pool
        # Of reads of all models, whose documents are large.
        self._reading = asyncio.Lock()

    async def read(self, target: RequestTarget) -> bytes:
        """Return the sums of a model's versions or, without a model, of all, as Triton does over HTTP.

        Raises Triton's error if no replica knows the model, or the failure of a replica if none answers.
        """
        replicas = [each for each in self._pool.replicas.values() if self._pool.is_reachable(each)]
        if not replicas:
            raise NoReplica
        # A replica that hangs delays no read of another model.
        async with nullcontext() if target.model else self._reading:
            outcomes = await run_together(self._try_to_read(each, target) for each in replicas)
            failures = [outcome for outcome in outcomes if isinstance(outcome, GatewayError)]
            if len(failures) == len(replicas):
                raise self._choose_failure(failures, target)
            answers = [outcome for outcome in outcomes if not isinstance(outcome, GatewayError)]
            return await asyncio.to_thread(sum_statistics, answers)

    async def read_replica(self, name: str, target: RequestTarget) -> bytes:
        """Return the answer of one replica. Raises `UnknownReplica`, or as `read`."""
        return await self._read(self._pool.get_replica(name), target)

    async def _try_to_read(self, replica: Replica, target: RequestTarget) -> bytes | GatewayError:
        try:
            return await self._read(replica, target)
        except UpstreamResponseTooLarge:  # every sum would lack it
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


def sum_statistics(answers: Collection[bytes]) -> bytes:
    """Return the sums of the versions in the answers of replicas."""
    sums: dict[tuple[str, str], Statistics] = {}
    for body in answers:
        for statistics in parse_statistics(body):
            key = (statistics["name"], statistics["version"])
            sums[key] = add_statistics(sums.get(key, {}), statistics)
    return orjson.dumps({"model_stats": list(sums.values())})


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
