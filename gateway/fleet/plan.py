"""What is to be done so that a replica has the models it should have. Values only: no clock, no I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.errors import Forbidden, Malformed
from gateway.fleet.declared import Declared
from gateway.fleet.health import State
from gateway.fleet.index import Index
from gateway.fleet.uploads import check_parameters
from gateway.state.loads import is_under_way
from gateway.state.wishes import Wish

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 300.0
MOST_DOUBLINGS: Final = 16  # then it is the longest, and a power without bound would not be a float


@dataclass(frozen=True)
class Action:
    """A load or an unload of a model."""

    model: str
    load: bool
    parameters: Mapping[str, Any]
    load_id: str = ""  # what the replica confirms when it is done


def wanted(wishes: Mapping[str, Wish], declared: Mapping[str, Declared]) -> dict[str, Wish]:
    """What should be loaded and what not; a declared model is, whatever was asked by the API.

    The parameters of its last load stay: that is how one changes the config of a declared model. One
    that was loaded without any has those of its declaration.
    """
    found = dict(wishes)
    for name, model in declared.items():
        if name not in found or not found[name].loaded or not found[name].parameters:
            revision = found[name].revision if name in found and found[name].loaded else 0
            found[name] = Wish(True, model.parameters, revision, model.digest)
    return found


def without_uploads(
    wishes: Mapping[str, Wish], *, uploads: bool
) -> tuple[dict[str, Wish], dict[str, str]]:
    """The wishes that may be carried out; and of each other one why not.

    Whoever can write to the state is not thereby somebody who may bring code.
    """
    found: dict[str, Wish] = {}
    ignored: dict[str, str] = {}
    for model, wish in wishes.items():
        try:
            check_parameters(wish.parameters, uploads=uploads)
        except (Forbidden, Malformed) as exc:
            ignored[model] = exc.detail
        else:
            found[model] = wish
    return found, ignored


def actions(wishes: Mapping[str, Wish], index: Index, loads: Mapping[str, str]) -> Iterator[Action]:
    """What this replica lacks. A model of which nothing is wished is left as it is.

    `loads` is what the replica confirmed of each model: after another load was wished, an older one may
    be ready there. A load that is under way is left to who does it.
    """
    for model, wish in wishes.items():
        load, ready = loads.get(model, ""), index.ready(model)
        if index.busy(model) or is_under_way(load):
            continue
        if wish.loaded and (not ready or is_behind(wish, load)):
            yield Action(model, True, wish.parameters, wish.load_id)
        elif ready and not wish.loaded:
            yield Action(model, False, {})


def is_behind(wish: Wish, load: str) -> bool:
    """Whether another load is wished than the replica confirmed; not while one is under way."""
    return wish.loaded and load != wish.load_id != "" and not is_under_way(load)


@dataclass(frozen=True)
class Backoff:
    """When a model that failed may be tried again."""

    failures: int = 0
    not_before: float = 0.0

    def failed(self, now: float) -> Backoff:
        pause_s = min(FIRST_PAUSE_S * 2 ** min(self.failures, MOST_DOUBLINGS), LONGEST_PAUSE_S)
        return Backoff(self.failures + 1, now + pause_s)


@dataclass(frozen=True)
class Seen:
    """A replica, as readiness looks at it."""

    address: str
    state: State
    index: Index
    reason: str = ""


@dataclass(frozen=True)
class Readiness:
    """Whether requests can be served, and what is missing where."""

    ready: bool
    document: Mapping[str, Any]


def readiness(
    replicas: Collection[Seen],
    declared: Mapping[str, Declared],
    required: Mapping[str, Declared],
    quorum: int,
    *,
    draining: bool,
) -> Readiness:
    """Return whether requests can be served: a replica is alive, and every required model is ready on
    `quorum` replicas, or on all if there are fewer. Declared models that are not required are `pending`
    until they are ready.
    """
    missing = absent(replicas, required, quorum)
    waiting = {name: model for name, model in declared.items() if required.get(name) != model}
    pending = absent(replicas, waiting, quorum)
    alive = any(replica.state <= State.EJECTED for replica in replicas)
    ready = alive and not missing and not draining
    document: dict[str, Any] = {"ready": ready}
    if draining:
        document["draining"] = True
    document["replicas"] = {
        replica.address: "ready" if replica.state == State.UP else told(replica)
        for replica in replicas
    }
    if missing:
        document["missing"] = missing
    if pending:
        document["pending"] = pending
    return Readiness(ready, document)


def absent(
    replicas: Collection[Seen], models: Mapping[str, Declared], quorum: int
) -> dict[str, dict[str, str]]:
    """Return the models that are ready on fewer than `quorum` replicas: where they are not, and why."""
    needed = max(min(quorum, len(replicas)), 1)
    found = {}
    for name, model in models.items():
        serving = [
            replica
            for replica in replicas
            if replica.state <= State.EJECTED and has(replica.index, model)
        ]
        if len(serving) < needed:
            found[name] = {
                replica.address: reason(replica, model)
                for replica in replicas
                if replica not in serving
            }
    return found


def next_required(
    required: Mapping[str, Declared],
    declared: Mapping[str, Declared],
    replicas: Collection[Seen],
    quorum: int,
) -> dict[str, Declared]:
    """Return the models that readiness requires from now on: of each declared model what was ready last.

    A model that is added to a models file, or other versions of one, must not take a running gateway out
    of service.
    """
    unready = absent(replicas, declared, quorum)
    found = {name: model for name, model in declared.items() if name not in unready}
    return {name: model for name, model in required.items() if name in declared} | found


def has(index: Index, model: Declared) -> bool:
    return all(index.ready(model.name, version) for version in model.versions or ("",))


def told(replica: Seen) -> str:
    state = replica.state.name.lower()
    return f"{state}: {replica.reason}" if replica.reason else state


def reason(replica: Seen, model: Declared) -> str:
    if replica.state > State.EJECTED:
        return told(replica)
    found = replica.index.state(model.name)
    return f"{found.state}: {found.reason}" if found.reason else found.state
