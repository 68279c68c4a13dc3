"""What the fleet decides: health, choice, plan, readiness and the models file, as values."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.fleet.balancer import (
    COLD_AFTER_S,
    MAX_RELATIVE_LATENCY,
    MIN_RELATIVE_LATENCY,
    SIMILAR_RATIO,
    RelativeLatency,
    choose_less_loaded,
)
from gateway.fleet.discovery import DnsName, ReplicaSource, parse_replica_source
from gateway.fleet.health import Health, HealthState, RetryBudget, can_eject
from gateway.fleet.index import (
    LOADING,
    READY,
    UNAVAILABLE,
    UNLOADING,
    Index,
    VersionState,
    build_index_entry,
    merge_indexes,
    model_names,
    parse_index,
)
from gateway.fleet.maintenance import count_busy_gateways
from gateway.fleet.models_file import BadModelsFile, DeclaredModel, ModelsFile, parse_models_file
from gateway.fleet.on_demand_plan import CopyLimits
from gateway.fleet.readiness import (
    Readiness,
    ReplicaStatus,
    check_readiness,
    update_required_models,
)
from gateway.fleet.reconcile_plan import (
    Backoff,
    ModelAction,
    is_outdated,
    merge_declared_models,
    plan_actions,
)
from gateway.fleet.replica import BadAddress, ReplicaAddress, parse_replica_url
from gateway.fleet.slow_start import SlowStart
from gateway.state.desired import DesiredModel
from gateway.state.loads import is_in_progress, new_load_token

UP = Health().with_probe_answer()


# Health.


def failed(health: Health, times: int, now: float) -> Health:
    for _ in range(times):
        health = health.with_failure(now, can_eject=True)
    return health


def test_a_replica_is_down_until_its_first_answer() -> None:
    assert Health().state(0) is HealthState.DOWN
    assert Health().with_probe_timeout().with_probe_timeout().state(0) is HealthState.DOWN
    assert Health().with_probe_answer().state(0) is HealthState.UP


def test_a_refused_connection_means_down_at_once_and_an_answer_up_again() -> None:
    assert UP.with_refusal().state(0) is HealthState.DOWN
    assert UP.with_refusal().with_probe_answer().state(0) is HealthState.UP


def test_two_missed_probes_in_a_row_mean_slow() -> None:
    assert UP.with_probe_timeout().state(0) is HealthState.UP
    assert UP.with_probe_timeout().with_probe_timeout().state(0) is HealthState.SLOW
    assert (
        UP.with_probe_timeout().with_probe_answer().with_probe_timeout().state(0) is HealthState.UP
    )
    assert (
        UP.with_probe_timeout().with_probe_timeout().with_probe_answer().state(0) is HealthState.UP
    )


def test_five_failures_in_a_row_eject_for_five_seconds() -> None:
    assert failed(UP, 4, 1000).state(1000) is HealthState.UP
    ejected = failed(UP, 5, 1000)
    assert ejected.state(1000) is HealthState.EJECTED
    assert ejected.state(1004.999) is HealthState.EJECTED
    assert ejected.state(1005) is HealthState.UP


def test_a_success_between_failures_makes_them_count_anew() -> None:
    assert failed(failed(UP, 4, 1000).with_success(), 4, 1000).state(1000) is HealthState.UP
    back = failed(UP, 5, 1000).with_success()
    assert failed(back, 4, 1006).state(1006) is HealthState.UP
    assert failed(back, 5, 1006).state(1006) is HealthState.EJECTED


def test_the_first_failure_after_its_return_ejects_a_replica_again_and_for_longer() -> None:
    health, now = failed(UP, 5, 1000), 1000.0
    for nth in range(1, 80):
        lasts_s = min(5.0 * nth, 300.0)
        assert health.state(now + lasts_s - 0.001) is HealthState.EJECTED
        now += lasts_s
        assert health.state(now) is HealthState.UP
        health = failed(health, 1, now)


def test_failures_while_it_is_ejected_do_not_lengthen_the_ejection() -> None:
    assert failed(failed(UP, 5, 1000), 50, 1004).state(1005) is HealthState.UP


def test_a_replica_that_was_well_for_five_minutes_is_ejected_as_if_for_the_first_time() -> None:
    often = failed(failed(failed(UP, 5, 1000), 1, 1010), 1, 1030)
    assert often.ejections == 3
    assert failed(often, 5, often.ejected_until + 300).ejections == 4
    forgiven = failed(often, 5, often.ejected_until + 301)
    assert forgiven.ejections == 1
    assert forgiven.ejected_until == often.ejected_until + 301 + 5


def test_what_may_not_be_ejected_is_when_it_may() -> None:
    health = UP
    for _ in range(20):
        health = health.with_failure(1000, can_eject=False)
        assert health.state(1000) is HealthState.UP
    assert failed(health, 1, 1000).state(1000) is HealthState.EJECTED


def test_of_several_states_the_worst_is_told() -> None:
    ejected = failed(UP, 5, 1000)
    assert ejected.with_probe_timeout().with_probe_timeout().state(1000) is HealthState.SLOW
    assert (
        ejected.with_probe_timeout().with_probe_timeout().with_refusal().state(1000)
        is HealthState.DOWN
    )
    assert sorted(HealthState) == [
        HealthState.UP,
        HealthState.EJECTED,
        HealthState.SLOW,
        HealthState.DOWN,
    ]


EVENTS: Mapping[str, Callable[[Health, float], Health]] = {
    "answered": lambda health, _: health.with_probe_answer(),
    "missed": lambda health, _: health.with_probe_timeout(),
    "refused": lambda health, _: health.with_refusal(),
    "succeeded": lambda health, _: health.with_success(),
    "failed": lambda health, now: health.with_failure(now, can_eject=True),
    "failed, but spared": lambda health, now: health.with_failure(now, can_eject=False),
}


@given(st.lists(st.tuples(st.sampled_from(sorted(EVENTS)), st.floats(0, 400))))
def test_whatever_happens_an_ejection_has_a_reason_and_an_end(
    happened: list[tuple[str, float]],
) -> None:
    health, now, in_a_row = Health(), 1000.0, 0
    for event, pause_s in happened:
        now += pause_s
        before, health = health, EVENTS[event](health, now)
        if event == "succeeded":
            in_a_row = 0
        in_a_row += event.startswith("failed")
        assert health.ejected_until <= now + 300
        assert health.state(health.ejected_until) is not HealthState.EJECTED
        if health.ejected_until != before.ejected_until:
            assert event == "failed"
            assert in_a_row >= 5
            assert before.state(now) is not HealthState.EJECTED


@given(st.integers(0, 200))
def test_never_more_than_half_of_a_fleet_is_ejected(fleet: int) -> None:
    ejected = 0
    while can_eject(fleet, ejected):
        ejected += 1
    assert ejected == fleet // 2


@given(st.lists(st.booleans(), max_size=400))
def test_retries_are_a_fifth_of_the_requests_and_what_was_saved(wanted: list[bool]) -> None:
    budget, spent = RetryBudget(), 0
    for sent, retry in enumerate(wanted, 1):
        budget.earn()
        spent += retry and budget.try_spend()
        assert spent <= 10 + 0.2 * sent + 1e-9
        assert 0 <= budget.tokens < 10.2 + 1e-9


def test_over_a_long_time_a_fifth_of_the_requests_is_retried_and_no_more_is_saved_up() -> None:
    budget = RetryBudget()
    for _ in range(100_000):
        budget.earn()
    spent = 0
    for _ in range(100_000):
        budget.earn()
        spent += budget.try_spend()
    assert 20_000 <= spent <= 20_011


# Choice.


@dataclass(eq=False)
class Candidate:
    outstanding: int = 0
    relative_latency: float = 1.0


PACES = st.floats(MIN_RELATIVE_LATENCY, MAX_RELATIVE_LATENCY)


@given(st.integers(0, 1000), st.integers(0, 1000), PACES, PACES)
def test_the_replica_that_is_expected_to_answer_first_is_chosen(
    few: int, many: int, fast: float, slow: float
) -> None:
    """Small differences of the pace count for nothing."""
    one, other = Candidate(few, fast), Candidate(many, slow)
    chosen = choose_less_loaded([one, other])
    left = other if chosen is one else one
    if 1 / SIMILAR_RATIO <= fast / slow <= SIMILAR_RATIO:
        assert chosen.outstanding <= left.outstanding
    else:
        expected = (chosen.outstanding + 1) * chosen.relative_latency
        assert expected <= (left.outstanding + 1) * left.relative_latency * (1 + 1e-9)


def test_the_only_candidate_is_chosen() -> None:
    only = Candidate(10**9, MAX_RELATIVE_LATENCY)
    assert choose_less_loaded([only]) is only


@pytest.fixture
def fixed_chance() -> Iterator[None]:
    before = random.getstate()
    random.seed(20)
    yield
    random.setstate(before)


def chi_squared(seen: Sequence[int], expected: Sequence[float]) -> float:
    return sum((n - m) ** 2 / m for n, m in zip(seen, expected, strict=True))


def chosen_often(candidates: Sequence[Candidate], times: int) -> list[int]:
    chosen = Counter(id(choose_less_loaded(candidates)) for _ in range(times))
    return [chosen[id(candidate)] for candidate in candidates]


@pytest.mark.usefixtures("fixed_chance")
@pytest.mark.parametrize("count", [2, 3, 10])
def test_equally_loaded_replicas_are_chosen_equally_often(count: int) -> None:
    paces = [1 + at * 0.4 / count for at in range(count)]  # differences that mean nothing
    seen = chosen_often([Candidate(3, pace) for pace in paces], 20_000)
    assert chi_squared(seen, [20_000 / count] * count) < 35  # 9 degrees: less than once in 10,000


@pytest.mark.usefixtures("fixed_chance")
def test_the_more_loaded_the_more_rarely_chosen_and_the_most_loaded_never() -> None:
    seen = chosen_often([Candidate(load) for load in range(10)], 20_000)
    assert seen[9] == 0
    expected = [20_000 * 2 * (9 - rank) / 90 for rank in range(9)]
    assert chi_squared(seen[:9], expected) < 35


# Slow start.


@dataclass
class Started:
    name: str
    up_since: float = 0.0
    outstanding: int = 0
    relative_latency: float = 1.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


OLD, NEW, NEWER = Started("old"), Started("new"), Started("newer")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def slow_start(clock: Clock) -> SlowStart:
    found = SlowStart(60.0, clock)
    found.track_candidates("m", "", [OLD])
    clock.now += 10
    found.track_candidates("m", "", [OLD, NEW])
    return found


def share_of(slow_start: SlowStart, one: Started, candidates: Sequence[Started]) -> float:
    chosen = Counter(
        choose_less_loaded(slow_start.limit_candidates("m", "", candidates)).name
        for _ in range(20_000)
    )
    return chosen[one.name] / 20_000


@pytest.mark.usefixtures("fixed_chance")
@pytest.mark.parametrize(
    ("age_s", "share"), [(0, 0.05), (3, 0.05), (15, 0.125), (30, 0.25), (54, 0.45), (60, 0.5)]
)
def test_the_share_of_a_new_replica_grows_linearly(
    slow_start: SlowStart, clock: Clock, age_s: float, share: float
) -> None:
    clock.now += age_s
    assert share_of(slow_start, NEW, [OLD, NEW]) == pytest.approx(share, abs=0.02)


@pytest.mark.usefixtures("fixed_chance")
def test_replicas_that_are_new_together_share_what_there_is(clock: Clock) -> None:
    slow_start = SlowStart(60.0, clock)
    slow_start.track_candidates("m", "", [OLD, NEW])  # of the gateway's start
    assert slow_start.limit_candidates("m", "", both := [OLD, NEW]) is both
    slow_start.track_candidates("m", "", [])
    clock.now += 1
    slow_start.track_candidates("m", "", [OLD, NEW])
    assert share_of(slow_start, NEW, [OLD, NEW]) == pytest.approx(0.5, abs=0.02)
    clock.now += 30
    slow_start.track_candidates("m", "", [OLD, NEW, NEWER])
    # Half of the full share against a tenth of it: the newest gets a fifth of a third.
    shares = share_of(slow_start, NEWER, [OLD, NEW, NEWER])
    assert shares == pytest.approx(0.2 / 3, abs=0.02)


def test_a_warm_replica_stays_warm_until_it_leaves_or_starts_again(
    slow_start: SlowStart, clock: Clock
) -> None:
    both = [OLD, NEW]
    clock.now += 60
    assert slow_start.limit_candidates("m", "", both) is both
    slow_start.track_candidates("m", "", both)
    assert slow_start.limit_candidates("m", "", both) is both
    # It started again, and no request came while it was down.
    restarted = Started("new", up_since=clock.now + 1)
    clock.now += 5
    slow_start.track_candidates("m", "", [OLD, restarted])
    assert share_of(slow_start, restarted, [OLD, restarted]) < 0.1
    clock.now += 60
    # It was cordoned, for example.
    slow_start.track_candidates("m", "", [OLD])
    slow_start.track_candidates("m", "", [OLD, restarted])
    assert share_of(slow_start, restarted, [OLD, restarted]) < 0.1


def test_a_replica_is_warm_or_not_by_model(slow_start: SlowStart) -> None:
    assert slow_start.limit_candidates("other", "", both := [OLD, NEW]) is both
    # A retry has no other candidate.
    assert slow_start.limit_candidates("m", "", [NEW]) == [NEW]


@given(PACES, PACES)
def test_the_pace_becomes_what_the_answers_show(start: float, ratio: float) -> None:
    pace = RelativeLatency(start)
    for _ in range(80):
        pace.update(ratio * 10.0, 10.0)
    assert pace.ratio == pytest.approx(ratio, rel=0.01)


@given(st.lists(st.floats(0, 0.003)))
def test_some_milliseconds_of_chance_are_not_taken_for_the_pace(took_s: list[float]) -> None:
    pace = RelativeLatency()
    for each_s in took_s:
        pace.update(each_s, 0.001)
    assert 0.8 < pace.ratio < 1.4


@given(st.floats(0, 1e9))
def test_one_answer_that_took_long_is_not_taken_for_the_pace(took_s: float) -> None:
    pace = RelativeLatency()
    pace.update(took_s, 0.001)
    assert pace.ratio < SIMILAR_RATIO


def test_the_first_answers_after_idleness_say_nothing_of_the_pace() -> None:
    pace = RelativeLatency()
    assert not pace.record_response("m", started_at=10.0, now=12.0)
    assert not pace.record_response("m", started_at=11.0, now=13.0)  # was under way with the first
    assert pace.record_response("m", started_at=12.0, now=12.1)
    assert not pace.record_response("other", started_at=12.0, now=12.1)
    assert pace.record_response("m", started_at=14.0, now=14.1)
    later = 19.0
    assert pace.record_response("m", started_at=14.2, now=later)
    assert not pace.record_response("m", started_at=later, now=later + COLD_AFTER_S + 1)


@given(PACES)
def test_what_was_learned_of_the_pace_fades(start: float) -> None:
    pace, before = RelativeLatency(start), abs(start - 1)
    for _ in range(120):  # a minute
        pace.decay()
        assert abs(pace.ratio - 1) <= before
        before = abs(pace.ratio - 1)
    assert pace.ratio == pytest.approx(1, abs=0.01)


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e9))))
def test_no_answer_makes_the_pace_extreme(answers: list[tuple[float, float]]) -> None:
    pace = RelativeLatency()
    for took_s, usual_s in answers:
        pace.update(took_s, usual_s)
        assert MIN_RELATIVE_LATENCY - 1e-9 <= pace.ratio <= MAX_RELATIVE_LATENCY + 1e-9


# The index.

SAID = [
    {"name": "never"},
    {"name": "well", "version": "1", "state": "READY"},
    {"name": "well", "version": "2", "state": "UNAVAILABLE", "reason": "no file"},
    {"name": "coming", "version": "1", "state": "LOADING"},
    {"name": "going", "version": "3", "state": "UNLOADING"},
    {"name": "gone", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
]


def test_the_reason_of_a_failed_load_names_no_files() -> None:
    reason = "Internal: ValueError: no weights\n\nAt:\n  /srv/m/1/model.py(3): initialize\n"
    index = parse_index([{"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": reason}])
    assert index.models["m"]["1"].reason == "no weights"


def test_an_index_says_what_can_be_asked() -> None:
    index = parse_index(SAID)
    assert index.is_ready("well")
    assert index.is_ready("well", "1")
    assert not index.is_ready("well", "2")
    assert not index.is_ready("well", "9")
    for model in ("never", "coming", "going", "gone", "unheard of"):
        assert not index.is_ready(model)
    assert [model for model in index.models if index.is_changing(model)] == ["coming", "going"]
    assert [model for model in index.models if index.is_unloaded(model)] == ["never", "gone"]
    assert model_names([index]) == {"never", "well", "coming", "going", "gone"}


def test_the_state_of_a_model_is_that_of_its_best_version() -> None:
    index = parse_index(SAID)
    assert index.model_state("well") == VersionState(READY)
    assert index.model_state("gone") == VersionState(UNAVAILABLE, "unloaded")
    assert index.model_state("never") == VersionState(UNAVAILABLE)
    assert index.model_state("unheard of").reason == "not in this replica's repository"


def test_a_model_that_contradicts_the_index_is_taken_for_unloaded_and_no_other() -> None:
    index = parse_index(SAID).with_model_unloaded("well")
    assert not index.is_ready("well")
    assert index.is_unloaded("well")
    assert index.is_changing("coming")
    assert "unheard of" in index.with_model_unloaded("unheard of").models


def test_a_state_that_triton_may_have_one_day_is_not_ready() -> None:
    index = parse_index([{"name": "m", "version": "1", "state": "DREAMING"}])
    assert not index.is_ready("m")
    assert merge_indexes({"a": index, "b": parse_index(SAID[1:2])})[0]["state"] == "DREAMING"


@pytest.mark.parametrize("document", [None, {}, "READY", 1, [1], [{}], [{"name": 1}], [["name"]]])
def test_what_is_no_index_is_a_value_error(document: Any) -> None:
    with pytest.raises(ValueError, match="repository index"):
        parse_index(document)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
STATES = st.sampled_from([READY, LOADING, UNLOADING, UNAVAILABLE])
HOSTILE = st.lists(
    st.fixed_dictionaries(
        {"name": st.text() | JSON},
        optional={
            "version": st.text(st.characters(categories=["Nd", "No"])) | JSON,
            "state": STATES | JSON,
            "reason": st.text() | JSON,
        },
    )
)
DEEP = orjson.loads("[" * 1000 + "]" * 1000)


@pytest.mark.long
@given(JSON | HOSTILE)
@example([{"name": "m", "version": "²"}])
@example([{"name": "m", "version": "9" * 5000}])
def test_a_hostile_document_is_a_value_error_or_an_index_that_can_be_used(document: Any) -> None:
    try:
        index = parse_index(document)
    except ValueError:
        return
    entries = merge_indexes({"a": index, "b": parse_index(SAID)})
    assert {entry["name"] for entry in entries} == model_names([index, parse_index(SAID)])
    for model in index.models:
        (
            index.is_ready(model),
            index.is_changing(model),
            index.is_unloaded(model),
            index.model_state(model),
        )
        assert not index.with_model_unloaded(model).is_ready(model)


@pytest.mark.parametrize("key", ["name", "version", "state", "reason"])
def test_a_document_as_deep_as_json_can_be_is_a_value_error(key: str) -> None:
    with pytest.raises(ValueError, match="repository index"):
        parse_index([{"name": "m", "version": "1", "state": READY, key: DEEP}])
    with pytest.raises(ValueError, match="repository index"):
        parse_index(DEEP)


def versions_of(**states: str) -> Index:
    return Index({"m": {number[1:]: VersionState(state) for number, state in states.items()}})


@pytest.mark.parametrize(
    ("states", "state", "reason"),
    [
        ((READY, READY, READY), READY, None),
        ((READY, LOADING, READY), LOADING, "on b"),
        ((LOADING, UNLOADING, READY), UNLOADING, "on b"),
        ((UNAVAILABLE, LOADING, UNAVAILABLE), UNAVAILABLE, "on a, c"),
        ((UNAVAILABLE, UNAVAILABLE, UNAVAILABLE), UNAVAILABLE, None),
    ],
)
def test_of_several_replicas_the_worst_state_is_told_and_where(
    states: tuple[str, ...], state: str, reason: str | None
) -> None:
    indexes = {name: versions_of(v1=said) for name, said in zip("abc", states, strict=True)}
    (entry,) = merge_indexes(indexes)
    assert (entry["state"], entry.get("reason")) == (state, reason)


def test_a_version_that_a_replica_does_not_have_is_named_with_that_replica() -> None:
    indexes = {"a": versions_of(v1=READY, v2=READY), "b": versions_of(v1=READY), "c": Index({})}
    assert merge_indexes(indexes) == [
        {"name": "m", "version": "1", "state": UNAVAILABLE, "reason": "on c: not loaded"},
        {"name": "m", "version": "2", "state": UNAVAILABLE, "reason": "on b, c: not loaded"},
    ]
    detail = build_index_entry(indexes, merge_indexes(indexes)[1])
    missing = {"state": UNAVAILABLE, "reason": "not loaded"}
    assert detail["replicas"] == {"a": {"state": READY}, "b": missing, "c": missing}


def test_versions_follow_one_another_as_numbers() -> None:
    index = versions_of(v10=READY, v9=READY, v1=READY)
    assert [entry["version"] for entry in merge_indexes({"a": index})] == ["1", "9", "10"]


MODELS = st.sampled_from(["a", "b", "c", "d"])
VERSIONS = st.builds(VersionState, STATES, st.sampled_from(["", "unloaded", "no file"]))
INDEXES = st.builds(
    Index,
    st.dictionaries(MODELS, st.dictionaries(st.sampled_from(["1", "2", "10"]), VERSIONS)),
)


@given(INDEXES)
def test_the_index_of_one_replica_is_told_as_it_was_said(index: Index) -> None:
    assert parse_index(merge_indexes({"a": index})) == index


@given(st.dictionaries(st.sampled_from(["x", "y", "z"]), INDEXES, min_size=1))
def test_a_version_is_ready_in_the_fleet_if_it_is_on_every_replica(
    indexes: dict[str, Index],
) -> None:
    for entry in merge_indexes(indexes):
        if "version" in entry:
            everywhere = all(
                index.is_ready(entry["name"], entry["version"]) for index in indexes.values()
            )
            assert everywhere == (entry["state"] == READY)


# The models file.


@pytest.mark.parametrize(
    ("text", "models"),
    [
        ("", {}),
        ("# nothing\n---\n", {}),
        ("models:\n", {}),
        ("models: []", {}),
        ("models: [a, b]", {"a": DeclaredModel("a"), "b": DeclaredModel("b")}),
        ("models:\n- name: a\n  versions: [1, '3']\n", {"a": DeclaredModel("a", ("1", "3"))}),
        (
            "models: [{name: a, config: {max_batch_size: 4}}]",
            {"a": DeclaredModel("a", (), {"max_batch_size": 4})},
        ),
        ("models: [{name: a, config: '{}'}]", {"a": DeclaredModel("a", (), "{}")}),
        ("models: [{name: a, on_demand: false}]", {"a": DeclaredModel("a")}),
        (
            "models: [{name: a, on_demand: true}]",
            {"a": DeclaredModel("a", copies=CopyLimits(1, 1))},
        ),
        (
            "models: [{name: a, on_demand: true, replicas: {min: 1, max: 3}}]",
            {"a": DeclaredModel("a", copies=CopyLimits(1, 3))},
        ),
        (
            "models: [{name: a, on_demand: true, replicas: 2}]",
            {"a": DeclaredModel("a", copies=CopyLimits(2, 2))},
        ),
        ("models: ['no', '1', grün]", {name: DeclaredModel(name) for name in ("no", "1", "grün")}),
    ],
)
def test_a_models_file_names_models(text: str, models: dict[str, DeclaredModel]) -> None:
    assert parse_models_file(text) == models


def test_the_config_of_a_declared_model_is_that_of_its_load() -> None:
    assert DeclaredModel("a").load_parameters == {}
    assert DeclaredModel("a", (), {"x": 1}).load_parameters == {"config": {"x": 1}}


BOMB = "models:\n-\n  - &a0 [x, x]\n" + "".join(
    f"  - &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60)
)
CONFIG_BOMB = "models:\n- name: m\n  config:\n    k0: &a0 [x, x]\n" + "".join(
    f"    k{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60)
)


@pytest.mark.parametrize(
    "text",
    [
        "models: [",
        "\x00",
        "\t- a",
        "a: b: c",
        "[a, b]",
        "a",
        "7",
        "model: [a]",
        "{models: [a], more: 1}",
        "models: a",
        "models: 0",
        "models: {a: 1}",
        "models: [1]",
        "models: [null]",
        "models: ['']",
        "models: [[a]]",
        "models: [{versions: [1]}]",
        "models: [{name: ''}]",
        "models: [{name: 5}]",
        "models: [{name: a, version: 1}]",
        "models: [{name: a, versions: 1}]",
        "models: [{name: a, versions: [x]}]",
        "models: [{name: a, versions: [-1]}]",
        "models: [{name: a, versions: [1.5]}]",
        "models: [{name: a, versions: ['²']}]",
        "models: [{name: a, config: 7}]",
        "models: [{name: a, on_demand: 1}]",
        "models: [{name: a, on_demand: true, versions: [1]}]",
        "models: [{name: a, replicas: 2}]",
        "models: [{name: a, on_demand: true, replicas: 0}]",
        "models: [{name: a, on_demand: true, replicas: true}]",
        "models: [{name: a, on_demand: true, replicas: {min: 2, max: 1}}]",
        "models: [{name: a, on_demand: true, replicas: {most: 3}}]",
        "models: [{name: a, on_demand: true, replicas: {min: x}}]",
        "models: [{name: a, config: [x]}]",
        "models: [a, a]",
        "models: [a, {name: a}]",
        "models: [a]\nmodels: [b]",
        "models: [{name: a, name: b}]",
        "models: [{name: a, config: {x: 1, x: 2}}]",
        "models: [{name: a, config: {1: 2}}]",
        "models: [{name: a, config: {x: !!set {b}}}]",
        "models: [{name: a, config: {x: !!binary aGk=}}]",
        "models: [{name: a, config: &x {x: *x}}]",
        "models: [!!python/object/apply:os.getpid []]",
        "models: [!!int x]",
        "models: [!!bool x]",
        "models: [!!timestamp x]",
        "models: [2020-13-45]",
        "models: [0x_]",
        f"models: [{'9' * 5000}]",
        '{? {a: b} : c}',
        "models: [a]\n--- \nmodels: [b]",
        "models: " + "[" * 5000,
        "- " * 5000,
        "models: [{name: a, config: " + "{x: " * 300 + "1" + "}" * 300 + "}]",
        BOMB,
        CONFIG_BOMB,
        "models: &a [*a]",
        'models: ["\\ud800"]',
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_a_broken_models_file_is_told_of_in_one_sentence(text: str) -> None:
    with pytest.raises(BadModelsFile) as told:
        parse_models_file(text)
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 400


@given(st.text() | st.text("models: [{name}],&*!-'\"\n 0x_1"))
def test_no_text_makes_the_models_file_fail_in_another_way(text: str) -> None:
    for written in (text, f"models: {text}", f"models: [{text}]"):
        try:
            models = parse_models_file(written)
        except BadModelsFile:
            continue
        assert all(name == model.name for name, model in models.items())


def test_without_a_models_file_nothing_is_declared() -> None:
    file = ModelsFile(None)
    assert not file.reload_if_changed()
    assert file.models == {}


def test_a_gateway_does_not_start_with_a_broken_models_file(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    for make in (lambda: None, lambda: path.write_text("["), lambda: path.write_bytes(b"\xff\xfe")):
        make()
        with pytest.raises(BadModelsFile, match=r"models\.yaml"):
            ModelsFile(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(BadModelsFile, match=r"models\.yaml"):
        ModelsFile(path)


def opened(path: Path, text: str) -> ModelsFile:
    path.write_text(text)
    return ModelsFile(path)


def test_a_change_of_the_models_file_is_noticed_once(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    file = opened(path, "models: [a]")
    assert not file.reload_if_changed()
    path.write_text("models: [a, b]")
    assert file.reload_if_changed()
    assert set(file.models) == {"a", "b"}
    assert not file.reload_if_changed()
    path.write_text("models: [a, b]  # the same, said otherwise")
    assert not file.reload_if_changed()


def test_a_change_that_keeps_the_length_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    file = opened(path, "models: [a]")
    new = tmp_path / "new"
    new.write_text("models: [b]")
    status = path.stat()
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    new.replace(path)
    assert file.reload_if_changed()
    assert set(file.models) == {"b"}


@pytest.mark.parametrize(
    "broken",
    ["models: [a, ", "models: [!!int x]", "models: 1", "[" * 5000],
    ids=["cut off", "no integer", "no list", "brackets"],
)
def test_a_broken_new_file_leaves_the_old_one_in_force_and_is_complained_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    path = tmp_path / "models.yaml"
    file = opened(path, "models: [a]")
    path.write_text(broken)
    for _ in range(3):
        assert not file.reload_if_changed()
        assert set(file.models) == {"a"}
    assert len(caplog.records) == 1
    path.write_text("models: [repaired]")
    assert file.reload_if_changed()
    assert set(file.models) == {"repaired"}


def test_a_models_file_may_vanish_and_return(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "models.yaml"
    file = opened(path, "models: [a]")
    path.unlink()
    for _ in range(3):
        assert not file.reload_if_changed()
        assert set(file.models) == {"a"}
    assert len(caplog.records) == 1
    path.write_text("models: [b]")
    assert file.reload_if_changed()
    assert set(file.models) == {"b"}


def test_the_swapped_links_of_a_config_map_are_noticed(tmp_path: Path) -> None:
    """Kubernetes replaces the link to a folder; what is mounted is a link through that."""

    def publish(number: int, text: str) -> None:
        folder = tmp_path / f"..{number}"
        folder.mkdir()
        (folder / "models.yaml").write_text(text)
        os.utime(folder / "models.yaml", ns=(10**18, 10**18))
        (tmp_path / "..new").symlink_to(folder.name)
        (tmp_path / "..new").replace(tmp_path / "..data")

    publish(1, "models: [a]")
    path = tmp_path / "models.yaml"
    path.symlink_to("..data/models.yaml")
    file = ModelsFile(path)
    publish(2, "models: [b]")
    assert file.reload_if_changed()
    assert set(file.models) == {"b"}
    assert not file.reload_if_changed()


# The plan.

WISHES = st.dictionaries(
    MODELS,
    st.builds(
        DesiredModel, st.booleans(), st.just({}) | st.just({"config": "{}"}), st.integers(0, 2)
    ),
)
DECLARED = st.dictionaries(MODELS, st.just({}), max_size=3).map(
    lambda found: {name: DeclaredModel(name, (), {"declared": True}) for name in found}
)
LOADS = st.dictionaries(MODELS, st.sampled_from(["1", "2", new_load_token("another")]))


def done(index: Index, action: ModelAction) -> Index:
    if action.is_load:
        return Index({**index.models, action.model: {"1": VersionState(READY)}})
    return index.with_model_unloaded(action.model)


@given(WISHES, DECLARED, INDEXES, LOADS)
def test_what_was_planned_and_done_leaves_nothing_to_do(
    wishes: dict[str, DesiredModel],
    declared: dict[str, DeclaredModel],
    index: Index,
    loads: dict[str, str],
) -> None:
    should = merge_declared_models(wishes, declared)
    for action in list(plan_actions(should, index, loads)):
        index = done(index, action)
        loads = {**loads, action.model: action.load_id}
    assert not list(plan_actions(should, index, loads))
    for model, wish in should.items():
        load = loads.get(model, "")
        if not index.is_changing(model) and not is_in_progress(load):
            assert index.is_ready(model) == wish.is_loaded
            assert not wish.is_loaded or wish.load_id in ("", load)


@given(WISHES, DECLARED, INDEXES, LOADS)
def test_only_what_is_wished_is_done_and_nothing_to_a_busy_model(
    wishes: dict[str, DesiredModel],
    declared: dict[str, DeclaredModel],
    index: Index,
    loads: dict[str, str],
) -> None:
    should = merge_declared_models(wishes, declared)
    planned = list(plan_actions(should, index, loads))
    assert len({action.model for action in planned}) == len(planned)
    for action in planned:
        assert action.model in wishes or action.model in declared
        assert should[action.model].is_loaded == action.is_load
        assert not index.is_changing(action.model)
        assert not is_in_progress(loads.get(action.model, ""))
        if not action.is_load:
            assert action.model not in declared
            assert wishes[action.model].is_loaded is False
            assert index.is_ready(action.model)
        else:
            assert not index.is_ready(action.model) or is_outdated(
                should[action.model], loads.get(action.model, "")
            )


def test_a_declared_model_is_wanted_whatever_the_api_was_asked() -> None:
    a = DeclaredModel("a", (), {"x": 1})
    declared = {"a": a}
    assert merge_declared_models({}, declared)["a"] == DesiredModel(
        True, {"config": {"x": 1}}, 0, a.config_digest
    )
    assert (
        merge_declared_models({"a": DesiredModel(False, {}, 6)}, declared)["a"]
        == merge_declared_models({}, declared)["a"]
    )
    assert merge_declared_models({"a": DesiredModel(True, {}, 6)}, declared)["a"] == DesiredModel(
        True, {"config": {"x": 1}}, 6, a.config_digest
    )
    kept = DesiredModel(True, {"config": {"x": 2}}, 7)
    assert merge_declared_models({"a": kept}, declared)["a"] == kept


def test_a_model_whose_last_load_was_not_confirmed_is_loaded_though_an_older_one_is_ready() -> None:
    parameters = {"config": "{}"}
    wishes, index = {"m": DesiredModel(True, parameters, 2)}, versions_of(v1=READY)
    assert not list(plan_actions(wishes, index, {"m": "2"}))
    for load in ({}, {"m": "1"}, {"m": "2/digest"}):
        assert list(plan_actions(wishes, index, load)) == [ModelAction("m", True, parameters, "2")]
    assert not list(plan_actions(wishes, index, {"m": new_load_token("another")}))
    assert not list(plan_actions({"m": DesiredModel(False, {}, 3)}, Index({}), {"m": "2"}))


def test_a_declared_model_is_loaded_again_when_its_config_changes() -> None:
    index = versions_of(v1=READY)
    declared = {"m": DeclaredModel("m", (), {"max_batch_size": 1})}
    (first,) = plan_actions(merge_declared_models({}, declared), index, {})
    confirmed = {"m": first.load_id}
    assert not list(plan_actions(merge_declared_models({}, declared), index, confirmed))
    changed = {"m": DeclaredModel("m", (), {"max_batch_size": 2})}
    (again,) = plan_actions(merge_declared_models({}, changed), index, confirmed)
    assert again.parameters == {"config": {"max_batch_size": 2}}
    assert not list(plan_actions(merge_declared_models({}, {"m": DeclaredModel("m")}), index, {}))


@given(st.integers(0, 5000))
@example(1024)
def test_the_pauses_between_tries_double_up_to_five_minutes(failures: int) -> None:
    backoff = replace(Backoff(), failures=failures).with_failure(1000)
    assert backoff.failures == failures + 1
    assert backoff.not_before == 1000 + min(2.0 ** min(failures, 20), 300)


# Readiness.


def seen(
    address: str, state: HealthState = HealthState.UP, reason: str = "", **models: str
) -> ReplicaStatus:
    index = Index({name: {"1": VersionState(state)} for name, state in models.items()})
    return ReplicaStatus(address, state, index, reason)


def ready_with(
    *replicas: ReplicaStatus,
    declared: Sequence[DeclaredModel] = (),
    quorum: int = 1,
    draining: bool = False,
) -> Readiness:
    models = {model.name: model for model in declared}
    return check_readiness(replicas, models, models, quorum, is_draining=draining)


def test_without_declared_models_one_living_replica_is_enough() -> None:
    assert ready_with(seen("a")).document == {"ready": True, "replicas": {"a": "ready"}}
    assert ready_with(seen("a", HealthState.DOWN, "refused"), seen("b")).is_ready
    assert ready_with(seen("a", HealthState.EJECTED)).is_ready


def test_it_is_not_ready_while_nobody_lives_or_while_it_drains() -> None:
    assert not ready_with().is_ready
    found = ready_with(seen("a", HealthState.DOWN, "nobody there"), seen("b", HealthState.SLOW))
    assert found.document == {
        "ready": False,
        "replicas": {"a": "down: nobody there", "b": "slow"},
    }
    draining = ready_with(seen("a"), draining=True)
    assert (draining.is_ready, draining.document["draining"]) == (False, True)


@pytest.mark.parametrize(
    ("quorum", "states", "ready"),
    [
        (1, (READY, UNAVAILABLE, UNAVAILABLE), True),
        (1, (LOADING, UNAVAILABLE, UNLOADING), False),
        (2, (READY, UNAVAILABLE, UNAVAILABLE), False),
        (2, (READY, READY, LOADING), True),
        (3, (READY, READY, LOADING), False),
        (3, (READY, READY, READY), True),
        (9, (READY, READY, READY), True),  # all, if there are fewer
        (9, (READY, READY, LOADING), False),
    ],
)
def test_a_declared_model_must_be_ready_on_a_quorum(
    quorum: int, states: tuple[str, ...], ready: bool
) -> None:
    replicas = [seen(name, m=state) for name, state in zip("abc", states, strict=True)]
    found = ready_with(*replicas, declared=[DeclaredModel("m")], quorum=quorum)
    assert found.is_ready == found.document["ready"] == ready
    missing = found.document.get("missing", {}).get("m", {})
    expected = {name for name, state in zip("abc", states, strict=True) if state != READY}
    assert set(missing) == (set() if ready else expected)


def test_a_model_on_a_replica_that_cannot_be_asked_does_not_count() -> None:
    dead = seen("a", HealthState.DOWN, "refused", m=READY)
    found = ready_with(dead, seen("b", m=UNAVAILABLE), declared=[DeclaredModel("m")])
    assert not found.is_ready
    assert found.document["missing"] == {"m": {"a": "down: refused", "b": UNAVAILABLE}}


def test_declared_versions_must_all_be_ready_on_the_same_replica() -> None:
    both = ReplicaStatus("a", HealthState.UP, versions_of(v1=READY, v2=READY))
    one = ReplicaStatus("b", HealthState.UP, versions_of(v1=READY))
    other = ReplicaStatus("c", HealthState.UP, versions_of(v2=READY))
    declared = [DeclaredModel("m", ("1", "2"))]
    assert ready_with(both, one, declared=declared).is_ready
    assert not ready_with(one, other, declared=declared).is_ready
    assert not ready_with(both, one, declared=declared, quorum=2).is_ready


def test_a_declared_model_counts_once_it_was_ready() -> None:
    m, added = {"m": DeclaredModel("m")}, {"m": DeclaredModel("m"), "added": DeclaredModel("added")}
    without, loaded = [seen("a", m=READY)], [seen("a", m=READY, added=READY)]
    assert update_required_models(m, added, without, 1) == m
    found = check_readiness(without, added, m, 1, is_draining=False)
    assert found.is_ready
    assert found.document["pending"] == {
        "added": {"a": "UNAVAILABLE: not in this replica's repository"}
    }
    assert update_required_models(m, added, loaded, 1) == added
    assert update_required_models(m, added, loaded, 2) == added  # on all, if there are fewer
    assert update_required_models(m, added, [*loaded, *without], 2) == m
    found = check_readiness(without, added, added, 1, is_draining=False)
    assert not found.is_ready
    assert "pending" not in found.document
    assert update_required_models(added, m, without, 1) == m


def test_other_versions_of_a_declared_model_count_once_they_were_ready() -> None:
    old, new = {"m": DeclaredModel("m", ("1",))}, {"m": DeclaredModel("m", ("2",))}
    only_old = [ReplicaStatus("a", HealthState.UP, versions_of(v1=READY))]
    both = [ReplicaStatus("a", HealthState.UP, versions_of(v1=READY, v2=READY))]
    assert update_required_models(old, new, only_old, 1) == old
    assert check_readiness(only_old, new, old, 1, is_draining=False).is_ready
    assert not check_readiness([seen("a")], new, old, 1, is_draining=False).is_ready
    assert update_required_models(old, new, both, 1) == new


def test_the_reason_why_a_model_is_missing_is_tritons() -> None:
    index = Index({"m": {"1": VersionState(UNAVAILABLE, "no model file")}})
    found = ready_with(
        ReplicaStatus("a", HealthState.UP, index), seen("b"), declared=[DeclaredModel("m")]
    )
    assert found.document["missing"]["m"] == {
        "a": "UNAVAILABLE: no model file",
        "b": "UNAVAILABLE: not in this replica's repository",
    }


REPLICAS = st.lists(
    st.builds(ReplicaStatus, st.uuids().map(str), st.sampled_from(HealthState), INDEXES), max_size=6
)


@given(REPLICAS, DECLARED, st.integers(1, 8), st.booleans())
def test_what_is_not_ready_says_why_and_what_is_ready_has_it_all(
    replicas: list[ReplicaStatus], declared: dict[str, DeclaredModel], quorum: int, draining: bool
) -> None:
    found = check_readiness(replicas, declared, declared, quorum, is_draining=draining)
    assert orjson.loads(orjson.dumps(found.document)) == found.document
    alive = [replica for replica in replicas if replica.state <= HealthState.EJECTED]
    reasons = not alive or "missing" in found.document or "draining" in found.document
    assert found.is_ready != reasons
    if found.is_ready:
        for name in declared:
            there = sum(replica.index.is_ready(name) for replica in alive)
            assert there >= min(quorum, len(replicas))


# Addresses.


@pytest.mark.parametrize(
    ("url", "found", "shown"),
    [
        ("http://triton", ReplicaAddress("triton", 8000), "triton:8000"),
        ("http://triton:9000/", ReplicaAddress("triton", 9000), "triton:9000"),
        ("triton", ReplicaAddress("triton", 8000), "triton:8000"),
        ("triton:9000", ReplicaAddress("triton", 9000), "triton:9000"),
        ("10.0.0.1:9000", ReplicaAddress("10.0.0.1", 9000), "10.0.0.1:9000"),
        ("http://h:1?grpc=2&metrics=3", ReplicaAddress("h", 1, 2, 3), "h:1"),
        ("http://h?metrics=65535", ReplicaAddress("h", 8000, 8001, 65535), "h:8000"),
        ("https://h", ReplicaAddress("h", 8000, tls=True), "h:8000"),
        ("http://[::1]", ReplicaAddress("::1", 8000), "[::1]:8000"),
        (
            "https://[2001:db8::7]:9",
            ReplicaAddress("2001:db8::7", 9, tls=True),
            "[2001:db8::7]:9",
        ),
        (
            "dns+http://triton:9000",
            DnsName(ReplicaAddress("triton", 9000)),
            "triton",
        ),
        (
            "dns+https://triton.ml.svc?grpc=7",
            DnsName(ReplicaAddress("triton.ml.svc", 8000, 7, tls=True)),
            "triton.ml.svc",
        ),
        ("HTTP://TRITON", ReplicaAddress("triton", 8000), "triton:8000"),
    ],
)
def test_an_address_is_read(url: str, found: ReplicaSource, shown: str) -> None:
    assert parse_replica_source(url) == found
    assert str(found) == shown


def test_grpc_is_on_the_same_host() -> None:
    assert parse_replica_url("http://[::1]:9?grpc=10").grpc_target == "[::1]:10"
    assert parse_replica_url("http://h").grpc_target == "h:8001"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://",
        "ftp://triton",
        "grpc://triton:8001",
        "dns://triton",
        "http://triton/v2",
        "http://triton:port",
        "http://triton:99999",
        "http://triton:-1",
        "http://triton:0",
        "http://triton?grpc",
        "http://triton?grpc=",
        "http://triton?grpc=0",
        "http://triton?grpc=65536",
        "http://triton?grpc=-1",
        "http://triton?grpc=²",
        f"http://triton?grpc={'9' * 5000}",
        "http://triton?http=8000",
        "http://[::1",
        "http://::1]:8000",
        "::1",
        "http://℀",
    ],
    ids=lambda url: url[:40],
)
def test_what_is_no_address_is_told_of(url: str) -> None:
    with pytest.raises(BadAddress):
        parse_replica_source(url)


@given(st.text() | st.text("dnshttp+:/[]?=&grpc.0189%"))
def test_no_text_makes_an_address_fail_in_another_way(text: str) -> None:
    for url in (text, f"http://{text}", f"http://h?{text}", f"dns+https://h:{text}"):
        try:
            source = parse_replica_source(url)
        except BadAddress:
            continue
        address = source.address if isinstance(source, DnsName) else source
        assert isinstance(address, ReplicaAddress)
        assert address.host
        assert all(0 < port < 65536 for port in (address.port, address.grpc_port))


@pytest.mark.parametrize("names", [None, 5, "a:8000", {"a:8000": 1}, [], ["b:8000"], [["a:8000"]]])
def test_only_reports_that_list_a_replica_count_as_gateways_with_work_there(names: Any) -> None:
    busy = {"busy_replicas": ["b:8000", "a:8000"]}
    reports: list[dict[str, Any]] = [busy, {"ages": {}}, {"busy_replicas": names}]
    assert count_busy_gateways(reports, "a:8000") == 1
