"""A model with many concurrent requests gets more copies, where there is room."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.capabilities.on_demand.support.on_demand import (
    evictions,
    list_held,
    model_names,
    on_demand_fleet,
    on_demand_gateway,
    tritons_with,
    used_continuously,
)
from tests.support.fleet import Fleet
from tests.support.servers import Triton
from tests.support.wait import wait_until

MODELS = model_names(4)
SLOW = {"inputs": {"X": [-0.2, 0.0]}}  # it takes 0.2 s
CLIENTS = 16


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Triton]]:
    with tritons_with(tmp_path_factory.mktemp("three"), 3, MODELS) as tritons:
        yield tritons


@contextmanager
def fleet_with(
    three: list[Triton], folder: Path, replicas: str, **settings: str
) -> Iterator[Fleet]:
    models_file = folder / "models.yaml"
    models_file.write_text(f"models: [{{name: model00, on_demand: true, replicas: {replicas}}}]")
    with on_demand_fleet(three, models_file=str(models_file), **settings) as fleet:
        yield fleet


def count_copies(three: list[Triton]) -> int:
    return sum("model00" in list_held(triton) for triton in three)


@pytest.mark.long
def test_busy_model_gets_copies_until_it_is_idle(three: list[Triton], tmp_path: Path) -> None:
    with (
        fleet_with(three, tmp_path, "{min: 1, max: 3}", max_loaded_models="1") as fleet,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        assert fleet.infer("model01").status_code == 200  # one replica is full
        assert fleet.infer("model00").status_code == 200
        assert count_copies(three) == 1

        def send_until_copied(_: int) -> set[int]:
            statuses = set()
            while count_copies(three) < 2:
                answer = fleet.client.post("/v1/models/model00/infer", json=SLOW)
                statuses.add(answer.status_code)
            return statuses

        statuses = set().union(*pool.map(send_until_copied, range(CLIENTS)))
        assert statuses == {200}
        assert sum("model01" in list_held(triton) for triton in three) == 1  # not displaced
        wait_until(lambda: count_copies(three) == 1)
        wait_until(lambda: evictions(fleet, "copies") == 1)
        assert fleet.infer("model00").status_code == 200
        assert evictions(fleet) == 0


def test_model_has_the_copies_of_the_models_file(three: list[Triton], tmp_path: Path) -> None:
    with fleet_with(three, tmp_path, "2") as fleet:
        assert fleet.infer("model00").status_code == 200
        wait_until(lambda: count_copies(three) == 2)
        assert fleet.infer("model01").status_code == 200
        assert sum("model01" in list_held(triton) for triton in three) == 1


@pytest.mark.long
def test_gateway_without_requests_keeps_the_copies_that_another_needs(
    three: list[Triton], tmp_path: Path
) -> None:
    with (
        fleet_with(three, tmp_path, "{min: 1, max: 2}", state="none:") as busy,
        used_continuously(busy, "model00", SLOW, clients=CLIENTS) as statuses,
    ):
        wait_until(lambda: count_copies(three) == 2)
        models_file = str(tmp_path / "models.yaml")
        with on_demand_gateway(three, models_file=models_file, state="none:") as idle:
            count_before = len(statuses)
            wait_until(lambda: len(statuses) > count_before + 40)
            assert evictions(idle, "copies") == 0
            assert count_copies(three) == 2
        assert set(statuses) == {200}


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
def test_cordoned_copy_is_replaced_until_it_is_uncordoned(
    three: list[Triton], tmp_path: Path, count: int
) -> None:
    with fleet_with(three, tmp_path, str(count)) as fleet:
        assert fleet.infer("model00").status_code == 200
        wait_until(lambda: count_copies(three) == count)
        holder = next(triton for triton in three if "model00" in list_held(triton))
        assert fleet.client.post(f"/v1/replicas/{holder.address}/cordon").status_code == 200
        assert fleet.infer("model00").status_code == 200
        wait_until(lambda: count_copies(three) == count + 1)
        assert fleet.client.post(f"/v1/replicas/{holder.address}/uncordon").status_code == 200
        wait_until(lambda: count_copies(three) == count)
        assert fleet.infer("model00").status_code == 200
        wait_until(lambda: evictions(fleet, "copies") == 1)  # counted when Triton has answered
