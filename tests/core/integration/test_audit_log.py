"""The audit log of `GATEWAY_AUDIT_LOG`: a file or standard output."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.fake_triton import Fake, fake_triton
from tests.support.keys import ADMIN, INFER, bearer, entry, written
from tests.support.servers import Command, free_ports, gateway
from tests.support.wait import wait_until

SCRAPER = "tgw_scraper-secret"
ENTRIES = [entry(ADMIN, "admin"), entry(INFER, "infer"), entry(SCRAPER, "metrics")]
LEVEL = "/v1/log-level"


@pytest.fixture(scope="module")
def triton() -> Iterator[Fake]:
    with fake_triton() as fake:
        yield fake


@dataclass(frozen=True)
class Service:
    client: httpx.Client
    command: Command
    path: Path

    def set_level(self, level: str = "error", key: str = ADMIN) -> httpx.Response:
        return self.client.put(LEVEL, headers=bearer(key), json={"level": level})

    def read(self) -> list[dict[str, Any]]:
        # The last line may still be in writing.
        *lines, _ = self.path.read_text().split("\n")
        return [json.loads(line) for line in lines]

    def read_lines_of(self, calls: Sequence[httpx.Response]) -> list[dict[str, Any]]:
        """Return the lines since the first of these calls, once the last one has its line."""

        def list_ids() -> list[str]:
            return [line["request_id"] for line in self.read()] if self.path.exists() else []

        first, last = (calls[index].headers["x-request-id"] for index in (0, -1))
        wait_until(lambda: last in list_ids())
        return self.read()[list_ids().index(first) :]


@pytest.fixture(scope="module")
def service(triton: Fake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("audit")
    keys = written(folder / "keys.yaml", ENTRIES)
    settings = {
        "keys_file": str(keys),
        "audit_log": str(folder / "audit.log"),
        "log_level": "error",
    }
    with gateway(f"http://127.0.0.1:{triton.port}", **settings) as (client, command):
        yield Service(client, command, folder / "audit.log")


def test_each_call_has_its_line(service: Service) -> None:
    client = service.client
    headers = bearer(ADMIN)
    calls = [
        service.set_level(),
        service.set_level(key=INFER),
        service.set_level(key=INFER),  # the log has no second line of a refused call
        client.put(f"{LEVEL}?level=debug", headers=bearer(INFER)),
        service.set_level("none"),
        client.post("/v2/logging", headers=headers, json={}),
        client.post("/v2/trace/setting", headers=bearer(INFER), json={}),
        client.post("/v2/repository/models/any/unload", headers=headers),
    ]
    lines = service.read_lines_of(calls)
    assert [line["request_id"] for line in lines] == [
        response.headers["x-request-id"] for response in calls
    ]
    assert [line["status"] for line in lines] == [response.status_code for response in calls]
    assert [line["outcome"] for line in lines[:4]] == ["succeeded", "denied", "denied", "denied"]
    first = lines[0]
    assert (first["caller"], first["client"], first["method"], first["path"]) == (
        *("admin", "127.0.0.1"),
        *("PUT", LEVEL),
    )
    assert first["route"] == LEVEL
    assert first["duration_ms"] > 0
    assert "gateway.audit" not in service.command.output


def test_refused_calls_of_a_key_cannot_fill_the_disk(service: Service) -> None:
    refused = [service.set_level(key=SCRAPER) for _ in range(80)]
    assert {call.status_code for call in refused} == {403}
    lines = service.read_lines_of([*refused, service.set_level()])
    assert [line["caller"] for line in lines] == [*(61 * ["scraper"]), "admin"]


def test_file_that_was_moved_is_created_again(service: Service) -> None:
    service.read_lines_of([service.set_level()])
    old = service.path.with_suffix(".1")
    service.path.replace(old)
    psutil.Process(service.command.pid).send_signal(signal.SIGHUP)
    moved = old.read_bytes()
    assert len(service.read_lines_of([service.set_level()])) == 1
    assert service.path.stat().st_mode & 0o777 == 0o600
    assert old.read_bytes() == moved


def test_line_that_cannot_be_written_is_counted_and_is_in_the_log(service: Service) -> None:
    link = service.path.with_suffix(".link")
    link.symlink_to(service.path.parent)
    link.replace(service.path)
    lost = service.set_level("error")
    assert lost.status_code == 200
    line = service.command.wait_for("the audit log cannot be written (Is a directory)")
    assert lost.headers["x-request-id"] in line

    def is_counted() -> bool:
        page = service.client.get("/metrics", headers=bearer(SCRAPER)).text
        return "\ngateway_log_lines_dropped_total 1.0\n" in page

    wait_until(is_counted)
    service.path.unlink()
    assert len(service.read_lines_of([service.set_level()])) == 1


def test_changed_keys_file_has_a_line(service: Service) -> None:
    written(service.path.with_name("keys.yaml"), [*ENTRIES, entry("tgw_new-secret", "infer")])
    wait_until(lambda: any(line["action"] == "keys file" for line in service.read()))


def test_lines_go_to_standard_output(triton: Fake, tmp_path: Path) -> None:
    keys = written(tmp_path / "keys.yaml", ENTRIES)
    settings = {"keys_file": str(keys), "audit_log": "stdout"}
    with gateway(f"http://127.0.0.1:{triton.port}", **settings) as (client, command):
        service = Service(client, command, tmp_path)
        assert service.set_level().status_code == 200
        line = json.loads(command.wait_for('"logger":"gateway.audit"'))
        assert line["path"] == LEVEL


def test_gateway_does_not_start_with_an_audit_log_that_it_cannot_write(tmp_path: Path) -> None:
    environment = {"GATEWAY_AUDIT_LOG": str(tmp_path / "none" / "audit.log")}
    with Command("serve", "--port", str(*free_ports(1)), environment=environment) as command:
        assert command.end() == 1
    assert "GATEWAY_AUDIT_LOG: " in command.output
    assert command.output.endswith("cannot be written: No such file or directory")
