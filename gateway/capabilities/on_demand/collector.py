"""The Prometheus collector of the memory that models hold."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.capabilities.on_demand.loader import OnDemandLoader
from gateway.fleet.pool import ReplicaPool

MEBIBYTE = 1 << 20


class OnDemandCollector(Collector):
    """Metrics of the memory that models hold, by their configs; none without on-demand models."""

    def __init__(self, pool: ReplicaPool, loader: OnDemandLoader | None) -> None:
        self._pool = pool
        self._loader = loader

    def collect(self) -> Iterator[GaugeMetricFamily]:
        memory = GaugeMetricFamily(
            "gateway_replica_model_memory_bytes",
            "Memory of the models on the replica, by gateway.memory_mb or GATEWAY_DEFAULT_MODEL_MEMORY_MB.",
            labels=["replica"],
        )
        if self._loader is not None:
            for load in self._loader.held.describe(list(self._pool.replicas.values())):
                memory_mb = sum([model.memory_mb for model in load.models])
                memory.add_metric([load.name], memory_mb * MEBIBYTE)
        yield memory
