"""The models that replicas hold, with what decides on their eviction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from gateway.fleet.model_facts import ModelFactsCache
from gateway.fleet.on_demand_models import ModelUsage, OnDemandModels
from gateway.fleet.on_demand_plan import Eviction, LoadedModel, ReplicaLoad
from gateway.fleet.reconciler import Reconciler
from gateway.fleet.replica import Replica
from gateway.fleet.shared_state import SharedState
from gateway.state.loads import is_in_progress


@dataclass(eq=False, repr=False)
class HeldModels:
    """Describes replicas for one decision: each model is described once for all of them."""

    _state: SharedState
    _reconciler: Reconciler
    _models: OnDemandModels
    _usage: ModelUsage
    _facts: ModelFactsCache
    awaited: set[str] = field(default_factory=set)  # models that requests wait for
    starting: dict[str, set[str]] = field(default_factory=dict)  # replica → own loads in progress

    def describe(self, replicas: Iterable[Replica]) -> list[ReplicaLoad]:
        """Return what each replica holds, what is being loaded, and what must be loaded there."""
        merged = self._state.merge_models()
        desired = {name for name, model in merged.items() if model.is_loaded}
        ensemble_parts = self._find_ensemble_parts()
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
                    model = known[name] = self._describe_model(name, is_part=name in ensemble_parts)
                if name in changing and model.eviction is Eviction.FREE:
                    model = replace(model, eviction=Eviction.BUSY)
                models.append(model)
            loads.append(ReplicaLoad(replica.name, tuple(models), replica.outstanding))
        return loads

    def _find_started_loads(self, replica: Replica) -> set[str]:
        loads = self._state.loads.get(replica.name, {})
        started = {name for name, load in loads.items() if is_in_progress(load)}
        return started | self.starting.get(replica.name, set())

    def _find_ensemble_parts(self) -> set[str]:
        """Return the parts of on-demand ensembles, which may be evicted as well."""
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
            self._check_eviction(model, is_part=is_part),
            self._facts.find_parts(model),
        )

    def _check_eviction(self, model: str, *, is_part: bool) -> Eviction:
        is_kept = model in self._state.declared_models or model in self._state.desired_models
        if is_kept or not (is_part or self._models.is_on_demand(model)):
            return Eviction.NEVER
        is_busy = (
            model in self.awaited
            or self._reconciler.is_locked(model)
            or not self._facts.is_current(model)  # it may be an ensemble
            or self._usage.count_requests(model) > 0
        )
        return Eviction.BUSY if is_busy else Eviction.FREE
