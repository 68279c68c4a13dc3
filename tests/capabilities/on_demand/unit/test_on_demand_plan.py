"""Loading on demand, as values: the uses of models, and as few loads as one cache."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from typing import Any

import orjson
import pytest

from gateway.capabilities.on_demand.activation import NoRoom
from gateway.capabilities.on_demand.settings import MODEL_KEYS
from gateway.capabilities.on_demand.usage import ModelUsage
from gateway.capacity.admission import AdmissionQueue
from gateway.repository.models_file import BadModelsFile, parse_models_file
from gateway.repository.placement import LoadedModel, ModelBudget, ReplicaLoad, plan_placement
from gateway.repository.state.content import DEMAND
from gateway.telemetry.metrics import Metrics
from tests.capabilities.on_demand.support.on_demand import count_lru_loads


def test_gateways_tell_each_other_when_models_were_used() -> None:
    """Others can write anything into the state."""
    now = 100.0
    usage, other = (ModelUsage(AdmissionQueue(1, 1, 1, Metrics()), lambda: now) for _ in range(2))
    usage.record_use("m")
    assert usage.admission.try_acquire("m")
    now = 111.0
    other.record_use("own")
    other.apply_reports([orjson.loads(orjson.dumps(usage.build_report()))])
    assert [other.get_last_used(each) for each in ("m", "own", "unknown")] == [100.0, 111.0, 100.0]
    assert other.count_requests("m") == 1
    wrong: list[Any] = [{"ages": [1]}, {"ages": {"m": "x", "x": 1}, "requests": {"m": -1}}, {}]
    other.apply_reports(wrong)
    assert [other.get_last_used(each) for each in "mx"] == [100.0, 110.0]
    assert other.count_requests("m") == 0


def test_missing_room_names_the_models_that_hold_the_memory() -> None:
    error = NoRoom("m", ["a", "b"])
    assert error.detail == "no replica has room for model 'm'; its memory is held by 'a' and 'b'"
    assert error.headers == {"Retry-After": "1"}


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
            plan = plan_placement(model, DEMAND, fleet, {model: 1}, budget)
            assert isinstance(plan, list)
            *evictions, load = plan
            owner, loads = load.replica, loads + 1
            for eviction in evictions:
                del held[owner][eviction.model]
        held[owner][model] = float(now)
        assert all(len(models) <= slots for models in held.values())
    return loads


def test_fleet_loads_as_rarely_as_one_lru_cache() -> None:
    weights = [1 / (rank + 1) for rank in range(12)]
    names = [f"m{number}" for number in range(12)]
    trace = random.Random(1).choices(names, weights, k=3000)
    assert simulate_policy(trace, 3, 2) == count_lru_loads(trace, 6)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("on_demand: false", False),
        ("on_demand: true", True),
        ("on_demand: true, versions: []", True),
        ("on_demand: 1", "on_demand of model 'a' must be true or false"),
        (
            "on_demand: true, required: always",
            "has required, which on_demand: true does not permit",
        ),
        ("on_demand: true, versions: [1]", "has versions, which on_demand: true does not permit"),
    ],
)
def test_model_of_the_models_file_is_loaded_on_demand(keys: str, expected: bool | str) -> None:
    text = f"models: [{{name: a, {keys}}}]"
    if isinstance(expected, str):
        with pytest.raises(BadModelsFile, match=re.escape(expected)):
            parse_models_file(text, MODEL_KEYS)
    else:
        model = parse_models_file(text, MODEL_KEYS)["a"]
        assert model.is_loaded_by_capability == expected
