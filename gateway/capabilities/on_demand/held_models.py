"""The models that replicas hold, with what decides on their eviction: rules, sizes, parts and last uses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from math import inf
from time import perf_counter
from typing import Any, Final

from gateway.capabilities.on_demand.settings import OnDemandSettings
from gateway.capabilities.on_demand.usage import ModelUsage
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.replica import Replica
from gateway.repository.model_facts import ModelFacts
from gateway.repository.placement import Eviction, LoadedModel, ReplicaLoad
from gateway.repository.plan import find_all_steps
from gateway.repository.repository import Repository

# A model is not evicted for this time after it was loaded or used: a caller that asks for many models must
# not have those of others reloaded all the time. Gateways report their uses in a quarter of it.
MIN_AGE_S: Final = 2.0


class HeldModels:
    """Describes replicas for one decision: each model is described once for all of them."""

    def __init__(
        self,
        pool: ReplicaPool,
        repository: Repository,
        *,
        usage: ModelUsage,
        settings: OnDemandSettings,
    ) -> None:
        self._pool = pool
        self._state = repository.state
        self._reconciler = repository.reconciler
        self._usage = usage
        self._patterns = settings.on_demand_models
        self._facts = repository.facts
        self._current_facts: set[str] = set()
        self._ready_since: dict[str, float] = {}

    # Rules

    @property
    def is_enabled(self) -> bool:
        return bool(self._patterns or self._state.capability_models)

    def is_on_demand(self, model: str) -> bool:
        """Return whether requests load the model. The models file and the API take precedence."""
        return not self._is_kept(model) and self.matches(model)

    def _is_kept(self, model: str) -> bool:
        return model in self._state.declared_models or model in self._state.desired_models

    def matches(self, model: str) -> bool:
        return model in self._state.capability_models or any(
            fnmatchcase(model, pattern) for pattern in self._patterns
        )

    def get_load_parameters(self, model: str) -> dict[str, Any]:
        entry = self._state.capability_models.get(model)
        return {} if entry is None else entry.load_parameters

    # Facts

    def record_ready(self, model: str) -> None:
        """Note the end of a load: until an update, the model would seem to be ready since that update."""
        self._ready_since.setdefault(model, perf_counter())

    async def update(self, max_age_s: float = inf) -> None:
        """Read the facts of ready models that are not known, or older, and when they became ready."""
        now = perf_counter()
        ready_since = self._ready_since
        self._ready_since = {
            model: ready_since.get(model, now) for model in self._pool.ready_models
        }
        await self._facts.read(max_age_s)

    def list_memory_mb(self, model: str) -> dict[str, int]:
        """Return the memory of a model and of the parts that it brings."""
        return {name: self._get_memory_mb(name) for name in (model, *self._find_parts(model))}

    def _get_memory_mb(self, model: str) -> int:
        return self._facts.facts.get(model, ModelFacts()).memory_mb

    def _find_parts(self, model: str) -> frozenset[str]:
        return find_all_steps((model,), self._facts.steps) - {model}

    # Replicas

    def describe(self, replicas: Iterable[Replica]) -> list[ReplicaLoad]:
        """Return the models that each replica holds, is loading, or must load."""
        merged = self._state.merge_models()
        desired = {name for name, model in merged.items() if model.is_loaded}
        ensemble_parts = self._find_ensemble_parts()
        self._current_facts = self._facts.list_current()
        known: dict[str, LoadedModel] = {}
        described = []
        for replica in replicas:
            index = replica.index
            changing = index.changing_models
            parts = {part for name in changing for part in self._find_parts(name)}
            wanted = desired & index.models.keys()
            models = []
            for name in sorted(index.ready_models | changing | wanted | parts):
                if name not in known:
                    known[name] = self._describe_model(name, is_part=name in ensemble_parts)
                model = known[name]
                if name in changing and model.eviction is Eviction.NOW:
                    model = replace(model, eviction=Eviction.LATER)
                models.append(model)
            described.append(ReplicaLoad(replica.name, tuple(models), replica.outstanding))
        return described

    def _find_ensemble_parts(self) -> set[str]:
        return {
            part
            for name, steps in self._facts.steps.items()
            if steps and self.is_on_demand(name)
            for part in self._find_parts(name)
        }

    def _describe_model(self, model: str, *, is_part: bool) -> LoadedModel:
        # Something else than this gateway may have loaded it; nobody could use it before.
        ready_since = self._ready_since.get(model, -inf)
        last_used = max(self._usage.get_last_used(model), ready_since)
        return LoadedModel(
            model,
            self._get_memory_mb(model),
            last_used,
            eviction=self._find_eviction(model, last_used, is_part=is_part),
            parts=self._find_parts(model),
        )

    def _find_eviction(self, model: str, last_used: float, *, is_part: bool) -> Eviction:
        if self._is_kept(model) or not (is_part or self.matches(model)):
            return Eviction.NEVER
        is_in_use = (
            self._reconciler.is_locked(model)
            or model not in self._current_facts  # it may be an ensemble
            or self._usage.count_requests(model) > 0
            or perf_counter() - last_used < MIN_AGE_S
        )
        return Eviction.LATER if is_in_use else Eviction.NOW
