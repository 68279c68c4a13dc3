"""Decisions of loading on demand, without I/O: whose turn, which replica, which victims, how many copies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum
from itertools import zip_longest
from typing import Any, Final

from gateway.capabilities.on_demand.settings import CopyLimits
from gateway.tensors.signature import find_steps

MEMORY_PARAMETER: Final = "gateway.memory_mb"
UNKNOWN_LOAD_S: Final = 5.0  # expected for a model that was never loaded
LOAD_TIME_WEIGHT: Final = 0.5  # weight of the last load in the expected time
DEMAND_WEIGHT: Final = 0.3  # weight of the last sample in the mean demand
# Concurrent requests per copy above which another copy is loaded, and below which one is unloaded.
DEMAND_FOR_COPY: Final = 4.0
DEMAND_WITHOUT_COPY: Final = 1.0


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

    FREE = "idle"
    YIELDED = "shared"  # its callers wait for room as well: evicted if nothing is free
    BUSY = "in use"  # it can be evicted when its requests and changes have finished
    NEVER = "kept loaded"  # declared, or loaded through the API


# The order in which models are evicted.
EVICTABLE: Final = (Eviction.FREE, Eviction.YIELDED)
EVICTABLE_LATER: Final = (*EVICTABLE, Eviction.BUSY)


@dataclass(frozen=True)
class LoadedModel:
    """A model that a replica holds, or is about to hold."""

    name: str
    memory_mb: int = 0
    last_used: float = 0.0
    eviction: Eviction = Eviction.FREE
    parts: frozenset[str] = frozenset()  # the models that an ensemble uses
    protected_until: float = -math.inf  # other callers use it until then


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
    protected_until: float = -math.inf  # other callers use the possible victims until then


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
    plans_later = [plan_victims(each, wanted_mb, budget, includes_busy=True) for each in replicas]
    times = [
        max((victim.protected_until for victim in victims), default=-math.inf)
        for victims in plans_later
        if victims is not None
    ]
    holders = {model.name for replica in replicas for model in replica.models}
    protected_until = min(times, default=-math.inf)
    return NoPlacement(tuple(sorted(holders)), is_final=not times, protected_until=protected_until)


def rank_plan(
    replica: ReplicaLoad, victims: Sequence[LoadedModel]
) -> tuple[bool, float, int, int, int, str]:
    is_yielded = any(victim.eviction is Eviction.YIELDED for victim in victims)
    last_used = max((victim.last_used for victim in victims), default=-math.inf)
    memory_mb = sum(model.memory_mb for model in replica.models)
    return (
        is_yielded,
        last_used,
        len(replica.models),
        memory_mb,
        replica.outstanding,
        replica.name,
    )


def plan_victims(
    replica: ReplicaLoad,
    wanted_mb: Mapping[str, int],
    budget: ModelBudget,
    *,
    includes_busy: bool = False,
) -> tuple[LoadedModel, ...] | None:
    """Return the models to unload before the load; None if there is no room for it.

    A part of an ensemble that stays is never a victim. With `includes_busy`, models that are in use count as
    victims as well, because their requests will have finished.
    """
    held = {model.name: model for model in replica.models}
    victims: list[LoadedModel] = []
    while not is_within(budget, held, wanted_mb):
        victim = choose_victim(held, wanted_mb, includes_busy=includes_busy)
        if victim is None:
            return None
        victims.append(victim)
        remove_victim(held, victim)
    # A large victim may have made room for smaller ones, of which the last used ones stay.
    for victim in sorted(victims, key=rank_victim, reverse=True):
        restored = {**held, victim.name: victim}
        if victim.parts <= held.keys() and is_within(budget, restored, wanted_mb):
            held = restored
    return tuple(victim for victim in victims if victim.name not in held)


def is_within(
    budget: ModelBudget, held: Mapping[str, LoadedModel], added_mb: Mapping[str, int]
) -> bool:
    costs_mb = {name: model.memory_mb for name, model in held.items()}
    return budget.allows({**added_mb, **costs_mb}.values())


def choose_victim(
    held: Mapping[str, LoadedModel], protected: Iterable[str], *, includes_busy: bool = False
) -> LoadedModel | None:
    """Return the least recently used model that can be evicted."""
    needed = {part for model in held.values() for part in model.parts}.union(protected)
    accepted = EVICTABLE_LATER if includes_busy else EVICTABLE
    candidates = [
        model for model in held.values() if model.eviction in accepted and model.name not in needed
    ]
    return min(candidates, key=rank_victim, default=None)


def rank_victim(model: LoadedModel) -> tuple[int, float, str]:
    return EVICTABLE_LATER.index(model.eviction), model.last_used, model.name


def remove_victim(held: dict[str, LoadedModel], model: LoadedModel) -> None:
    """Remove a model; its parts were used when it was."""
    del held[model.name]
    for part in model.parts & held.keys():
        last_used = max(held[part].last_used, model.last_used)
        held[part] = replace(held[part], last_used=last_used)


def protect_model(
    model: LoadedModel, users: Mapping[str, float], callers: Set[str], waiting: Set[str]
) -> LoadedModel:
    """Return the model as it is for a load that `callers` wait for.

    `users` are the callers that used it lately, each with the end of its protection. A caller that waits for
    a load itself would have its own model unloaded for it, so the room is shared in turns.
    """
    others = users.keys() - callers
    if not others or model.eviction is Eviction.NEVER:
        return model
    if others <= waiting:
        is_free = model.eviction is Eviction.FREE
        return replace(model, eviction=Eviction.YIELDED) if is_free else model
    protected_until = max(users[caller] for caller in others)
    return replace(model, eviction=Eviction.BUSY, protected_until=protected_until)


def is_removable(replica: ReplicaLoad, model: str) -> bool:
    """Return whether nobody uses this copy of a model, as a part of an ensemble or otherwise."""
    is_free = any(each.name == model and each.eviction is Eviction.FREE for each in replica.models)
    return is_free and not any(model in each.parts for each in replica.models)


def plan_excess(replica: ReplicaLoad, budget: ModelBudget) -> tuple[str, ...]:
    """Return the victims that bring a replica back within its budget, as far as possible.

    A replica exceeds it when an ensemble brought parts that were not known before.
    """
    held = {model.name: model for model in replica.models}
    victims = []
    while not is_within(budget, held, {}):
        victim = choose_victim(held, ())
        if victim is None:
            break
        victims.append(victim.name)
        remove_victim(held, victim)
    return tuple(victims)


def find_idle_models(replica: ReplicaLoad, idle_since: float) -> tuple[str, ...]:
    """Return the models that nobody used since then, an ensemble before its parts."""
    held = {model.name: model for model in replica.models}
    idle = []
    while (victim := choose_victim(held, ())) is not None and victim.last_used <= idle_since:
        idle.append(victim.name)
        remove_victim(held, victim)
    return tuple(idle)


class LoadTurns:
    """The order of the loads that wait for room: callers take turns, first come first served within one."""

    def __init__(self) -> None:
        # Caller → its models; whose turn it is comes first.
        self._queues: dict[str, dict[str, None]] = {}

    @property
    def callers(self) -> Set[str]:
        return self._queues.keys()

    def add(self, model: str, callers: Iterable[str]) -> None:
        for caller in callers:
            self._queues.setdefault(caller, {}).setdefault(model)

    def remove(self, model: str, callers: Iterable[str]) -> None:
        for caller in callers:
            queue = self._queues.get(caller, {})
            queue.pop(model, None)
            if not queue:
                self._queues.pop(caller, None)

    def take(self, model: str) -> None:
        """Remove a load that gets room. The caller whose turn this was becomes the last one."""
        places = {
            caller: list(queue).index(model)
            for caller, queue in self._queues.items()
            if model in queue
        }
        caller = min(places, key=places.__getitem__)
        self._queues[caller] = self._queues.pop(caller)
        self.remove(model, places)

    def put_back(self, model: str, callers: Iterable[str]) -> None:
        """Add a load that found no room after all: it comes first again."""
        for caller in callers:
            queue = {model: None, **self._queues.pop(caller, {})}
            self._queues = {caller: queue, **self._queues}

    def list_models(self) -> list[str]:
        """Return the models in the order in which they get room: the first of each caller, the second, …"""
        rounds = zip_longest(*self._queues.values())
        models = dict.fromkeys(model for each in rounds for model in each)
        return [model for model in models if model is not None]


def plan_copies(mean_demand: float, copies: int, limits: CopyLimits) -> int:
    if copies < limits.minimum or (
        copies < limits.maximum and mean_demand > DEMAND_FOR_COPY * copies
    ):
        return copies + 1
    is_excess = copies > limits.minimum and mean_demand < DEMAND_WITHOUT_COPY * (copies - 1)
    return copies - 1 if is_excess or copies > limits.maximum else copies


def update_mean_demand(mean: float, sample: float) -> float:
    return mean + DEMAND_WEIGHT * (sample - mean)


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


def update_load_time(expected_s: float | None, duration_s: float) -> float:
    if expected_s is None:
        return duration_s
    return expected_s + LOAD_TIME_WEIGHT * (duration_s - expected_s)


def compute_retry_after_s(expected_s: float | None, elapsed_s: float) -> int:
    remaining_s = (UNKNOWN_LOAD_S if expected_s is None else expected_s) - elapsed_s
    return max(math.ceil(remaining_s), 1)
