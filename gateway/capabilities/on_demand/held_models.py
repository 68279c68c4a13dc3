"""The models that replicas hold, with the facts that decide on their eviction: sizes, parts and last uses."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, Final

from gateway.capabilities.on_demand.models import ModelUsage, OnDemandModels
from gateway.capabilities.on_demand.plan import (
    EVICTABLE,
    Eviction,
    LoadedModel,
    ModelFacts,
    ReplicaLoad,
    find_all_parts,
    parse_model_facts,
    protect_model,
)
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.replica import Replica
from gateway.fleet.signatures import SignatureCache
from gateway.repository.reconciler import Reconciler
from gateway.repository.shared_state import SharedState
from gateway.repository.state.content import is_in_progress

# A model that something else than this gateway loaded again in place is still ready, with other facts.
MAX_FACTS_AGE_S: Final = 30.0
# The requests that waited for a load read the model's metadata and their bodies before they count as running.
FIRST_USE_S: Final = 1.0


class ModelFactsCache:
    """The facts of all models that were ready once. Triton returns the configs of ready models only."""

    def __init__(self, pool: ReplicaPool, signatures: SignatureCache) -> None:
        self._pool = pool
        self._signatures = signatures
        self.facts: dict[str, ModelFacts] = {}
        self._read_at: dict[str, float] = {}  # has only models with current facts
        self._ready_since: dict[str, float] = {}
        self._changed_at: dict[str, float] = {}

    async def update(self, *, checks_ensembles: bool = False) -> None:
        """Read the configs that are not known, or too old. Those that cannot be read stay unknown.

        Before models are unloaded, `checks_ensembles` reads the parts of all ensembles again.
        """
        now = perf_counter()
        ready = self._pool.ready_models
        self._ready_since = {model: self._ready_since.get(model, now) for model in ready}
        self._read_at = {model: at for model, at in self._read_at.items() if model in ready}
        oldest = now - MAX_FACTS_AGE_S
        outdated = {model for model in ready if self._read_at.get(model, -inf) < oldest}
        if checks_ensembles:
            outdated |= {model for model in ready & self.facts.keys() if self.facts[model].parts}
        if outdated:
            await self._signatures.read_configs(outdated, partial(self._store, now))

    def _store(self, read_at: float, model: str, config: Any) -> None:
        if self._changed_at.get(model, -inf) < read_at:  # otherwise this may be the previous config
            self.facts[model] = parse_model_facts(config)
            self._read_at[model] = read_at

    def invalidate(self, model: str) -> None:
        """Read the config again when the model is ready. Until then its last known facts apply."""
        self._changed_at[model] = perf_counter()
        self._read_at.pop(model, None)

    def is_current(self, model: str) -> bool:
        return model in self._read_at

    def get_ready_since(self, model: str) -> float:
        """Return when the model became ready, as far as this gateway knows; nobody could use it before."""
        return self._ready_since.get(model, -inf)

    def get_memory_mb(self, model: str) -> int:
        facts = self.facts.get(model)
        return 0 if facts is None else facts.memory_mb

    def find_parts(self, model: str) -> frozenset[str]:
        return find_all_parts(model, self.facts)

    def list_memory_mb(self, model: str) -> dict[str, int]:
        return {name: self.get_memory_mb(name) for name in (model, *self.find_parts(model))}


class HeldModels:
    """Describes replicas for one decision: each model is described once for all of them."""

    def __init__(
        self,
        state: SharedState,
        reconciler: Reconciler,
        models: OnDemandModels,
        *,
        usage: ModelUsage,
        facts: ModelFactsCache,
    ) -> None:
        self._state = state
        self._reconciler = reconciler
        self._models = models
        self._usage = usage
        self._facts = facts
        self.awaited: set[str] = set()  # models that requests wait for
        self.starting: dict[str, set[str]] = {}  # replica → own loads in progress
        self.loaded_at: dict[str, float] = {}  # the ends of own loads

    def describe(
        self, replicas: Iterable[Replica], callers: Set[str] | None = None
    ) -> list[ReplicaLoad]:
        """Return the models that each replica holds, is loading, or must load.

        Models that others than `callers` use are protected, if room is wanted for these.
        """
        merged = self._state.merge_models()
        desired = {name for name, model in merged.items() if model.is_loaded}
        ensemble_parts = self._find_ensemble_parts()
        waiting = self._usage.waiting_callers
        known: dict[str, LoadedModel] = {}
        loads = []
        for replica in replicas:
            index = replica.index
            started = self._find_started_loads(replica)
            parts = {part for name in started for part in self._facts.find_parts(name)}
            wanted = desired & index.models.keys()
            names = index.ready_models | index.changing_models | started | wanted | parts
            changing = index.changing_models | started
            models = []
            for name in sorted(names):
                model = known.get(name)
                if model is None:
                    model = self._describe_model(name, is_part=name in ensemble_parts)
                    if callers is not None:
                        model = protect_model(model, self._usage.find_users(name), callers, waiting)
                    known[name] = model
                if name in changing and model.eviction in EVICTABLE:
                    model = replace(model, eviction=Eviction.BUSY)
                models.append(model)
            loads.append(ReplicaLoad(replica.name, tuple(models), replica.outstanding))
        return loads

    def _find_started_loads(self, replica: Replica) -> set[str]:
        loads = self._state.loads.get(replica.name, {})
        started = {name for name, load in loads.items() if is_in_progress(load)}
        return started | self.starting.get(replica.name, set())

    def _find_ensemble_parts(self) -> set[str]:
        return {
            part
            for name, facts in self._facts.facts.items()
            if facts.parts and self._models.is_on_demand(name)
            for part in self._facts.find_parts(name)
        }

    def _describe_model(self, model: str, *, is_part: bool) -> LoadedModel:
        last_used = max(self._usage.get_last_used(model), self._facts.get_ready_since(model))
        return LoadedModel(
            model,
            self._facts.get_memory_mb(model),
            last_used,
            eviction=self._find_eviction(model, is_part=is_part),
            parts=self._facts.find_parts(model),
        )

    def _find_eviction(self, model: str, *, is_part: bool) -> Eviction:
        is_kept = model in self._state.declared_models or model in self._state.desired_models
        if is_kept or not (is_part or self._models.is_on_demand(model)):
            return Eviction.NEVER
        is_busy = (
            model in self.awaited
            or self._reconciler.is_locked(model)
            or not self._facts.is_current(model)  # it may be an ensemble
            or self._usage.count_requests(model) > 0
            or self._waits_for_first_use(model)
        )
        return Eviction.BUSY if is_busy else Eviction.FREE

    def _waits_for_first_use(self, model: str) -> bool:
        loaded_at = self.loaded_at.get(model, -inf)
        is_new = perf_counter() - loaded_at < FIRST_USE_S
        return is_new and self._usage.get_last_used(model) <= loaded_at
