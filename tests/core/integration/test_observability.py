"""Metrics, access log and audit log."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.embedded.supervisor import EmbeddedTriton
from tests.interface.names import read_log_fields
from tests.support.keys import ADMIN, ENTRIES, INFER, TEXTS_ADMIN, bearer, written
from tests.support.scripted_server import Replica, scripted_replica
from tests.support.servers import Command, gateway
from tests.support.wait import TIMEOUT_S, lengthening, wait_until

SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
TEXT = {"Content-Type": "text/plain"}
LOAD = "/v2/repository/models/{}/load"


@pytest.fixture(scope="module")
def fresh(demo_triton: EmbeddedTriton) -> Iterator[tuple[httpx.Client, Command]]:
    """A gateway that no other test uses, with a log in JSON."""
    with gateway(demo_triton.options.url, log_format="json") as pair:
        yield pair


@pytest.fixture
def client(fresh: tuple[httpx.Client, Command]) -> httpx.Client:
    return fresh[0]


def samples(client: httpx.Client, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """Return the samples of a metric, by their labels."""
    found = {}
    for line in client.get("/metrics").text.splitlines():
        match = SAMPLE.match(line)
        if match and match[1] == name:
            labels = tuple(sorted(re.findall(r'(\w+)="([^"]*)"', match[2] or "")))
            found[labels] = float(match[3])
    return found


def total(client: httpx.Client, name: str, **labels: str) -> float:
    return sum(
        value
        for found, value in samples(client, name).items()
        if labels.items() <= dict(found).items()
    )


def logged(command: Command, request_id: str) -> list[dict[str, object]]:
    """The lines of a request, as soon as its own is there."""
    wait_until(
        lambda: any(request_id in line and "duration_ms" in line for line in list(command.lines))
    )
    return [json.loads(line) for line in list(command.lines) if request_id in line]


def test_request_is_counted_once_with_its_bytes_and_times(client: httpx.Client) -> None:
    kind = {"route": "/v1/models/{model}/infer", "model": "text_ensemble"}
    count = "gateway_request_duration_seconds_count"
    before = total(client, count, **kind)
    text = b"The ship left the harbour at dawn."
    answers = [
        client.post("/v1/models/text_ensemble/infer", content=text, headers=TEXT) for _ in range(7)
    ]
    assert total(client, count, **kind) == before + 7
    assert total(client, count, **kind, status="2xx") == before + 7
    assert total(client, "gateway_request_bytes_total", model="text_ensemble") == 7 * len(text)
    answer_bytes = total(client, "gateway_answer_bytes_total", model="text_ensemble")
    assert answer_bytes == sum(len(answer.content) for answer in answers)
    duration = total(client, "gateway_request_duration_seconds_sum", **kind)
    phase = "gateway_request_phase_seconds"
    upstream = total(client, f"{phase}_sum", phase="upstream", model="text_ensemble")
    assert 0 < upstream < duration
    assert total(client, f"{phase}_count", phase="upstream", model="text_ensemble") == 7
    attempts = total(client, "gateway_upstream_attempts_total", outcome="answered")
    assert attempts >= 7


def test_passed_request_is_counted_by_its_labels(client: httpx.Client) -> None:
    def counted(route: str, status: str, model: str = "", version: str = "") -> float:
        kind = {"route": route, "model": model, "version": version, "status": status}
        return total(client, "gateway_request_duration_seconds_count", **kind)

    assert not counted("/v2", "2xx")
    for _ in range(3):
        assert client.get("/v2/models/core").status_code == 200
        assert client.get("/v2/models/core/versions/01").status_code == 200
        assert client.post("/v2/models/core/infer", content=b"{").status_code == 400
        assert client.get("/v2/health/ready").status_code == 200
        assert client.get("/v2/models/stats").status_code == 200
        assert client.get("/v2").status_code == 200
    assert counted("/v2/models/{model}", "2xx", "core") == 3
    assert counted("/v2/models/{model}/versions/{version}", "2xx", "core", "1") == 3
    assert counted("/v2/models/{model}/infer", "4xx", "core") == 3
    assert counted("/v2/health/ready", "2xx") == 3
    assert counted("/v2/models/stats", "2xx") == 3
    assert counted("/v2", "2xx") == 3


def test_failed_request_is_counted_by_its_status(client: httpx.Client) -> None:
    def failed(code: str) -> float:
        route = "/v2/models/{model}/infer"
        kind = {"route": route, "status": "5xx", "code": code}
        return total(client, "gateway_request_duration_seconds_count", **kind)

    text = "The ship left the harbour at dawn. " * 40
    tensor = {"name": "TEXT", "shape": [32, 1], "datatype": "BYTES", "data": [text] * 32}
    brief = {"X-Request-Timeout": "0.001"}
    before = failed("504")
    answer = client.post("/v2/models/text_ensemble/infer", json={"inputs": [tensor]}, headers=brief)
    assert answer.status_code == 504
    assert failed("504") == before + 1
    assert not failed("")
    assert not total(client, "gateway_request_duration_seconds_count", status="2xx", code="504")


@pytest.mark.long
@pytest.mark.fault(
    "thousands of unknown model names, and names that a server of completions accepts"
)
def test_unknown_names_add_no_metric_series(client: httpx.Client) -> None:
    def series() -> int:
        return len(re.findall(r"^gateway_", client.get("/metrics").text, re.MULTILINE))

    def strange(number: int) -> None:
        client.get(f"/v2/models/nobody{number}")
        client.post(f"/v1/models/nobody{number}/infer", content=b"x", headers=TEXT)
        client.get(f"/v2/models/core/versions/{number + 2}")
        client.get(f"/nowhere/{number}")
        client.get(f"/v2/nowhere/{number}")
        client.get(f"/v2/systemsharedmemory/region/nobody{number}/status")
        client.delete(f"/v2/models/nobody{number}/infer")

    strange(0)
    strange(1)
    series()  # which is a request itself
    before = series()
    for number in range(2, 60):
        strange(number)
    assert series() == before


def test_connections_and_requests_of_clients_are_counted(client: httpx.Client) -> None:
    url = client.base_url
    assert total(client, "gateway_requests_in_flight") == 1  # the page itself
    before = total(client, "gateway_connections")
    with socket.create_connection((url.host, url.port or 80), TIMEOUT_S):
        wait_until(lambda: total(client, "gateway_connections") == before + 1)
    wait_until(lambda: total(client, "gateway_connections") == before)


def test_malformed_request_is_counted_as_refused(client: httpx.Client) -> None:
    address = client.base_url.host, client.base_url.port or 80
    for request, reason in (
        (b"GARBAGE\r\n\r\n", "malformed_request"),
        (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", "url_too_long"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 200 + b"\r\n", "header_too_large"),
    ):
        before = total(client, "gateway_requests_refused_total", reason=reason)
        with socket.create_connection(address, TIMEOUT_S) as connection:
            connection.sendall(request)
            while connection.recv(4096):
                pass
        assert total(client, "gateway_requests_refused_total", reason=reason) == before + 1


def test_metrics_describe_the_fleet(client: httpx.Client, demo_triton: EmbeddedTriton) -> None:
    address = demo_triton.options.address

    def states() -> dict[str, float]:
        found = samples(client, "gateway_replica_state")
        return {dict(labels)["state"]: value for labels, value in found.items()}

    wait_until(lambda: states() == {"up": 1, "ejected": 0, "slow": 0, "down": 0})
    assert total(client, "gateway_replica_models", replica=address, state="READY") == 8
    assert total(client, "gateway_model_ready_replicas", model="text_core") == 1
    # Triton may still compute a request whose deadline has passed.
    wait_until(lambda: total(client, "gateway_upstream_outstanding", replica=address) == 0)
    assert client.post("/v2/repository/models/text_core/load").status_code == 200
    assert total(client, "gateway_model_actions_total", by="api", outcome="done") >= 1


def test_request_has_one_access_line_with_all_fields(
    fresh: tuple[httpx.Client, Command], demo_triton: EmbeddedTriton
) -> None:
    client, command = fresh
    (serving,) = (json.loads(line) for line in command.lines if "serving" in line)
    assert serving["message"].startswith(f"serving {demo_triton.options.url} on http://")
    headers = {"X-Request-ID": "line-1", **TEXT}
    answer = client.post("/v1/models/text_ensemble/infer", content=b"hello", headers=headers)
    (line,) = logged(command, "line-1")
    assert line.keys() == read_log_fields("gateway.access")
    assert line["message"] == "POST /v1/models/text_ensemble/infer 200"
    assert (line["model"], line["route"]) == ("text_ensemble", "/v1/models/{model}/infer")
    assert line["replica"] == demo_triton.options.address
    assert (line["bytes_in"], line["bytes_out"]) == (5, len(answer.content))
    assert isinstance(line["duration_ms"], float)
    assert isinstance(line["upstream_ms"], float)
    assert 0 < line["upstream_ms"] < line["duration_ms"]
    # That of a load names the model, if there is one.
    for model, logged_model in (("text_core", "text_core"), ("nobody", "")):
        headers = {"X-Request-ID": f"load-{model}"}
        client.post(LOAD.format(model), headers=headers)
        line = logged(command, headers["X-Request-ID"])[-1]
        assert (line["route"], line["model"]) == (LOAD.format("{model}"), logged_model)


def test_probes_write_no_access_line_unless_they_fail(
    fresh: tuple[httpx.Client, Command],
) -> None:
    client, command = fresh
    for path in ("/", "/docs/docs.js", "/livez", "/metrics", "/v1/models", "/v1/replicas"):
        assert client.get(path, headers={"X-Request-ID": "routine-1"}).status_code == 200
    client.post("/v1/models", headers={"X-Request-ID": "failed-1"})
    assert logged(command, "failed-1")[0]["message"] == "POST /v1/models 405"
    assert not [line for line in command.lines if "routine-1" in line]


def test_readiness_is_logged_when_it_changes(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text("models: [m]\n")
    Replica.answers = {"index": [], "models": {}}  # it answers a load, and loads nothing
    with scripted_replica() as url:
        address = url.removeprefix("http://")
        models = str(tmp_path / "models.yaml")
        with gateway(f"{url}?grpc=9", models_file=models) as (client, command):
            command.wait_for(
                "not ready: model m is on 0 of 1 replicas: UNAVAILABLE: not in this replica's "
                f"repository on {address}"
            )
            for path in ("/readyz", "/v2/health/ready"):
                assert client.get(path).status_code == 503
            Replica.answers["index"] = [{"name": "m", "version": "1", "state": "READY"}]
            command.wait_for("ready after ")
            assert client.get("/readyz").status_code == 200
    assert sum("not ready:" in line for line in command.lines) == 1
    assert not [line for line in command.lines if "503" in line]


def test_access_line_of_an_abandoned_inference_has_its_time(
    fresh: tuple[httpx.Client, Command],
) -> None:
    client, command = fresh
    body = {"inputs": ["The ship left the harbour at dawn. " * 40] * 32}
    for deadline_s in lengthening(0.05):
        name = f"given-up-{deadline_s:g}."
        headers = {"X-Request-ID": name, "X-Request-Timeout": str(deadline_s)}
        answer = client.post("/v1/models/text_ensemble/infer", json=body, headers=headers)
        assert answer.status_code == 504
        (line,) = logged(command, name)
        if line["attempts"] == 1:  # it was at Triton by then, on this machine
            break
    assert 0 < float(str(line["upstream_ms"])) < float(str(line["duration_ms"]))
    # The deadline of the request and that of its attempt are the same: either may be noticed first.
    attempts = [
        total(client, "gateway_upstream_attempts_total", outcome=outcome)
        for outcome in ("given_up", "deadline")
    ]
    assert sum(attempts) >= 1


def test_head_has_the_headers_of_get_without_the_body(client: httpx.Client) -> None:
    """Every resource that supports GET supports HEAD (RFC 9110, section 9.1)."""
    for path in ("/livez", "/readyz", "/metrics", "/v1/models", "/v1/models/core", "/openapi.json"):
        head = client.head(path)
        whole = client.get(path)
        assert (head.status_code, head.content) == (200, b""), path
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert client.head("/v1/models/nobody").status_code == 404
    assert client.head("/v1/models/core/infer").status_code == 405


def test_error_of_triton_is_logged_in_full_with_the_request_id(
    fresh: tuple[httpx.Client, Command],
) -> None:
    client, command = fresh
    headers = {"X-Request-ID": "reason-1", "Content-Type": "image/png"}
    refused = client.post("/v1/models/ensemble/infer", content=b"no image", headers=headers)
    reason, line = logged(command, "reason-1")
    assert (reason["level"], line["level"]) == ("warning", "info")
    assert "Triton returned status" in str(reason["message"])
    assert "in ensemble 'ensemble'" in str(reason["message"])
    assert "in ensemble" not in refused.text


@pytest.mark.long
def test_metadata_requests_are_no_attempts_of_the_request(
    fresh: tuple[httpx.Client, Command],
) -> None:
    client, command = fresh
    # After a load what was known of the model is read again.
    assert client.post("/v2/repository/models/text_ensemble/load").status_code == 200
    headers = {"X-Request-ID": "attempts-1.", **TEXT}
    sent = "gateway_upstream_attempts_total"
    before = total(client, sent)
    client.post("/v1/models/text_ensemble/infer", content=b"hello", headers=headers)
    assert total(client, sent) == before + 3  # metadata, config, inference
    (line,) = logged(command, "attempts-1.")
    assert line["attempts"] == 1


@pytest.fixture(scope="module")
def audited(
    demo_triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[httpx.Client, Command]]:
    """A gateway with keys that logs nothing but errors."""
    keys = written(tmp_path_factory.mktemp("audit") / "keys.yaml", ENTRIES)
    settings = {"keys_file": str(keys), "log_format": "json", "log_level": "error"}
    with gateway(demo_triton.options.url, **settings) as pair:
        yield pair


def audit_lines(command: Command, request_id: str, count: int = 1) -> list[dict[str, Any]]:
    """All lines of a request, which has so many."""
    wait_until(lambda: sum(request_id in line for line in list(command.lines)) >= count)
    lines = [json.loads(line) for line in list(command.lines) if request_id in line]
    assert len(lines) == count
    assert {(line["logger"], line["level"]) for line in lines} == {("gateway.audit", "info")}
    return lines


def test_audit_log_has_every_administrative_call(
    audited: tuple[httpx.Client, Command], subtests: pytest.Subtests
) -> None:
    client, command = audited
    core = LOAD.format("core")
    texts = LOAD.format("text_core")
    unload = texts.replace("/load", "/unload")
    code = {"parameters": {"config": "{}", "file:1/model.py": "code"}}
    names = ["config", "file:1/model.py"]
    table: list[tuple[str, dict[str, Any], str, int, tuple[str, str, str, list[str]]]] = [
        (texts, {}, ADMIN, 200, ("text_core", "admin", "succeeded", [])),
        (texts, {}, INFER, 403, ("text_core", "infer", "denied", [])),
        (core, {}, TEXTS_ADMIN, 404, ("core", "texts-admin", "failed", [])),
        (core, code, ADMIN, 403, ("core", "admin", "denied", names)),
        (LOAD.format("nobody"), {}, ADMIN, 404, ("nobody", "admin", "failed", [])),
        (unload, {}, ADMIN, 409, ("text_core", "admin", "failed", [])),
        ("/v2/logging", {}, ADMIN, 200, ("", "admin", "succeeded", [])),
        ("/v2/trace/setting", {}, INFER, 403, ("", "infer", "denied", [])),
        ("/v2/models/core/trace/setting", {}, ADMIN, 200, ("core", "admin", "succeeded", [])),
    ]
    for number, (path, body, key, status, fields) in enumerate(table):
        with subtests.test(f"{path} {status}"):
            headers = {"X-Request-ID": f"audit-{number}.", **bearer(key)}
            assert client.post(path, json=body, headers=headers).status_code == status
            (line,) = audit_lines(command, f"audit-{number}.")
            error = {"code", "reason"} if status >= 400 else set()
            assert line.keys() == read_log_fields("gateway.audit") | error
            assert (line["model"], line["key"], line["outcome"], line["parameters"]) == fields
            assert line["status"] == status
            assert line["client"] == "127.0.0.1"
            assert "code" not in line["message"]


def test_audit_log_has_the_result_of_an_asynchronous_load(
    audited: tuple[httpx.Client, Command],
) -> None:
    client, command = audited
    for model, outcome, code in (
        ("text_core", "succeeded", None),
        ("nobody", "failed", "MODEL_NOT_FOUND"),
    ):
        headers = {"X-Request-ID": f"later-{model}.", "Prefer": "respond-async", **bearer(ADMIN)}
        answer = client.post(LOAD.format(model), headers=headers)
        assert answer.status_code == 202
        accepted, ended = sorted(
            audit_lines(command, f"later-{model}.", 2), key=lambda line: "status" not in line
        )
        assert accepted["outcome"] == "accepted"
        assert accepted["operation"] == ended["operation"] == answer.json()["id"]
        assert (ended["model"], ended["key"], ended["outcome"]) == (model, "admin", outcome)
        assert ended.get("code") == code
        listed = client.get("/v1/events", headers=bearer(ADMIN)).json()["events"]
        assert not any("denied" in event["outcome"] for event in listed)
        events = [event for event in listed if event.get("request_id") == f"later-{model}."]
        assert [event["outcome"] for event in events] == ["accepted", outcome]
        assert events[1]["message"] == ended["message"]


def test_audit_log_has_the_result_of_an_abandoned_load(
    audited: tuple[httpx.Client, Command],
) -> None:
    client, command = audited
    address = client.base_url.host, client.base_url.port or 80
    # Until the answer was not quicker than the end of the connection.
    for number in itertools.count():
        name = f"disconnects-{number}."
        head = f"POST {LOAD.format('text_core')} HTTP/1.1\r\nHost: x\r\nX-Request-ID: {name}\r\n"
        with socket.create_connection(address, TIMEOUT_S) as connection:
            # A reset: of a connection that is only closed, the client may wait for its response.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(f"{head}X-API-Key: {ADMIN}\r\nContent-Length: 0\r\n\r\n".encode())
        wait_until(lambda name=name: name in command.output)  # type: ignore[misc]
        if "client disconnected" in command.output:
            break
    left, ended = audit_lines(command, name, 2)
    assert (left["status"], left["model"]) == (499, "text_core")
    assert (ended["outcome"], ended["model"], ended["key"]) == ("succeeded", "text_core", "admin")


def test_audit_log_lacks_calls_that_change_nothing(
    audited: tuple[httpx.Client, Command],
) -> None:
    client, command = audited
    headers = {"X-Request-ID": "reading-1", **bearer(ADMIN)}
    for path in ("/v2/logging", "/v2/trace/setting", "/v1/models", "/v1/replicas"):
        assert client.get(path, headers=headers).status_code == 200
    assert client.post("/v2/repository/index", headers=headers).status_code == 200
    last = {"X-Request-ID": "reading-2", **bearer(ADMIN)}
    assert client.post("/v2/logging", json={}, headers=last).status_code == 200
    audit_lines(command, "reading-2")
    assert not [line for line in command.lines if "reading-1" in line]


@pytest.mark.long
@pytest.mark.fault("the keys file, the models file or the certificate becomes a pipe")
def test_metric_shows_a_rejected_file_until_it_is_valid(
    demo_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    models = tmp_path / "models.yaml"
    good = {"keys": written(keys, ENTRIES).read_text(), "models": "models: [core]\n"}
    models.write_text(good["models"])
    files = {"keys": keys, "models": models}
    settings = {"keys_file": str(keys), "models_file": str(models)}
    with gateway(demo_triton.options.url, **settings) as (client, command):
        client.headers.update(bearer(ADMIN))

        def is_valid(name: str) -> bool:
            return bool(total(client, "gateway_file_valid", file=name))

        assert is_valid("keys")
        assert is_valid("models")
        for name, sentence in (
            ("keys", f"the keys file {keys}: "),
            ("models", f"the models file {models}: "),
        ):
            files[name].write_text(f"{name}: 1\n")
            wait_until(lambda name=name: not is_valid(name))  # type: ignore[misc]
            assert "error" in command.wait_for(sentence)
            assert client.get("/v1/models/core").status_code == 200  # as before
            os.mkfifo(tmp_path / "pipe")
            (tmp_path / "pipe").replace(files[name])
            command.wait_for(f"{sentence}it is not a regular file")
            assert client.get("/v1/models/core").status_code == 200
            (tmp_path / "good").write_text(good[name])
            (tmp_path / "good").replace(files[name])
            wait_until(lambda name=name: is_valid(name))  # type: ignore[misc]


def test_metric_shows_an_unavailable_state_until_it_is_back(
    demo_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    folder = tmp_path / "state"
    away = tmp_path / "away"
    with gateway(demo_triton.options.url, state=f"file://{folder}/state.db") as (client, command):
        assert total(client, "gateway_state_up") == 1
        folder.rename(away)
        wait_until(lambda: total(client, "gateway_state_up") == 0)
        command.wait_for("cannot be read: no such file or directory")
        refused = client.post("/v2/repository/models/text_core/load")
        assert (refused.status_code, refused.json()["code"]) == (503, "STATE_UNAVAILABLE")
        command.wait_for("cannot be written")
        away.rename(folder)
        # Nobody has to load a model for that.
        wait_until(lambda: total(client, "gateway_state_up") == 1)


@pytest.mark.fault("CR, LF and escape sequences in paths, names and request IDs")
def test_log_line_cannot_be_ended_by_a_client(
    fresh: tuple[httpx.Client, Command], demo_triton: EmbeddedTriton
) -> None:
    """Nor in the log that is meant for people."""
    with gateway(demo_triton.options.url, log_format="console") as for_people:
        for client, command in (fresh, for_people):
            client.get("/v1/models/%0d%0aFORGED%1b%5b31m/infer", headers={"X-Request-ID": "evil-1"})
            client.get("/v1/models/nobody", headers={"X-Request-ID": "bad id\x1b[31m"})
            client.post("/v1/models/a%20200%20key=b/infer", headers={"X-Request-ID": "evil-2"})
            client.get("/v1/models/nobody", headers={"X-Request-ID": "good-1"})
            command.wait_for("good-1")
            lines = [line for line in command.lines if "evil-2" in line]
            access = "POST /v1/models/a%20200%20key=b/infer 404"
            assert len([line for line in lines if access in line]) == 1
            assert not [line for line in lines if " key=b" in line]
            assert not [line for line in command.lines if line.startswith("FORGED")]
            assert "\x1b" not in command.output
            assert len([line for line in command.lines if "evil-1" in line]) == 1


def test_log_level_warning_omits_the_access_lines(demo_triton: EmbeddedTriton) -> None:
    with gateway(demo_triton.options.url, log_level="warning") as (client, command):
        before = len(command.lines)
        for _ in range(5):
            assert client.get("/v1/models").status_code == 200
        assert client.get("/v2/models/nobody").status_code == 404  # its own mistake
        headers = {"X-Request-ID": "last-1", "Content-Type": "image/png"}
        refused = client.post("/v1/models/ensemble/infer", content=b"no image", headers=headers)
        assert refused.is_client_error
        command.wait_for("last-1")
        of_requests = [line for line in command.lines[before:] if "request_id=" in line]
        assert len(of_requests) == 1
