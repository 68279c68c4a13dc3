"""State that was stored by an earlier release, and fields that a later one has added.

`tests/data/state` has what each release has written: the file, and the keys in Redis. A release whose
format differs adds a file of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.repository.state.content import MODELS, DesiredModel
from gateway.repository.state.transfer import export_state, import_state, parse_export
from tests.support.redis_server import RedisServer
from tests.support.servers import ROOT
from tests.support.state_contract import LABELS, opened

RECORDED = {
    path.stem: json.loads(path.read_text()) for path in (ROOT / "tests/data/state").iterdir()
}
CURRENT = "0.2.0"  # what this source writes
STORED = {
    "m": DesiredModel(True, {"config": '{"name": "m"}'}, 1),
    "gone": DesiredModel(False, {}, 2),
}
LABEL = {
    "versions": {"1": 90, "2": 10},
    "sticky": "key",
    "shadow": {"version": "3", "percent": 5.0, "tolerance": 0.001},
}
LATER = {"of_a_later_release": {"deep": [1]}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


def prefix_of(url: str) -> str:
    return url.partition("prefix=")[2]


def fill(server: RedisServer, url: str, keys: dict[str, Any]) -> None:
    with server.client() as client:
        for key, value in keys.items():
            name = f"{prefix_of(url)}{key}"
            if isinstance(value, dict):
                client.hset(name, mapping=value)
            else:
                client.set(name, value)


def read_hash(server: RedisServer, url: str, key: str) -> dict[str, Any]:
    with server.client() as client:
        stored = client.hgetall(f"{prefix_of(url)}{key}")
    return {name.decode(): orjson.loads(value) for name, value in stored.items()}


async def write_example(url: str) -> None:
    """Write what is recorded."""
    async with opened(url) as (store,):
        for name, desired in STORED.items():
            await store.set_desired_model(name, DesiredModel(desired.is_loaded, desired.parameters))
        await store.write(LABELS, ("m", "stable"), LABEL)


@pytest.mark.parametrize("release", RECORDED)
async def test_recorded_state_is_read_and_other_models_can_be_changed(
    server: RedisServer, tmp_path: Path, release: str
) -> None:
    recorded, file, redis_url = RECORDED[release], tmp_path / "state.json", server.url()
    file.write_text(json.dumps(recorded["file"]))
    fill(server, redis_url, recorded["redis"])
    labels = {"m": {"stable": LABEL}} if "labels" in recorded["file"] else {}
    for url in (f"file://{file}", redis_url):
        async with opened(url) as (store,):
            assert await store.read(MODELS) == STORED
            assert await store.read(LABELS) == labels
            await store.set_desired_model("other", DesiredModel(True))
    written = json.loads(file.read_text())
    assert written["models"].items() > recorded["file"]["models"].items()
    assert written.get("labels") == recorded["file"].get("labels")


async def test_written_state_is_the_recorded_one(server: RedisServer, tmp_path: Path) -> None:
    """What differs needs a new record, and a look at what the release before it would read."""
    recorded, file, redis_url = RECORDED[CURRENT], tmp_path / "state.json", server.url()
    for url in (f"file://{file}", redis_url):
        await write_example(url)
    assert json.loads(file.read_text()) == recorded["file"]
    for key in ("wishes", "labels"):
        expected = {name: json.loads(value) for name, value in recorded["redis"][key].items()}
        assert read_hash(server, redis_url, key) == expected


async def test_unknown_fields_are_kept_and_written_back(
    server: RedisServer, tmp_path: Path
) -> None:
    label = {**LABEL, "shadow": {**LABEL["shadow"], **LATER}, **LATER}  # type: ignore[dict-item]
    model = {"loaded": True, "parameters": {}, "revision": 1, **LATER}
    stored = {"format": 1, "revision": 1, "models": {"m": model}, "labels": {"m": {"a": label}}}
    file, redis_url = tmp_path / "state.json", server.url()
    file.write_text(json.dumps({**stored, **LATER}))
    keys = {"wishes": {"m": orjson.dumps(model)}, "labels": {'["m","a"]': orjson.dumps(label)}}
    fill(server, redis_url, {**keys, "revision": "1"})
    for url in (f"file://{file}", redis_url):
        async with opened(url) as (store,):
            assert (await store.read(MODELS))["m"].is_loaded
            assert (await store.read(LABELS))["m"]["a"]["versions"] == {"1": 90, "2": 10}
            await store.set_desired_model("other", DesiredModel(True))
            await store.write(LABELS, ("m", "b"), {"version": "1"})
            exported = await export_state(store)
    written = json.loads(file.read_text())
    assert written["models"]["m"] == model
    assert written["labels"]["m"]["a"] == label
    assert written.items() >= LATER.items()
    assert read_hash(server, redis_url, "wishes")["m"] == model
    assert read_hash(server, redis_url, "labels")['["m","a"]'] == label
    async with opened("memory:") as (store,):
        await import_state(store, parse_export(exported.to_json()))
        imported = (await store.read(MODELS))["m"]
        assert (imported.unknown, await store.read(LABELS)) == (LATER, exported.tables["labels"])
