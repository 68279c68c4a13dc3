"""A run: steps of faults and changes, after each of which the fleet must become as acknowledged."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Final, TypeGuard

import httpx

from tests.chaos.actions import Action, Response, draw_step, pack_model
from tests.chaos.answers import RIVAL, Violation, describe, judge
from tests.chaos.checks import count_actions, find_differences, find_log_fault
from tests.chaos.fleet import GATEWAYS, MODELS, Failure, Fleet, start_fleet
from tests.chaos.world import (
    ENSEMBLES,
    LOADED,
    NO_WISH,
    STEPS,
    UNLOADED,
    Details,
    Model,
    World,
    list_possible_worlds,
)
from tests.support.keys import ADMIN, bearer
from tests.support.wait import TIMEOUT_S

SETTLE_S: Final = 15.0  # from the end of a step until the fleet is as acknowledged
GRACE_S: Final = 3.0  # after a fault, in which a request may fail
HOLD_S: Final = 3.0  # in which the fleet must stay as it is, and no gateway corrects anything
CALM_S: Final = 60.0  # the same after the last step
LOOK_PAUSE_S: Final = 0.2
TAIL_LINES: Final = 40
LOAD_FAILED: Final = "LOAD_FAILED"


@dataclass(frozen=True)
class Interruption:
    """A fault, and when it ran."""

    target: str
    began: float
    ended: float

    def excuses(self, failure: Failure, grace_s: float) -> bool:
        is_concerned = self.target.startswith("replica") or self.target == failure.gateway
        is_late = failure.began > self.ended + grace_s
        return is_concerned and not is_late and failure.ended >= self.began


@dataclass
class Run:
    """The steps so far. `patience` multiplies the times, for a machine that is busy."""

    fleet: Fleet
    pool: ThreadPoolExecutor
    patience: float
    world: World
    slowest_s: float = 0.0
    crashes: int = 0
    _has_failed_load: bool = False  # in this step or the last one
    _last_targets: list[str] = field(default_factory=list)
    _interruptions: list[Interruption] = field(default_factory=list)

    def take_step(self, actions: Sequence[Action]) -> str:
        """Return what happened. Raises `Violation`."""
        began = time.monotonic()
        running = [self.pool.submit(act, self.fleet, action) for action in actions]
        responses = [each.result() for each in running]
        self.fleet.start_killed()
        unanswered = [
            action.model
            for action, response in zip(actions, responses, strict=True)
            if action.changes_files and isinstance(response, httpx.HTTPError)
        ]
        for model in unanswered:
            self._remove_files(model)
        codes = [each.json().get("code") for each in responses if is_error(each)]
        self._has_failed_load = LOAD_FAILED in codes or self._has_failed_load
        targets = [action.target for action in actions if action.target]
        targets += self._restart_crashed(began)
        ended = time.monotonic()
        self._interruptions += [Interruption(target, began, ended) for target in targets]
        happened = "; ".join(map(describe, actions, responses))
        try:
            worlds = self._find_worlds(actions, responses, targets)
            removed = dict.fromkeys(unanswered, Model())
            settled_s = self.settle(
                [replace(world, models={**world.models, **removed}) for world in worlds]
            )
            self._check_background()
            if logged := find_log_fault(self.fleet):
                raise Violation(logged)
        except Violation as exc:
            raise Violation(f"{happened}\n{exc}") from None
        self._last_targets = targets
        self._has_failed_load = LOAD_FAILED in codes
        self.slowest_s = max(self.slowest_s, settled_s)
        return f"{happened}: settled in {settled_s:.1f} s"

    def _remove_files(self, model: str) -> None:
        """Upload a model again and remove it, as its owner would who got no answer.

        A gateway that is killed meanwhile can leave files that are not loaded, and hidden ones for a day.
        """
        ended = time.monotonic() + SETTLE_S * self.patience
        gateways = cycle(self.fleet.gateways.values())
        pending = [("PUT", pack_model(Details(model, 1, "", 0))), ("DELETE", {})]
        while pending and time.monotonic() < ended:
            method, body = pending[0]
            with suppress(httpx.HTTPError):
                url = f"{next(gateways).url}/v1/models/{model}"
                answer = httpx.request(
                    method, url, headers=bearer(ADMIN), timeout=TIMEOUT_S, **body
                )
                if answer.is_success:
                    pending.pop(0)
                    continue
            time.sleep(LOOK_PAUSE_S)
        for path in (self.fleet.folder / "models").glob(".triton-gateway-*"):
            path.unlink()

    def _restart_crashed(self, began: float) -> list[str]:
        """Start the Tritons that a failed load has ended.

        Triton 2.51 dies of one in a hundred while the machine is busy, also without a gateway.

        Raises `Violation` if one ended without a failed load.
        """
        crashed = self.fleet.restart_crashed()
        if crashed and not self._has_failed_load:
            raise Violation(f"{crashed[0]} ended by itself")
        self.crashes += len(crashed)
        self._interruptions += [Interruption(name, began, time.monotonic()) for name in crashed]
        return crashed

    def _find_worlds(
        self,
        actions: Sequence[Action],
        responses: Sequence[Response | None],
        targets: Sequence[str],
    ) -> list[World]:
        """Return the worlds that are possible after the answers. Raises `Violation`."""
        models = [action.model for action in actions if action.model]
        causes = [*targets, *self._last_targets]
        causes += [RIVAL] * (len(set(models)) < len(models))
        answers = [
            judge(action, response, causes)
            for action, response in zip(actions, responses, strict=True)
            if action.effect is not None
        ]
        worlds = list_possible_worlds(self.world, answers)
        if not worlds:
            told = [each.text for each in responses if isinstance(each, httpx.Response)]
            raise Violation("\n".join([f"the answers do not follow from {self.world}:", *told]))
        return worlds

    def settle(self, possible: Sequence[World], hold_s: float = HOLD_S) -> float:
        """Wait until the fleet is in one of these worlds, and stays so; return the seconds until it was."""
        began = time.monotonic()
        since: float | None = None
        actions: dict[str, list[str]] = {}
        while since is None or time.monotonic() - since < hold_s:
            if self._restart_crashed(began):
                began = time.monotonic()
                since = None
            now = time.monotonic()
            differences: list[list[str]] = []
            for world in possible:
                differences.append(find_differences(self.fleet, world))
                if not differences[-1]:
                    self.world = world
                    seen = count_actions(self.fleet)
                    since = now if since is None or seen != actions else since
                    actions = seen
                    break
            else:
                since = None
            if since in (None, now) and now - began > SETTLE_S * self.patience:
                nearest: list[str] = min(differences, key=len)
                sentences = "\n".join(nearest) or "the gateways go on to load and unload models"
                raise Violation(f"not settled after {now - began:.0f} s:\n{sentences}")
            time.sleep(LOOK_PAUSE_S)
        return since - began

    def _check_background(self) -> None:
        grace_s = GRACE_S * self.patience
        for failure in list(self.fleet.background.failures):
            if not any(each.excuses(failure, grace_s) for each in self._interruptions):
                took_s = failure.ended - failure.began
                raise Violation(
                    f"an inference through {failure.gateway} failed outside of a fault, after "
                    f"{took_s:.1f} s: {failure.reason}"
                )


def is_error(response: Response | None) -> TypeGuard[httpx.Response]:
    return isinstance(response, httpx.Response) and not response.is_success


def act(fleet: Fleet, action: Action) -> Response | None:
    time.sleep(action.delay_s)
    return action.run(fleet)


def start_models(fleet: Fleet) -> World:
    """Load the first of the models that change, and of the ensembles; unload the others."""
    first, *others = MODELS
    loaded, *unloaded = ENSEMBLES
    wishes = {first: LOADED, **dict.fromkeys(others, UNLOADED)}
    wishes |= {loaded: LOADED, **dict.fromkeys(unloaded, UNLOADED)}
    for name, wish in wishes.items():
        verb = "load" if wish == LOADED else "unload"
        url = f"{fleet.gateways[GATEWAYS[0]].url}/v2/repository/models/{name}/{verb}"
        httpx.post(url, headers=bearer(ADMIN), timeout=TIMEOUT_S).raise_for_status()
    models = {name: Model(wishes[name], {1: 0}) for name in MODELS}
    return World(models, {name: wishes.get(name, NO_WISH) for name in STEPS})


def run(
    folder: Path,
    seed: int,
    steps: int,
    *,
    excluded: Collection[str] = (),
    patience: float = 1.0,
    say: Callable[[str], None] = print,
) -> None:
    """Raises `Violation` after the first step that breaks a rule."""
    # The pool is left after the fleet, whose end ends what it waits for.
    with ThreadPoolExecutor(2) as pool, start_fleet(folder) as fleet:
        run = Run(fleet, pool, patience, start_models(fleet))
        run.settle([run.world])
        for number in range(1, steps + 1):
            try:
                happened = run.take_step(draw_step(seed, number, excluded))
            except Violation as exc:
                for name, gateway in fleet.gateways.items():
                    say("\n  ".join([f"the last lines of {name}:", *gateway.lines[-TAIL_LINES:]]))
                raise Violation(f"SEED={seed} step {number}: {exc}") from None
            say(f"step {number}: {happened}")
        run.settle([run.world], CALM_S)
        counts = " and ".join(
            f"{count} through {at}" for at, count in fleet.background.answered.items()
        )
        say(
            f"the slowest step settled in {run.slowest_s:.1f} s; inferences answered: {counts}; "
            f"Tritons that a failed load ended: {run.crashes}"
        )
