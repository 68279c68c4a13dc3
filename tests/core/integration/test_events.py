"""What changed, and by whom: the events of real gateways, and the refusals in their logs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.client import Client
from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.errors import assert_error
from tests.support.gateway_forks import run_gateway
from tests.support.keys import ADMIN, ENTRIES, INFER, TEXTS_ADMIN, bearer, entry, written
from tests.support.redis_server import RedisServer
from tests.support.servers import Command, free_ports, gateway
from tests.support.wait import wait_until

LOAD, UNLOAD = "/v2/repository/models/text_core/load", "/v2/repository/models/text_core/unload"
EVENTS = "/v1/events"


def list_events(client: httpx.Client, **query: Any) -> list[dict[str, Any]]:
    answer = client.get(EVENTS, params=query)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["events"])


@pytest.fixture(scope="module")
def pair(
    demo_triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[httpx.Client, httpx.Client, Path]]:
    """Two gateways with one Redis, and the folder of their files. An address of the fleet is nobody's."""
    folder = tmp_path_factory.mktemp("events")
    (folder / "models.yaml").write_text("models: [core]\n")
    (port,) = free_ports(1)
    with RedisServer(folder) as redis, ExitStack() as stack:
        settings = {
            "keys_file": str(written(folder / "keys.yaml", ENTRIES)),
            "models_file": str(folder / "models.yaml"),
            "state": redis.url(),
        }
        urls = (demo_triton.options.url, f"http://127.0.0.1:{port}")
        clients = [stack.enter_context(gateway(*urls, **settings))[0] for _ in range(2)]
        for client in clients:
            client.headers.update(bearer(ADMIN))
        yield clients[0], clients[1], folder


def test_both_gateways_list_who_changed_what_with_the_outcome_of_each_replica(
    pair: tuple[httpx.Client, httpx.Client, Path],
) -> None:
    one, other, folder = pair
    start = one.get(EVENTS).json()["next"]
    (absent,) = {
        each["address"]
        for each in one.get("/v1/replicas").json()["replicas"]
        if each["state"] == "DOWN"
    }
    assert one.post(LOAD, headers={"X-Request-ID": "partly"}).status_code == 502
    assert other.post(f"/v1/replicas/{absent}/cordon").status_code == 200
    written(folder / "keys.yaml", [*ENTRIES, entry("tgw_new-secret", "infer")])
    (folder / "models.yaml").write_text("models: [core, {name: text_core, versions: [1]}]\n")

    def find(client: httpx.Client) -> dict[str, dict[str, Any]]:
        return {each["action"]: each for each in list_events(client, after=start)}

    wait_until(lambda: len(find(one)) == 4)
    found = find(one)
    assert found == find(other)
    assert len(list_events(one, after=start)) == 4  # both have read the files
    load = found["load"]
    assert (load["caller"], load["outcome"], load["code"]) == ("admin", "failed", "PARTLY_DONE")
    assert load["request_id"] == "partly"
    assert load["changes"] == [{"subject": "model text_core", "from": None, "to": {"loaded": True}}]
    states = {address: each["state"] for address, each in load["replicas"].items()}
    assert sorted(states.values()) == ["READY", "UNREACHABLE"]
    assert load["replicas"][absent]["reason"]
    assert found["cordon"]["replica"] == absent
    assert found["cordon"]["changes"] == [
        {"subject": f"replica {absent}", "from": {"cordoned": False}, "to": {"cordoned": True}}
    ]
    (key,) = found["keys file"]["changes"]
    assert (key["subject"], key["from"], key["to"]["roles"]) == ("key new", None, ["infer"])
    assert "caller" not in found["keys file"]
    assert found["models file"]["file"] == str(folder / "models.yaml")
    assert found["models file"]["changes"] == [
        {"subject": "model text_core", "from": None, "to": {"versions": ["1"]}}
    ]


def test_events_are_read_in_pieces_from_a_time_or_cursor_on(
    pair: tuple[httpx.Client, httpx.Client, Path],
) -> None:
    one, other, _ = pair
    for level in ("debug", "info", "debug", "info"):
        assert one.put("/v1/log-level", json={"level": level}).status_code == 200
    last = list_events(one, limit=4)
    assert [each["changes"][0]["to"] for each in last] == ["debug", "info", "debug", "info"]
    everything: list[Any] = []
    piece = other.get(EVENTS, params={"since": "2026-01-01T00:00:00Z", "limit": 1}).json()
    while piece["events"]:
        everything += piece["events"]
        piece = other.get(EVENTS, params={"after": piece["next"], "limit": 1}).json()
    assert everything == list_events(one, limit=1000)
    assert list_events(one, since="2100-01-01T00:00:00+00:00") == []
    for query, words in (
        ("since=yesterday", "since 'yesterday' is not a time, such as 2026-01-31T14:03:00Z"),
        ("since=2026-01-31T14:03:00Z&after=1-1", "since and after exclude each other"),
        ("after=yesterday", "after 'yesterday' is not the \"next\" of an earlier answer"),
        ("limit=0", "invalid query parameter 'limit'"),
        ("limit=1001", "invalid query parameter 'limit'"),
    ):
        assert_error(one.get(f"{EVENTS}?{query}"), 400, "MALFORMED_REQUEST", words)
    for key in (INFER, TEXTS_ADMIN):  # the events have the names of all models
        assert_error(one.get(EVENTS, headers=bearer(key)), 403, "FORBIDDEN")


def test_command_and_client_show_the_events(pair: tuple[httpx.Client, httpx.Client, Path]) -> None:
    one, _, _ = pair
    url = str(one.base_url).rstrip("/")
    environment = {**os.environ, "TRITON_GATEWAY_URL": url, "TRITON_GATEWAY_KEY": ADMIN}
    assert one.put("/v1/log-level", json={"level": "warning"}).status_code == 200
    assert one.put("/v1/log-level", json={"level": "info"}).status_code == 200
    table = run_gateway("events", "--since", "1h", environment=environment)
    assert table.stdout.splitlines()[0].split() == ["TIME", "WHO", "WHAT", "CHANGES", "OUTCOME"]
    row = re.sub(" {2,}", "  ", table.stdout.splitlines()[-1])
    assert row.endswith("Z  admin  log level  log level: warning → info  succeeded")
    listed = run_gateway("events", "--limit", "2", "--json", environment=environment)
    with Client(url, key=ADMIN) as client:
        page = client.events(limit=2)
        assert json.loads(listed.stdout) == page["events"]
        assert client.events(after=page["next"])["events"] == []
    with Command("events", "--follow", "--json", environment=environment) as following:
        following.wait_for('"to":"info"')
        assert one.put("/v1/log-level", json={"level": "error"}).status_code == 200
        following.wait_for('"to":"error"')
        following.process.terminate()


def test_events_in_a_file_outlast_their_gateway_and_have_the_import_of_a_state(
    demo_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    state = f"file://{tmp_path}/state.db"
    with gateway(demo_triton.options.url, state=state) as (client, _):
        assert client.post(LOAD).status_code == 200
        (load,) = list_events(client)
        assert (load["caller"], load["client"]) == ("127.0.0.1", "127.0.0.1")
    exported = tmp_path / "exported.json"
    cordons = ["10.0.0.7:8000"]
    exported.write_text(json.dumps({"format": 1, "models": {}, "cordons": cordons}))
    assert run_gateway("state", "import", str(exported), "--state", state).returncode == 0
    with gateway(demo_triton.options.url, state=state) as (client, _):
        first, imported = list_events(client)
        assert first == load
        assert (imported["action"], imported["outcome"]) == ("state import", "succeeded")
        assert "@" in imported["caller"]
        assert imported["changes"] == [
            {"subject": "model text_core", "from": {"loaded": True}, "to": None},
            {
                "subject": "replica 10.0.0.7:8000",
                "from": {"cordoned": False},
                "to": {"cordoned": True},
            },
        ]


def test_refusals_are_warnings_without_the_access_log_and_unknown_models_are_none(
    demo_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    limited = entry("tgw_slow-secret", "infer", requests_per_second=0.01)
    keys = written(tmp_path / "keys.yaml", [*ENTRIES, limited])
    settings = {"keys_file": str(keys), "log_level": "warning", "log_format": "json"}
    with gateway(demo_triton.options.url, **settings) as (client, command):
        for key, path, status in (
            ("wrong", "/v1/models", 401),
            (INFER, "/v1/log-level", 403),
            (INFER, "/v1/models/nobody", 404),
            (INFER, "/v2/models/nobody", 404),
            (INFER, "/v2/models/core/versions/77", 404),
        ):
            for _ in range(3):
                assert client.get(path, headers=bearer(key)).status_code == status
        for path in (LOAD, UNLOAD, UNLOAD, UNLOAD):
            assert client.post(path, headers=bearer(INFER)).status_code == 403
        slow = [client.get("/v1/models", headers=bearer("tgw_slow-secret")) for _ in range(3)]
        assert [each.status_code for each in slow] == [200, 429, 429]
    lines = [json.loads(line) for line in command.lines if "gateway.refusals" in line]
    assert {line["level"] for line in lines} == {"warning"}
    first, last = lines[:5], lines[5:]
    load, unload = (f"/v2/repository/models/{{model}}/{name}" for name in ("load", "unload"))
    assert [(line["caller"], line["code"], line["status"], line["route"]) for line in first] == [
        ("127.0.0.1", "UNAUTHENTICATED", 401, ""),
        ("infer", "FORBIDDEN", 403, "/v1/log-level"),
        ("infer", "FORBIDDEN", 403, load),
        ("infer", "FORBIDDEN", 403, unload),
        ("slow", "OVERLOADED", 429, ""),
    ]
    assert [(line["caller"], line["count"], line.get("route")) for line in last] == [
        ("127.0.0.1", 2, None),
        ("infer", 2, None),
        ("infer", 2, unload),
        ("slow", 1, None),
    ]
    # The administrative calls of a key are in the audit log, too.
    audit = [json.loads(line) for line in command.lines if "gateway.audit" in line]
    assert [(line["route"], line["outcome"]) for line in audit] == [
        (load, "denied"),
        *(3 * [(unload, "denied")]),
    ]
    assert "nobody" not in command.output
    assert "77" not in "".join(line for line in command.lines if "Triton returned" in line)
