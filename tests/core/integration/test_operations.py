"""Operations on a running gateway: log level, metrics without replicas, export and import of the state."""

from __future__ import annotations

import asyncio
import json
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.embedded.supervisor import EmbeddedTriton
from gateway.errors import GatewayError
from gateway.repository.models_file import ModelsFile
from gateway.repository.operations import (
    OperationLost,
    OperationReport,
    OperationRunner,
    Outcome,
    TooManyOperations,
)
from gateway.repository.shared_state import SharedState
from gateway.repository.state.places import open_state_store
from gateway.repository.state.store import StateStore
from gateway.triton.error_mapping import LoadFailed
from tests.support.gateway_forks import run_gateway
from tests.support.keys import ADMIN, ENTRIES, INFER, TEXTS_ADMIN, bearer, written
from tests.support.redis_server import RedisServer
from tests.support.servers import gateway, gateway_before
from tests.support.wait import wait_until, wait_until_async

EXPORTED = {
    "format": 1,
    "models": {
        "core": {"loaded": False, "parameters": {}},
        "resnet": {"loaded": True, "parameters": {"config": "{}"}},
    },
    "labels": {"a": {"stable": {"version": "2"}, "split": {"versions": {"1": 9, "2": 1}}}},
    "cordons": ["10.0.0.7:8000"],
}


def test_log_level_can_be_changed_at_runtime(demo_triton: EmbeddedTriton) -> None:
    url = demo_triton.options.url
    with gateway(url, state="memory:", log_level="warning") as (client, command):
        assert client.get("/v1/log-level").json() == {"level": "warning"}
        answer = client.get("/v1/models/core", headers={"X-Request-ID": "unlogged"})
        assert answer.status_code == 200
        changed = client.put("/v1/log-level", json={"level": "info"})
        assert (changed.status_code, changed.json()) == (200, {"level": "info"})
        command.wait_for("PUT /v1/log-level: succeeded")
        client.get("/v1/models/core", headers={"X-Request-ID": "logged"})
        command.wait_for("logged")
        assert "unlogged" not in command.output
        refused = client.put("/v1/log-level", json={"level": "loud"})
        assert (refused.status_code, refused.json()["code"]) == (400, "MALFORMED_REQUEST")
        assert client.get("/v1/log-level").json() == {"level": "info"}


def test_metrics_without_replicas_lack_their_pages(demo_triton: EmbeddedTriton) -> None:
    pages = {}
    for flag in ("true", "false"):
        with gateway_before(
            demo_triton.options.url, state="memory:", metrics_replicas=flag
        ) as client:
            pages[flag] = client.get("/metrics").text
    assert "\nnv_inference_count{" in pages["true"]
    assert "nv_" not in pages["false"]
    assert "\ngateway_scrape_up{" not in pages["false"]
    assert "\ngateway_replica_state{" in pages["false"]


def state(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return run_gateway("state", *words, given=given)


def test_state_moves_from_a_file_to_redis_and_back(tmp_path: Path) -> None:
    file = tmp_path / "exported.json"
    file.write_text(json.dumps(EXPORTED))
    first, second = f"file://{tmp_path}/one.db", f"file://{tmp_path}/two.db"
    assert state("import", str(file), "--state", first).returncode == 0
    with RedisServer(tmp_path) as redis:
        shared = redis.url()
        for source, target in ((first, shared), (shared, second)):
            exported = state("export", "--state", source)
            assert json.loads(exported.stdout) == EXPORTED
            imported = state("import", "-", "--state", target, given=exported.stdout)
            assert imported.stderr == "imported 2 models and 1 cordons\n"
    assert json.loads(state("export", "--state", second).stdout) == EXPORTED
    # An import replaces what was there.
    empty = {"format": 1, "models": {}, "labels": {}, "cordons": []}
    assert state("import", "-", "--state", second, given=json.dumps(empty)).returncode == 0
    assert json.loads(state("export", "--state", second).stdout) == empty


@pytest.mark.parametrize(
    ("given", "words", "message"),
    [
        ("{", ("--state", "file:///tmp/x.db"), "the file is not an exported state: invalid JSON"),
        ("[]", ("--state", "file:///tmp/x.db"), "a dict is expected, not a list"),
        ('{"format": 2}', ("--state", "file:///tmp/x.db"), "format 2 is not supported"),
        (
            '{"format": 1, "models": {"a": {}}, "cordons": []}',
            ("--state", "file:///tmp/x.db"),
            "unexpected structure of model 'a'",
        ),
        (
            '{"format": 1, "models": {}, "labels": {"a": {"x": {"version": "b"}}}, "cordons": []}',
            ("--state", "file:///tmp/x.db"),
            "'b' is not a valid version",
        ),
        (json.dumps(EXPORTED), ("--state", "memory:"), "only a state in a file or in Redis"),
        (json.dumps(EXPORTED), (), "only a state in a file or in Redis"),
    ],
)
def test_import_of_an_invalid_state_is_refused_in_a_sentence(
    given: str, words: tuple[str, ...], message: str
) -> None:
    ended = state("import", "-", *words, given=given)
    assert ended.returncode != 0
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_gateway_that_runs_applies_an_imported_state(
    demo_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/state.db"
    document = {
        "format": 1,
        "models": {"absent": {"loaded": True, "parameters": {}}},
        "cordons": [],
    }
    with gateway_before(demo_triton.options.url, state=url, log_level="error") as client:
        assert state("import", "-", "--state", url, given=json.dumps(document)).returncode == 0

        def read_desired_models() -> dict[str, str]:
            models = client.get("/v1/models").json()["models"]
            return {each["name"]: each["wished"] for each in models if "wished" in each}

        wait_until(lambda: read_desired_models() == {"absent": "loaded"})


def runner_of(store: StateStore) -> OperationRunner:
    return OperationRunner(store, SharedState(store, ModelsFile(None), can_upload=False).events)


def test_state_of_a_running_gateway_is_exported_by_an_administrator(
    demo_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    keys = str(written(tmp_path / "keys.yaml", ENTRIES))
    with gateway_before(demo_triton.options.url, state="memory:", keys_file=keys) as client:
        loaded = client.post("/v2/repository/models/text_core/load", headers=bearer(ADMIN))
        assert loaded.status_code == 200
        url = ("--url", str(client.base_url))
        exported = json.loads(state("export", *url, "--key", ADMIN).stdout)
        models = {"text_core": {"loaded": True, "parameters": {}}}
        assert exported == {"format": 1, "models": models, "labels": {}, "cordons": []}
        for key, status in (("", 4), (INFER, 4), (TEXTS_ADMIN, 4)):
            assert state("export", *url, "--key", key).returncode == status
        assert client.get("/v1/state", headers=bearer(TEXTS_ADMIN)).status_code == 403


@pytest.mark.fault("thousands of labels and of operations in the background, long names of load")
def test_requests_of_administrators_are_bounded(
    demo_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    settings = {"state": f"file://{tmp_path}/state.db", "log_format": "json"}
    with gateway(demo_triton.options.url, **settings) as (client, command):
        wait_until(lambda: client.get("/v1/models/core").status_code == 200)
        large = {"unknown": "x" * 70_000}
        for method, path in (
            ("POST", "/v2/repository/index"),
            ("PUT", "/v1/log-level"),
        ):
            assert client.request(method, path, json=large).status_code == 413
        # A name of 900 KB is refused, and is not in the log.
        parameters = {"x" * 900_000: 1, **{f"p{number}": 1 for number in range(100)}}
        refused = client.post("/v2/repository/models/core/load", json={"parameters": parameters})
        assert (refused.status_code, refused.json()["code"]) == (403, "FORBIDDEN")
        assert len(refused.text) < 1000
        line = command.wait_for("/v2/repository/models/core/load: denied")
        recorded = json.loads(line)["parameters"]
        assert [name[:3] for name in recorded] == ["xxx", *(f"p{number}" for number in range(15))]
        assert max(map(len, command.lines)) < 4000


@pytest.mark.fault("thousands of labels and of operations in the background, long names of load")
async def test_operations_in_the_background_are_bounded() -> None:
    report = OperationReport("m", True, 0)

    async def start_until_refused(*, ends: bool) -> int:
        """Return how many operations are started before one is refused; they end soon, or do not."""
        runner = runner_of(open_state_store("memory:"))
        is_over = asyncio.Event()

        async def wait() -> OperationReport:
            await is_over.wait()
            return report

        started = 0
        with suppress(TooManyOperations):
            while started < 20_000:
                await runner.start(report, wait)
                started += 1
                if ends and started % 100 == 0:
                    is_over.set()
                    await asyncio.gather(*runner.tasks)
        is_over.set()
        await asyncio.gather(*runner.tasks)
        return started

    assert await start_until_refused(ends=False) in range(256, 513)
    assert await start_until_refused(ends=True) == 10_000


@pytest.mark.parametrize("error", [None, LoadFailed("m", "no memory")])
async def test_operation_that_ends_without_the_state_is_recorded_later(
    tmp_path: Path, error: GatewayError | None
) -> None:
    store = open_state_store(f"file://{tmp_path}/state/state.db")
    report, is_over = OperationReport("m", True, 2), asyncio.Event()

    async def load() -> OperationReport:
        await is_over.wait()
        if error is not None:
            raise error
        return report

    runner = runner_of(store)
    operation = await runner.start(report, load)
    (tmp_path / "state").rename(tmp_path / "away")
    report.record("a:8000", Outcome("READY"))
    await wait_until_async(lambda: not store.is_available)  # progress was not recorded
    is_over.set()
    await wait_until_async(lambda: len(runner.tasks) == 1)
    (tmp_path / "away").rename(tmp_path / "state")
    await asyncio.gather(*runner.tasks)
    found = await store.read_operation(operation)
    assert found is not None
    assert found["operation"] == ("succeeded" if error is None else "failed")
    assert found["replicas"] == {"a:8000": {"state": "READY"}}
    await store.close()


async def test_operation_of_a_gateway_that_ended_is_lost(tmp_path: Path) -> None:
    store, other = (open_state_store(f"file://{tmp_path}/state.db") for _ in range(2))
    runner, report = runner_of(store), OperationReport("m", True, 2)

    async def wait() -> OperationReport:
        await asyncio.Event().wait()
        return report

    await store.renew_presence()
    operation = await runner.start(report, wait)
    running = await runner_of(other).read(operation)
    assert running is not None
    assert running["operation"] == "running"
    assert await runner.read(operation) == running
    for task in runner.tasks:
        task.cancel()
    await asyncio.gather(*runner.tasks, return_exceptions=True)
    await store.close()
    lost = await runner_of(other).read(operation)
    failure = {"error": OperationLost.message, "code": "UNAVAILABLE"}
    assert lost == {**running, "operation": "lost", **failure}
    assert await runner_of(other).read("0" * 32) is None
    await other.close()
