"""The part of a plan that keeps to a budget: the replica for a load, what it evicts, and idle models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from gateway.repository.plan import ModelAction, build_action
from gateway.repository.state.content import DesiredModel


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
class NoPlacement:
    """The reason why no replica has room."""

    holders: tuple[str, ...]  # the models that hold the memory
    is_final: bool  # waiting does not help


def plan_placement(
    model: str,
    desired: DesiredModel,
    replicas: Sequence[ReplicaLoad],
    wanted_mb: Mapping[str, int],
    budget: ModelBudget,
) -> list[ModelAction] | NoPlacement:
    """Return the load of a model that one replica should have, after the unloads that make room for it.

    That is the replica with the most room, or else the one whose victims were used least recently.
    `wanted_mb` contains the memory of the model, and of the parts that it brings, by name.
    """
    plans = [(replica, plan_victims(replica, wanted_mb, budget)) for replica in replicas]
    possible = [(replica, victims) for replica, victims in plans if victims is not None]
    if possible:
        replica, victims = min(possible, key=lambda plan: rank_plan(*plan))
        reason = f"to make room for {model}"
        evictions = [build_unload(replica, victim.name, reason) for victim in victims]
        return [*evictions, build_action(model, desired, replica.name)]
    later = [plan_victims(replica, wanted_mb, budget, waits=True) for replica in replicas]
    holders = {held.name for replica in replicas for held in replica.models}
    return NoPlacement(tuple(sorted(holders)), is_final=all(plan is None for plan in later))


def build_unload(replica: ReplicaLoad, model: str, reason: str) -> ModelAction:
    return ModelAction(model, False, replica=replica.name, reason=reason)


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


def plan_idle_unloads(replica: ReplicaLoad, now: float, idle_s: float) -> list[ModelAction]:
    """Return the unloads of the models that nobody has used for a time."""
    reason = f"after {idle_s:g} s without requests"
    return [
        build_unload(replica, victim.name, reason)
        for victim in list_victims(replica)
        if victim.last_used <= now - idle_s
    ]


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
