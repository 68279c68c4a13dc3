"""Prometheus collectors for the metrics of the fleet and of the state store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.config.files import watched_files
from gateway.fleet.health import HealthState
from gateway.fleet.index import STATE_RANKS
from gateway.fleet.pool import ReplicaPool
from gateway.repository.repository import Repository
from gateway.repository.state.store import StateStore

replica_gauge = partial(GaugeMetricFamily, labels=["replica"])
state_gauge = partial(GaugeMetricFamily, labels=["replica", "state"])
model_gauge = partial(GaugeMetricFamily, labels=["model"])


class FleetCollector(Collector):
    """Metrics of the replicas and models, as this process sees them at the time of a scrape."""

    def __init__(self, pool: ReplicaPool, repository: Repository) -> None:
        self._pool = pool
        self._repository = repository

    def collect(self) -> Iterator[GaugeMetricFamily]:
        replicas = list(self._pool.replicas.values())
        state = state_gauge(
            "gateway_replica_state", "1 for the current state of the replica, 0 for the others."
        )
        outstanding = replica_gauge(
            "gateway_upstream_outstanding", "Requests sent to the replica and not yet answered."
        )
        models = state_gauge("gateway_replica_models", "Number of models on the replica, by state.")
        cordoned = replica_gauge(
            "gateway_replica_cordoned",
            "1 if the replica gets no new requests, because of a cordon.",
        )
        failing = replica_gauge(
            "gateway_replica_failing_models",
            "Number of models whose requests fail on the replica, and not on the others.",
        )
        ready: Counter[str] = Counter()
        versions: dict[str, set[frozenset[str]]] = {}
        for replica in replicas:
            address = str(replica.address)
            current = self._pool.replica_state(replica)
            for value in HealthState:
                state.add_metric([address, value.name.lower()], float(value is current))
            outstanding.add_metric([address], replica.outstanding)
            index = self._pool.known_index(replica)
            states = index.state_counts
            for name in STATE_RANKS.keys() | states.keys():
                models.add_metric([address, name], states[name])
            cordoned.add_metric([address], float(replica.name in self._pool.cordoned))
            failing.add_metric([address], len(self._pool.failures.list_models(replica.name)))
            ready.update(dict.fromkeys(replica.index.models, 0))
            if self._pool.accepts_requests(replica):
                ready.update(replica.index.ready_models)
                for name, numbers in replica.index.ready_versions_by_model.items():
                    versions.setdefault(name, set()).add(numbers)
        yield from (state, outstanding, models, cordoned, failing)
        yield from self._collect_models(ready, versions)

    def _collect_models(
        self, ready: Counter[str], versions: Mapping[str, set[frozenset[str]]]
    ) -> Iterator[GaugeMetricFamily]:
        count = model_gauge(
            "gateway_model_ready_replicas", "Number of replicas on which the model is ready."
        )
        missing = model_gauge(
            "gateway_model_missing",
            "1 while the declared model is ready on fewer than GATEWAY_READY_QUORUM replicas.",
        )
        skew = model_gauge(
            "gateway_model_version_skew", "1 while replicas serve different versions of the model."
        )
        outdated = model_gauge(
            "gateway_model_behind_replicas",
            "Number of replicas that have not confirmed the last load of the model.",
        )
        for name in sorted(ready.keys() | self._repository.state.declared_models.keys()):
            count.add_metric([name], ready[name])
            skew.add_metric([name], len(versions.get(name, ())) > 1)
            outdated.add_metric([name], len(self._repository.outdated_replicas(name)))
        missing_models = self._repository.readiness.find_missing_models()
        for name in sorted(self._repository.state.declared_models):
            missing.add_metric([name], name in missing_models)
        yield from (count, missing, skew, outdated)


class StateCollector(Collector):
    """Metrics of the state store and of the configuration files."""

    def __init__(self, store: StateStore) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "gateway_state_up", "1 if the state store (GATEWAY_STATE) can be read and written."
        )
        state.add_metric([], float(self._store.is_available))
        valid = GaugeMetricFamily(
            "gateway_file_valid",
            "1 if the file (keys, models, certificate) is valid, 0 while it is rejected and the last valid "
            "one is used.",
            labels=["file"],
        )
        for label, file in sorted(watched_files.items()):
            valid.add_metric([label], float(file.is_valid))
        losses = CounterMetricFamily(
            "gateway_state_losses",
            "How often the state had been lost, and this process wrote the last known one again.",
            value=self._store.loss_count,
        )
        unreadable = CounterMetricFamily(
            "gateway_state_unreadable",
            "Documents in the state that this process could not read, and went on without.",
            labels=["kind"],
        )
        for kind, count in self._store.unreadable_counts.items():
            unreadable.add_metric([kind], count)
        yield from (state, valid, losses, unreadable)
