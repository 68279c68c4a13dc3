"""What is to be done so that a replica has the models it should have. Values only: no clock, no I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.errors import Forbidden, MalformedRequest
from gateway.fleet.health import HealthState
from gateway.fleet.index import Index
from gateway.fleet.models_file import DeclaredModel
from gateway.fleet.uploads import check_load_parameters
from gateway.state.desired import DesiredModel
from gateway.state.loads import is_in_progress

INITIAL_BACKOFF_S: Final = 1.0
MAX_BACKOFF_S: Final = 300.0
MAX_BACKOFF_DOUBLINGS: Final = (
    16  # then it is the longest, and a power without bound would not be a float
)


@dataclass(frozen=True)
class ModelAction:
    """A load or an unload of a model."""

    model: str
    is_load: bool
    parameters: Mapping[str, Any]
    load_id: str = ""  # what the replica confirms when it is done


def merge_declared_models(
    desired_models: Mapping[str, DesiredModel], declared: Mapping[str, DeclaredModel]
) -> dict[str, DesiredModel]:
    """What should be loaded and what not; a declared model is, whatever was asked by the API.

    The parameters of its last load stay: that is how one changes the config of a declared model. One
    that was loaded without any has those of its declaration.
    """
    found = dict(desired_models)
    for name, model in declared.items():
        if name not in found or not found[name].is_loaded or not found[name].parameters:
            revision = found[name].revision if name in found and found[name].is_loaded else 0
            found[name] = DesiredModel(True, model.load_parameters, revision, model.config_digest)
    return found


def filter_uploads(
    desired_models: Mapping[str, DesiredModel], *, can_upload: bool
) -> tuple[dict[str, DesiredModel], dict[str, str]]:
    """The wishes that may be carried out; and of each other one why not.

    Whoever can write to the state is not thereby somebody who may bring code.
    """
    found: dict[str, DesiredModel] = {}
    ignored: dict[str, str] = {}
    for model, wish in desired_models.items():
        try:
            check_load_parameters(wish.parameters, can_upload=can_upload)
        except (Forbidden, MalformedRequest) as exc:
            ignored[model] = exc.detail
        else:
            found[model] = wish
    return found, ignored


def plan_actions(
    desired_models: Mapping[str, DesiredModel], index: Index, loads: Mapping[str, str]
) -> Iterator[ModelAction]:
    """What this replica lacks. A model of which nothing is wished is left as it is.

    `loads` is what the replica confirmed of each model: after another load was wished, an older one may
    be ready there. A load that is under way is left to who does it.
    """
    for model, wish in desired_models.items():
        load, ready = loads.get(model, ""), index.is_ready(model)
        if index.is_changing(model) or is_in_progress(load):
            continue
        if wish.is_loaded and (not ready or is_behind(wish, load)):
            yield ModelAction(model, True, wish.parameters, wish.load_id)
        elif ready and not wish.is_loaded:
            yield ModelAction(model, False, {})


def is_behind(desired: DesiredModel, confirmed_load: str) -> bool:
    """Whether another load is wished than the replica confirmed; not while one is under way."""
    return (
        desired.is_loaded
        and confirmed_load != desired.load_id != ""
        and not is_in_progress(confirmed_load)
    )


@dataclass(frozen=True)
class Backoff:
    """When a model that failed may be tried again."""

    failures: int = 0
    not_before: float = 0.0

    def with_failure(self, now: float) -> Backoff:
        pause_s = min(
            INITIAL_BACKOFF_S * 2 ** min(self.failures, MAX_BACKOFF_DOUBLINGS), MAX_BACKOFF_S
        )
        return Backoff(self.failures + 1, now + pause_s)


@dataclass(frozen=True)
class ReplicaStatus:
    """A replica, as readiness looks at it."""

    address: str
    state: HealthState
    index: Index
    reason: str = ""


@dataclass(frozen=True)
class Readiness:
    """Whether requests can be served, and what is missing where."""

    is_ready: bool
    document: Mapping[str, Any]


def check_readiness(
    replicas: Collection[ReplicaStatus],
    declared: Mapping[str, DeclaredModel],
    required: Mapping[str, DeclaredModel],
    quorum: int,
    *,
    is_draining: bool,
) -> Readiness:
    """Return whether requests can be served: a replica is alive, and every required model is ready on
    `quorum` replicas, or on all if there are fewer. Declared models that are not required are `pending`
    until they are ready.
    """
    missing = find_unready_models(replicas, required, quorum)
    waiting = {name: model for name, model in declared.items() if required.get(name) != model}
    pending = find_unready_models(replicas, waiting, quorum)
    alive = any(replica.state <= HealthState.EJECTED for replica in replicas)
    ready = alive and not missing and not is_draining
    document: dict[str, Any] = {"ready": ready}
    if is_draining:
        document["draining"] = True
    document["replicas"] = {
        replica.address: "ready" if replica.state == HealthState.UP else describe_state(replica)
        for replica in replicas
    }
    if missing:
        document["missing"] = missing
    if pending:
        document["pending"] = pending
    return Readiness(ready, document)


def find_unready_models(
    replicas: Collection[ReplicaStatus], models: Mapping[str, DeclaredModel], quorum: int
) -> dict[str, dict[str, str]]:
    """Return the models that are ready on fewer than `quorum` replicas: where they are not, and why."""
    needed = max(min(quorum, len(replicas)), 1)
    found = {}
    for name, model in models.items():
        serving = [
            replica
            for replica in replicas
            if replica.state <= HealthState.EJECTED and has_model(replica.index, model)
        ]
        if len(serving) < needed:
            found[name] = {
                replica.address: explain_unready(replica, model)
                for replica in replicas
                if replica not in serving
            }
    return found


def update_required_models(
    required: Mapping[str, DeclaredModel],
    declared: Mapping[str, DeclaredModel],
    replicas: Collection[ReplicaStatus],
    quorum: int,
) -> dict[str, DeclaredModel]:
    """Return the models that readiness requires from now on: of each declared model what was ready last.

    A model that is added to a models file, or other versions of one, must not take a running gateway out
    of service.
    """
    unready = find_unready_models(replicas, declared, quorum)
    found = {name: model for name, model in declared.items() if name not in unready}
    return {name: model for name, model in required.items() if name in declared} | found


def has_model(index: Index, model: DeclaredModel) -> bool:
    return all(index.is_ready(model.name, version) for version in model.versions or ("",))


def describe_state(replica: ReplicaStatus) -> str:
    state = replica.state.name.lower()
    return f"{state}: {replica.reason}" if replica.reason else state


def explain_unready(replica: ReplicaStatus, model: DeclaredModel) -> str:
    if replica.state > HealthState.EJECTED:
        return describe_state(replica)
    found = replica.index.model_state(model.name)
    return f"{found.state}: {found.reason}" if found.reason else found.state
