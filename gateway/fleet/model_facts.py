"""The facts of the models' configs that loading on demand needs: their sizes and parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, Final

from gateway.fleet.on_demand_plan import ModelFacts, WantedModel, find_all_parts, parse_model_facts
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.signatures import SignatureCache

# A model that something else than this gateway loaded again in place is still ready, with other facts.
MAX_FACTS_AGE_S: Final = 30.0


@dataclass(eq=False, repr=False)
class ModelFactsCache:
    """The facts of all models that were ready once. Triton returns the configs of ready models only."""

    _pool: ReplicaPool
    _signatures: SignatureCache
    _default_memory_mb: int
    facts: dict[str, ModelFacts] = field(default_factory=dict)
    _read_at: dict[str, float] = field(default_factory=dict)  # of models with current facts
    _ready_since: dict[str, float] = field(default_factory=dict)
    _changed_at: dict[str, float] = field(default_factory=dict)

    async def update(self, *, checks_ensembles: bool = False) -> None:
        """Read the configs that are not known, or too old. Those that cannot be read stay unknown.

        Before models are unloaded, `checks_ensembles` reads the parts of all ensembles again.
        """
        now, ready = perf_counter(), self._pool.ready_models
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
        known = None if facts is None else facts.memory_mb
        return self._default_memory_mb if known is None else known

    def find_parts(self, model: str) -> frozenset[str]:
        return find_all_parts(model, self.facts)

    def build_wanted_model(self, model: str) -> WantedModel:
        parts = {part: self.get_memory_mb(part) for part in self.find_parts(model)}
        return WantedModel(model, self.get_memory_mb(model), parts)
