"""The audit log of `GATEWAY_AUDIT_LOG`: a file or standard output, written before the response."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
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

    def read_level(self) -> str:
        return str(self.client.get(LEVEL, headers=bearer(ADMIN)).json()["level"])

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


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


def test_each_call_has_its_line_before_its_response(service: Service) -> None:
    client = service.client
    headers = bearer(ADMIN)
    before = len(service.read())
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
    lines = service.read()[before:]
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
    statuses = {service.set_level(key=SCRAPER).status_code for _ in range(80)}
    assert statuses == {403}
    lines = [line for line in service.read() if line["caller"] == "scraper"]
    assert len(lines) == 60
    assert service.set_level().status_code == 200
    assert service.read()[-1]["caller"] == "admin"


# It prints what the next change would be refused for, while nobody reads standard output.
FLOOD = """
import logging, sys
from gateway.telemetry.logs import AuditLogHandler

handler = AuditLogHandler(None)
for count in (400, 400, 400):
    for _ in range(count):
        handler.emit(logging.makeLogRecord({"msg": "a" * 10_000}))
    print(repr(handler.find_problem()), repr(handler.problem), file=sys.stderr)
"""


def test_changes_are_refused_before_lines_are_lost() -> None:
    with subprocess.Popen([sys.executable, "-c", FLOOD], stdout=PIPE, stderr=PIPE) as process:
        assert process.stderr is not None
        try:
            lines = [process.stderr.readline().decode().strip() for _ in range(4)]
        finally:
            process.kill()
    reason = "too many lines wait"
    dropped = f"the audit log cannot be written, and changes are refused: {reason}"
    assert lines == ["'' ''", f"'{reason}' ''", dropped, f"'{reason}' '{reason}'"]


# It writes three lines, the second one to a file that may not become larger, as on a full disk.
CUT = """
import logging, pathlib, resource, sys
from gateway.telemetry.logs import AuditLogHandler

handler = AuditLogHandler(pathlib.Path(sys.argv[1]))
for text, limit in (("first", 10_000), ("second", 200), ("third", 10_000)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, 10_000))
    handler.emit(logging.makeLogRecord({"msg": text}))
    handler.flush()
"""


def test_line_that_a_full_disk_cuts_ends_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    subprocess.run([sys.executable, "-c", CUT, path], check=True, capture_output=True)
    first, second, third = path.read_text().splitlines()
    assert [json.loads(line)["message"] for line in (first, third)] == ["first", "third"]
    assert len(second) < len(first)


def test_file_that_was_moved_is_created_again(service: Service) -> None:
    service.set_level()
    old = service.path.with_suffix(".1")
    service.path.replace(old)
    psutil.Process(service.command.pid).send_signal(signal.SIGHUP)
    moved = old.read_bytes()
    assert service.set_level().status_code == 200
    assert len(service.read()) == 1
    assert service.path.stat().st_mode & 0o777 == 0o600
    assert old.read_bytes() == moved


def test_change_is_refused_if_the_file_cannot_be_created_again(service: Service) -> None:
    link = service.path.with_suffix(".link")
    link.symlink_to(service.path.parent)
    link.replace(service.path)
    service.command.wait_for("the audit log cannot be written, and changes are refused: is a dir")
    assert service.set_level("debug").json()["code"] == "AUDIT_LOG_UNAVAILABLE"
    assert service.read_level() == "error"
    line = service.command.wait_for("the audit log may not have this line")
    assert "PUT /v1/log-level: failed" in line
    service.path.unlink()
    wait_until(lambda: service.set_level().status_code == 200)


def test_changed_keys_file_has_a_line(service: Service) -> None:
    written(service.path.with_name("keys.yaml"), [*ENTRIES, entry("tgw_new-secret", "infer")])
    wait_until(lambda: any(line["action"] == "keys file" for line in service.read()))


def test_full_disk_refuses_changes_until_it_has_room(triton: Fake, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user cannot mount a file system")
    keys = written(tmp_path / "keys.yaml", ENTRIES)
    settings = {"keys_file": str(keys), "audit_log": str(folder / "audit.log")}
    try:
        with gateway(f"http://127.0.0.1:{triton.port}", **settings) as (client, command):
            service = Service(client, command, folder / "audit.log")
            filler = folder / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            # What is in progress when the disk becomes full has room for its line.
            while service.set_level("warning").status_code == 200:
                assert service.read()[-1]["status"] == 200
            lines = service.read()
            refused = service.set_level("debug")
            assert refused.status_code == 503
            assert refused.json()["code"] == "AUDIT_LOG_UNAVAILABLE"
            assert "(no space left on device)" in refused.json()["error"]
            assert service.read_level() == "warning"
            assert client.get("/v1/models", headers=bearer(INFER)).status_code == 200
            filler.unlink()
            wait_until(lambda: service.set_level("error").status_code == 200)
            assert service.read_level() == "error"
            assert [line["status"] for line in service.read()[len(lines) :]][-2:] == [503, 200]
    finally:
        subprocess.run(["umount", str(folder)], check=True)


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
