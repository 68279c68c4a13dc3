"""Declared models, and the stored state of loads and unloads: a real tritonserver behind the gateway."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.support.fleet import BODY, QUICK, Quick, fleet_of, repository, url_of
from tests.support.gateway_forks import run_gateway
from tests.support.metrics import metric
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
            wait_until(lambda: list(client.get("/readyz").json().get("missing", ())) == ["late"])
            assert client.get("/readyz").status_code == 200
            assert client.get("/v2/health/ready").status_code == 200
            trouble.unlink()
            wait_until(lambda: "missing" not in client.get("/readyz").json())
            declared.write_text("models: []\n")
            wait_until(lambda: client.post("/v2/repository/models/echo/unload").is_success)


@pytest.mark.long
@pytest.mark.fault("the file of a declared model breaks")
def test_gateways_stay_ready_without_a_broken_model_that_is_not_always_required(
    tmp_path: Path,
) -> None:
    declared, marked = tmp_path / "models.yaml", tmp_path / "marked.yaml"
    load = ("echo", "other", "late")
    declared.write_text("models: [echo, other, late]\n")
    marked.write_text("models: [echo, other, {name: late, required: always}]\n")
    with (
        fleet_of(tmp_path, 2, load=load, models_file=str(declared), **QUICK) as fleet,
        gateway(*map(url_of, fleet.tritons), models_file=str(marked), **QUICK) as (strict, _),
    ):

        def wait_for(client: httpx.Client, status: int, *missing: str) -> None:
            def is_reached() -> bool:
                response = client.get("/readyz")
                found = (response.status_code, *response.json().get("missing", ()))
                return found == (status, *missing)

            wait_until(is_reached)

        def is_back(address: str) -> bool:
            assert fleet.client.get("/readyz").status_code == 200
            replicas = fleet.client.get("/v1/replicas").json()["replicas"]
            (models,) = (each["models"] for each in replicas if each["address"] == address)
            return {models.get("echo"), models.get("other")} == {"READY"}

        for client in (fleet.client, strict):
            wait_for(client, 200)
        for triton in fleet.tritons:
            (triton.repository / "late" / "1" / "model.py").write_text("import nonesuch\n")
        for triton in fleet.tritons:
            triton.kill()
            triton.options = replace(triton.options, exit_on_error=False)
            wait_until(lambda: "DOWN" in fleet.replicas().values())
            triton.start()
            triton.wait()
            wait_until(partial(is_back, triton.address))
        wait_for(strict, 503, "late")
        wait_for(fleet.client, 200, "late")
        # There is no reason while the model is tried again.
        wait_until(lambda: "nonesuch" in fleet.client.get("/readyz").text)
        for client in (fleet.client, strict):
            assert metric(client, 'gateway_model_missing{model="late"}') == 1
            assert metric(client, 'gateway_model_missing{model="echo"}') == 0
            assert client.post("/v1/models/echo/infer", json=BODY).status_code == 200
        run = run_gateway("ready", "--url", str(fleet.client.base_url))
        assert (run.returncode, run.stdout) == (0, "ready, but late cannot be served\n")
        marked.write_text("models: [echo, other, late]\n")
        wait_for(strict, 200, "late")


def test_invalid_models_file_ends_the_start_with_one_sentence(tmp_path: Path) -> None:
    declared = tmp_path / "models.yaml"
    declared.write_text("models: {}")
    environment = {"GATEWAY_MODELS_FILE": str(declared), "GATEWAY_STATE": "memory:", "PATH": ""}
    ended = run_gateway("serve", "--port", 0, environment=environment)
    assert ended.returncode != 0
    assert "'models' must be a list" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.long
def test_desired_models_survive_restarts_of_the_gateway_and_triton(tmp_path: Path) -> None:
    state = f"file://{tmp_path}/state/state.db"
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
        settings: Quick = {**QUICK, "log_level": "info"}
        with gateway(triton.options.url, state=state, **settings) as (client, command):
            command.wait_for("restored desired state: load 'other'; unload 'echo'")
            listed = {model["name"]: model for model in client.get("/v1/models").json()["models"]}
            assert (listed["other"]["wished"], listed["other"]["ready"]) == ("loaded", False)
            table = run_gateway("models", "--url", str(client.base_url))
            assert table.returncode == 0, table
            assert re.search(
                "^other +(?:not loaded|failed) .*to be loaded by the API",
                table.stdout,
                re.MULTILINE,
            )
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
def test_two_gateways_share_the_desired_models_in_redis(tmp_path: Path, redis: RedisServer) -> None:
    with Triton(repository(tmp_path / "models"), "echo") as triton:
        triton.wait()
        url, state = triton.options.url, redis.url()
        with (
            gateway(url, state=state, **QUICK) as (one, _),
            gateway(url, state=state, **QUICK) as (other, _),
        ):
            assert one.post("/v2/repository/models/other/load").status_code == 200

            def read_desired_models(client: httpx.Client) -> dict[str, str]:
                models = client.get("/v1/models").json()["models"]
                return {model["name"]: model["wished"] for model in models if "wished" in model}

            wait_until(lambda: read_desired_models(other) == {"other": "loaded"})
            location = one.post(
                "/v2/repository/models/late/load", headers={"Prefer": "respond-async"}
            ).headers["location"]
            wait_until(lambda: other.get(location).json().get("operation") == "succeeded")
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
