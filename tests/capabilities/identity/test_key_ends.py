"""Quotas that administrators see and reset, and when keys expire, by the metrics and the log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import httpx
import pytest

from gateway.messages import format_utc_time
from tests.support.fake_triton import fake_triton
from tests.support.keys import ADMIN, INFER, bearer, entry, written
from tests.support.servers import ROOT, Command, gateway
from tests.support.wait import wait_until

TEAM, BOTH, ENDING = "tgw_team-secret", "tgw_both-secret", "tgw_ending-secret"
NOW = datetime.now(timezone.utc)
ENDS = format_utc_time(NOW + timedelta(days=10))
ENTRIES = [
    entry(ADMIN, "admin"),
    entry(INFER, "infer"),
    entry(TEAM, "infer", name="team/a", requests_per_day=1, requests_per_month=9),
    entry(BOTH, "infer", expires=format_utc_time(NOW + timedelta(days=1))),
    entry("tgw_new-secret", "infer", name="both"),
    entry(ENDING, "infer", expires=ENDS),
    entry("tgw_far-secret", "infer", expires=format_utc_time(NOW + timedelta(days=90))),
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Command]]:
    keys = written(tmp_path_factory.mktemp("keys") / "keys.yaml", ENTRIES)
    settings = {"keys_file": str(keys), "log_format": "json"}
    with (
        fake_triton() as triton,
        gateway(f"http://127.0.0.1:{triton.port}", **settings) as started,
    ):
        yield started


def test_administrator_resets_a_quota(service: tuple[httpx.Client, Command]) -> None:
    client, command = service

    def infer() -> int:
        return client.post("/v2/models/any/infer", headers=bearer(TEAM), json={}).status_code

    def read_used() -> dict[str, int]:
        quotas = client.get("/v1/quotas", headers=bearer(ADMIN)).json()["quotas"]
        assert {quota["caller"] for quota in quotas} == {"team/a"}
        return {quota["period"]: quota["used"] for quota in quotas}

    assert [infer(), infer()] == [200, 429]
    assert read_used() == {"day": 1, "month": 1}
    assert client.delete("/v1/quotas/team/a", headers=bearer(INFER)).status_code == 403
    assert client.delete("/v1/quotas/infer", headers=bearer(ADMIN)).status_code == 404
    reset = client.delete("/v1/quotas/team/a", headers=bearer(ADMIN))
    assert [quota["used"] for quota in reset.json()["quotas"]] == [0, 0]
    line = json.loads(command.wait_for('"action":"reset quotas","outcome":"succeeded"'))
    assert line["changes"][0] == {
        "subject": "used quota of team/a in this day",
        "from": 1,
        "to": 0,
    }
    assert [infer(), infer()] == [200, 429]


def test_ends_of_keys_are_in_the_metrics_and_warned_of(
    service: tuple[httpx.Client, Command], tmp_path: Path
) -> None:
    client, command = service
    page = client.get("/metrics", headers=bearer(ADMIN)).text
    (text,) = re.findall(r"^# HELP gateway_key_expires_seconds (.*)$", page, re.MULTILINE)
    row = f"| `gateway_key_expires_seconds` | gauge | caller | {text} |"
    assert row in (ROOT / "docs/operate/metrics.md").read_text().splitlines()
    ends = {
        line.split('"')[1]: float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if line.startswith("gateway_key_expires_seconds{")
    }
    assert ends.keys() == {"ending", "far"}  # both has a second key
    assert 9 < ends["ending"] / 86400 < 10
    command.wait_for(f"key ending expires at {ENDS}; make another one")
    wait_until(lambda: command.output.count(" expires at ") == 1)
