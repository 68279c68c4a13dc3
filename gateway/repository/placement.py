"""Decisions of loading on demand, without I/O: the replica for a load, its victims, and idle models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from gateway.repository.ensembles import find_steps

MEMORY_PARAMETER: Final = "gateway.memory_mb"


@dataclass(frozen=True)
class ModelBudget:
    """The limits of the models on each replica; 0 means no limit."""

    max_models: int = 0
    memory_mb: int = 0

    def allows(self, costs_mb: Iterable[int]) -> bool:
        costs = list(costs_mb)
        is_count_allowed = not self.max_models or len(costs) <= self.max_models
        return is_count_allowed and (not self.memory_mb or sum(costs) <= self.memory_mb)


class Eviction(Enum):
    """The possibility to evict a loaded model."""

    NOW = "idle"
    LATER = "in use, or used a moment ago"
    NEVER = "kept loaded"  # declared, or loaded through the API


@dataclass(frozen=True)
class LoadedModel:
    """A model that a replica holds, or is about to hold."""

    name: str
    memory_mb: int = 0
    last_used: float = 0.0
    eviction: Eviction = Eviction.NOW
    parts: frozenset[str] = frozenset()  # the models that an ensemble or a pipeline uses


@dataclass(frozen=True)
class ReplicaLoad:
    """A replica that can load a model, and its models when its actions in progress are done."""

    name: str
    models: tuple[LoadedModel, ...] = ()
    outstanding: int = 0


@dataclass(frozen=True)
class Placement:
    """The replica for a load, and the models to unload there first."""

    replica: str
    victims: tuple[str, ...] = ()


@dataclass(frozen=True)
class NoPlacement:
    """The reason why no replica has room."""

    holders: tuple[str, ...]  # the models that hold the memory
    is_final: bool  # waiting does not help


def choose_placement(
    replicas: Sequence[ReplicaLoad], wanted_mb: Mapping[str, int], budget: ModelBudget
) -> Placement | NoPlacement:
    """Return the replica with the most room, or else the one whose victims were used least recently.

    `wanted_mb` contains the memory of the model to load, and of the parts that it brings, by name.
    """
    plans = [(replica, plan_victims(replica, wanted_mb, budget)) for replica in replicas]
    possible = [(replica, victims) for replica, victims in plans if victims is not None]
    if possible:
        replica, victims = min(possible, key=lambda plan: rank_plan(*plan))
        return Placement(replica.name, tuple(model.name for model in victims))
    later = [plan_victims(replica, wanted_mb, budget, waits=True) for replica in replicas]
    holders = {model.name for replica in replicas for model in replica.models}
    return NoPlacement(tuple(sorted(holders)), is_final=all(plan is None for plan in later))


def rank_plan(
    replica: ReplicaLoad, victims: Sequence[LoadedModel]
) -> tuple[float, int, int, int, str]:
    last_used = max((victim.last_used for victim in victims), default=-math.inf)
    memory_mb = sum(model.memory_mb for model in replica.models)
    return (last_used, len(replica.models), memory_mb, replica.outstanding, replica.name)


def plan_victims(
    replica: ReplicaLoad, wanted_mb: Mapping[str, int], budget: ModelBudget, *, waits: bool = False
) -> list[LoadedModel] | None:
    """Return the models to unload before the load; None if there is no room for it.

    With `waits`, the models in use are among them, because their requests will have finished.
    """
    costs_mb = {**wanted_mb, **{model.name: model.memory_mb for model in replica.models}}
    victims: list[LoadedModel] = []
    candidates = list_victims(replica, wanted_mb, waits=waits)
    while not budget.allows(costs_mb.values()):
        victim = next(candidates, None)
        if victim is None:
            return None
        del costs_mb[victim.name]
        victims.append(victim)
    return victims


def find_idle_models(replica: ReplicaLoad, idle_since: float) -> tuple[str, ...]:
    """Return the models that nobody used since then."""
    victims = list_victims(replica)
    return tuple(victim.name for victim in victims if victim.last_used <= idle_since)


def list_victims(
    replica: ReplicaLoad, kept: Iterable[str] = (), *, waits: bool = False
) -> Iterator[LoadedModel]:
    """Yield the models that can be unloaded: the least recently used first, an ensemble before its parts.

    A part was used when its ensemble was, and stays as long as that.
    """
    held = {model.name: model for model in replica.models}
    while True:
        needed = {part for model in held.values() for part in model.parts}.union(kept)
        candidates = [
            model
            for model in held.values()
            if model.name not in needed
            and (model.eviction is Eviction.NOW or (waits and model.eviction is Eviction.LATER))
        ]
        if not candidates:
            return
        victim = min(candidates, key=lambda model: (model.last_used, model.name))
        del held[victim.name]
        for part in victim.parts & held.keys():
            last_used = max(held[part].last_used, victim.last_used)
            held[part] = replace(held[part], last_used=last_used)
        yield victim


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a model's config that decide on its place."""

    memory_mb: int = 0
    parts: frozenset[str] = frozenset()


def parse_model_facts(config: Any) -> ModelFacts:
    """Return the facts of Triton's config of a model; an invalid size is 0."""
    try:
        parameter = config.get("parameters", {}).get(MEMORY_PARAMETER, {})
        written = str(parameter.get("string_value", "")).strip()
    except (AttributeError, TypeError):
        return ModelFacts()
    is_number = written.isascii() and written.isdecimal() and len(written) < 10
    return ModelFacts(int(written) if is_number else 0, find_steps(config))


def find_all_parts(model: str, facts: Mapping[str, ModelFacts]) -> frozenset[str]:
    found: set[str] = set()
    pending = [model]
    while pending:
        parts = facts.get(pending.pop(), ModelFacts()).parts - found
        found |= parts
        pending += parts
    return frozenset(found - {model})
