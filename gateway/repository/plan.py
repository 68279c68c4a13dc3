"""What the reconciler does next, as pure functions: no clock, no I/O.

A replica has a desired model if its index shows it ready, and it has confirmed the desired generation.
Otherwise it is loaded; a model that should be unloaded, and is ready, is unloaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.errors import Forbidden, MalformedRequest
from gateway.fleet.index import Index
from gateway.messages import is_model_name
from gateway.repository.load_parameters import check_load_parameters
from gateway.repository.models_file import DeclaredModel
from gateway.repository.state.content import ALL, DesiredModel, Origin

INITIAL_BACKOFF_S: Final = 1.0
MAX_BACKOFF_S: Final = 300.0
MAX_BACKOFF_DOUBLINGS: Final = 16  # more than MAX_BACKOFF_S needs; keeps the power a float
ACTION_MEMORY_S: Final = 60.0  # an action that is needed again later is a new one
CONFLICT_SUCCESSES: Final = 3  # something else undoes an action that succeeded so many times

StepTable = Mapping[str, Set[str]]  # model → the models that it runs


@dataclass(frozen=True)
class ModelAction:
    model: str
    is_load: bool
    parameters: Mapping[str, Any] = field(default_factory=dict)
    generation: str = ""  # confirmed for the replica when the load is done
    replica: str = ""
    reason: str = field(default="", compare=False)  # of a plan, for the log

    @property
    def verb(self) -> str:
        return "load" if self.is_load else "unload"


def merge_declared_models(
    desired_models: Mapping[str, DesiredModel], declared: Mapping[str, DeclaredModel]
) -> dict[str, DesiredModel]:
    """Return the desired models with the declared ones added. A declared model is always loaded.

    The parameters of its last load through the API take precedence over its declared ones.
    """
    merged = dict(desired_models)
    for name, model in declared.items():
        if name not in merged or not merged[name].is_loaded or not merged[name].parameters:
            revision = merged[name].revision if name in merged and merged[name].is_loaded else 0
            merged[name] = DesiredModel(
                ALL,
                model.load_parameters,
                revision,
                config_digest=model.config_digest,
                origin=Origin.declared,
            )
    return merged


def find_ignored_models(
    desired_models: Mapping[str, DesiredModel], *, can_upload: bool
) -> dict[str, str]:
    """Return model → reason for the desired models that are not permitted.

    Write access to the state does not imply the right to upload code.
    """
    ignored: dict[str, str] = {}
    for model, desired in desired_models.items():
        if not (model and is_model_name(model)):  # Triton would take it for a path
            ignored[model] = "it is not a valid name of a model"
            continue
        try:
            check_load_parameters(desired.parameters, can_upload=can_upload)
        except (Forbidden, MalformedRequest) as exc:
            ignored[model] = exc.detail
    return ignored


# The steps of models. Triton loads the steps of an ensemble before it, leaves them when the ensemble is
# unloaded, and takes the ensemble down with any of them: what is loaded, or should be, keeps its steps.


def find_all_steps(models: Iterable[str], steps: StepTable) -> frozenset[str]:
    """Return the steps of the models on all levels, as far as the table has them."""
    found: set[str] = set()
    pending = list(models)
    while pending:
        new = steps.get(pending.pop(), frozenset()) - found
        found |= new
        pending += new
    return frozenset(found)


def find_dependents(model: str, steps: StepTable) -> list[str]:
    """Return the models that run this one on any level, each before its own steps."""
    dependents = [name for name in steps if model in find_all_steps((name,), steps)]
    return sorted(
        dependents, key=lambda name: (-len(find_all_steps((name,), steps) & {*dependents}), name)
    )


def find_needed_models(
    desired_models: Mapping[str, DesiredModel],
    replica: ReplicaView,
    steps: StepTable,
) -> frozenset[str] | None:
    """Return the steps of all models that a replica keeps or must load; None if some are not known yet.

    The steps of a model can be ready before it is. A model whose load failed there is not waited for.
    """
    index = replica.index
    unwanted = {name for name, desired in desired_models.items() if not desired.is_loaded}
    wanted = (desired_models.keys() & index.models.keys()) - unwanted
    kept = wanted | ((index.ready_models | index.changing_models) - unwanted)
    unknown = {
        name
        for name in kept - replica.failed
        if name not in steps
        or index.is_changing(name)
        or name in replica.running
        or (
            name in desired_models
            and is_outdated(desired_models[name], replica.confirmed.get(name, ""))
        )
    }
    return None if unknown else find_all_steps(kept, steps)


# The plan.


@dataclass(frozen=True)
class ReplicaView:
    """A replica that can load and unload models, as a plan sees it."""

    name: str
    index: Index
    confirmed: Mapping[str, str] = field(default_factory=dict)  # model → generation
    running: Set[str] = frozenset()  # models with an action in progress
    paused: Set[str] = frozenset()  # models whose next action has to wait
    failed: Set[str] = frozenset()  # models whose last action failed


def plan_actions(
    desired_models: Mapping[str, DesiredModel],
    replicas: Sequence[ReplicaView],
    needed: Mapping[str, Set[str] | None],
    *,
    is_call: bool = False,
) -> list[ModelAction]:
    """Return the actions that replicas need. Models that nobody desires are left alone.

    A model that is not ready is loaded everywhere at once. One that is ready and gets other parameters or
    files is replaced on one replica after the other.
    `needed` are, by replica, the steps of other models that stay, and are not unloaded; None, while they are
    unknown, unloads nothing. A call, which answers for each replica, is tried there whatever its index shows.
    """
    replaced = {model for replica in replicas for model in replica.running}
    actions = []
    for replica in replicas:
        for model, desired in desired_models.items():
            is_replacement = desired.is_loaded and replica.index.is_ready(model)
            if model in replica.running or (is_replacement and model in replaced):
                continue
            reason = "called" if is_call else find_reason(model, desired, replica, needed)
            if reason:
                actions.append(build_action(model, desired, replica.name, reason))
                replaced |= {model} if is_replacement else set()
    return actions


def find_reason(
    model: str,
    desired: DesiredModel,
    replica: ReplicaView,
    needed: Mapping[str, Set[str] | None],
) -> str:
    """Return why the replica has to load or unload the model now; empty if it has not."""
    index = replica.index
    if index.is_changing(model) or model in replica.paused:
        return ""
    is_ready = index.is_ready(model)
    if not desired.is_loaded:
        kept = needed.get(replica.name, frozenset())
        is_free = is_ready and kept is not None and model not in kept
        return "it is to be unloaded, and is ready" if is_free else ""
    if not is_ready:
        return "it is to be loaded, and is not ready"
    is_current = not is_outdated(desired, replica.confirmed.get(model, ""))
    return "" if is_current else "another load is desired"


def build_action(
    model: str, desired: DesiredModel, replica: str = "", reason: str = ""
) -> ModelAction:
    generation = desired.generation if desired.is_loaded else ""
    return ModelAction(
        model, desired.is_loaded, desired.parameters, generation, replica=replica, reason=reason
    )


def is_outdated(desired: DesiredModel, confirmed: str) -> bool:
    return desired.is_loaded and desired.generation not in ("", confirmed)


@dataclass(frozen=True)
class Backoff:
    """The time before which an action is not repeated. It grows with each repetition, successful or not."""

    repetitions: int = 0
    successes: int = 0
    not_before: float = 0.0
    reason: str = ""  # why the action failed the last time
    generation: str = ""  # another one begins anew

    def with_repetition(self, now: float, reason: str = "", generation: str = "") -> Backoff:
        doublings = min(self.repetitions, MAX_BACKOFF_DOUBLINGS)
        pause_s = min(INITIAL_BACKOFF_S * 2**doublings, MAX_BACKOFF_S)
        successes = self.successes + (not reason)
        return Backoff(self.repetitions + 1, successes, now + pause_s, reason, generation)

    def is_over(self, now: float) -> bool:
        return now > self.not_before + ACTION_MEMORY_S
