"""Plans of the reconciler as rows: loads, replacements, unloads, steps of ensembles, back-off."""

from __future__ import annotations

import re

import pytest

from gateway.fleet.index import LOADING, READY, UNAVAILABLE, Index, VersionState
from gateway.repository.models_file import DeclaredModel
from gateway.repository.plan import (
    ACTION_MEMORY_S,
    Backoff,
    ModelAction,
    ReplicaView,
    find_dependents,
    find_needed_models,
    merge_declared_models,
    plan_actions,
)
from gateway.repository.state.content import ALL, DesiredModel, Origin

# "m+4 n-5" are desired models with their generations: to be loaded, to be unloaded. "m@4 n! o~" are the
# states of a replica: ready with the confirmed generation, not ready, being loaded; *m has an action in
# progress, and the next action of ^m has to wait. "e:a,b" are the steps of e.
STATES = {"": READY, "!": UNAVAILABLE, "~": LOADING}
MODEL = re.compile(r"([*^]?)(\w)([!~]?)(?:@(\d+))?")


def parse_desired(text: str) -> dict[str, DesiredModel]:
    return {
        each[0]: DesiredModel(ALL if each[1] == "+" else 0, {}, int(each[2:] or 1))
        for each in text.split()
    }


def parse_replica(text: str, name: str = "1", failed: str = "") -> ReplicaView:
    models: dict[str, dict[str, VersionState]] = {}
    confirmed: dict[str, str] = {}
    marked: dict[str, set[str]] = {"": set(), "*": set(), "^": set()}
    for word in text.split():
        match = MODEL.fullmatch(word)
        assert match is not None
        mark, model, state, generation = match.groups()
        models[model] = {"1": VersionState(STATES[state])}
        if generation:
            confirmed[model] = generation
        marked[mark].add(model)
    return ReplicaView(
        name,
        Index(models),
        confirmed=confirmed,
        running=marked["*"],
        paused=marked["^"],
        failed=frozenset(failed.split()),
    )


def parse_steps(text: str) -> dict[str, frozenset[str]]:
    pairs = (each.split(":") for each in text.split())
    return {name: frozenset(filter(None, steps.split(","))) for name, steps in pairs}


def describe(actions: list[ModelAction]) -> str:
    return " ".join(f"{each.replica}{'+' if each.is_load else '-'}{each.model}" for each in actions)


@pytest.mark.parametrize(
    ("desired", "fleet", "actions"),
    [
        ("", "m@1 | m!", ""),  # what nobody desires is left alone
        ("m+1", "m@1 | m@1", ""),
        ("m+1", "m! | m!@1 | n", "1+m 2+m 3+m"),  # not ready: everywhere at once
        ("m+1 n+1", "m! n!", "1+m 1+n"),
        ("m+1", "m~ | *m! | ^m!", ""),
        ("m+2", "m | m@1 | m@2", "1+m"),  # unknown and earlier generations are loaded again,
        ("m+2", "m@1 | m@1 | m!", "1+m 3+m"),  # where it is served one after the other
        ("m+2", "*m@1 | m@1", ""),
        ("m+2", "^m@1 | m@1", "2+m"),
        ("m+2", "m~ | m@1", "2+m"),
        ("m+2 n+3", "m@1 n@1 | m@1 n@1", "1+m 1+n"),
        ("m-2", "m@1 | m! | m~ | *m | ^m | m", "1-m 6-m"),
    ],
)
def test_replicas_get_what_is_desired(desired: str, fleet: str, actions: str) -> None:
    views = [parse_replica(text, str(number)) for number, text in enumerate(fleet.split("|"), 1)]
    assert describe(plan_actions(parse_desired(desired), views, {})) == actions


def test_load_has_the_desired_parameters_and_generation() -> None:
    desired = {"m": DesiredModel(ALL, {"config": "{}"}, 2)}
    (action,) = plan_actions(desired, [parse_replica("m@1")], {})
    assert action == ModelAction("m", True, {"config": "{}"}, "2", "1")


@pytest.mark.parametrize(
    ("desired", "fleet", "actions"),
    [
        ("m+2", "m! | n | m~ | ^m!", "1+m 2+m 3+m 4+m"),
        ("m+2", "m@1 | m! | m@1 | m@2", "1+m 2+m"),  # served ones one after the other
        ("m+2", "*m@1 | m! | m@1", "2+m"),
        ("m-2", "m@1 | m! | m~ | n", "1-m 2-m 3-m 4-m"),
    ],
)
def test_call_is_tried_on_every_replica(desired: str, fleet: str, actions: str) -> None:
    views = [parse_replica(text, str(number)) for number, text in enumerate(fleet.split("|"), 1)]
    assert describe(plan_actions(parse_desired(desired), views, {}, is_call=True)) == actions


def test_declared_model_is_desired_whatever_the_api_requested() -> None:
    model = DeclaredModel("a", (), {"x": 1})
    declared = {"a": model}
    expected = DesiredModel(ALL, {"config": {"x": 1}}, 0, model.config_digest, Origin.declared)
    assert merge_declared_models({}, declared) == {"a": expected}
    assert expected.generation == f"/{model.config_digest}"
    assert merge_declared_models({"a": DesiredModel(0, {}, 6)}, declared) == {"a": expected}
    (loaded,) = merge_declared_models({"a": DesiredModel(ALL, {}, 6)}, declared).values()
    assert loaded.generation == f"6/{model.config_digest}"
    kept = {"a": DesiredModel(ALL, {"config": {"x": 2}}, 7)}
    assert merge_declared_models(kept, declared) == kept
    (plain,) = merge_declared_models({}, {"a": DeclaredModel("a")}).values()
    assert plain.generation == ""  # any load is sufficient
    assert plan_actions({"a": plain}, [parse_replica("a")], {}) == []


@pytest.mark.parametrize(
    ("desired", "states", "steps", "failed", "unloaded"),
    [
        ("a-", "a", "a:", "", "a"),
        # Steps of what is desired, on all levels; of what others loaded; not of what is to be unloaded.
        ("e+ a-", "a e@1", "a: e:a", "", ""),
        ("g+ a-", "a e g@1", "a: e:a g:e", "", ""),
        ("a-", "a e", "a: e:a", "", ""),
        ("e- a-", "a e", "a: e:a", "", "a e"),
        ("e- a- f+ b-", "a b e f@1", "a: b: e:a,b f:b", "", "a e"),
        # An ensemble that is a step of a desired one keeps its own steps.
        ("g+ e- a-", "a e g@1", "a: e:a g:e", "", ""),
        # Unknown steps: not read yet, of a load in progress, of a desired model that has not been loaded.
        ("a-", "a e", "a:", "", ""),
        ("a-", "a e~", "a: e:", "", ""),
        ("a-", "a *e", "a: e:", "", ""),
        ("e+ a-", "a e!", "a:", "", ""),
        ("e+2 a-", "a e@1", "a: e:", "", ""),
        # The steps are known from before; the load failed; the replica does not have the model.
        ("e+ a-", "a e!@1", "a: e:", "", "a"),
        ("e+ a-", "a e!", "a:", "e", "a"),
        ("e+ a-", "a", "a:", "", "a"),
    ],
)
def test_plan_unloads_no_step_of_a_model_that_stays(
    desired: str, states: str, steps: str, failed: str, unloaded: str
) -> None:
    models, replica = parse_desired(desired), parse_replica(states, failed=failed)
    needed = find_needed_models(models, replica, parse_steps(steps))
    planned = plan_actions(models, [replica], {replica.name: needed})
    assert {each.model for each in planned if not each.is_load} == set(unloaded.split())


@pytest.mark.parametrize(
    ("model", "steps", "dependents"),
    [
        ("a", "a: b:", []),
        ("a", "a: e:a f:a", ["e", "f"]),
        ("a", "a: e:a g:e z:g y:a", ["z", "g", "e", "y"]),  # each before its steps
        ("a", "a:p p:a", ["a", "p"]),  # models that call each other
    ],
)
def test_dependents_use_a_model_on_any_level(model: str, steps: str, dependents: list[str]) -> None:
    assert find_dependents(model, parse_steps(steps)) == dependents


def test_action_that_is_repeated_waits_longer_and_longer() -> None:
    """It failed, or something else undoes it."""
    backoff, now, pauses = Backoff(), 1000.0, []
    for _ in range(12):
        backoff = backoff.with_repetition(now)
        pauses.append(backoff.not_before - now)
        now = backoff.not_before + 1
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]
    assert not backoff.is_over(backoff.not_before + ACTION_MEMORY_S)
    assert backoff.is_over(backoff.not_before + ACTION_MEMORY_S + 1)
    assert Backoff(repetitions=5000).with_repetition(0).not_before == 300
