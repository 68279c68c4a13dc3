"""The facts of the models' configs that loading on demand needs: their sizes and parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gateway.fleet.on_demand_plan import ModelFacts, WantedModel, find_all_parts, parse_model_facts
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.signatures import ModelService


@dataclass(eq=False, repr=False)
class ModelFactsCache:
    """The facts of all models that were ready once. Triton returns the configs of ready models only."""

    _pool: ReplicaPool
    _models: ModelService
    _default_memory_mb: int
    facts: dict[str, ModelFacts] = field(default_factory=dict)
    _current: set[str] = field(default_factory=set)  # of the models that are ready now

    async def update(self) -> None:
        """Read the configs that are not known. Those that cannot be read stay unknown."""
        await self._models.read_configs(self._pool.ready_models - self._current, self._store)

    def _store(self, model: str, config: Any) -> None:
        self.facts[model] = parse_model_facts(config)
        self._current.add(model)

    def invalidate(self, model: str) -> None:
        """Read the config again when the model is ready. Until then its last known facts apply."""
        self._current.discard(model)

    def is_current(self, model: str) -> bool:
        return model in self._current

    def get_memory_mb(self, model: str) -> int:
        facts = self.facts.get(model)
        known = None if facts is None else facts.memory_mb
        return self._default_memory_mb if known is None else known

    def find_parts(self, model: str) -> frozenset[str]:
        return find_all_parts(model, self.facts)

    def build_wanted_model(self, model: str) -> WantedModel:
        parts = {part: self.get_memory_mb(part) for part in self.find_parts(model)}
        return WantedModel(model, self.get_memory_mb(model), parts)
