"""The fleet as the gateways acknowledged it, as values: what each change makes of it, and which fleets are
possible after changes of which some overlapped or were not answered. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import permutations

LOADED = "loaded"
UNLOADED = "unloaded"
NO_WISH = ""  # as in `GET /v1/models`
# Two ensembles, which share a step. Only loads and unloads change these models.
STEPS: Mapping[str, tuple[str, ...]] = {
    "pair": ("left", "right"),
    "single": ("right",),
    "left": (),
    "right": (),
}
ENSEMBLES = tuple(name for name, steps in STEPS.items() if steps)


@dataclass(frozen=True)
class Model:
    """A model that changes: its desired state, the number that each version adds, and its labels."""

    wish: str = NO_WISH
    versions: Mapping[int, int] = field(default_factory=dict)
    labels: Mapping[str, int] = field(default_factory=dict)

    @property
    def served(self) -> Mapping[int, int]:
        return self.versions if self.wish == LOADED else {}


@dataclass(frozen=True)
class World:
    models: Mapping[str, Model]
    wishes: Mapping[str, str] = field(default_factory=dict)  # of the ensembles and their steps
    is_cordoned: bool = False  # replica 0
    has_extra_model: bool = False  # in the models file
    has_extra_key: bool = False  # in the keys file

    @property
    def needed(self) -> set[str]:
        """Return the steps of the ensembles that are to be loaded."""
        wanted = [name for name in ENSEMBLES if self.wishes.get(name) == LOADED]
        return {step for name in wanted for step in STEPS[name]}


@dataclass(frozen=True)
class Details:
    """The details that the seed chose for a change; each change uses some of them."""

    model: str
    version: int
    label: str
    number: int


# The world after a change, or the code of the error with which a gateway must refuse it.
Effect = Callable[[World, Details], "World | str"]
ModelEffect = Callable[[Model, Details], "Model | str"]


def of_model(effect: ModelEffect) -> Effect:
    """Apply an effect to the model of a change."""

    def apply(world: World, details: Details) -> World | str:
        model = effect(world.models[details.model], details)
        if isinstance(model, str):
            return model
        return replace(world, models={**world.models, details.model: model})

    return apply


@of_model
def load(model: Model, _: Details) -> Model | str:
    return replace(model, wish=LOADED) if model.versions else "MODEL_NOT_FOUND"


@of_model
def unload(model: Model, _: Details) -> Model | str:
    return replace(model, wish=UNLOADED) if model.versions else "MODEL_NOT_FOUND"


@of_model
def upload(model: Model, details: Details) -> Model:
    """Upload the next version."""
    version = max(model.versions, default=0) + 1
    return replace(model, wish=LOADED, versions={**model.versions, version: details.number})


@of_model
def upload_version(model: Model, details: Details) -> Model:
    return replace(model, wish=LOADED, versions={**model.versions, details.version: details.number})


@of_model
def upload_broken(model: Model, _: Details) -> str:
    return "LOAD_FAILED"


@of_model
def delete(model: Model, _: Details) -> Model | str:
    return Model() if model.versions else "MODEL_NOT_FOUND"


@of_model
def delete_version(model: Model, details: Details) -> Model | str:
    if details.version not in model.versions:
        return "MODEL_NOT_FOUND"
    left = {key: number for key, number in model.versions.items() if key != details.version}
    return replace(model, versions=left) if left else "CONFLICT"


@of_model
def set_label(model: Model, details: Details) -> Model | str:
    if details.version not in model.served:
        return "VERSION_NOT_READY" if model.versions else "MODEL_NOT_FOUND"
    return replace(model, labels={**model.labels, details.label: details.version})


@of_model
def delete_label(model: Model, details: Details) -> Model | str:
    if details.label not in model.labels:
        return "LABEL_NOT_FOUND" if model.versions else "MODEL_NOT_FOUND"
    left = {key: version for key, version in model.labels.items() if key != details.label}
    return replace(model, labels=left)


def load_part(world: World, details: Details) -> World:
    """Load an ensemble or a step. The unloads of its steps are forgotten."""
    forgotten = {step: NO_WISH for step in STEPS[details.model] if world.wishes[step] == UNLOADED}
    return replace(world, wishes={**world.wishes, **forgotten, details.model: LOADED})


def unload_part(world: World, details: Details) -> World | str:
    if details.model in world.needed:
        return "CONFLICT"
    return replace(world, wishes={**world.wishes, details.model: UNLOADED})


def cordon(world: World, _: Details) -> World:
    return replace(world, is_cordoned=True)


def uncordon(world: World, _: Details) -> World:
    return replace(world, is_cordoned=False)


def keep(world: World, _: Details) -> World:
    return world


class Outcome(Enum):
    done = auto()  # acknowledged
    partly_done = auto()  # acknowledged as well: the gateways finish it
    refused = auto()  # must not be applied
    unknown = auto()  # no answer: either is right


# An effect with its details.
WorldEffect = Callable[[World], "World | str"]


@dataclass(frozen=True)
class Answer:
    """The known outcome of a change. A refusal that a fault or another change explains is excused."""

    effect: WorldEffect
    outcome: Outcome
    code: str = ""
    is_excused: bool = False
    partial_effect: WorldEffect | None = None  # right as well, if it is partly done or not answered

    def list_next_worlds(self, world: World) -> list[World]:
        """Return the worlds that are possible if this change came next; none if it was not answered so."""
        after = self.effect(world)
        if self.outcome is Outcome.refused:
            return [world] if self.is_excused or after == self.code else []
        found = [after]
        if self.outcome is Outcome.unknown:
            found.append(world)
        if self.outcome is not Outcome.done and self.partial_effect is not None:
            found.append(self.partial_effect(world))
        return [each for each in found if isinstance(each, World)]


def list_possible_worlds(before: World, answers: Sequence[Answer]) -> list[World]:
    """Return the worlds after these changes in any order; none if no order explains all answers."""
    possible: list[World] = []
    for order in permutations(answers):
        worlds = [before]
        for answer in order:
            worlds = [after for world in worlds for after in answer.list_next_worlds(world)]
        possible += [world for world in worlds if world not in possible]
    return possible
