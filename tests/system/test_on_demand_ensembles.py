"""An ensemble on demand brings its parts, counts with them, and protects them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fleet import repository
from tests.support.on_demand import evictions, list_held, loads, on_demand_fleet
from tests.support.servers import Triton
from tests.support.wait import wait_until

CHAIN = {"chain", "echo", "other"}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    with Triton(repository(tmp_path_factory.mktemp("one"))) as triton:
        triton.wait()
        yield triton


def test_an_ensemble_brings_its_parts_and_they_stay_while_it_does(one: Triton) -> None:
    with on_demand_fleet([one], max_loaded_models="4") as fleet:
        assert fleet.infer("chain").json()["outputs"] == {"Y": [1, 2]}
        assert list_held(one) == CHAIN
        assert loads(fleet) == 1
        assert fleet.infer("late").status_code == 200
        # A part was used longest ago, and is needed.
        assert fleet.infer("echo").status_code == 200
        assert fleet.infer("chain").status_code == 200
        assert fleet.infer("foreign").status_code == 200
        assert list_held(one) == CHAIN | {"foreign"}
        # When the ensemble goes, its parts can go as well.
        assert fleet.infer("late").status_code == 200
        assert fleet.infer("foreign").status_code == 200
        before = evictions(fleet)
        assert fleet.infer("late").status_code == 200
        assert evictions(fleet) == before


def test_parts_that_match_no_pattern_go_after_their_ensemble(one: Triton) -> None:
    patterns = "chain,late,foreign"
    with on_demand_fleet([one], patterns, max_loaded_models="3", idle_unload_s="2") as fleet:
        assert fleet.infer("echo").json()["code"] == "MODEL_NOT_READY"
        assert fleet.infer("chain").status_code == 200
        assert list_held(one) == CHAIN
        wait_until(lambda: not list_held(one))
        assert fleet.infer("late").status_code == 200
        assert fleet.infer("foreign").status_code == 200
        assert list_held(one) >= {"late", "foreign"}


def test_an_ensemble_whose_parts_are_not_known_yet_is_brought_within_the_budget(
    one: Triton,
) -> None:
    with on_demand_fleet([one], max_loaded_models="3") as fleet:
        for model in ("late", "foreign"):
            assert fleet.infer(model).status_code == 200
        assert fleet.infer("chain").status_code == 200
        wait_until(lambda: list_held(one) == CHAIN)
        assert fleet.infer("late").status_code == 200
        wait_until(lambda: len(list_held(one)) <= 3)
