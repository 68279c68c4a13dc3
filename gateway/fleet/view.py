"""The fleet as metrics: read when a page is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.fleet.health import State
from gateway.fleet.index import RANKS
from gateway.fleet.pool import Pool
from gateway.fleet.repository import Repository


class FleetView(Collector):
    """What this process knows of the replicas and models."""

    def __init__(self, pool: Pool, repository: Repository) -> None:
        self._pool = pool
        self._repository = repository

    def collect(self) -> Iterator[GaugeMetricFamily]:
        replicas = list(self._pool.replicas.values())
        state = GaugeMetricFamily(
            "gateway_replica_state",
            "1 for the state that a replica is in.",
            labels=["replica", "state"],
        )
        outstanding = GaugeMetricFamily(
            "gateway_upstream_outstanding",
            "Requests that a replica has not answered yet.",
            labels=["replica"],
        )
        models = GaugeMetricFamily(
            "gateway_replica_models", "Models of a replica by state.", labels=["replica", "state"]
        )
        ready: Counter[str] = Counter()
        for replica in replicas:
            address, found = str(replica.address), self._pool.state(replica)
            for each in State:
                state.add_metric([address, each.name.lower()], float(each is found))
            outstanding.add_metric([address], replica.outstanding)
            states = Counter(replica.index.state(name).state for name in replica.index.models)
            for name in RANKS.keys() | states.keys():
                models.add_metric([address, name], states[name])
            usable = found <= State.EJECTED
            for name in replica.index.models:
                ready[name] += usable and replica.index.ready(name)
        yield from (state, outstanding, models)
        yield from self._models(ready)

    def _models(self, ready: Counter[str]) -> Iterator[GaugeMetricFamily]:
        count = GaugeMetricFamily(
            "gateway_model_ready_replicas",
            "On how many replicas a model is ready.",
            labels=["model"],
        )
        declared = GaugeMetricFamily(
            "gateway_model_declared", "1 for every model of the models file.", labels=["model"]
        )
        for name in sorted(ready.keys() | self._repository.declared.keys()):
            count.add_metric([name], ready[name])
        for name in sorted(self._repository.declared):
            declared.add_metric([name], 1)
        yield from (count, declared)
