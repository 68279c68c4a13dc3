"""Readiness: usable replicas, and declared models that are ready on enough of them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from math import inf
from time import monotonic
from typing import Any, Final

from gateway.fleet.health import HealthState
from gateway.fleet.index import Index
from gateway.fleet.pool import ReplicaPool
from gateway.messages import join_names
from gateway.repository.models_file import DeclaredModel
from gateway.repository.shared_state import SharedState

log = logging.getLogger(__name__)

MAX_LOGGED_MODELS: Final = 5
MAX_LOGGED_REPLICAS: Final = 3


class ReadinessMonitor:
    def __init__(self, pool: ReplicaPool, state: SharedState, quorum: int) -> None:
        self._pool = pool
        self._state = state
        self._quorum = quorum
        self.hold_s = 0.0  # how long requests wait for a replica and its models
        self._asleep_at = -inf
        self._was_ready = False
        self._unready_since: float | None = None

    def evaluate(self, *, is_draining: bool) -> Readiness:
        readiness = evaluate_readiness(
            self._list_statuses(),
            self._state.declared_models,
            quorum=self._quorum,
            was_ready=self._was_ready,
            is_draining=is_draining,
        )
        self._was_ready = self._was_ready or readiness.is_ready
        if is_draining or not self._update_sleep():
            return readiness
        sleep = {} if self._pool.has_live_replica else {"asleep": True}
        return Readiness(True, {**readiness.document, "ready": True, **sleep})

    def _update_sleep(self) -> bool:
        """Return whether requests wait: there is no replica, or the first one is loading its models."""
        now = monotonic()
        if not self._pool.has_live_replica:
            self._asleep_at = now
        return now - self._asleep_at < self.hold_s

    def update(self) -> None:
        """Log a change of the readiness.

        The reconciler calls it after every change of the models, or of the models file, and every second.
        """
        readiness = self.evaluate(is_draining=False)
        if not readiness.is_ready and self._unready_since is None:
            self._unready_since = monotonic()
            names = self._pool.describe_lookups()
            log.warning("not ready: %s", explain_unreadiness(readiness.document, names))
        elif readiness.is_ready and self._unready_since is not None:
            log.info("ready after %.1f s", monotonic() - self._unready_since)
            self._unready_since = None

    def find_missing_models(self) -> Collection[str]:
        declared = self._state.declared_models
        return find_unready_models(self._list_statuses(), declared, self._quorum).keys()

    def _list_statuses(self) -> list[ReplicaStatus]:
        return [
            ReplicaStatus(
                replica.name,
                self._pool.replica_state(replica),
                replica.index,
                reason=replica.reason,
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


def evaluate_readiness(
    replicas: Collection[ReplicaStatus],
    declared: Mapping[str, DeclaredModel],
    quorum: int,
    *,
    was_ready: bool,
    is_draining: bool,
) -> Readiness:
    """Return whether requests can be served.

    At least one replica must be usable, and every declared model ready on `quorum` replicas, or on all if
    there are fewer; a gateway that `was_ready` needs less.
    """
    missing = find_unready_models(replicas, declared, quorum)
    usable = [replica for replica in replicas if replica.is_usable]
    has_enough = not missing or (was_ready and is_tolerable(missing, declared, usable))
    ready = bool(usable) and has_enough and not is_draining
    document: dict[str, Any] = {"ready": ready}
    if is_draining:
        document["draining"] = True
    document["replicas"] = {replica.address: describe_state(replica) for replica in replicas}
    if missing:
        document["missing"] = missing
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
        serving = list(islice(found, required_count))  # no more than needed: large fleets cost time
        if len(serving) < required_count:
            unready[name] = {
                replica.address: explain_unready(replica, model)
                for replica in replicas
                if replica not in serving
            }
    return unready


def is_tolerable(
    missing: Collection[str],
    declared: Mapping[str, DeclaredModel],
    usable: Collection[ReplicaStatus],
) -> bool:
    """Return whether a gateway that was ready stays so without the missing models.

    All gateways see the same replicas, so that a model that breaks would take all of them out of service.
    """
    if any(declared[name].is_always_required for name in missing):
        return False
    return any(replica.index.is_ready(name) for replica in usable for name in declared)


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


def explain_unreadiness(document: Mapping[str, Any], names: Collection[str]) -> str:
    """Return what the gateway waits for, from the document of `/readyz`, and the names to look up."""
    states: Mapping[str, str] = document["replicas"]
    if not states:
        return f"no Triton has been found at {join_names(names)}"
    if "missing" not in document:
        listed = (f"{address} is {state}" for address, state in states.items())
        return f"no Triton can be used: {join_names(listed, MAX_LOGGED_REPLICAS)}"
    models = []
    for name, reasons in document["missing"].items():
        listed = (f"{reason} on {address}" for address, reason in reasons.items())
        count = len(states) - len(reasons)
        why = join_names(listed, MAX_LOGGED_REPLICAS)
        models.append(f"model {name} is on {count} of {len(states)} replicas: {why}")
    shown = models[:MAX_LOGGED_MODELS]
    if hidden := len(models) - len(shown):
        shown.append(f"{hidden} more models are missing")
    return "; ".join(shown)
