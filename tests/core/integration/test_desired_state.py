"""A state that somebody else wrote: its models are loaded, but the code in it does not run."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path

import httpx
import orjson
import pytest

from gateway.embedded.supervisor import EmbeddedTriton
from gateway.repository.state.content import ALL, DesiredModel
from tests.support.fleet import BODY, ECHO, write_echo
from tests.support.redis_server import RedisServer
from tests.support.servers import gateway, triton_on_free_ports
from tests.support.state import opened
from tests.support.wait import wait_until

TRIPLES = base64.b64encode(ECHO.replace('"Y", value', '"Y", value * 3').encode()).decode()
TENSOR = {"data_type": "TYPE_FP32", "dims": [2]}
CONFIG = orjson.dumps(
    {
        "name": "late",
        "backend": "python",
        "input": [{"name": "X", **TENSOR}],
        "output": [{"name": "Y", **TENSOR}],
    }
).decode()
MODELS = {
    "other": DesiredModel(ALL),
    "late": DesiredModel(ALL, {"config": CONFIG, "file:1/model.py": TRIPLES}),
}


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("echo", "other", "late"):
        write_echo(folder, name)
    return folder


@pytest.fixture
def triton(repository: Path) -> Iterator[EmbeddedTriton]:
    with triton_on_free_ports(repository, "echo") as running:
        yield running


def store_models(url: str) -> str:
    """Write into a state what a gateway without uploads would not store there; return its address."""

    async def store() -> None:
        async with opened(url) as (store,):
            for name, model in MODELS.items():
                await store.set_desired_model(name, model)

    asyncio.run(store())
    return url


def ready(client: httpx.Client, model: str) -> bool:
    return client.get(f"/v2/models/{model}/ready").status_code == 200


@pytest.mark.long
@pytest.mark.fault("somebody writes code into the state, in its file or in Redis")
@pytest.mark.parametrize("where", ["a file", "Redis"])
def test_code_in_the_state_is_ignored_and_logged(
    triton: EmbeddedTriton, redis: RedisServer, tmp_path: Path, where: str
) -> None:
    state = store_models(f"file://{tmp_path}/state.db" if where == "a file" else redis.url())
    with gateway(triton.options.url, state=state) as (client, command):
        line = command.wait_for("desired state of model late is ignored")
        assert "GATEWAY_MODEL_UPLOADS=code" in line
        wait_until(lambda: ready(client, "other"))
        assert "loading model other" in command.output
        assert "loading model late" not in command.output
        assert not ready(client, "late")
        loaded = client.post("/v2/repository/models/late/load", timeout=60)
        assert loaded.status_code == 200
        listed = client.get("/v1/models").json()["models"]
        assert [each["wished"] for each in listed if each["name"] == "late"] == ["loaded"]
        answer = client.post("/v1/models/late/infer", json=BODY)
        assert answer.json()["outputs"] == {"Y": [1, 2]}  # the repository's own
    assert command.output.count("of model late is ignored") == 1


def test_code_in_the_state_runs_if_uploads_are_allowed(
    triton: EmbeddedTriton, tmp_path: Path
) -> None:
    state = store_models(f"file://{tmp_path}/state.db")
    with gateway(triton.options.url, state=state, model_uploads="code") as (client, _):
        wait_until(lambda: ready(client, "late"))
        answer = client.post("/v1/models/late/infer", json=BODY)
        assert answer.json()["outputs"] == {"Y": [3, 6]}
