"""Jobs that are accepted while no Triton is up, and wake the fleet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.capabilities.jobs.support import ASYNC, wait_for
from tests.capabilities.on_demand.support.from_zero import npy, sleeping_fleet
from tests.support.metrics import metric
from tests.support.wait import wait_until


@pytest.mark.long
def test_jobs_wake_the_fleet_and_run_when_it_is_up(tmp_path: Path) -> None:
    settings = {"jobs": f"sqlite://{tmp_path}/jobs", "max_running_jobs": "2"}
    headers = {**ASYNC, "Content-Type": "application/x-npy"}
    with sleeping_fleet(tmp_path, **settings) as fleet:
        path = "/v1/models/echo/infer"
        answers = [fleet.client.post(path, content=npy(), headers=headers) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [202] * 3
        wait_until(lambda: metric(fleet.client, "gateway_demand") == 2)  # those that run
        fleet.triton.start()
        for answer in answers:
            document = wait_for(fleet.client, answer.json()["id"])
            assert (document["state"], document["model"]) == ("done", "echo"), document
