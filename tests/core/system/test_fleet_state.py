"""What is declared, and what is kept of loads and unloads: a real tritonserver behind the gateway."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.fleet import BODY, QUICK, Quick, repository
from tests.support.gateway_forks import run_gateway
from tests.support.redis_server import RedisServer
from tests.support.servers import Triton, gateway
from tests.support.wait import wait_until


def test_declared_models_are_loaded_awaited_and_protected(tmp_path: Path) -> None:
    declared = tmp_path / "models.yaml"
    declared.write_text("models: [echo]\n")
    with Triton(repository(tmp_path / "models")) as triton:
        triton.wait()
        with gateway(triton.options.url, models_file=str(declared), **QUICK) as (client, command):
            wait_until(lambda: client.get("/readyz").status_code == 200)
            assert client.post("/v1/models/echo/infer", json=BODY).status_code == 200
            refused = client.post("/v2/repository/models/echo/unload")
            assert (refused.status_code, refused.json()["code"]) == (409, "CONFLICT")
            declared.write_text("models: [")
            command.wait_for("stays in use")
            assert client.get("/readyz").status_code == 200
            trouble = triton.repository / "late" / "trouble"
            trouble.write_text("hold")
            declared.write_text("models: [echo, {name: late, versions: [1]}]\n")
            wait_until(lambda: list(client.get("/readyz").json().get("pending", ())) == ["late"])
            assert client.get("/readyz").status_code == 200
            assert client.get("/v2/health/ready").status_code == 200
            trouble.unlink()
            wait_until(lambda: "pending" not in client.get("/readyz").json())
            declared.write_text("models: []\n")
            wait_until(lambda: client.post("/v2/repository/models/echo/unload").is_success)


def test_a_models_file_that_cannot_be_read_ends_the_start_with_a_sentence(tmp_path: Path) -> None:
    declared = tmp_path / "models.yaml"
    declared.write_text("models: {}")
    environment = {"GATEWAY_MODELS_FILE": str(declared), "GATEWAY_STATE": "memory:", "PATH": ""}
    ended = run_gateway("serve", "--port", 0, environment=environment)
    assert ended.returncode != 0
    assert "'models' must be a list" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_was_loaded_survives_the_gateway_and_triton(tmp_path: Path) -> None:
    state = f"file://{tmp_path}/state/state.json"
    with Triton(repository(tmp_path / "models"), "echo") as triton:
        triton.wait()
        with gateway(triton.options.url, state=state, **QUICK) as (client, _):
            assert client.post("/v2/repository/models/other/load").status_code == 200
            assert client.post("/v2/repository/models/echo/unload").status_code == 200
        triton.kill()
        triton.start()
        triton.wait()
        with gateway(triton.options.url, state=state, **QUICK) as (client, _):
            wait_until(lambda: client.post("/v1/models/other/infer", json=BODY).is_success)
            wait_until(lambda: client.post("/v1/models/echo/infer", json=BODY).status_code == 503)
        shutil.rmtree(triton.repository / "other")
        triton.kill()
        triton.start()
        triton.wait()
        told: Quick = {**QUICK, "log_level": "info"}
        with gateway(triton.options.url, state=state, **told) as (client, command):
            command.wait_for("restored desired state: load 'other'; unload 'echo'")
            listed = {model["name"]: model for model in client.get("/v1/models").json()["models"]}
            assert (listed["other"]["wished"], listed["other"]["ready"]) == ("loaded", False)
            table = run_gateway("models", "--url", str(client.base_url))
            assert table.returncode == 0, table
            assert re.search("^other +no .*to be loaded by the API", table.stdout, re.MULTILINE)
            unloaded = client.post("/v2/repository/models/other/unload")
            assert (unloaded.status_code, unloaded.json()["state"]) == (200, "UNAVAILABLE")
            listed = {model["name"]: model for model in client.get("/v1/models").json()["models"]}
            assert "other" not in listed
            assert client.post("/v2/repository/models/other/unload").status_code == 404


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    with RedisServer(folder, "--appendonly", "yes") as server:
        yield server


@pytest.mark.long
@pytest.mark.fault("Redis goes away and comes back")
def test_two_gateways_share_their_wishes_in_redis(tmp_path: Path, redis: RedisServer) -> None:
    with Triton(repository(tmp_path / "models"), "echo") as triton:
        triton.wait()
        url, state = triton.options.url, redis.url()
        with (
            gateway(url, state=state, **QUICK) as (one, _),
            gateway(url, state=state, **QUICK) as (other, _),
        ):
            assert one.post("/v2/repository/models/other/load").status_code == 200

            def wished(client: httpx.Client) -> dict[str, str]:
                models = client.get("/v1/models").json()["models"]
                return {model["name"]: model["wished"] for model in models if "wished" in model}

            wait_until(lambda: wished(other) == {"other": "loaded"})
            begun = one.post(
                "/v2/repository/models/late/load", headers={"Prefer": "respond-async"}
            ).headers["location"]
            wait_until(lambda: other.get(begun).json().get("operation") == "succeeded")
            redis.stop()
            refused = one.post("/v2/repository/models/late/unload")
            assert (refused.status_code, refused.json()["code"]) == (503, "STATE_UNAVAILABLE")
            for client in (one, other):
                assert client.post("/v1/models/late/infer", json=BODY).status_code == 200
            triton.kill()
            triton.start()
            triton.wait()
            wait_until(lambda: other.post("/v1/models/other/infer", json=BODY).is_success)
            redis.start()
            wait_until(lambda: one.post("/v2/repository/models/late/unload").is_success)
