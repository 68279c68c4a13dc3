"""The facts that the configs of loaded models tell: the models that each one runs, and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, Final

from gateway.fleet.pool import ReplicaPool
from gateway.fleet.signatures import SignatureCache
from gateway.repository.shared_state import SharedState
from gateway.tensors.signature import find_ensemble_steps

# Something else than the gateways may load another config of a model that stays ready.
MAX_FACTS_AGE_S: Final = 30.0
STEPS_PARAMETER: Final = "gateway.steps"  # the models that a Python model calls
MEMORY_PARAMETER: Final = "gateway.memory_mb"


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a model, when they were read, and which of its loads had them."""

    steps: frozenset[str] = frozenset()
    memory_mb: int = 0
    generation: str = ""
    read_at: float = -inf


class FactsReader:
    """The last known facts of each model that was ready once, which are read when a decision needs them.

    Triton returns the config of a model only while it is ready.
    """

    def __init__(self, pool: ReplicaPool, signatures: SignatureCache, state: SharedState) -> None:
        self._pool = pool
        self._signatures = signatures
        self._state = state
        self.facts: dict[str, ModelFacts] = {}
        self.steps: dict[str, frozenset[str]] = {}
        self._changed_at: dict[str, float] = {}

    async def read(self, max_age_s: float = MAX_FACTS_AGE_S) -> None:
        """Read the facts that are not known of the present load, or older; some can stay unknown."""
        now = perf_counter()
        generations = self._list_generations()
        outdated = {
            name
            for name in self._pool.ready_models
            if not self._is_current(name, generations) or self.facts[name].read_at < now - max_age_s
        }
        if outdated:
            await self._signatures.read_configs(outdated, partial(self._store, generations, now))

    async def read_steps(self, max_age_s: float = MAX_FACTS_AGE_S) -> dict[str, frozenset[str]]:
        """Return the steps of each model whose present load has been ready, now or before."""
        await self.read(max_age_s)
        return {name: self.steps[name] for name in self.list_current()}

    def list_current(self) -> set[str]:
        generations = self._list_generations()
        return {name for name in self.facts if self._is_current(name, generations)}

    def _list_generations(self) -> dict[str, str]:
        merged = self._state.merge_models()
        return {name: desired.generation for name, desired in merged.items()}

    def _store(
        self, generations: Mapping[str, str], read_at: float, model: str, config: Any
    ) -> None:
        if self._changed_at.get(model, -inf) < read_at:  # otherwise this may be the previous config
            facts = parse_model_facts(config)
            generation = generations.get(model, "")
            self.facts[model] = replace(facts, generation=generation, read_at=read_at)
            self.steps[model] = facts.steps

    def _is_current(self, model: str, generations: Mapping[str, str]) -> bool:
        facts = self.facts.get(model)
        return (
            facts is not None
            and facts.generation == generations.get(model, "")
            and facts.read_at > self._changed_at.get(model, -inf)
        )

    def invalidate(self, model: str) -> None:
        """Read the config of a model again that was loaded or unloaded."""
        self._changed_at[model] = perf_counter()


def parse_model_facts(config: Any) -> ModelFacts:
    """Return the facts of Triton's config of a model; an invalid one says nothing.

    It runs the steps of an ensemble, and the models that `gateway.steps` names.
    """
    steps = find_ensemble_steps(config)
    try:
        parameters = config.get("parameters", {})
        named, memory = (
            str(parameters.get(name, {}).get("string_value", "")).strip()
            for name in (STEPS_PARAMETER, MEMORY_PARAMETER)
        )
    except (AttributeError, TypeError):
        return ModelFacts(steps)
    is_number = memory.isascii() and memory.isdecimal() and len(memory) < 10
    names = {name.strip() for name in named.split(",")}
    return ModelFacts(steps | (names - {""}), int(memory) if is_number else 0)
