"""The limit of concurrent inferences of a model, found from what Triton says about its own queue.

Triton's dynamic batcher makes the usual signal, round-trip times that rise, useless: they rise with the load
long before a model is busy. The ratio of the time that requests wait in Triton to the time that they are
computed does not: near 1.5, the next batch is always there, and what waits longer waits in the gateway, where
priorities can reorder it; without batches 0.5 is enough, where one waits for every two that are computed. A
limit grows by additions and shrinks by a factor, as a window of TCP does.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import orjson

from gateway.capacity.admission import AdmissionQueue
from gateway.errors import GatewayError
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.signatures import SignatureCache
from gateway.fleet.statistics import FleetStatistics
from gateway.tasks import repeat
from gateway.tensors.signature import Signature
from gateway.triton.request_target import RequestTarget

INTERVAL_S: Final = 1.0
STATISTICS_TIMEOUT_S: Final = 1.0
MAX_MODELS_PER_INTERVAL: Final = 32
BATCHING_RATIO: Final = 1.5
SINGLE_RATIO: Final = 0.5
TOLERANCE: Final = 1.2
MIN_SAMPLES: Final = 5
GROWTH: Final = 0.1
REDUCTION: Final = 0.85
MIN_LIMIT: Final = 2
COMPUTE_PHASES: Final = ("compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True)
class QueueTimes:
    """Triton's counts of a model: inferences, and the nanoseconds that they waited and were computed."""

    count: int = 0
    waited_ns: int = 0
    computed_ns: int = 0

    def __sub__(self, other: QueueTimes) -> QueueTimes:
        return QueueTimes(
            self.count - other.count,
            self.waited_ns - other.waited_ns,
            self.computed_ns - other.computed_ns,
        )

    @property
    def ratio(self) -> float:
        return self.waited_ns / max(self.computed_ns, 1)


def choose_limit(
    limit: int,
    min_limit: int,
    times: QueueTimes,
    *,
    is_reached: bool,
    wanted_ratio: float = BATCHING_RATIO,
) -> int:
    """Return the next limit after an interval with these times.

    A limit that the requests did not reach does not grow: nothing shows that more would be of use.
    """
    if times.count < MIN_SAMPLES:
        return limit
    if times.ratio > wanted_ratio * TOLERANCE:
        return max(int(limit * REDUCTION), min_limit)
    if times.ratio < wanted_ratio / TOLERANCE and is_reached:
        return limit + max(int(limit * GROWTH), 1)
    return limit


def choose_first_limit(signature: Signature) -> int:
    """Return two batches for each instance, or without batching three inferences for every two instances."""
    batch_size, instances = signature.max_batch_size, signature.instances
    limit = 2 * batch_size * instances if batch_size > 1 else math.ceil(1.5 * instances)
    return max(limit, MIN_LIMIT)


def find_stages(signatures: SignatureCache, model: str) -> Mapping[str, Signature]:
    """Return the signatures of the models in whose queues requests wait: the steps of an ensemble, or itself.

    There are none until the configs were read, which this starts.
    """
    signature = signatures.find_or_start_reading(model)
    names = (signature.steps or {model}) if signature is not None else ()
    stages = {name: signatures.find_or_start_reading(name) for name in names}
    found = {name: each for name, each in stages.items() if each is not None}
    return found if len(found) == len(stages) else {}


def count_replicas(pool: ReplicaPool) -> int:
    return max(sum(map(pool.accepts_requests, pool.replicas.values())), 1)


def parse_queue_times(document: bytes) -> QueueTimes:
    """Return the sums over the versions of a model, from an answer of the statistics extension."""
    versions = [each["inference_stats"] for each in orjson.loads(document)["model_stats"]]

    def add_up(phase: str, field: str) -> int:
        return sum(version.get(phase, {}).get(field, 0) for version in versions)

    return QueueTimes(
        add_up("queue", "count"),
        add_up("queue", "ns"),
        sum(add_up(phase, "ns") for phase in COMPUTE_PHASES),
    )


class ModelLimits:
    """Adjusts the limits of the models that fill theirs."""

    def __init__(
        self,
        admission: AdmissionQueue,
        pool: ReplicaPool,
        statistics: FleetStatistics,
        signatures: SignatureCache,
        default_limit: int,
    ) -> None:
        """The default is the limit of names that are no models of Triton."""
        self._admission = admission
        self._pool = pool
        self._statistics = statistics
        self._signatures = signatures
        self._default_limit = default_limit
        # By the model, and the model or the step of the ensemble that counted them.
        self._times: dict[str, Mapping[str, QueueTimes]] = {}

    async def run(self) -> None:
        async def adjust() -> None:
            await asyncio.sleep(INTERVAL_S)
            await asyncio.gather(*map(self._adjust, self._list_crowded()))

        await repeat("model_limits", adjust)

    def _list_crowded(self) -> list[str]:
        admission = self._admission
        counts = admission.count_all_requests()
        for model in [each for each in admission.limits if each not in counts]:
            if not self._pool.is_listed(model):
                admission.forget_limit(model)
        crowded = [
            model
            for model, count in counts.items()
            if admission.is_crowded(model) or (count > MIN_LIMIT and model not in admission.limits)
        ]
        crowded.sort(key=lambda model: counts[model], reverse=True)
        del crowded[MAX_MODELS_PER_INTERVAL:]
        # Times are compared only with those of the interval before.
        for model in self._times.keys() - set(crowded):
            del self._times[model]
        return crowded

    async def _adjust(self, model: str) -> None:
        admission = self._admission
        if not self._pool.is_listed(model):
            # No metric: the name may be invented.
            admission.limits[model] = self._default_limit
            return
        signature = self._signatures.find_or_start_reading(model)
        stages = find_stages(self._signatures, model)
        if signature is None or not stages:
            return
        replicas = count_replicas(self._pool)
        limit = admission.limits.get(model)
        if limit is None:
            limit = max(map(choose_first_limit, stages.values())) * replicas
            if signature.max_batch_size:
                admission.batching_models.add(model)
            admission.set_limit(model, limit)
        is_reached = model in admission.queue.models
        before = self._times.get(model)
        try:
            counted = await asyncio.gather(*map(self._read_times, stages))
        except GatewayError:
            return
        times = self._times[model] = dict(zip(stages, counted, strict=True))
        if before is not None and before.keys() == times.keys():
            changes = {stage: times[stage] - before[stage] for stage in stages}
            # The step with the longest queue limits the ensemble.
            slowest = max(changes, key=lambda stage: changes[stage].ratio)
            batch_size = stages[slowest].max_batch_size
            limit = choose_limit(
                limit,
                max(batch_size, MIN_LIMIT) * replicas,
                changes[slowest],
                is_reached=is_reached,
                wanted_ratio=BATCHING_RATIO if batch_size > 1 else SINGLE_RATIO,
            )
            admission.set_limit(model, limit)

    async def _read_times(self, model: str) -> QueueTimes:
        target = RequestTarget(model, timeout_s=STATISTICS_TIMEOUT_S)
        return parse_queue_times(await self._statistics.read(target))
