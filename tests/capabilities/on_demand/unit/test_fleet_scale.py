"""The decisions and pages of a large fleet: how many function calls they take, on any machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import NamedTuple

import pytest

from gateway.capabilities.on_demand.held_models import HeldModels
from gateway.capabilities.on_demand.metrics import OnDemandCollector
from gateway.capabilities.on_demand.settings import OnDemandSettings
from gateway.capabilities.on_demand.usage import ModelUsage
from gateway.capacity.admission import AdmissionQueue
from gateway.config.settings import Settings
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.health import Health
from gateway.fleet.index import Index, merge_indexes, parse_index
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.replica import Replica, ReplicaAddress
from gateway.fleet.signatures import SignatureCache
from gateway.repository.collector import FleetCollector
from gateway.repository.model_facts import ModelFacts
from gateway.repository.models_file import DeclaredModel, ModelsFile
from gateway.repository.placement import ModelBudget, NoPlacement, plan_idle_unloads, plan_placement
from gateway.repository.readiness import ReplicaStatus, evaluate_readiness
from gateway.repository.repository import Repository, build_repository
from gateway.repository.state.content import DEMAND
from gateway.repository.state.places import open_state_store

REPLICAS, MODELS, LOADED = 100, 200, 30


class LargeFleet(NamedTuple):
    """A fleet that is never opened: its replicas have indexes, and nothing is sent."""

    pool: ReplicaPool
    repository: Repository
    held: HeldModels


def build_index(number: int) -> Index:
    """Each replica has other models loaded."""
    states = {
        f"m{model}": "READY" if (model - number * 7) % MODELS < LOADED else "UNAVAILABLE"
        for model in range(MODELS)
    }
    return parse_index(
        [{"name": name, "version": "1", "state": state} for name, state in states.items()]
    )


def build_fleet() -> LargeFleet:
    settings = Settings()
    on_demand = OnDemandSettings(on_demand_models=("*",))
    pool = ReplicaPool([], settings)
    for number in range(REPLICAS):
        address = ReplicaAddress(f"10.0.0.{number + 1}", 8000)
        replica = pool.replicas[address] = Replica(address, settings)
        replica.health = Health(is_down=False)
        replica.index = build_index(number)
    signatures = SignatureCache(Dispatcher(pool))
    repository = build_repository(
        pool,
        signatures,
        open_state_store("memory:"),
        models_file=ModelsFile(None),
        settings=settings,
    )
    admission = AdmissionQueue(64, 32, 100, pool.metrics)
    usage = ModelUsage(admission, perf_counter)
    held = HeldModels(pool, repository, usage=usage, settings=on_demand)
    repository.facts.facts.update({f"m{model}": ModelFacts() for model in range(MODELS)})
    return LargeFleet(pool, repository, held)


def count_calls(work: Callable[[], object]) -> int:
    """Return the number of Python functions and generators that the second round enters."""
    work()  # what is computed once per index is computed
    count = 0

    def record(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(record)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def find_idle(fleet: LargeFleet) -> None:
    for load in fleet.held.describe(fleet.pool.replicas.values()):
        assert not plan_idle_unloads(load, perf_counter(), 60)


def place_model(fleet: LargeFleet) -> None:
    # The facts are not current, so that nothing can be evicted yet.
    replicas = fleet.held.describe(fleet.pool.replicas.values())
    wanted = fleet.held.list_memory_mb("another")
    placement = plan_placement("another", DEMAND, replicas, wanted, ModelBudget(LOADED))
    assert isinstance(placement, NoPlacement)
    assert not placement.is_final


def merge_one_model(fleet: LargeFleet) -> None:
    assert len(merge_indexes(fleet.pool.list_serving_indexes(), ["m0"])) == 1


def check_declared_models(fleet: LargeFleet) -> None:
    statuses = [
        ReplicaStatus(each.name, fleet.pool.replica_state(each), each.index)
        for each in fleet.pool.replicas.values()
    ]
    declared: Mapping[str, DeclaredModel] = {f"m{n}": DeclaredModel(f"m{n}") for n in range(MODELS)}
    readiness = evaluate_readiness(statuses, declared, 1, was_ready=False, is_draining=False)
    assert readiness.is_ready


def collect_fleet(fleet: LargeFleet) -> None:
    families = {each.name: each for each in FleetCollector(fleet.pool, fleet.repository).collect()}
    assert len(families["gateway_model_ready_replicas"].samples) == MODELS


def collect_memory(fleet: LargeFleet) -> None:
    (memory,) = OnDemandCollector(fleet.pool, fleet.held).collect()
    assert len(memory.samples) == REPLICAS


MOST_CALLS: Mapping[Callable[[LargeFleet], None], int] = {
    place_model: 30_000,
    find_idle: 30_000,
    collect_memory: 20_000,
    collect_fleet: 20_000,
    check_declared_models: 15_000,
    merge_one_model: 2_000,
}


async def test_work_for_100_replicas_and_200_models_is_bounded(subtests: pytest.Subtests) -> None:
    fleet = build_fleet()
    for work, most_calls in MOST_CALLS.items():
        with subtests.test(work.__name__):
            assert count_calls(partial(work, fleet)) < most_calls
