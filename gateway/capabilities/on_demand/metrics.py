"""The metrics of loads on demand, and of the memory that models hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.capabilities.on_demand.held_models import HeldModels
from gateway.fleet.pool import ReplicaPool
from gateway.telemetry.metrics import MetricFactory

MEBIBYTE: Final = 1 << 20
EVICTION_REASONS: Final = ("room", "idle")


class OnDemandMetrics:
    def __init__(self, create: MetricFactory) -> None:
        self.evictions = create.counter(
            "gateway_on_demand_evictions_total",
            f"Unloads of on-demand models, by reason: {', '.join(EVICTION_REASONS)}.",
            ("reason",),
        )
        self.demand = create.level(
            "gateway_demand",
            "Inferences that run or wait, by which KEDA scales Tritons, also from zero.",
        )
        self.held_requests = create.level(
            "gateway_requests_held",
            "Requests that wait for a replica, or for the load of their model.",
        )
        # A series that exists from the start makes its first event visible to increase().
        for reason in EVICTION_REASONS:
            self.evictions.labels(reason)


class OnDemandCollector(Collector):
    """Metrics of the memory that models hold, by their configs; none without on-demand models."""

    def __init__(self, pool: ReplicaPool, held: HeldModels | None) -> None:
        self._pool = pool
        self._held = held

    def collect(self) -> Iterator[GaugeMetricFamily]:
        memory = GaugeMetricFamily(
            "gateway_replica_model_memory_bytes",
            "Memory of the models on the replica, by gateway.memory_mb in their configs.",
            labels=["replica"],
        )
        if self._held is not None:
            for load in self._held.describe(list(self._pool.replicas.values())):
                memory_mb = sum([model.memory_mb for model in load.models])
                memory.add_metric([load.name], memory_mb * MEBIBYTE)
        yield memory
