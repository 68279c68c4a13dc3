"""Plans of the reconciler: corrections that something else undoes, and steps of ensembles."""

from __future__ import annotations

import pytest

from gateway.fleet.index import LOADING, READY, UNAVAILABLE, Index, VersionState
from gateway.repository.ensembles import find_steps
from gateway.repository.reconcile_plan import (
    CORRECTION_MEMORY_S,
    Backoff,
    ModelAction,
    PlannedAction,
    find_dependents,
    find_needed_models,
    plan_actions,
    with_correction,
)
from gateway.repository.state.content import DesiredModel, new_load_token


def test_corrections_that_are_undone_are_made_less_and_less_often() -> None:
    corrections: Backoff | None = None
    now, pauses = 1000.0, []
    for _ in range(12):
        corrections = with_correction(corrections, now)
        pauses.append(corrections.not_before - now)
        now = corrections.not_before + 1
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


def test_correction_that_lasted_is_forgotten() -> None:
    corrections = with_correction(with_correction(None, 1000), 1001)
    assert corrections.repetitions == 1
    later = corrections.not_before + CORRECTION_MEMORY_S + 1
    assert with_correction(corrections, later) == Backoff(0, later)


# Steps. "e:a,b" are the steps of e; "e+ a-" are the desired states; "a e~" are ready and changing models.


def parse_steps(text: str) -> dict[str, frozenset[str]]:
    pairs = (each.split(":") for each in text.split())
    return {name: frozenset(filter(None, steps.split(","))) for name, steps in pairs}


def parse_desired(text: str) -> dict[str, DesiredModel]:
    return {each[:-1]: DesiredModel(each[-1] == "+", {}, 1) for each in text.split()}


def parse_states(text: str) -> Index:
    states = {"~": LOADING, "!": UNAVAILABLE}
    return Index(
        {
            each.strip("~!"): {"1": VersionState(states.get(each[-1], READY))}
            for each in text.split()
        }
    )


@pytest.mark.parametrize(
    ("desired", "states", "steps", "failed", "unloaded"),
    [
        ("a-", "a", "a:", "", "a"),
        # Steps of what is desired, on all levels; of what others loaded; not of what is to be unloaded.
        ("e+ a-", "a e", "a: e:a", "", ""),
        ("g+ a-", "a e g", "a: e:a g:e", "", ""),
        ("a-", "a e", "a: e:a", "", ""),
        ("e- a-", "a e", "a: e:a", "", "a e"),
        ("e- a- f+ b-", "a b e f", "a: b: e:a,b f:b", "", "a e"),
        # An ensemble that is a step of a desired one keeps its own steps.
        ("g+ e- a-", "a e g", "a: e:a g:e", "", ""),
        # Unknown steps: not read yet, of a load in progress, of a desired model that is not loaded yet.
        ("a-", "a e", "a:", "", ""),
        ("a-", "a e~", "a: e:", "", ""),
        ("e+ a-", "a e!", "a:", "", ""),
        # The steps are known from before; the load failed; the replica does not have the model.
        ("e+ a-", "a e!", "a: e:", "", "a"),
        ("e+ a-", "a e!", "a:", "e", "a"),
        ("e+ a-", "a", "a:", "", "a"),
    ],
)
def test_plan_unloads_no_step_of_a_model_that_stays(
    desired: str, states: str, steps: str, failed: str, unloaded: str
) -> None:
    models, index = parse_desired(desired), parse_states(states)
    loads = dict.fromkeys(models, "1")
    needed = find_needed_models(
        models, index, loads, steps=parse_steps(steps), failed=frozenset(failed.split())
    )
    planned = plan_actions(models, index, loads, needed)
    assert {each.model for each in planned if not each.is_load} == set(unloaded.split())


def test_load_in_progress_hides_the_steps() -> None:
    models, index = parse_desired("e+ a-"), parse_states("a e")
    loads = {"e": new_load_token("another")}
    assert find_needed_models(models, index, loads, steps=parse_steps("a: e:")) is None


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


@pytest.mark.parametrize(
    ("earlier", "later", "desired_later", "after_s", "is_reversal"),
    [
        ("load e", "unload a", "e+ a-", 1, True),
        ("unload a", "load e", "e+ a-", 60, True),
        ("unload a", "load e", "e+ a-", 61, False),
        ("unload a", "load e", "a-", 1, False),  # e was desired only later
        ("unload a", "load a", "e+ a+", 1, False),
        ("load e", "unload b", "e+ a- b-", 1, False),  # no step of e
        ("load e", "load e", "e+ a-", 1, False),  # something else unloaded it
    ],
)
def test_plan_that_undoes_an_earlier_one_is_a_reversal_unless_a_call_came_between(
    earlier: str, later: str, desired_later: str, after_s: float, is_reversal: bool
) -> None:
    def plan(text: str, desired: str, at: float) -> PlannedAction:
        verb, model = text.split()
        return PlannedAction(ModelAction(model, verb == "load", {}), parse_desired(desired), at)

    first = plan(earlier, "e+ a- b-", 1000)
    second = plan(later, desired_later, 1000 + after_s)
    assert second.reverses(first, parse_steps("a: b: e:a")) == is_reversal


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({}, set()),
        ({"ensemble_scheduling": {"step": [{"model_name": "a"}, {"model_name": "b"}]}}, {"a", "b"}),
        ({"parameters": {"gateway.steps": {"string_value": "a, b,"}}}, {"a", "b"}),
        ({"parameters": []}, set()),
        ({"parameters": {"gateway.steps": "a"}}, set()),
    ],
)
def test_steps_are_read_from_the_config(config: object, steps: set[str]) -> None:
    assert find_steps(config) == steps
