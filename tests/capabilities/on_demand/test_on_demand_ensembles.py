"""An ensemble on demand brings its parts, counts with them, and protects them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.capabilities.on_demand.support.on_demand import (
    evictions,
    list_held,
    loads,
    on_demand_fleet,
)
from tests.support.fleet import Fleet, load_behind, repository
from tests.support.servers import Triton
from tests.support.wait import wait_until

CHAIN = {"chain", "echo", "other"}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    with Triton(repository(tmp_path_factory.mktemp("one"))) as triton:
        triton.wait()
        yield triton


def test_parts_of_an_ensemble_are_loaded_and_kept_with_it(one: Triton) -> None:
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


@pytest.mark.long
def test_parts_that_match_no_pattern_are_unloaded_after_their_ensemble(one: Triton) -> None:
    patterns = "chain,late,foreign"
    with on_demand_fleet([one], patterns, max_loaded_models="3", idle_unload_s="2") as fleet:
        assert fleet.infer("echo").json()["code"] == "MODEL_NOT_READY"
        assert fleet.infer("chain").status_code == 200
        assert list_held(one) == CHAIN
        wait_until(lambda: not list_held(one))
        assert fleet.infer("late").status_code == 200
        assert fleet.infer("foreign").status_code == 200
        assert list_held(one) >= {"late", "foreign"}


@pytest.mark.long
def test_parts_that_were_not_known_count_from_the_next_load_on(one: Triton) -> None:
    with on_demand_fleet([one], max_loaded_models="3") as fleet:
        for model in ("late", "chain"):
            assert fleet.infer(model).status_code == 200
        assert list_held(one) == CHAIN | {"late"}
        assert fleet.infer("foreign").status_code == 200
        assert len(list_held(one)) <= 3


def load_through_the_api(fleet: Fleet) -> None:
    assert fleet.load("chain").status_code == 200


def load_in_place(fleet: Fleet) -> None:
    """As another gateway does that shares no state with this one."""
    load_behind(fleet.tritons[0], "chain")


def use_until_idle(fleet: Fleet, model: str) -> None:
    assert fleet.infer(model).status_code == 200
    wait_until(lambda: model not in list_held(fleet.tritons[0]))


@pytest.mark.long
@pytest.mark.parametrize("load", [load_through_the_api, load_in_place])
def test_new_part_of_a_served_ensemble_is_not_idle(
    one: Triton, tmp_path: Path, load: Callable[[Fleet], None]
) -> None:
    models_file = tmp_path / "models.yaml"
    models_file.write_text("models: [chain]")
    config = one.repository / "chain" / "config.pbtxt"
    before = config.read_text()
    try:
        settings = {"models_file": str(models_file), "idle_unload_s": "2"}
        with on_demand_fleet([one], **settings) as fleet:
            wait_until(lambda: fleet.infer("chain").status_code == 200)
            use_until_idle(fleet, "foreign")  # the gateway knows the parts by then
            assert list_held(one) == CHAIN
            config.write_text(before.replace('"other"', '"late"'))
            load(fleet)
            wait_until(lambda: list_held(one) == {"chain", "echo", "late"})
            use_until_idle(fleet, "foreign")  # the new part is idle before
            assert list_held(one) == {"chain", "echo", "late"}
            assert fleet.infer("chain").status_code == 200
            # The former part, and twice the other model; counted when Triton has answered.
            wait_until(lambda: evictions(fleet, "idle") == 3)
    finally:
        config.write_text(before)
