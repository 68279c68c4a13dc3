"""Plans within a budget as rows: the replica for a load, what it evicts, idle models, facts of configs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gateway.repository.model_facts import ModelFacts, parse_model_facts
from gateway.repository.placement import (
    Eviction,
    LoadedModel,
    ModelBudget,
    NoPlacement,
    ReplicaLoad,
    plan_idle_unloads,
    plan_placement,
)
from gateway.repository.plan import ModelAction, find_all_steps
from gateway.repository.state.content import DEMAND

EVICTIONS = {"": Eviction.NOW, "+": Eviction.LATER, "!": Eviction.NEVER}
MODEL = re.compile(r"([+!]?)([a-z])(\d*)(?:@(\d+))?(?:>([a-z]+))?")


def parse_replica(text: str, name: str = "r1", outstanding: int = 0) -> ReplicaLoad:
    """Return a replica with models such as `+e7@3>ab`: in use, 7 MB, last used at 3, with parts a and b."""
    models = []
    for word in text.split():
        match = MODEL.fullmatch(word)
        assert match is not None
        sign, model, size, used, parts = match.groups()
        models.append(
            LoadedModel(
                model,
                int(size or 0),
                float(used or 0),
                EVICTIONS[sign],
                frozenset(parts or ""),
            )
        )
    return ReplicaLoad(name, tuple(models), outstanding)


# The replicas, the wanted models, the budget; the replica and its victims, or why there is none.
PLACEMENTS = [
    ("", "w", "1/0", "never: "),
    ("a@1 b@2|c@9", "w", "2/0", "r2"),  # the room that there is
    ("a@1|", "w", "2/0", "r2"),  # the most room
    ("a5|b4", "w", "2/0", "r2"),
    ("a@2 b@1", "w", "2/0", "r1 b"),  # the least recently used
    ("a b", "w", "2/0", "r1 a"),
    ("a@2|b@1", "w", "1/0", "r2 b"),
    ("a@3 b@1|c@2", "w", "1/0", "r2 c"),
    ("a2@1 b3@2 c9@3", "w4", "0/14", "r1 a b"),
    ("a6", "w4", "0/10", "r1"),
    ("a7", "w4", "0/10", "r1 a"),
    ("a", "w9", "0/8", "never: a"),
    ("+a", "w", "1/0", "later: a"),
    ("!a", "w", "1/0", "never: a"),
    ("!a|+b", "w", "1/0", "later: a b"),
    ("+a !b", "w", "1/0", "never: a b"),
    ("+a@1 b@2", "w", "2/0", "r1 b"),
    ("p", "w p", "1/0", "never: p"),  # its own part stays
    ("p1", "w p1", "2/0", "r1"),  # and counts once
    ("+e>p p", "w", "2/0", "later: e p"),  # a part of an ensemble that stays
    ("!e>p p", "w", "2/0", "never: e p"),
    ("!e>p p@1 a@2", "w", "3/0", "r1 a"),
    ("e@5>p p@1 a@4", "w", "3/0", "r1 a"),
    ("e@5>p p@1 a@6", "w", "3/0", "r1 e"),
    ("e@5>p p@1 a@6", "w", "2/0", "r1 e p"),  # the part was used when the ensemble was
    ("e@5>p p@1 a@4", "w", "2/0", "r1 a e"),
    ("e@5>ip i@1>p p@1 a@9", "w", "2/0", "r1 e i p"),  # an ensemble of ensembles
]


def describe(plan: list[ModelAction] | NoPlacement) -> str:
    if isinstance(plan, NoPlacement):
        return f"{'never' if plan.is_final else 'later'}: {' '.join(plan.holders)}"
    *evictions, load = plan
    assert load.is_load
    assert {(each.is_load, each.replica) for each in evictions} <= {(False, load.replica)}
    return " ".join((load.replica, *(each.model for each in evictions)))


@pytest.mark.parametrize(("fleet", "wanted", "budget", "expected"), PLACEMENTS)
def test_load_goes_where_room_is_or_the_oldest_victims_are(
    fleet: str, wanted: str, budget: str, expected: str
) -> None:
    texts = fleet.split("|") if fleet else []
    replicas = [parse_replica(text, f"r{number}") for number, text in enumerate(texts, 1)]
    sizes = {word[0]: int(word[1:] or 0) for word in wanted.split()}
    limits = ModelBudget(*map(int, budget.split("/")))
    assert describe(plan_placement("w", DEMAND, replicas, sizes, limits)) == expected


def test_equal_replicas_are_told_apart_by_their_requests_and_names() -> None:
    fleet = [parse_replica("", "b"), parse_replica("", "c"), parse_replica("", "a", outstanding=1)]
    assert describe(plan_placement("w", DEMAND, fleet, {"w": 0}, ModelBudget())) == "b"


@pytest.mark.parametrize(
    ("models", "idle"),
    [
        ("a@1 b@2 c@3", "ab"),
        ("+a@1 b@5 !c@1", ""),
        ("e@2>p p@1 b@9", "ep"),  # an ensemble before its parts
        ("e@4>p p@1 b@9", ""),
        ("+e@1>p p@1", ""),
    ],
)
def test_models_that_nobody_used_since_2_are_idle(models: str, idle: str) -> None:
    unloads = plan_idle_unloads(parse_replica(models), now=7.0, idle_s=5.0)
    assert "".join(each.model for each in unloads) == idle


MEMORY = "gateway.memory_mb"
FACTS: list[tuple[Any, ModelFacts]] = [
    ({"parameters": {MEMORY: {"string_value": " 512 "}}}, ModelFacts(memory_mb=512)),
    ({"ensemble_scheduling": {"step": [{"model_name": "a"}]}}, ModelFacts(frozenset("a"))),
    (
        {"parameters": {"gateway.steps": {"string_value": "a, b"}}},
        ModelFacts(frozenset("ab")),
    ),
    *(
        ({"parameters": {MEMORY: {"string_value": wrong}}}, ModelFacts())
        for wrong in ("-1", "many", "1e9", "9" * 10, "٣")
    ),
    (None, ModelFacts()),
    ([1], ModelFacts()),
    ({"parameters": []}, ModelFacts()),
    ({"parameters": {MEMORY: [1]}}, ModelFacts()),
    ({"ensemble_scheduling": {"step": 1}}, ModelFacts()),
    ({"ensemble_scheduling": {"step": [1]}}, ModelFacts()),
]


@pytest.mark.fault(
    "a response is valid HTTP but not a Triton response: JSON of other types, shapes and"
)
@pytest.mark.parametrize(("config", "facts"), FACTS)
def test_facts_of_a_model_are_read_from_its_config_or_unknown(
    config: Any, facts: ModelFacts
) -> None:
    """The response of one replica must not end the loads of all models."""
    assert parse_model_facts(config) == facts


def test_ensemble_of_ensembles_has_the_parts_of_both() -> None:
    names = {"o": "il", "i": "fo"}  # a circle ends, too
    steps = {name: frozenset(parts) for name, parts in names.items()}
    assert find_all_steps(("o",), steps) == set("oilf")
    assert find_all_steps(("x",), steps) == frozenset()
