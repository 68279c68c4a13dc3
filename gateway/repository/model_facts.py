"""The steps of the models that replicas have loaded, as their configs tell them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, Final

from gateway.fleet.pool import ReplicaPool
from gateway.fleet.signatures import SignatureCache
from gateway.repository.state.content import DesiredModel
from gateway.tensors.signature import find_ensemble_steps

# Something else than the gateways may load another config of a model that stays ready.
MAX_STEPS_AGE_S: Final = 30.0
STEPS_PARAMETER: Final = "gateway.steps"  # the models that a Python model calls


@dataclass(frozen=True)
class KnownSteps:
    """The steps of a model, and which of its loads had them."""

    steps: frozenset[str]
    generation: str
    read_at: float


class EnsembleSteps:
    """The last known steps of each model, which are read only when something may be unloaded.

    Triton returns the config of a model only while it is ready.
    """

    def __init__(self, pool: ReplicaPool, signatures: SignatureCache) -> None:
        self._pool = pool
        self._signatures = signatures
        self._known: dict[str, KnownSteps] = {}
        self._changed_at: dict[str, float] = {}

    async def read(
        self, desired_models: Mapping[str, DesiredModel], max_age_s: float = MAX_STEPS_AGE_S
    ) -> dict[str, frozenset[str]]:
        """Return the steps of each model whose present load has been ready, now or before."""
        generations = {name: desired.generation for name, desired in desired_models.items()}
        now = perf_counter()
        outdated = {
            name
            for name in self._pool.ready_models
            if not self._is_current(name, generations.get(name, ""))
            or self._known[name].read_at < now - max_age_s
        }
        if outdated:
            store = partial(self._store, generations, now)
            await self._signatures.read_configs(outdated, store)
        return {
            name: known.steps
            for name, known in self._known.items()
            if self._is_current(name, generations.get(name, ""))
        }

    def _store(
        self, generations: Mapping[str, str], read_at: float, model: str, config: Any
    ) -> None:
        if self._changed_at.get(model, -inf) < read_at:  # otherwise this may be the previous config
            self._known[model] = KnownSteps(find_steps(config), generations.get(model, ""), read_at)

    def _is_current(self, model: str, generation: str) -> bool:
        known = self._known.get(model)
        return known is not None and known.generation == generation

    def invalidate(self, model: str) -> None:
        """Drop the steps of a model that was loaded or unloaded."""
        self._changed_at[model] = perf_counter()
        self._known.pop(model, None)


def find_steps(config: Any) -> frozenset[str]:
    """Return the models that a model runs: the steps of an ensemble, and those that `gateway.steps` names."""
    try:
        named = config.get("parameters", {}).get(STEPS_PARAMETER, {}).get("string_value", "")
        names = {name.strip() for name in str(named).split(",")}
    except AttributeError:
        names = set()
    return find_ensemble_steps(config) | (names - {""})
