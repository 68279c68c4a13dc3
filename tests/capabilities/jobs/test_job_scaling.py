"""Jobs that are accepted while no Triton is up, and wake the fleet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.capabilities.jobs.support import ASYNC, wait_for
from tests.capabilities.on_demand.support.from_zero import npy, sleeping_fleet
from tests.capabilities.on_demand.test_scaler import scaler_client
from tests.support.servers import free_ports
from tests.support.wait import wait_until


@pytest.mark.long
def test_jobs_wake_the_fleet_and_run_when_it_is_up(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    settings = {"jobs": f"sqlite://{tmp_path}/jobs", "max_running_jobs": "1"}
    headers = {**ASYNC, "Content-Type": "application/x-npy"}
    with (
        sleeping_fleet(tmp_path, scaler_port=str(port), **settings) as fleet,
        scaler_client(port, lingerSeconds="1") as scaler,
    ):
        path = "/v1/models/echo/infer"
        answers = [fleet.client.post(path, content=npy(), headers=headers) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [202] * 3
        wait_until(lambda: scaler.read_demand() == 3)
        fleet.triton.start()
        for answer in answers:
            document = wait_for(fleet.client, answer.json()["id"])
            assert (document["state"], document["model"]) == ("done", "echo"), document
