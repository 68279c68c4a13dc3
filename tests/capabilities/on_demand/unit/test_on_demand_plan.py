"""Loading on demand, as values: the replica for a load, its victims, the budget, idle models, copies."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.capabilities.on_demand.loader import (
    LastInference,
    parse_last_inference,
    update_last_inference,
)
from gateway.capabilities.on_demand.models import UNKNOWN_CALLER, ModelUsage, NoRoom
from gateway.capabilities.on_demand.plan import (
    EVICTABLE,
    Eviction,
    LoadedModel,
    LoadTurns,
    ModelBudget,
    ModelFacts,
    NoPlacement,
    Placement,
    ReplicaLoad,
    choose_placement,
    compute_retry_after_s,
    find_all_parts,
    find_idle_models,
    is_removable,
    parse_model_facts,
    plan_copies,
    plan_excess,
    plan_victims,
    protect_model,
    update_load_time,
    update_mean_demand,
)
from gateway.capabilities.on_demand.settings import MODEL_KEYS, CopyLimits
from gateway.capacity.admission import AdmissionQueue
from gateway.repository.models_file import BadModelsFile, parse_models_file
from gateway.telemetry.metrics import Metrics
from tests.capabilities.on_demand.support.on_demand import count_lru_loads

NAMES = [f"m{number}" for number in range(8)]
SIZES = st.integers(0, 20)
# An ensemble has parts of a lower number, so that no two models are parts of each other.
MODELS = st.builds(
    lambda picks: tuple(
        LoadedModel(
            NAMES[number],
            size,
            used,
            eviction,
            frozenset(NAMES[part] for part in parts if part < number and part in picks),
        )
        for number, (size, used, eviction, parts) in sorted(picks.items())
    ),
    st.dictionaries(
        st.integers(0, 6),
        st.tuples(
            SIZES,
            st.integers(0, 9).map(float),
            st.sampled_from(Eviction),
            st.sets(st.integers(0, 5), max_size=2),
        ),
        max_size=6,
    ),
)
BUDGETS = st.builds(ModelBudget, st.integers(0, 5), st.integers(0, 60))
WANTED = st.builds(
    lambda parts, size: {**parts, "m7": size},
    st.dictionaries(st.sampled_from(NAMES[:3]), SIZES),
    SIZES,
)


SHARED = LoadedModel("shared", eviction=Eviction.YIELDED)


def held_after(
    replica: ReplicaLoad, wanted: dict[str, int], victims: Iterable[str]
) -> dict[str, int]:
    gone = set(victims)
    held = {model.name: model.memory_mb for model in replica.models if model.name not in gone}
    return {**wanted, **held}


def evict_all_free(
    models: tuple[LoadedModel, ...], wanted: dict[str, int]
) -> tuple[LoadedModel, ...]:
    held = {model.name: model for model in models}
    while True:
        needed = {part for model in held.values() for part in model.parts} | wanted.keys()
        free = [
            name
            for name, model in held.items()
            if model.eviction in EVICTABLE and name not in needed
        ]
        if not free:
            return tuple(held.values())
        del held[free[0]]


@given(MODELS, WANTED, BUDGETS)
def test_victims_are_free_unneeded_and_no_more_than_necessary(
    models: tuple[LoadedModel, ...], wanted: dict[str, int], budget: ModelBudget
) -> None:
    replica = ReplicaLoad("a", models)
    victims = plan_victims(replica, wanted, budget)
    if victims is None:  # even the eviction of all that is free makes no room
        remaining = ReplicaLoad("a", evict_all_free(models, wanted))
        assert not budget.allows(held_after(remaining, wanted, ()).values())
        return
    names = {victim.name for victim in victims}
    assert len(names) == len(victims)
    staying = [model for model in models if model.name not in names]
    needed = {part for model in staying for part in model.parts} | wanted.keys()
    assert not names & needed
    assert {victim.eviction for victim in victims} <= set(EVICTABLE)
    assert budget.allows(held_after(replica, wanted, names).values())
    # With any one of them back, the budget or an ensemble's parts would be violated.
    for victim in victims:
        others = names - {victim.name}
        fits = budget.allows(held_after(replica, wanted, others).values())
        assert not fits or victim.parts & others


@given(st.lists(MODELS, min_size=1, max_size=3), WANTED, BUDGETS)
def test_load_goes_to_a_replica_with_room_or_with_the_oldest_victims(
    fleet: list[tuple[LoadedModel, ...]], wanted: dict[str, int], budget: ModelBudget
) -> None:
    replicas = [ReplicaLoad(f"r{number}", models) for number, models in enumerate(fleet)]
    plans = {each.name: plan_victims(each, wanted, budget) for each in replicas}
    placement = choose_placement(replicas, wanted, budget)
    if isinstance(placement, NoPlacement):
        assert set(plans.values()) == {None}
        patient = [plan_victims(each, wanted, budget, includes_busy=True) for each in replicas]
        assert placement.is_final == (set(patient) == {None})
        return
    chosen = plans[placement.replica]
    assert chosen is not None
    assert placement.victims == tuple(victim.name for victim in chosen)
    if any(plan == () for plan in plans.values()):
        assert not placement.victims
        return
    newest = {
        name: (
            any(victim.eviction is Eviction.YIELDED for victim in plan),
            max(victim.last_used for victim in plan),
        )
        for name, plan in plans.items()
        if plan is not None
    }
    assert newest[placement.replica] == min(newest.values())


@given(MODELS, BUDGETS)
def test_exceeded_budget_is_met_or_nothing_more_can_be_evicted(
    models: tuple[LoadedModel, ...], budget: ModelBudget
) -> None:
    victims = set(plan_excess(ReplicaLoad("a", models), budget))
    staying = [model for model in models if model.name not in victims]
    needed = {part for model in staying for part in model.parts}
    assert all(model.eviction in EVICTABLE for model in models if model.name in victims)
    assert not victims & needed
    evictable = [
        model for model in staying if model.eviction in EVICTABLE and model.name not in needed
    ]
    assert budget.allows(model.memory_mb for model in staying) or not evictable


@given(MODELS, st.integers(0, 9))
def test_idle_models_are_old_and_their_ensembles_idle_as_well(
    models: tuple[LoadedModel, ...], since: int
) -> None:
    idle = find_idle_models(ReplicaLoad("a", models), since)
    by_name = {model.name: model for model in models}
    assert all(by_name[name].last_used <= since for name in idle)
    for model in models:
        if model.name not in idle:
            assert not model.parts & set(idle)
    for number, name in enumerate(idle):  # an ensemble precedes its parts
        assert not by_name[name].parts & set(idle[:number])


OWN = LoadedModel("own", last_used=9.0)
PLACEMENTS: dict[str, tuple[list[list[LoadedModel]], int, Placement | NoPlacement]] = {
    "a model in use": (
        [[LoadedModel("old", eviction=Eviction.BUSY)]],
        1,
        NoPlacement(("old",), is_final=False),
    ),
    "a model of the API": (
        [[LoadedModel("kept", eviction=Eviction.NEVER)]],
        1,
        NoPlacement(("kept",), is_final=True),
    ),
    "a part of the model itself": ([[LoadedModel("part", 10)]], 1, Placement("a")),
    "no replica": ([], 1, NoPlacement((), is_final=True)),
    "a model of a caller that waits as well": ([[SHARED]], 1, Placement("a", ("shared",))),
    "a model that other callers use": (
        [[LoadedModel("used", eviction=Eviction.BUSY, protected_until=30.0)]],
        1,
        NoPlacement(("used",), is_final=False, protected_until=30.0),
    ),
    "not enough own models": ([[SHARED, OWN]], 1, Placement("a", ("own", "shared"))),
    "one model instead of two": ([[SHARED], [OWN, SHARED]], 1, Placement("a", ("shared",))),
    "an own and a shared model": ([[OWN, SHARED]], 2, Placement("a", ("own",))),
    "an own model on another replica": ([[SHARED], [OWN]], 1, Placement("b", ("own",))),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_placement_evicts_own_models_first_and_says_whether_waiting_makes_room(name: str) -> None:
    fleet, count, placement = PLACEMENTS[name]
    replicas = [ReplicaLoad("ab"[number], tuple(models)) for number, models in enumerate(fleet)]
    assert choose_placement(replicas, {"part": 10}, ModelBudget(count, 10)) == placement


@pytest.mark.fault(
    "a response is valid HTTP but not a Triton response: JSON of other types, shapes and"
)
def test_facts_of_a_model_are_read_from_its_config_or_unknown() -> None:
    """The response of one replica must not end the loads of all models."""
    config = {
        "parameters": {"gateway.memory_mb": {"string_value": " 512 "}},
        "ensemble_scheduling": {"step": [{"model_name": "a"}, {"model_name": "b"}]},
    }
    assert parse_model_facts(config) == ModelFacts(512, frozenset("ab"))
    for wrong in ("-1", "many", "1e9", "9" * 99, "٣"):
        config = {"parameters": {"gateway.memory_mb": {"string_value": wrong}}}
        assert parse_model_facts(config).memory_mb == 0
    documents: tuple[Any, ...] = (
        {},
        None,
        [1],
        {"parameters": []},
        {"parameters": {"gateway.memory_mb": [1]}},
        {"ensemble_scheduling": {"step": 1}},
        {"ensemble_scheduling": {"step": [1]}},
    )
    for document in documents:
        assert parse_model_facts(document) == ModelFacts()


def test_ensemble_of_ensembles_has_the_parts_of_both() -> None:
    facts = {
        "outer": ModelFacts(parts=frozenset(("inner", "last"))),
        "inner": ModelFacts(parts=frozenset(("first", "outer"))),  # a circle ends, too
    }
    assert find_all_parts("outer", facts) == {"inner", "last", "first"}
    assert find_all_parts("unknown", facts) == frozenset()


def test_retry_delay_is_the_expected_rest_of_the_load() -> None:
    assert compute_retry_after_s(None, 0) == 5
    assert compute_retry_after_s(6.2, 2) == 5
    assert compute_retry_after_s(6.2, 60) == 1
    assert update_load_time(None, 4) == 4
    assert 2 < update_load_time(4, 2) < 4


# Copies.


@given(st.floats(0, 1000), st.integers(1, 20), st.integers(1, 5), st.integers(0, 5))
def test_copies_stay_within_their_limits_and_change_by_one(
    demand: float, copies: int, minimum: int, more: int
) -> None:
    limits = CopyLimits(minimum, minimum + more)
    target = plan_copies(demand, copies, limits)
    assert abs(target - copies) <= 1
    assert target >= min(copies, limits.minimum)
    assert target <= max(copies, limits.maximum)


@pytest.mark.parametrize(
    ("copies", "demand", "settled"),
    [(1, 0, 1), (1, 1, 1), (1, 3, 1), (1, 9, 3), (1, 40, 4), (4, 0, 1)],
)
def test_copies_settle_under_a_steady_demand(copies: int, demand: int, settled: int) -> None:
    limits, mean = CopyLimits(1, 4), 10.0 * (copies - 1)
    history = [copies]
    for _ in range(200):
        mean = update_mean_demand(mean, demand)
        history.append(plan_copies(mean, history[-1], limits))
    assert history[-1] == settled
    assert history == sorted(history, reverse=settled < copies)  # none is loaded in vain


# Several callers.


@pytest.mark.parametrize(
    ("eviction", "users", "found"),
    [
        (Eviction.FREE, {}, (Eviction.FREE, -math.inf)),
        (Eviction.FREE, {"me": 20.0}, (Eviction.FREE, -math.inf)),
        (Eviction.FREE, {"me": 20.0, "other": 15.0}, (Eviction.BUSY, 15.0)),
        (Eviction.FREE, {"other": 15.0, "waiting": 20.0}, (Eviction.BUSY, 20.0)),
        (Eviction.FREE, {"me": 20.0, "waiting": 15.0}, (Eviction.YIELDED, -math.inf)),
        (Eviction.BUSY, {"waiting": 15.0}, (Eviction.BUSY, -math.inf)),
        (Eviction.BUSY, {"other": 15.0}, (Eviction.BUSY, 15.0)),
        (Eviction.NEVER, {"other": 15.0}, (Eviction.NEVER, -math.inf)),
    ],
)
def test_model_is_protected_from_loads_of_other_callers_unless_its_users_wait_as_well(
    eviction: Eviction, users: dict[str, float], found: tuple[Eviction, float]
) -> None:
    model = LoadedModel("m", eviction=eviction)
    model = protect_model(model, users, callers={"me"}, waiting={"me", "waiting"})
    assert (model.eviction, model.protected_until) == found


def test_waiting_loads_take_turns_between_callers_and_come_in_order_within_one() -> None:
    turns = LoadTurns()
    for number in range(4):
        turns.add(f"a{number}", ["a"])
    assert turns.list_models() == ["a0", "a1", "a2", "a3"]
    turns.take("a0")
    turns.add("b0", ["b"])
    turns.add("a3", ["b", "c"])  # a load that several callers wait for
    assert turns.list_models() == ["a1", "b0", "a3", "a2"]
    turns.take("a1")
    assert turns.list_models() == ["b0", "a3", "a2"]
    turns.take("a3")  # there is no room for b0 yet, and this is the turn of c
    assert turns.callers == {"a", "b"}
    turns.add("a4", ["a"])
    turns.take("b0")
    turns.add("b1", ["b"])
    assert turns.list_models() == ["a2", "b1", "a4"]
    turns.remove("a2", ["a", "b"])
    assert turns.list_models() == ["a4", "b1"]
    turns.take("b1")
    turns.put_back("b1", ["b"])  # a request has come for the model that was to be unloaded
    assert turns.list_models() == ["b1", "a4"]


def create_usage(clock: Callable[[], float]) -> ModelUsage:
    return ModelUsage(AdmissionQueue(1, 1, 1, Metrics()), clock, 10.0)


def test_gateways_tell_each_other_the_callers_of_their_models() -> None:
    """Others can write anything into the state."""
    now = 100.0
    usage, other = create_usage(lambda: now), create_usage(lambda: now)
    for model, caller in (("m", "shop"), ("m", "lab"), ("old", "shop")):
        usage.record_use(model, caller)
    now = 108.0
    usage.record_use("m", "lab")
    usage.turns.add("wanted", ["lab"])
    now = 111.0
    other.apply_reports([orjson.loads(orjson.dumps(usage.build_report()))])
    assert usage.find_users("m") == other.find_users("m") == {"lab": 118.0}
    assert other.find_users("old") == {}
    assert other.get_last_used("old") == 100.0
    assert other.waiting_callers == {"lab"}
    other.apply_reports(
        [
            {"ages": {"x": 1}},
            {"ages": {"y": 2}, "callers": {"y": [1]}, "waiting": {"lab": 1}},
            {"ages": {"z": 3}, "callers": [1], "waiting": [1, None]},
        ]
    )
    for model, protected_until in (("x", 120.0), ("y", 119.0), ("z", 118.0)):
        assert other.find_users(model) == {UNKNOWN_CALLER: protected_until}
    assert other.waiting_callers == set()


def test_model_of_many_callers_is_protected_in_bounded_memory() -> None:
    now = 0.0
    usage = create_usage(lambda: now)
    for number in range(1000):
        now = number / 100
        usage.record_use("m", f"caller{number}")
    users = usage.find_users("m")
    assert len(users) < 20
    assert users["caller999"] == pytest.approx(19.99)
    assert UNKNOWN_CALLER in users
    now = 30.0
    assert usage.find_users("m") == {}


@pytest.mark.parametrize(
    ("protected_s", "message", "retry_after"),
    [
        (-math.inf, "by 'a' and models that this key cannot see", "1"),
        (-0.1, "by 'a' and models that this key cannot see", "1"),
        (7.2, "cannot see, and other callers use it; try again in 8 s", "8"),
    ],
)
def test_missing_room_says_whether_others_use_it_and_when_to_try_again(
    protected_s: float, message: str, retry_after: str
) -> None:
    error = NoRoom("m", ["a"], has_hidden=True, protected_s=protected_s)
    assert error.detail.endswith(message)
    assert error.headers == {"Retry-After": retry_after}


# A simulation of one trace: the loads of this policy, and of a plain LRU with all slots in one place.


def simulate_policy(trace: Iterable[str], replicas: int, slots: int) -> int:
    held: dict[str, dict[str, float]] = {f"r{number}": {} for number in range(replicas)}
    budget, loads = ModelBudget(slots), 0
    for now, model in enumerate(trace):
        owner = next((name for name, models in held.items() if model in models), None)
        if owner is None:
            fleet = [
                ReplicaLoad(
                    name, tuple(LoadedModel(each, 1, used) for each, used in models.items())
                )
                for name, models in held.items()
            ]
            placement = choose_placement(fleet, {model: 1}, budget)
            assert isinstance(placement, Placement)
            owner, loads = placement.replica, loads + 1
            for victim in placement.victims:
                del held[owner][victim]
        held[owner][model] = float(now)
        assert all(len(models) <= slots for models in held.values())
    return loads


def zipf_trace(length: int, models: int, seed: int) -> list[str]:
    weights = [1 / (rank + 1) for rank in range(models)]
    names = [f"m{number}" for number in range(models)]
    return random.Random(seed).choices(names, weights, k=length)


@pytest.mark.parametrize(("replicas", "slots", "models"), [(3, 4, 12), (3, 2, 12), (2, 4, 40)])
@pytest.mark.parametrize("seed", range(5))
def test_fleet_loads_as_rarely_as_one_lru_cache(
    replicas: int, slots: int, models: int, seed: int
) -> None:
    trace = zipf_trace(3000, models, seed)
    loads = simulate_policy(trace, replicas, slots)
    assert loads == count_lru_loads(trace, replicas * slots)


@pytest.mark.parametrize(
    ("document", "timestamp_ms"),
    [
        ({"model_stats": [{"last_inference": 5}, {"last_inference": 7}]}, 7),
        ({"model_stats": [{"last_inference": "x"}, {}, None]}, 0),
        ({"model_stats": {}}, 0),
        ({"error": "unknown model"}, 0),
        (None, 0),
    ],
)
def test_last_inference_is_the_latest_of_all_versions(document: object, timestamp_ms: int) -> None:
    assert parse_last_inference(document) == timestamp_ms


@pytest.mark.parametrize(
    ("known", "timestamp_ms", "at"),
    [
        (None, 0, -math.inf),  # never
        (None, 990_000, 40.0),  # 10 s ago
        (None, 5_000_000, 50.0),  # the replica's clock is ahead
        (LastInference(990_000, 12.0), 990_000, 12.0),
        (LastInference(990_000, 12.0), 990_001, 50.0),  # since the last look, by any clock
        (LastInference(0, -math.inf), 1, 50.0),
    ],
)
def test_clock_of_a_replica_is_trusted_at_the_first_look_only(
    known: LastInference | None, timestamp_ms: int, at: float
) -> None:
    found = update_last_inference(known, timestamp_ms, now=50.0, wall_clock_s=1000.0)
    assert found == LastInference(timestamp_ms, at)


def test_copy_is_removable_unless_it_is_in_use_or_a_part() -> None:
    ensemble = LoadedModel("ensemble", parts=frozenset({"part"}))
    busy = LoadedModel("busy", eviction=Eviction.BUSY)
    replica = ReplicaLoad("r", (ensemble, busy, LoadedModel("part"), LoadedModel("free")))
    found = [each.name for each in replica.models if is_removable(replica, each.name)]
    assert found == ["ensemble", "free"]
    assert not is_removable(replica, "absent")


@pytest.mark.parametrize(
    ("keys", "limits"),
    [
        ("on_demand: false", None),
        ("on_demand: true", CopyLimits(1, 1)),
        ("on_demand: true, versions: []", CopyLimits(1, 1)),
        ("on_demand: true, replicas: 2", CopyLimits(2, 2)),
        ("on_demand: true, replicas: {min: 1, max: 3}", CopyLimits(1, 3)),
    ],
)
def test_model_of_the_models_file_is_loaded_on_demand(keys: str, limits: CopyLimits | None) -> None:
    model = parse_models_file(f"models: [{{name: a, {keys}}}]", MODEL_KEYS)["a"]
    assert model.capability_values["on_demand"] == limits
    assert model.is_loaded_by_capability == (limits is not None)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ("on_demand: 1", "on_demand of model 'a' must be true or false"),
        (
            "on_demand: true, required: always",
            "has required, which on_demand: true does not permit",
        ),
        ("on_demand: true, versions: [1]", "has versions, which on_demand: true does not permit"),
        ("replicas: 2", "has replicas, which only a model with on_demand: true can have"),
        ("on_demand: false, replicas: 2", "has replicas, which only a model with on_demand: true"),
        ("on_demand: true, replicas: 0", "must be a number above 0, or {min: 1, max: 3}"),
        ("on_demand: true, replicas: true", "must be a number above 0"),
        ("on_demand: true, replicas: {min: 2, max: 1}", "must be a number above 0"),
        ("on_demand: true, replicas: {most: 3}", "must be a number above 0"),
        ("on_demand: true, replicas: {min: x}", "must be a number above 0"),
    ],
)
def test_invalid_keys_of_an_on_demand_model_are_explained(keys: str, reason: str) -> None:
    with pytest.raises(BadModelsFile, match=re.escape(reason)):
        parse_models_file(f"models: [{{name: a, {keys}}}]", MODEL_KEYS)
