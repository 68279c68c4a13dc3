"""Readiness: usable replicas, and declared models that are ready on enough of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from math import inf
from time import monotonic
from typing import Any

from gateway.fleet.health import HealthState
from gateway.fleet.index import Index
from gateway.fleet.models_file import DeclaredModel
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.shared_state import SharedState


class ReadinessMonitor:
    """The readiness of this gateway. A model is required once it was ready, or from the start."""

    def __init__(
        self, pool: ReplicaPool, state: SharedState, quorum: int, hold_s: float = 0.0
    ) -> None:
        self._pool = pool
        self._state = state
        self._quorum = quorum
        self._hold_s = hold_s
        self._asleep_at = -inf
        self._required_models = dict(state.declared_models)

    def check(self, *, is_draining: bool) -> Readiness:
        statuses, declared = self._list_statuses(), self._state.declared_models
        required, quorum = self._required_models, self._quorum
        readiness = check_readiness(statuses, declared, required, quorum, is_draining=is_draining)
        if is_draining or not self._update_sleep():
            return readiness
        sleep = {} if self._pool.has_live_replica else {"asleep": True}
        return Readiness(True, {**readiness.document, "ready": True, **sleep})

    def _update_sleep(self) -> bool:
        """Return whether requests wait: there is no replica, or the first one is loading its models."""
        now = monotonic()
        if not self._pool.has_live_replica:
            self._asleep_at = now
        return now - self._asleep_at < self._hold_s

    def update_required_models(self) -> None:
        self._update_sleep()
        declared = self._state.declared_models
        if self._required_models != declared:
            self._required_models = update_required_models(
                self._required_models, declared, self._list_statuses(), self._quorum
            )

    def _list_statuses(self) -> list[ReplicaStatus]:
        return [
            ReplicaStatus(
                replica.name,
                self._pool.replica_state(replica),
                replica.index,
                replica.reason,
                is_cordoned=replica.name in self._pool.cordoned,
            )
            for replica in self._pool.replicas.values()
        ]


@dataclass(frozen=True)
class ReplicaStatus:
    """The facts about a replica that decide on readiness."""

    address: str
    state: HealthState
    index: Index
    reason: str = ""
    is_cordoned: bool = False

    @property
    def is_usable(self) -> bool:
        return self.state <= HealthState.EJECTED and not self.is_cordoned


@dataclass(frozen=True)
class Readiness:
    """The readiness of the gateway, and the document of `GET /readyz`."""

    is_ready: bool
    document: Mapping[str, Any]


def check_readiness(
    replicas: Collection[ReplicaStatus],
    declared: Mapping[str, DeclaredModel],
    required: Mapping[str, DeclaredModel],
    quorum: int,
    *,
    is_draining: bool,
) -> Readiness:
    """Return whether requests can be served.

    At least one replica must be usable, and every required model ready on `quorum` replicas, or on all if
    there are fewer. Declared models that are not required are `pending` until they are ready.
    """
    missing = find_unready_models(replicas, required, quorum)
    optional = {name: model for name, model in declared.items() if required.get(name) != model}
    pending = find_unready_models(replicas, optional, quorum)
    alive = any(replica.is_usable for replica in replicas)
    ready = alive and not missing and not is_draining
    document: dict[str, Any] = {"ready": ready}
    if is_draining:
        document["draining"] = True
    document["replicas"] = {replica.address: describe_state(replica) for replica in replicas}
    if missing:
        document["missing"] = missing
    if pending:
        document["pending"] = pending
    return Readiness(ready, document)


def find_unready_models(
    replicas: Collection[ReplicaStatus], models: Mapping[str, DeclaredModel], quorum: int
) -> dict[str, dict[str, str]]:
    """Return model → replica → reason for the models that are ready on fewer than `quorum` replicas."""
    # A cordon must not make the gateway unready: the quorum is one of the others.
    required_count = max(min(quorum, sum(not replica.is_cordoned for replica in replicas)), 1)
    unready = {}
    usable = [replica for replica in replicas if replica.is_usable]
    for name, model in models.items():
        found = (replica for replica in usable if has_model(replica.index, model))
        serving = list(islice(found, required_count))  # to look for more would cost their number
        if len(serving) < required_count:
            unready[name] = {
                replica.address: explain_unready(replica, model)
                for replica in replicas
                if replica not in serving
            }
    return unready


def update_required_models(
    required: Mapping[str, DeclaredModel],
    declared: Mapping[str, DeclaredModel],
    replicas: Collection[ReplicaStatus],
    quorum: int,
) -> dict[str, DeclaredModel]:
    """Return the models that readiness requires from now on: each declared model as it was last ready.

    Models or versions that are added to the models file must not make a running gateway unready.
    """
    unready = find_unready_models(replicas, declared, quorum)
    ready = {name: model for name, model in declared.items() if name not in unready}
    return {name: model for name, model in required.items() if name in declared} | ready


def has_model(index: Index, model: DeclaredModel) -> bool:
    return all(index.is_ready(model.name, version) for version in model.versions or ("",))


def describe_state(replica: ReplicaStatus) -> str:
    if replica.is_cordoned and replica.state <= HealthState.EJECTED:
        return "cordoned"
    state = replica.state.name.lower()
    if replica.state is HealthState.UP:
        return "ready"
    return f"{state}: {replica.reason}" if replica.reason else state


def explain_unready(replica: ReplicaStatus, model: DeclaredModel) -> str:
    if not replica.is_usable:
        return describe_state(replica)
    return str(replica.index.model_state(model.name))
