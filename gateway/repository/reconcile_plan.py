"""Reconciliation plans, as pure functions: no clock, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.errors import Forbidden, MalformedRequest
from gateway.fleet.index import Index
from gateway.messages import is_model_name
from gateway.repository.load_parameters import check_load_parameters
from gateway.repository.models_file import DeclaredModel
from gateway.repository.state.content import DesiredModel, is_in_progress

INITIAL_BACKOFF_S: Final = 1.0
MAX_BACKOFF_S: Final = 300.0
MAX_BACKOFF_DOUBLINGS: Final = 16  # more than MAX_BACKOFF_S needs; keeps the power a float
CORRECTION_MEMORY_S: Final = 60.0  # a correction that is needed again later is a new one
CONFLICT_CORRECTIONS: Final = 2  # something else changes a model whose corrections it undid twice

StepTable = Mapping[str, Set[str]]  # model → the models that it runs


@dataclass(frozen=True)
class ModelAction:
    model: str
    is_load: bool
    parameters: Mapping[str, Any]
    load_id: str = ""  # recorded for the replica when the load is done
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
                True, model.load_parameters, revision, config_digest=model.config_digest
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
    index: Index,
    loads: Mapping[str, str],
    *,
    steps: StepTable,
    failed: Set[str] = frozenset(),
) -> frozenset[str] | None:
    """Return the steps of all models that a replica keeps or must load; None if some are not known yet.

    The steps of a model can be ready before it is. A model whose load failed there is not waited for.
    """
    unwanted = {name for name, desired in desired_models.items() if not desired.is_loaded}
    wanted = (desired_models.keys() & index.models.keys()) - unwanted
    kept = wanted | ((index.ready_models | index.changing_models) - unwanted)
    unknown = {
        name
        for name in kept - failed
        if name not in steps or index.is_changing(name) or is_in_progress(loads.get(name, ""))
    }
    return None if unknown else find_all_steps(kept, steps)


# The plan.


def plan_actions(
    desired_models: Mapping[str, DesiredModel],
    index: Index,
    loads: Mapping[str, str],
    needed: Set[str] | None = frozenset(),
) -> Iterator[ModelAction]:
    """Yield the actions that a replica needs. Models without a desired state are left alone.

    `loads` are the loads that the replica confirmed: a model that is ready there may be outdated. Models
    with a load in progress are skipped. The `needed` models are steps of others that stay, and are not
    unloaded; None, while they are unknown, unloads nothing.
    """
    for model, desired in desired_models.items():
        load = loads.get(model, "")
        ready = index.is_ready(model)
        if index.is_changing(model) or is_in_progress(load):
            continue
        if desired.is_loaded and (not ready or is_outdated(desired, load)):
            reason = "another load is desired" if ready else "it is to be loaded, and is not ready"
            yield ModelAction(model, True, desired.parameters, desired.load_id, reason)
        elif ready and not desired.is_loaded and needed is not None and model not in needed:
            yield ModelAction(model, False, {}, reason="it is to be unloaded, and is ready")


def is_outdated(desired: DesiredModel, confirmed_load: str) -> bool:
    is_current = desired.load_id in ("", confirmed_load)
    return desired.is_loaded and not is_current and not is_in_progress(confirmed_load)


@dataclass(frozen=True)
class Backoff:
    """The time before which an action is not repeated. It grows with each repetition."""

    repetitions: int = 0
    not_before: float = 0.0
    reason: str = ""  # why the action failed the last time

    def with_repetition(self, now: float, reason: str = "") -> Backoff:
        doublings = min(self.repetitions, MAX_BACKOFF_DOUBLINGS)
        pause_s = min(INITIAL_BACKOFF_S * 2**doublings, MAX_BACKOFF_S)
        return Backoff(self.repetitions + 1, now + pause_s, reason)


def with_correction(corrections: Backoff | None, now: float) -> Backoff:
    """Count a successful action as a repetition if something else has undone the last one soon."""
    if corrections is None or now > corrections.not_before + CORRECTION_MEMORY_S:
        return Backoff(0, now)
    return corrections.with_repetition(now)


@dataclass(frozen=True)
class PlannedAction:
    """An action of a plan that was done, with the desired models of the plan."""

    action: ModelAction
    desired_models: Mapping[str, DesiredModel]
    done_at: float

    def reverses(self, earlier: PlannedAction, steps: StepTable) -> bool:
        """Return whether this undoes what an earlier plan did, though nobody desired anything else since.

        A load brings the steps of its model; an unload takes down the models whose step it is.
        """
        models = (earlier.action.model, self.action.model)
        return (
            self.action.is_load != earlier.action.is_load
            and self.done_at - earlier.done_at <= CORRECTION_MEMORY_S
            and all(
                self.desired_models.get(model) == earlier.desired_models.get(model)
                for model in models
            )
            and not find_changed_models(self.action, steps).isdisjoint(
                find_changed_models(earlier.action, steps)
            )
        )


def find_changed_models(action: ModelAction, steps: StepTable) -> frozenset[str]:
    model = action.model
    others = find_all_steps((model,), steps) if action.is_load else find_dependents(model, steps)
    return frozenset({model, *others})
